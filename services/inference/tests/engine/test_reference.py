"""The judge is judged first: right answers pass, every kind of wrong one is caught. No engine needed."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .answers import Sampled, of_events, of_json
from .evidence import Evidence, check_masked
from .reference import Cut, acceptable_sets, exact_set


class FixedLogits:
    """Stands in for a model: the same logits, whatever the ids."""

    def __init__(self, logits: np.ndarray):
        self.rows = logits

    def logits(self, prompt, completion):
        """[T, V] twice, as Reference answers."""
        assert len(completion) <= len(self.rows)
        return self.rows[: len(completion)].astype(np.float32), self.rows[: len(completion)]


CUT = Cut(temperature=0.6, top_p=0.9, top_k=20, min_p=0.01)


def plain_set(logits: np.ndarray, cut: Cut) -> set[int]:
    """The definition once more, by loops over probabilities."""
    p = np.exp(logits / cut.temperature - (logits / cut.temperature).max())
    p /= p.sum()
    ids = [i for i in range(len(p)) if p[i] >= cut.min_p * p.max()]
    ids = sorted(ids, key=lambda i: (-p[i], i))[: cut.top_k or None]
    total, above, kept = sum(p[i] for i in ids), 0.0, set()
    for i in ids:
        if cut.top_p >= 1 or above / total < cut.top_p:  # masses may round to a whole before the last id
            kept.add(i)
        above += p[i]
    return kept


def fake(seed: int = 0, tokens: int = 12, vocabulary: int = 64) -> tuple[dict, list[int], Sampled]:
    """A model, a prompt and the answer that a right engine would give."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(tokens, vocabulary)) * 3
    sampled = Sampled(0, [], logprobs=[], ranks=[], top=[], kept=[], versions=[("base", 0, tokens)])
    for x in logits:
        kept = sorted(plain_set(x, CUT))
        scaled = x[kept] / CUT.temperature
        logprobs = scaled - scaled.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        place = draw.choice(len(kept), p=np.exp(logprobs) / np.exp(logprobs).sum())
        sampled.token_ids.append(kept[place])
        sampled.kept.append(kept)
        sampled.logprobs.append(float(logprobs[place]))
        sampled.ranks.append(int((logprobs >= logprobs[place]).sum()))
        best = np.argsort(-logprobs)[:3]
        sampled.top.append({kept[i]: float(logprobs[i]) for i in best})
    return {"base": FixedLogits(logits)}, [1, 2, 3], sampled


def check(references, prompt, sampled, cut=CUT):
    evidence = Evidence()
    check_masked(evidence, references, prompt, sampled, cut, logprobs=3)
    return evidence


def test_a_right_answer_passes():
    evidence = check(*fake())
    assert evidence.counts["sets equal"] == evidence.counts["sets"] == 12
    assert evidence.worst_logprob < 1e-6


def _first(sampled, wide):
    return next(i for i, row in enumerate(sampled.kept) if len(row) >= wide)


def lose_an_id(s):
    at = _first(s, 2)
    s.kept[at].remove(next(i for i in s.kept[at] if i != s.token_ids[at]))


def gain_an_id(s):
    s.kept[0] = sorted({*s.kept[0], next(i for i in range(64) if i not in s.kept[0])})


def lose_the_sampled_id(s):
    at = _first(s, 2)
    s.kept[at].remove(s.token_ids[at])


def shift_by_one(s):
    s.kept = s.kept[1:] + s.kept[:1]


def swap_two_positions(s):
    at = _first(s, 2)
    other = next(i for i, row in enumerate(s.kept) if set(row) != set(s.kept[at]))
    s.kept[at], s.kept[other] = s.kept[other], s.kept[at]


def wrong_order(s):
    s.kept[_first(s, 2)].reverse()


def twice_the_same_id(s):
    s.kept[0] = sorted([*s.kept[0], s.kept[0][0]])


def no_masks(s):
    s.kept = None


def one_empty_mask(s):
    s.kept[3] = []


def bend_a_logprob(s):
    s.logprobs[5] -= 3e-4


def no_evidence(s):
    s.logprobs[5] = -9999.0


def positive_logprob(s):
    s.logprobs[_first(s, 1)] = 1e-6


def logprob_before_the_cut(s):
    s.logprobs[_first(s, 2)] += np.log(0.9)


def wrong_rank(s):
    s.ranks[0] += 1


def wrong_top(s):
    at = _first(s, 3)
    s.top[at] = dict(list(s.top[at].items())[1:])


def another_token(s):
    at = _first(s, 2)
    s.token_ids[at] = next(i for i in s.kept[at] if i != s.token_ids[at])


def span_with_a_hole(s):
    s.versions = [("base", 0, 4), ("base", 5, 12)]


def spans_too_short(s):
    s.versions = [("base", 0, 11)]


