"""Compares answers with the reference, and keeps count of what was compared."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from .answers import Sampled
from .reference import Cut, Reference, acceptable_sets, exact_set

LOGPROB_ERROR = 1e-4
EDGE_SHARE = 1e-3

NO_EVIDENCE = -9999.0


class Evidence:
    """The numbers of one test, or of a whole session."""

    def __init__(self, session: "Evidence | None" = None):
        self.session = session
        self.counts: Counter[str] = Counter()
        self.sizes: list[int] = []
        self.worst_logprob = 0.0

    def count(self, name: str, more: int = 1) -> None:
        """Add to one of the numbers."""
        self.counts[name] += more
        if self.session is not None:
            self.session.count(name, more)

    def size(self, kept: int) -> None:
        """Note the size of a compared set."""
        self.sizes.append(kept)
        if self.session is not None:
            self.session.size(kept)

    def logprob_error(self, error: float) -> None:
        """Keep the worst error of a logprob, and refuse one that is too large."""
        assert error <= LOGPROB_ERROR, f"logprob off by {error:.2e}"
        self.worst_logprob = max(self.worst_logprob, error)
        if self.session is not None:
            self.session.logprob_error(error)

    def check_edges(self, floor: int = 0) -> None:
        """At most one set in a thousand may differ at the edge; in a small sample `floor` may."""
        edge, sets = self.counts["differ at the edge"], self.counts["sets"]
        assert edge <= max(floor, EDGE_SHARE * sets), f"{edge} of {sets} sets differ at the edge"

    def lines(self) -> list[str]:
        """For people."""
        text = [", ".join(f"{self.counts[name]} {name}" for name in sorted(self.counts))]
        if self.sizes:
            p50, p99 = np.percentile(self.sizes, (50, 99))
            text.append(f"set sizes: p50 {p50:.0f}, p99 {p99:.0f}, largest {max(self.sizes)}")
        text.append(f"worst logprob error {self.worst_logprob:.1e} (bound {LOGPROB_ERROR:.0e})")
        return text


def check_masked(
    evidence: Evidence,
    references: Mapping[str, Reference],
    prompt: list[int],
    sampled: Sampled,
    cut: Cut,
    *,
    allowed: np.ndarray | None = None,
    logprobs: int | None = 0,
) -> None:
    """Every set and every logprob of one choice against the model named in its version spans.

    Args:
        evidence: where the numbers go.
        references: the models by weight version ("base", "v000001").
        prompt: ids before the completion.
        sampled: one choice of an answer.
        cut: what the request asked for.
        allowed: bool [T, V], what the masks beside the cut leave; None = everything.
        logprobs: as asked for; None = there may be none, but if there are they are right.
    """
    where = f"{cut} after a prompt of {len(prompt)}"
    assert sampled.kept is not None, f"no masks: {where}"
    assert len(sampled.kept) == len(sampled.token_ids)
    for token, version, single, double in _positions(references, prompt, sampled):
        here = f"token {token} of {len(sampled.token_ids)} under {version}, {where}"
        row, sampled_id = np.array(sampled.kept[token], np.int64), sampled.token_ids[token]
        assert len(row), f"empty set: {here}"
        assert (np.diff(row) > 0).all(), f"not ascending: {here}"
        assert row[0] >= 0, here
        assert row[-1] < len(single), here
        assert sampled_id in row, f"sampled {sampled_id} outside its set: {here}"
        assert not cut.top_k or len(row) <= cut.top_k, f"{len(row)} ids: {here}"
        here_allowed = None if allowed is None else allowed[token]
        evidence.count("sets")
        evidence.size(len(row))
        if np.array_equal(row, exact_set(single, cut, here_allowed)):
            evidence.count("sets equal")
        else:
            right = acceptable_sets(double, cut, here_allowed)
            exact = exact_set(double, cut, here_allowed)
            assert frozenset(row.tolist()) in right, (
                f"wrong set: {here}: {len(row)} ids, lacks {np.setdiff1d(exact, row)[:9].tolist()}, "
                f"has {np.setdiff1d(row, exact)[:9].tolist()} too many"
            )
            evidence.count("differ at the edge")
        check_logprobs(evidence, sampled, token, row, double / cut.temperature, logprobs, here)


def check_unmasked(
    evidence: Evidence, references: Mapping[str, Reference], prompt: list[int], sampled: Sampled, cut: Cut
) -> None:
    """A request that got no masks: none are there, and its logprobs are those of the set it was cut to."""
    assert sampled.kept is None, f"masks that nobody wanted: {cut}"
    for token, version, single, double in _positions(references, prompt, sampled):
        here = f"token {token} under {version}, unmasked {cut} after a prompt of {len(prompt)}"
        sampled_id = sampled.token_ids[token]
        if cut.temperature == 0:  # vLLM drops every cut of a greedy row and reports at temperature 1
            behind = double.max() - double[sampled_id]
            assert behind < 1e-5, f"greedy took an id that is {behind:.1e} behind the best: {here}"
            check_logprobs(evidence, sampled, token, np.arange(len(double)), double, 0, here)
        else:
            sets = [exact_set(single, cut)]
            if sampled_id not in sets[0] or cut.top_p < 1:
                sets = [np.array(sorted(one)) for one in acceptable_sets(double, cut)]
            x = double / cut.temperature
            errors = [abs(sampled.logprobs[token] - _logprob(x, one, sampled_id)) for one in sets]
            evidence.logprob_error(min(errors))
        evidence.count("unmasked logprobs")


def check_logprobs(
    evidence: Evidence,
    sampled: Sampled,
    token: int,
    row: np.ndarray,
    x: np.ndarray,
    asked: int | None,
    here: str,
) -> None:
    """The sampled token's logprob over `row`, its rank, and the best `asked` ones. `x`: [V], logit / T."""
    if asked is None:
        if sampled.logprobs is None:
            return
        asked = 0
    got, sampled_id = sampled.logprobs[token], sampled.token_ids[token]
    assert np.isfinite(got), here
    assert NO_EVIDENCE < got <= 0, f"logprob {got}: {here}"
    evidence.logprob_error(abs(got - _logprob(x, row, sampled_id)))
    evidence.count("logprobs")
    if sampled.ranks is not None:
        surely, maybe = ((x[row] > x[sampled_id] + gap).sum() for gap in (1e-4, -1e-4))
        assert surely < sampled.ranks[token] <= maybe, f"rank {sampled.ranks[token]}: {here}"
    if sampled.top is not None:
        top = sampled.top[token]
        inside = [i for i in top if i in row]
        assert all(np.isfinite(value) and value <= 0 for value in top.values()), here
        assert len(top) <= asked, f"{len(top)} top logprobs, {asked} asked for: {here}"
        assert len(inside) == min(asked, len(row)), f"{len(inside)} of {asked} top logprobs: {here}"
        assert all(top[i] == NO_EVIDENCE for i in top if i not in inside), here
        best = np.sort(x[row])[::-1]
        for place, i in enumerate(inside):
            assert abs(x[i] - best[place]) < 1e-4, f"top logprob {place} is not the {place}. best: {here}"
            evidence.logprob_error(abs(top[i] - _logprob(x, row, i)))


def _positions(references, prompt, sampled):
    """(token, version, float32 logits, float64 logits) of each token, under the weights that sampled it."""
    spans = sampled.versions or [("base", 0, len(sampled.token_ids))]
    at = 0
    for version, start, end in spans:
        assert start == at, f"version spans with a hole: {spans}"
        assert end > start, f"an empty version span: {spans}"
        at = end
        single, double = references[version].logits(prompt, sampled.token_ids)
        for token in range(start, end):
            yield token, version, single[token], double[token]
    assert at == len(sampled.token_ids), f"version spans end at {at} of {len(sampled.token_ids)} tokens"


def _logprob(x: np.ndarray, row: np.ndarray, i: int) -> float:
    kept = x[row]
    most = kept.max()
    return float(x[i] - most - np.log(np.exp(kept - most).sum()))
