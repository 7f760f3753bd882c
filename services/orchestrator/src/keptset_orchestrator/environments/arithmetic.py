"""arithmetic: add two numbers in which at least one digit carries."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

Addition = tuple[int, int]


@dataclass(frozen=True)
class Arithmetic:
    """Sums of two numbers of `min_digits` to `max_digits` digits.

    Attributes:
        min_digits: Fewest digits.
        max_digits: Most digits.
        grow_every: Examples until the numbers get a digit longer; 0: any length from the start.
    """

    min_digits: int
    max_digits: int
    grow_every: int = 0

    def examples(self, seed: int, start: int) -> Iterator[Addition]:
        """Pairs of numbers; item i comes from a generator of its own, seeded with (seed, i)."""
        for index in count(start):
            draw = random.Random(f"arithmetic/{seed}/{index}")
            digits = self._digits(draw, index)
            low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
            while True:  # more than half of all pairs carry from two digits on, and 45 % of single ones
                pair = draw.randint(low, high), draw.randint(low, high)
                if carries(*pair):
                    break
            yield pair

    def _digits(self, draw: random.Random, index: int) -> int:
        if self.grow_every:
            return min(self.max_digits, self.min_digits + index // self.grow_every)
        return draw.randint(self.min_digits, self.max_digits)

    def messages(self, example: Addition) -> list[dict[str, str]]:
        """The sum to be done."""
        return [{"role": "user", "content": f"{example[0]}+{example[1]}="}]

    def reward(self, example: Addition, completion: str) -> float:
        """1 if the answer is the sum and nothing else but white space."""
        said = completion.strip()
        return float(re.fullmatch(r"\d+", said, re.ASCII) is not None and said == self.solution(example))

    def solution(self, example: Addition) -> str:
        """The sum."""
        return str(sum(example))


def carries(a: int, b: int) -> bool:
    """Is there a place at which the digits of a and b sum to more than 9?

    >>> carries(15, 7), carries(12, 34)
    (True, False)
    """
    while a and b:
        if a % 10 + b % 10 > 9:
            return True
        a, b = a // 10, b // 10
    return False