@pytest.mark.parametrize(
    "mutate",
    [
        lose_an_id, gain_an_id, lose_the_sampled_id, shift_by_one, swap_two_positions, wrong_order,
        twice_the_same_id, no_masks, one_empty_mask, bend_a_logprob, no_evidence, positive_logprob,
        logprob_before_the_cut, wrong_rank, wrong_top, another_token, span_with_a_hole, spans_too_short,
    ],
)  # fmt: skip
def test_a_wrong_answer_is_caught(mutate):
    references, prompt, sampled = fake()
    wrong = copy.deepcopy(sampled)
    mutate(wrong)
    with pytest.raises(AssertionError):
        check(references, prompt, wrong)


@pytest.mark.parametrize(
    "cut",
    [Cut(1.0, 0.9, 20, 0.01), Cut(0.6, 0.8, 20, 0.01), Cut(0.6, 0.9, 5, 0.01), Cut(0.6, 0.9, 20, 0.1)],
)
def test_an_answer_to_other_parameters_is_caught(cut):
    with pytest.raises(AssertionError):
        check(*fake(tokens=40), cut=cut)


def test_the_wrong_weights_are_caught():
    references, prompt, sampled = fake()
    references["base"].rows = references["base"].rows + np.random.default_rng(5).normal(size=(12, 64)) * 1e-2
    with pytest.raises(AssertionError):
        check(references, prompt, sampled)


@given(
    st.integers(0, 10_000),
    st.sampled_from([0.3, 0.6, 1.0, 1.3]),
    st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    st.sampled_from([0, 1, 3, 12, 100]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_exact_set_is_the_definition(seed, temperature, top_p, top_k, min_p):
    logits = np.random.default_rng(seed).normal(size=48) * 2
    cut = Cut(temperature, top_p, top_k, min_p)
    exact = exact_set(logits, cut)
    assert set(exact.tolist()) == plain_set(logits, cut)
    assert frozenset(exact.tolist()) in acceptable_sets(logits, cut)


def test_ties_at_top_k_keep_the_lowest_ids():
    logits = np.array([1.0, 5.0, 2.0, 2.0, 2.0, 0.0])
    assert exact_set(logits, Cut(top_k=3)).tolist() == [1, 2, 3]
    many = np.tile(logits, 20)  # twenty of each, the best are 1, 7, 13 ...
    assert set(exact_set(many, Cut(top_k=23)).tolist()) == {*range(1, 120, 6), 2, 3, 4}


def log_of(*masses: float) -> np.ndarray:
    return np.log(np.array(masses))


def test_an_id_at_the_border_may_fall_on_either_side():
    near, far = 4e-6, 4e-5
    top_p = Cut(top_p=0.9)
    assert acceptable_sets(log_of(0.5, 0.4 - near, 0.1 + near), top_p) == {
        frozenset({0, 1}), frozenset({0, 1, 2}),
    }  # fmt: skip
    assert acceptable_sets(log_of(0.5, 0.4 - far, 0.1 + far), top_p) == {frozenset({0, 1, 2})}
    assert acceptable_sets(log_of(0.5, 0.4 + far, 0.1 - far), top_p) == {frozenset({0, 1})}
    top_k = Cut(top_k=1)
    assert acceptable_sets(np.array([1.0, 1.0 + near]), top_k) == {frozenset({0}), frozenset({1})}
    assert acceptable_sets(np.array([1.0, 1.0 + far]), top_k) == {frozenset({1})}
    min_p = Cut(min_p=0.25)
    assert acceptable_sets(np.array([0.0, np.log(0.25) + near, -9]), min_p) == {
        frozenset({0}),
        frozenset({0, 1}),
    }
    assert acceptable_sets(np.array([0.0, np.log(0.25) + far, -9]), min_p) == {frozenset({0, 1})}


def test_what_follows_a_border_follows_from_the_side():
    """min_p drops the third id or not; with it, top_p = 0.8 needs the second, without it not."""
    logits = log_of(0.64, 0.16, 0.16 * (1 + 2e-6), 0.04)
    sets = acceptable_sets(logits, Cut(min_p=0.25, top_p=0.7))
    assert frozenset({0, 1}) in sets
    assert frozenset({0}) in sets
    assert frozenset({1, 2}) not in sets


def test_pieces_of_a_stream_are_joined():
    def event(tokens, **more):
        content = [
            {
                "token": f"token_id:{t}",
                "token_id": t,
                "logprob": -0.5,
                "rank": 1,
                "bytes": None,
                "top_logprobs": [],
            }
            for t in tokens
        ]
        choice = {"index": 0, "token_ids": tokens, "finish_reason": None, "stop_reason": None,
                  "sampling_mask": [[t] for t in tokens], "logprobs": {"content": content}}  # fmt: skip
        return "data: " + json.dumps({"choices": [choice | more]})

    lines = [event([3, 4]), "", event([5], finish_reason="length"), "data: [DONE]"]
    (joined,) = of_events(lines)
    assert (joined.token_ids, joined.kept, joined.finish_reason) == ([3, 4, 5], [[3], [4], [5]], "length")
    assert joined.logprobs == [-0.5] * 3
    with pytest.raises(AssertionError):
        of_events(lines[:-1])
    with pytest.raises(AssertionError):
        of_json({"choices": [json.loads(lines[0][6:])["choices"][0] | {"sampling_mask": [[3]]}]})
