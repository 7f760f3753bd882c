"""Cross-entropy for what frozen generators said, references, and the logprobs over the whole vocabulary."""

import copy

import msgspec
import numpy as np
import pytest
import torch

from kept_loss import KeptLogprobs
from kept_tokens.messages import CROSS_ENTROPY, TrainingSample
from keptset_settings import ClippedRatioLoss, GeometricMeanLoss, SequenceProductLoss, TruncatedWeightLoss
from keptset_trainer.full_scores import FullScores
from keptset_trainer.losses import loss_function
from keptset_trainer.losses.objective import advantages_of, row_loss
from keptset_trainer.master_weights import OwnWeights
from keptset_trainer.model import Policy
from keptset_trainer.packing import pack, pack_row
from keptset_trainer.ranks import Ranks
from keptset_trainer.scorer import Scorer

from .one_step import one_step

CPU = Ranks(torch.device("cpu"))
LOSSES = [ClippedRatioLoss(), TruncatedWeightLoss(), SequenceProductLoss(), GeometricMeanLoss()]


def frozen(sample: TrainingSample, weight: float = 1.0) -> TrainingSample:
    """The same tokens, said by somebody else."""
    arrays = sample.arrays()
    return TrainingSample.build(
        token_ids=arrays.token_ids,
        loss_mask=arrays.loss_mask,
        logprobs=np.zeros(sample.num_tokens),
        temperatures=np.ones(sample.num_tokens),
        advantages=weight * arrays.loss_mask,
        kept=None,
        must_have_masks=False,
        source="books",
        group="g",
        sample_id=f"frozen-{sample.sample_id}",
        objective=CROSS_ENTROPY,
    )


def with_reference(sample: TrainingSample, reference: np.ndarray, weight: float, **changes) -> TrainingSample:
    arrays, kept = sample.arrays(), changes.pop("kept", sample.kept())
    return TrainingSample.build(
        **{**arrays._asdict(), **changes},
        kept=kept,
        must_have_masks=kept is not None,
        source=sample.source,
        group=sample.group,
        sample_id=sample.sample_id,
        reference_logprobs=np.where(arrays.loss_mask, reference, 0),
        reference_weight=weight,
    )


def step(model, samples, loss=None, scores: FullScores | None = None, **changes):
    """One step on a copy of the model: (metrics, copy)."""
    policy = Policy(copy.deepcopy(model), None)
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.1)
    weights = OwnWeights(policy.model)
    options = {"max_grad_norm": 1e9, "full_scores": scores} | changes
    return one_step(Scorer(policy), weights, optimizer, CPU, samples, loss, **options), policy.model


def logprobs_of(model, sample: TrainingSample, temperature: bool = True) -> np.ndarray:
    """Of every token over the whole vocabulary, by a plain forward pass; 0 for the first."""
    arrays = sample.arrays()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(arrays.token_ids.astype(np.int64))[None]).logits[0].double()
    if temperature:
        logits = logits / torch.tensor(arrays.temperatures.astype(np.float64))[:, None].roll(-1, 0)
    each = logits.log_softmax(-1)
    found = [0.0] + [float(each[t - 1, arrays.token_ids[t]]) for t in range(1, sample.num_tokens)]
    return np.array(found)


def parameters_close(a, b, **tolerance) -> bool:
    return all(torch.allclose(x, y, **tolerance) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.kind)
def test_frozen_rollouts_train_by_plain_cross_entropy(tiny_model, make_batch, loss):
    samples = [frozen(sample) for sample in make_batch(1, samples=4).samples]
    metrics, trained = step(tiny_model, samples, loss)

    plain = copy.deepcopy(tiny_model)
    total, tokens = 0.0, 0
    for sample in samples:
        arrays = sample.arrays()
        ids = torch.tensor(arrays.token_ids.astype(np.int64))
        logits = plain(input_ids=ids[None]).logits[0]
        labels = torch.where(torch.tensor(arrays.loss_mask.copy()), ids, -100)
        total = total + torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
        tokens += int(arrays.loss_mask.sum())
    (total / tokens).backward()
    for parameter in plain.parameters():
        parameter.data -= 0.1 * parameter.grad
    assert (
        metrics["loss"]
        == metrics["cross_entropy/mean"]
        == pytest.approx(float(total.detach()) / tokens, rel=1e-5)
    )
    assert metrics["tokens/cross_entropy"] == metrics["tokens/loss"] == tokens
    assert parameters_close(trained, plain, atol=1e-6)


