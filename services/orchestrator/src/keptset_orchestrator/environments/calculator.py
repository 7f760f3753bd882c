"""calculator: several turns, with a tool that evaluates one operation a turn."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from .numbers import last_number

_CALL = re.compile(r"<calc>\s*(-?\d{1,30})\s*([-+*])\s*(-?\d{1,30})\s*</calc>", re.ASCII)
_ANY_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)

OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}

INSTRUCTION = (
    "Write <calc>A op B</calc> with op +, - or * to use the calculator, one operation a turn. "
    "Without a call your turn is the answer: end it with the number."
)


@dataclass(frozen=True)
class Expression:
    """An expression, evaluated from left to right with the usual precedence."""

    text: str
    value: int


@dataclass(frozen=True)
class Calculator:
    """Expressions of `terms` numbers up to `max_number`, in at most `max_turns` turns."""

    terms: int
    max_number: int
    max_turns: int

    def examples(self, seed: int, start: int) -> Iterator[Expression]:
        """Expressions; item i comes from a generator of its own, seeded with (seed, i)."""
        for index in count(start):
            draw = random.Random(f"calculator/{seed}/{index}")
            products = [[draw.randint(1, self.max_number)]]
            signs = []
            for _ in range(self.terms - 1):
                operation, number = draw.choice("+-*"), draw.randint(1, self.max_number)
                if operation == "*":
                    products[-1].append(number)
                else:
                    products.append([number])
                    signs.append(operation)
            yield _expression(products, signs)

    def messages(self, example: Expression) -> list[dict[str, str]]:
        """How to use the tool, and the expression."""
        return [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": example.text},
        ]

    def reply(self, example: Expression, turns: Sequence[str]) -> list[dict[str, str]] | None:
        """What the calculator says to the last turn; None if that was the answer, or the last one allowed."""
        called = _ANY_CALL.search(turns[-1])
        if called is None or len(turns) >= self.max_turns:
            return None
        call = _CALL.fullmatch(called.group(0))
        if call is None:
            return [{"role": "user", "content": "error: write <calc>A op B</calc> with whole numbers"}]
        first, operation, second = call.groups()
        return [{"role": "user", "content": str(OPERATIONS[operation](int(first), int(second)))}]

    def reward(self, example: Expression, completion: str) -> float:
        """1 if the last turn ends with the value, rather than with a call."""
        if _ANY_CALL.search(completion):
            return 0.0
        return float(last_number(completion) == example.value)

    def solution(self, example: Expression) -> str:
        """The value."""
        return str(example.value)


def _expression(products: list[list[int]], signs: list[str]) -> Expression:
    text, value = "", 0
    for index, factors in enumerate(products):
        product = 1
        for factor in factors:
            product *= factor
        sign = signs[index - 1] if index else ""
        text += sign + "*".join(map(str, factors))
        value += -product if sign == "-" else product
    return Expression(text, value)
