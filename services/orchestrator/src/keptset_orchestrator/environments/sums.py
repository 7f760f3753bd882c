"""sums: a list of additions, to be written again with their results. Long answers that are easy to check."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from .arithmetic import Addition, Arithmetic

Additions = tuple[Addition, ...]


@dataclass(frozen=True)
class Sums:
    """`count` additions of numbers of `min_digits` to `max_digits` digits; in each a digit carries."""

    count: int
    min_digits: int
    max_digits: int

    def examples(self, seed: int, start: int) -> Iterator[Additions]:
        """Lists; item i has the pairs count * i and following of `arithmetic`."""
        pairs = Arithmetic(self.min_digits, self.max_digits).examples(seed, start * self.count)
        while True:
            yield tuple(islice(pairs, self.count))

    def messages(self, example: Additions) -> list[dict[str, str]]:
        """The additions, each on its line: "18+7="."""
        return [{"role": "user", "content": "\n".join(f"{a}+{b}=" for a, b in example)}]

    def reward(self, example: Additions, completion: str) -> float:
        """The share of the additions that a line of the answer says with their result, white space aside.

        Order does not count. Of an answer with more lines than additions it is the share of those lines, so
        that nothing is won by guessing again.
        """
        said = ["".join(line.split()) for line in completion.split("\n")]
        lines = [line for line in said if line]
        right = Counter(self.solution(example).split("\n")) & Counter(lines)
        return right.total() / max(self.count, len(lines))

    def solution(self, example: Additions) -> str:
        """Each addition with its result: "18+7=25"."""
        return "\n".join(f"{a}+{b}={a + b}" for a, b in example)