def test_weight_of_frozen_tokens_scales_their_gradient(tiny_model, make_batch):
    sample = make_batch(1, samples=1).samples[0]
    twice = step(tiny_model, [frozen(sample, 2.0)])[0]
    once = step(tiny_model, [frozen(sample)])[0]
    assert twice["loss"] == pytest.approx(2 * once["loss"], rel=1e-6)
    assert twice["grad_norm"] == pytest.approx(2 * once["grad_norm"], rel=1e-5)
    assert twice["cross_entropy/mean"] == once["cross_entropy/mean"]


def test_frozen_tokens_are_never_limited_even_where_a_ratio_of_1_is(make_batch):
    row = pack([frozen(sample) for sample in make_batch(1, samples=2).samples], 64)[0]
    logprobs = -torch.rand(len(row.labels))
    loss = loss_function(TruncatedWeightLoss(max_weight=0.5))
    summed = row_loss(loss, row, KeptLogprobs(logprobs, None, logprobs, None, None))
    assert not summed.clipped.any()


OF_THE_BATCH = {
    "loss",
    "grad_norm",
    "tokens/loss",
    "tokens/total",
    "tokens/cross_entropy",
    "cross_entropy/mean",
}
"""What a frozen generator's rollouts count in; everything else is said of the policy's."""


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.kind)
def test_frozen_rollouts_have_no_part_in_what_is_said_of_the_policys(tiny_model, make_batch, loss):
    """Not even where ratios are far from 1, so that tokens are clipped and sequences rejected."""
    policy = [
        msgspec.structs.replace(s, logprobs=(s.arrays().logprobs * 1.5).astype("<f4").tobytes())
        for s in make_batch(1, samples=6).samples
    ]
    said = [frozen(s) for s in make_batch(2, samples=6).samples]
    alone, _ = step(tiny_model, policy, loss, FullScores())
    mixed, _ = step(tiny_model, [*policy, *said], loss, FullScores())
    assert alone["clipped/tokens"] + alone["rejected/sequences"] > 0
    assert {"entropy/full", "entropy/kept", "kept/mass_mean", "full/logprob_mean"} <= alone.keys()
    assert alone.keys() == mixed.keys() - {"tokens/cross_entropy", "cross_entropy/mean"}
    for name in alone.keys() - OF_THE_BATCH:
        assert mixed[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6), name


def test_mixed_batch_is_the_sum_of_its_parts(tiny_model, make_batch):
    policy, said = make_batch(1, samples=4).samples, [frozen(s) for s in make_batch(2, samples=3).samples]
    each = [step(tiny_model, part)[0] for part in (policy, said, [*policy, *said])]
    first, second, both = (one["loss"] * one["tokens/loss"] for one in each)
    assert both == pytest.approx(first + second, rel=1e-5)


def test_batch_of_frozen_rollouts_alone_has_no_ratio(tiny_model, make_batch):
    metrics, _ = step(tiny_model, [frozen(sample) for sample in make_batch(1, samples=3).samples])
    assert metrics.keys() == OF_THE_BATCH | {"lr", "seconds/train"}
    assert all(np.isfinite(value) for value in metrics.values())


def test_full_scores_are_the_logprobs_over_the_whole_vocabulary(tiny_model, make_batch):
    samples = make_batch(1, samples=8).samples
    scores = FullScores()
    step(tiny_model, samples, scores=scores)
    for sample, data in zip(samples, scores.of_samples(samples, CPU), strict=True):
        found = np.frombuffer(data, "<f4")
        loss_mask = sample.arrays().loss_mask
        assert not found[~loss_mask].any()
        np.testing.assert_allclose(found[loss_mask], logprobs_of(tiny_model, sample)[loss_mask], atol=2e-5)
        if sample.must_have_masks:
            assert (found[loss_mask] <= sample.arrays().logprobs[loss_mask] + 1e-5).all(), "mass is at most 1"


