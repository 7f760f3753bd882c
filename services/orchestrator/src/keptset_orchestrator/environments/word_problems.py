"""word-problems: generated problems whose answer is one number."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from .numbers import last_number

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
THINGS = ("apples", "books", "coins", "pens", "shells", "stamps")


@dataclass(frozen=True)
class Problem:
    """A question and its answer."""

    question: str
    answer: int


@dataclass(frozen=True)
class WordProblems:
    """Problems of one to three steps with numbers from 2 to `max_number`; no answer is negative."""

    max_number: int

    def examples(self, seed: int, start: int) -> Iterator[Problem]:
        """Problems; item i comes from a generator of its own, seeded with (seed, i)."""
        for index in count(start):
            yield self._draw(random.Random(f"word-problems/{seed}/{index}"))

    def _draw(self, draw: random.Random) -> Problem:
        a, b, c = (draw.randint(2, self.max_number) for _ in range(3))
        who, other = draw.sample(NAMES, 2)
        what = draw.choice(THINGS)
        more, less = max(a, b), min(a, b)
        return draw.choice(
            [
                Problem(
                    f"{who} has {a} {what} and gets {b} from {other}. How many {what} has {who} now?", a + b
                ),
                Problem(
                    f"{who} has {more} {what} and gives {less} to {other}. How many {what} are left?",
                    more - less,
                ),
                Problem(f"{who} fills {a} boxes with {b} {what} each. How many {what} is that?", a * b),
                Problem(
                    f"{who} buys {a} bags of {b} {what}; {other} brings {c} more. How many {what} are there?",
                    a * b + c,
                ),
                Problem(
                    f"{a * b} {what} are shared equally by {b} children. How many does each child get?", a
                ),
                Problem(
                    f"{who} has {a} {what}, {other} has {b} more than {who}. How many have they together?",
                    2 * a + b,
                ),
            ]
        )

    def messages(self, example: Problem) -> list[dict[str, str]]:
        """The question."""
        return [{"role": "user", "content": example.question}]

    def reward(self, example: Problem, completion: str) -> float:
        """1 if the last number of the answer is the right one."""
        return float(last_number(completion) == example.answer)

    def solution(self, example: Problem) -> str:
        """The number."""
        return str(example.answer)
