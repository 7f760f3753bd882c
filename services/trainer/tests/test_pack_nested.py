"""Whatever was cut, padded and joined before: a packed row has each trained token with what belongs to it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kept_tokens import KeptTokens
from kept_tokens.messages import (
    CROSS_ENTROPY,
    POLICY_GRADIENT,
    TrainingSample,
    cut_sample,
    join_samples,
    pad_sample,
    split_sample,
)
from keptset_trainer.packing import pack_row

VOCAB = 50


@st.composite
def samples(draw, objective: str = POLICY_GRADIENT, truncates: bool = True) -> TrainingSample:
    """A first token of context, then trained tokens and context in any order; masks if the source truncates,
    else perhaps.
    """
    length = draw(st.integers(1, 10))
    loss_mask = np.array([False] + [draw(st.booleans()) for _ in range(length - 1)])
    token_ids = np.array([draw(st.integers(0, VOCAB - 1)) for _ in range(length)])
    policy = objective == POLICY_GRADIENT
    masked = policy and (truncates or draw(st.booleans()))
    others = [draw(st.sets(st.integers(0, VOCAB - 1), max_size=4)) for _ in range(length)]
    rows = [
        sorted({*other, int(t)}) if m else []
        for other, t, m in zip(others, token_ids, loss_mask, strict=True)
    ]
    values = np.arange(1, length + 1) + draw(st.integers(0, 100)) / 128
    return TrainingSample.build(
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=-values * loss_mask * policy,
        temperatures=0.5 + values / 1024,
        advantages=values * loss_mask,
        kept=KeptTokens.from_rows(rows) if masked else None,
        must_have_masks=policy and truncates,
        source="s",
        group="g",
        sample_id="i",
        objective=objective,
        reference_logprobs=-2 * values * loss_mask if policy else None,
        reference_weight=0.25 if policy else 0.0,
    )


def records(sample: TrainingSample) -> list[tuple | None]:
    """Of each token id, kept set, logprob, temperature, advantage, reference, objective. None: context."""
    arrays, kept, reference = sample.arrays(), sample.kept(), sample.reference()
    rows = [[]] * sample.num_tokens if kept is None else kept.rows()
    compared = np.zeros(sample.num_tokens, np.float32) if reference is None else reference
    frozen = sample.objective == CROSS_ENTROPY
    found: list[tuple | None] = []
    for n, (t, trained, logprob, heat, advantage) in enumerate(zip(*arrays, strict=True)):
        numbers = [float(x) for x in (logprob, heat, advantage, compared[n])]
        record = (int(t), tuple(rows[n]), *numbers, sample.reference_weight, frozen)
        found.append(record if trained else None)
    return found


Arranged = tuple[TrainingSample, list[tuple | None]]
"""A sample, and what each of its tokens was before anything was done to it."""


def as_drawn(sample: TrainingSample) -> Arranged:
    return sample, records(sample)


@st.composite
def arranged(draw) -> Arranged:
    """A few operations, one in the other; never a cut that leaves a trained token without its context."""
    drawn = samples(truncates=draw(st.booleans()))
    sample, tokens = as_drawn(draw(drawn))
    for _ in range(draw(st.integers(0, 5))):
        operation = draw(st.sampled_from(["cut", "pad", "join", "split"]))
        if operation == "cut":
            stop = draw(st.integers(1, sample.num_tokens))
            sample, tokens = cut_sample(sample, 0, stop), tokens[:stop]
        elif operation == "pad":
            more = draw(st.integers(0, 3))
            sample, tokens = pad_sample(sample, more), [*tokens, *[None] * more]
        elif operation == "join":
            first = draw(drawn)
            sample, tokens = join_samples([first, sample]), [*records(first), *tokens]
        else:
            first = draw(drawn)
            parts = split_sample(join_samples([first, sample]), [first.num_tokens, sample.num_tokens])
            chosen = draw(st.integers(0, 1))
            sample, tokens = parts[chosen], [records(first), tokens][chosen]
    return sample, tokens


@settings(max_examples=60, deadline=None)
@given(st.lists(arranged() | samples(objective=CROSS_ENTROPY).map(as_drawn), min_size=1, max_size=4))
def test_packed_row_has_every_trained_token_with_its_own_record(drawn: list[Arranged]):
    row = pack_row([sample for sample, _ in drawn], list(range(len(drawn))))
    starts, ends = row.kept.offsets[:-1].tolist(), row.kept.offsets[1:].tolist()
    sets = [tuple(row.kept.ids[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]
    rest = (
        row.rollout_logprobs, row.temperatures, row.advantages, row.reference_logprobs, row.reference_weights,
        row.cross_entropy,
    )  # fmt: skip
    packed = list(zip(row.labels.tolist(), sets, *(column.tolist() for column in rest), strict=True))
    expected = [[token for token in tokens if token is not None] for _, tokens in drawn]
    assert packed == [record for sample in expected for record in sample]
    assert row.sequence.tolist() == [s for s, sample in enumerate(expected) for _ in sample]