def test_full_scores_change_no_step(tiny_model, make_batch):
    samples = make_batch(1).samples
    plain, one = step(tiny_model, samples)
    scored, other = step(tiny_model, samples, scores=FullScores())
    assert {name: scored[name] for name in plain} == plain
    assert parameters_close(one, other, atol=0)


def test_reference_is_compared_over_the_whole_vocabulary_under_truncation(tiny_model, make_batch):
    """Its advantage is weight * (log reference - log policy); the kept set has no part in it."""
    sample = next(s for s in make_batch(1).samples if s.must_have_masks)
    reference = -np.linspace(0.1, 4, sample.num_tokens)
    compared = with_reference(sample, reference, 0.5)
    row = pack_row([compared], [0])
    full = torch.tensor(logprobs_of(tiny_model, sample)[sample.arrays().loss_mask])
    over_kept = torch.from_numpy(sample.arrays().logprobs[sample.arrays().loss_mask])  # not to be looked at
    scored = KeptLogprobs(over_kept, None, full, None, full.float())
    expected = sample.arrays().advantages[sample.arrays().loss_mask] + 0.5 * (
        reference[sample.arrays().loss_mask] - full.numpy()
    )
    np.testing.assert_allclose(advantages_of(row, scored).numpy(), expected, atol=1e-5)
    metrics, _ = step(tiny_model, [compared], scores=FullScores())
    kl = (full.numpy() - reference[sample.arrays().loss_mask]).mean()
    assert metrics["reference/kl_mean"] == pytest.approx(kl, abs=1e-4)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.kind)
def test_reference_is_the_untruncated_algorithm_where_nothing_is_cut(tiny_model, make_batch, loss):
    """There the rollout's own logprob may be taken: at unchanged weights both give the same step."""
    plain = [s for s in make_batch(1, samples=12).samples if not s.must_have_masks]
    references = [-np.linspace(0.1, 4, s.num_tokens) for s in plain]
    by_trainer = [with_reference(s, r, 0.7) for s, r in zip(plain, references, strict=True)]
    by_rollout = []
    for sample, reference in zip(plain, references, strict=True):
        arrays = sample.arrays()
        advantages = arrays.advantages + 0.7 * arrays.loss_mask * (reference - arrays.logprobs)
        by_rollout.append(with_reference(sample, reference, 0.0, advantages=advantages))
    one, first = step(tiny_model, by_trainer, loss, scores=FullScores())
    two, second = step(tiny_model, by_rollout, loss)
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    assert parameters_close(first, second, atol=1e-6)


def test_rollout_logprobs_would_be_wrong_under_truncation(tiny_model, make_batch):
    """What the refusal is there for: over the kept set every token seems likelier than it is."""
    masked = [s for s in make_batch(1, samples=12).samples if s.must_have_masks]
    for sample in masked:
        loss_mask = sample.arrays().loss_mask
        off = sample.arrays().logprobs[loss_mask] - logprobs_of(tiny_model, sample)[loss_mask]
        assert (off > -1e-5).all()
        assert off.mean() > 0.1


def test_without_full_scores_no_reference_is_looked_at(tiny_model, make_batch):
    sample = make_batch(1).samples[1]
    row = pack_row([with_reference(sample, -np.ones(sample.num_tokens), 0.5)], [0])
    logprobs = torch.zeros(len(row.labels), requires_grad=True)
    scored = KeptLogprobs(logprobs, None, logprobs, None, None)
    assert torch.equal(advantages_of(row, scored), row.advantages.double())


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.kind)
def test_frozen_tokens_have_exactly_their_gradient(loss, make_batch):
    samples = make_batch(1, samples=2).samples
    row = pack_row([samples[1], frozen(samples[0], 0.25)], [0, 1])
    logprobs = (row.rollout_logprobs - 0.5).clamp(max=-0.1).requires_grad_()
    scored = KeptLogprobs(logprobs, None, logprobs.detach(), None, None)
    summed = row_loss(loss_function(loss), row, scored)
    summed.total.backward()
    assert (logprobs.grad[row.cross_entropy] == -0.25).all()
    assert not summed.clipped[row.cross_entropy].any()
    assert not summed.rejected[1]
