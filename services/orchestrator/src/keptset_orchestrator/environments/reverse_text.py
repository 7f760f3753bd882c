"""reverse-text: say a random string of letters backwards."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import count
from string import ascii_lowercase


@dataclass(frozen=True)
class ReverseText:
    """Strings of `min_letters` to `max_letters` letters a-z, to be reversed."""

    min_letters: int
    max_letters: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_letters <= self.max_letters:
            raise ValueError(
                f"reverse-text: min_letters {self.min_letters} and max_letters {self.max_letters}: "
                "set 1 <= min_letters <= max_letters"
            )

    def examples(self, seed: int, start: int) -> Iterator[str]:
        """Strings; item i comes from a generator of its own, seeded with (seed, i)."""
        for index in count(start):
            draw = random.Random(f"reverse-text/{seed}/{index}")
            letters = draw.randint(self.min_letters, self.max_letters)
            yield "".join(draw.choices(ascii_lowercase, k=letters))

    def messages(self, example: str) -> list[dict[str, str]]:
        """The string itself is the whole prompt."""
        return [{"role": "user", "content": example}]

    def reward(self, example: str, completion: str) -> float:
        """Similarity by difflib, 2 * matches / total length: 1.0 is the reversed string."""
        return SequenceMatcher(None, completion, self.solution(example), autojunk=False).ratio()

    def solution(self, example: str) -> str:
        """The reversed string."""
        return example[::-1]
