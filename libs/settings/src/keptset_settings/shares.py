"""How many of a step's prompts each source gets."""

import heapq
from array import array
from collections.abc import Sequence
from fractions import Fraction
from math import lcm


class PromptShares:
    """Hands the prompts of a run out to its sources, by ratio and exact over time.

    After any number of prompts each source has had its share of them to within one prompt, so that 1 : 2 of
    8 prompts is 2 or 3 of each step and a third of the run. Prompt x of a source with share w may come from
    the run's prompt (x - 1) / w on and must have come by x / w; the earliest deadline is served first, which
    meets every deadline (Baruah et al., Proportionate Progress, Algorithmica 15 (1996), for one resource).

    What a step gets depends on the number of the step alone.

    Args:
        prompts_per_step: Of all sources.
        ratios: Of each source, above 0; as written in decimal, 0.1 is a tenth.
    """

    def __init__(self, prompts_per_step: int, ratios: Sequence[float]) -> None:
        exact = [Fraction(str(ratio)) for ratio in ratios]
        shares = [ratio / sum(exact) for ratio in exact]
        self._prompts = prompts_per_step
        self._period = lcm(*(share.denominator for share in shares))
        """Prompts after which the order begins anew."""
        self._counts = [int(share * self._period) for share in shares]
        """Of each source in a period."""
        self._order = array("H")
        """Whose prompt it is, for the prompts of the first period as far as was asked for."""
        self._waiting = [(0, source, 0) for source in range(len(ratios))]
        """(first prompt that it may be, source, how many the source has had)"""
        self._due: list[tuple[int, int, int]] = []
        """(prompt by which it must have come, source, how many the source has had)"""

    @property
    def means(self) -> list[Fraction]:
        """Prompts of each source in a step on average."""
        return [Fraction(count * self._prompts, self._period) for count in self._counts]

    def spans(self, step: int) -> list[range]:
        """Which of its own prompts each source has in a step (from 1)."""
        before, after = self._given((step - 1) * self._prompts), self._given(step * self._prompts)
        return [range(first, last) for first, last in zip(before, after, strict=True)]

    def _given(self, prompts: int) -> list[int]:
        """How many of the run's first prompts are each source's."""
        periods, rest = divmod(prompts, self._period)
        self._extend(rest)
        given = [periods * count for count in self._counts]
        for source in self._order[:rest]:
            given[source] += 1
        return given

    def _extend(self, prompts: int) -> None:
        for prompt in range(len(self._order), prompts):
            while self._waiting and self._waiting[0][0] <= prompt:
                _, source, had = heapq.heappop(self._waiting)
                due = -((had + 1) * self._period // -self._counts[source])
                heapq.heappush(self._due, (due, source, had))
            due, source, had = heapq.heappop(self._due)
            assert prompt < due, (prompt, due, source)
            self._order.append(source)
            release = (had + 1) * self._period // self._counts[source]
            heapq.heappush(self._waiting, (release, source, had + 1))
