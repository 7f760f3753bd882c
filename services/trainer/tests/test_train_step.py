"""One optimiser step: ratio 1, independence of packing, masks, errors that name the sample."""

import copy
import dataclasses
import math

import msgspec
import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from kept_loss import KeptLogprobs
from kept_tokens import KeptTokens
from kept_tokens.messages import TrainingBatch, TrainingSample, WeightSpan
from keptset_settings import ClippedRatioLoss, GeometricMeanLoss, SequenceProductLoss
from keptset_trainer import packing
from keptset_trainer.losses import loss_function
from keptset_trainer.master_weights import OwnWeights
from keptset_trainer.model import Policy, load_policy, prove, prove_head
from keptset_trainer.optimizer import clip_and_step
from keptset_trainer.ranks import Ranks
from keptset_trainer.scorer import Scorer
from keptset_trainer.step_metrics import StepMetrics
from keptset_trainer.train_step import Abandoned, NotFinite

from .one_step import one_step

CPU = Ranks(torch.device("cpu"))
TINY = {
    "vocab_size": 261,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
}


def step(model, samples, loss=None, *, row_tokens=64, softcap=None, lr=1e-3, sgd=False, **changes):
    """One step on a copy of `model`: (metrics, copy). With `sgd` that is minus lr times the gradient."""
    policy = Policy(copy.deepcopy(model), softcap)
    weights = OwnWeights(policy.model)
    kind = torch.optim.SGD if sgd else torch.optim.AdamW
    optimizer = kind(policy.model.parameters(), lr=lr)
    metrics = one_step(Scorer(policy), weights, optimizer, CPU, samples, loss, row_tokens, **changes)
    return metrics, policy.model


def changed(sample: TrainingSample, **arrays) -> TrainingSample:
    old = sample.arrays()
    return TrainingSample.build(
        **{name: arrays.get(name, getattr(old, name)) for name in old._fields},
        kept=sample.kept(),
        must_have_masks=sample.must_have_masks,
        source="",
        group="",
        sample_id=sample.sample_id,
    )


def test_the_ratio_is_one_at_unchanged_weights(tiny_model, make_batch):
    metrics, _ = step(tiny_model, make_batch(1, samples=24).samples)
    assert metrics["ratio/max_abs_log"] < 1e-5
    assert abs(metrics["ratio/mean"] - 1) < 1e-6
    assert 0 <= metrics["mismatch_kl/mean"] < 1e-10
    assert metrics["clipped/tokens"] == 0


def test_labels_are_packed_when_the_device_has_the_body(tiny_model, make_batch, monkeypatch):
    done = []

    def noted(name, work):
        return lambda *arguments: (done.append(name), work(*arguments))[1]

    monkeypatch.setattr(Policy, "hidden", noted("body", Policy.hidden))
    monkeypatch.setattr(packing, "label", noted("labels", packing.label))
    monkeypatch.setattr(packing.Rows, "loss_tokens", noted("loss tokens", packing.Rows.loss_tokens))
    step(tiny_model, make_batch(1, samples=6).samples)
    assert done[:5] == ["body", "labels", "loss tokens", "body", "labels"]


def test_the_ratio_is_one_with_a_soft_cap_and_an_untied_head(tmp_path, make_batch):
    torch.manual_seed(0)
    config = Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=2.0, tie_word_embeddings=False)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), torch.device("cpu"), "float32")
    assert policy.softcap == 2.0
    metrics, _ = step(policy.model, make_batch(1, model=policy.model).samples, softcap=policy.softcap)
    assert metrics["ratio/max_abs_log"] < 1e-5


def test_metrics_are_those_of_the_batch(tiny_model, make_batch):
    samples = make_batch(1).samples
    metrics, _ = step(tiny_model, samples)
    counts = np.concatenate([s.kept().counts if s.kept() else np.zeros(s.num_tokens, int) for s in samples])
    loss_mask = np.concatenate([s.arrays().loss_mask for s in samples])
    sizes = counts[loss_mask & (counts > 0)]
    assert metrics["tokens/total"] == len(counts)
    assert metrics["tokens/loss"] == loss_mask.sum()
    assert metrics["kept/coverage"] == pytest.approx(len(sizes) / loss_mask.sum())
    assert metrics["kept/size_mean"] == pytest.approx(sizes.mean())
    assert metrics["kept/singleton_share"] == pytest.approx((sizes == 1).mean())
    assert 0 < metrics["kept/mass_mean"] < 1
    assert 0 < metrics["entropy/kept"] < metrics["entropy/full"] < math.log(261)
    assert metrics["grad_norm"] > 0
    assert "unsafe/ignore_kept_tokens" not in metrics


REST = {"grad_norm": 1.0, "lr": 0.0, "seconds": 0.0, "ignored_masks": False}


def add(metrics: StepMetrics, row, off: float) -> None:
    """Count a row in whose logprobs are all `off` above the rollout's."""
    logprobs = row.rollout_logprobs + torch.tensor(off)
    ones = torch.ones_like(logprobs)
    loss = loss_function(ClippedRatioLoss())(
        logprobs, row.rollout_logprobs, ones, row.sequence, row.num_sequences
    )
    metrics.add(row, row, KeptLogprobs(logprobs, ones, ones, ones, None), loss)


@pytest.mark.parametrize("off", [1e-7, -1e-7, 1e-3, -1e-3, 0.5, -0.5])
def test_mismatch_keeps_its_digits_however_small_it_is(make_batch, off):
    """In float32, or without expm1, what is left of 5e-15 would be rounding."""
    row = packing.pack(make_batch(1, samples=1).samples, 64)[0]
    rollout = torch.full_like(row.rollout_logprobs, -abs(off) * 2)
    row = dataclasses.replace(row, rollout_logprobs=rollout)
    metrics = StepMetrics()
    add(metrics, row, off)
    result = metrics.read().result(**REST)
    x = float((rollout + torch.tensor(off))[0].double() - rollout[0].double())
    # exp(x) - 1 - x by its series, which cancels nothing
    expected = math.fsum(x**n / math.factorial(n) for n in range(2, 30))
    assert result["mismatch_kl/mean"] == pytest.approx(expected, rel=1e-6, abs=0)
    assert result["mismatch_kl/max"] == pytest.approx(expected, rel=1e-6, abs=0)
    assert result["ratio/max_abs_log"] == abs(x), "of a ratio below 1 too"
    assert result["ratio/mean"] == pytest.approx(math.exp(x), rel=1e-12, abs=0)


@pytest.mark.parametrize("largest", [0, 1, 2])
def test_metrics_of_ranks_merge_to_those_of_one_rank(make_batch, largest):
    rows = packing.pack(make_batch(1, samples=12).samples, 64)[:3]
    assert len(rows) == 3
    one, ranks = StepMetrics(), [StepMetrics() for _ in rows]
    for rank, row in enumerate(rows):
        off = 0.3 if rank == largest else 0.1
        add(one, row, off)
        add(ranks[rank], row, off)
    first, second, third = (metrics.read() for metrics in ranks)
    merged = first.merge(second).merge(third).result(**REST)
    assert merged == pytest.approx(one.read().result(**REST), rel=1e-12, abs=0)
    assert merged["ratio/max_abs_log"] == pytest.approx(0.3, rel=1e-5)


def by_versions(sample: TrainingSample, stale: float) -> TrainingSample:
    """The second half sampled by version 6, the first one by version 5, with logprobs `stale` below."""
    half, logprobs = sample.num_tokens // 2, np.array(sample.arrays().logprobs)
    logprobs[:half] -= np.float32(stale) * (sample.arrays().loss_mask[:half] != 0)
    spans = [WeightSpan(5, 0, half), WeightSpan(6, half, sample.num_tokens)]
    return msgspec.structs.replace(changed(sample, logprobs=logprobs), weight_versions=spans)


def test_ratios_of_what_the_trained_weights_sampled_are_1_however_stale_the_rest_is(tiny_model, make_batch):
    samples = [by_versions(sample, stale=0.3) for sample in make_batch(1, samples=6).samples]
    metrics, _ = step(tiny_model, samples, version=6)
    assert metrics["ratio/max_abs_log"] == pytest.approx(0.3, abs=1e-4)
    assert metrics["on_policy/ratio_max_abs_log"] < 1e-5
    assert metrics["on_policy/mismatch_kl_mean"] < 1e-9
    trained = np.concatenate([s.arrays().loss_mask != 0 for s in samples])
    fresh = np.concatenate([np.arange(s.num_tokens) >= s.num_tokens // 2 for s in samples])
    assert metrics["on_policy/share"] == pytest.approx((trained & fresh).sum() / trained.sum())


def test_a_wrong_set_shows_in_those_ratios_where_staleness_hides_it_from_the_others(tiny_model, make_batch):
    samples = [by_versions(sample, stale=12) for sample in make_batch(1, samples=6).samples]
    right, _ = step(tiny_model, samples, version=6)
    rows = [row and sorted({*row, (row[0] + 1) % 261}) for row in samples[1].kept().rows()]
    ids, counts = KeptTokens.from_rows(rows).to_bytes()
    samples[1] = msgspec.structs.replace(samples[1], kept_ids=ids, kept_counts=counts)
    wrong, _ = step(tiny_model, samples, version=6)
    assert wrong["ratio/max_abs_log"] == pytest.approx(right["ratio/max_abs_log"], rel=0.1)
    assert right["on_policy/ratio_max_abs_log"] < 1e-5
    assert wrong["on_policy/ratio_max_abs_log"] > 1e-3


@pytest.mark.parametrize("version", [None, 7])
def test_without_a_token_on_policy_there_is_no_ratio_of_such_tokens(tiny_model, make_batch, version):
    metrics, _ = step(tiny_model, [by_versions(s, 0.1) for s in make_batch(1).samples], version=version)
    assert metrics.get("on_policy/share") == (None if version is None else 0)
    assert not {"on_policy/ratio_max_abs_log", "on_policy/mismatch_kl_mean"} & metrics.keys()


def test_without_entropy_its_metrics_are_left_out(tiny_model, make_batch):
    metrics, _ = step(tiny_model, make_batch(1).samples, entropy=None)
    assert not {"entropy/full", "kept/mass_mean"} & metrics.keys()


def test_a_batch_without_any_masks_is_ordinary_training(tiny_model, make_batch):
    metrics, _ = step(tiny_model, make_batch(1).samples[::3])
    assert metrics["ratio/max_abs_log"] < 1e-5
    assert metrics["kept/coverage"] == 0


def test_a_sample_with_masks_from_a_source_that_need_not_have_them_replays_them(tiny_model, make_batch):
    samples = make_batch(1).samples
    relaxed = [
        type(s)(*[False if f == "must_have_masks" else getattr(s, f) for f in s.__struct_fields__])
        for s in samples
    ]
    assert step(tiny_model, relaxed)[0] == step(tiny_model, samples)[0]


@pytest.mark.parametrize("loss", [ClippedRatioLoss(), SequenceProductLoss(), GeometricMeanLoss()])
def test_packing_does_not_change_the_step(tiny_model, make_batch, loss):
    samples = [
        changed(s, logprobs=np.minimum(s.arrays().logprobs + 0.004 * s.arrays().loss_mask, 0))
        for s in make_batch(1).samples
    ]
    # AdamW's first step is the sign of the gradient, which rounding decides where that is next to nothing
    plain = {"sgd": True, "lr": 1.0}
    one_row, together = step(tiny_model, samples, loss, row_tokens=1024, **plain)
    many_rows, apart = step(tiny_model, samples[::-1], loss, row_tokens=24, **plain)
    assert one_row == pytest.approx(many_rows, rel=1e-4, abs=2e-6)
    for a, b in zip(together.parameters(), apart.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-6)


def test_a_sequence_without_trained_tokens_changes_nothing(tiny_model, make_batch):
    samples = make_batch(1).samples
    length = samples[0].num_tokens
    context = TrainingSample.build(
        token_ids=samples[0].arrays().token_ids,
        loss_mask=np.zeros(length, bool),
        logprobs=np.zeros(length),
        temperatures=np.ones(length),
        advantages=np.ones(length),
        kept=None,
        must_have_masks=True,
        source="",
        group="",
        sample_id="context",
    )
    for loss in (ClippedRatioLoss(), SequenceProductLoss(), GeometricMeanLoss()):
        without, _ = step(tiny_model, samples, loss, row_tokens=24)
        beside, _ = step(tiny_model, [*samples, context], loss, row_tokens=24)
        assert beside.pop("tokens/total") == without.pop("tokens/total") + length
        assert beside == pytest.approx(without, rel=1e-5, abs=1e-7)


def test_a_step_makes_good_tokens_likelier(tiny_model, make_batch):
    samples = [changed(s, advantages=np.ones(s.num_tokens)) for s in make_batch(1).samples]
    _, after = step(tiny_model, samples)
    assert step(after, samples)[0]["ratio/mean"] > 1.01


def test_ignoring_the_masks_gives_other_ratios_and_says_so(tiny_model, make_batch):
    metrics, _ = step(tiny_model, make_batch(1).samples, GeometricMeanLoss(), ignore_masks=True)
    assert metrics["unsafe/ignore_kept_tokens"] == 1.0
    assert metrics["mismatch_kl/mean"] > 0.1
    assert metrics["rejected/sequences"] > 0.5
    assert "kept/mass_mean" not in metrics


def test_damaged_weights_are_named_by_sample_and_position(tiny_model, make_batch):
    samples = make_batch(1).samples
    broken = copy.deepcopy(tiny_model)
    token = int(samples[0].arrays().token_ids[0])
    with torch.no_grad():
        broken.lm_head.weight[token] = math.nan
    with pytest.raises(NotFinite, match=r"sample \d+ \(id '1/\d+'\) at position \d+: token .* not applied"):
        step(broken, samples)


def test_a_rollout_logprob_that_no_ratio_can_be_formed_with_is_named(tiny_model, make_batch):
    samples = list(make_batch(1).samples)
    arrays = samples[5].arrays()
    position = int(np.flatnonzero(arrays.loss_mask)[1])
    logprobs = arrays.logprobs.copy()
    logprobs[position] = -2000
    samples[5] = changed(samples[5], logprobs=logprobs)
    with pytest.raises(NotFinite, match=rf"sample 5 \(id '1/5'\) at position {position}: .*-2000"):
        step(tiny_model, samples)


def test_a_gradient_that_overflows_names_its_sample_and_is_not_applied(tiny_model, make_batch):
    samples = list(make_batch(1).samples)
    samples[2] = changed(samples[2], advantages=np.full(samples[2].num_tokens, 3e38))
    before = copy.deepcopy(tiny_model.state_dict())
    policy = Policy(copy.deepcopy(tiny_model), None)
    optimizer = torch.optim.AdamW(policy.model.parameters())
    with pytest.raises(NotFinite, match=r"sample 2 \(id '1/2'\).*not applied"):
        one_step(Scorer(policy), OwnWeights(policy.model), optimizer, CPU, samples, entropy=None)
    assert all(torch.equal(value, before[name]) for name, value in policy.model.state_dict().items())
    assert not optimizer.state


def test_a_step_is_left_between_rows_when_told_to_stop(tiny_model, make_batch):
    answers = iter([False, True])
    with pytest.raises(Abandoned):
        step(tiny_model, make_batch(1).samples, row_tokens=24, told_to_stop=lambda: next(answers))


def test_an_architecture_that_scales_its_logits_is_refused(tmp_path):
    GraniteForCausalLM(GraniteConfig(**TINY, logits_scaling=3.0)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"trainer.model is a GraniteForCausalLM, whose logits differ"):
        prove(load_policy(str(tmp_path), torch.device("cpu"), "auto"))


def test_a_missing_soft_cap_would_be_noticed():
    model = Gemma2ForCausalLM(Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=2.0)).eval()
    prove_head(Policy(model, 2.0))
    with pytest.raises(ValueError, match="logits differ"):
        prove_head(Policy(model, None))


def test_batches_are_built_as_the_orchestrator_builds_them(make_batch):
    batch = make_batch(3)
    assert isinstance(batch, TrainingBatch)
    assert any(s.must_have_masks for s in batch.samples)
    assert any(not s.kept_counts for s in batch.samples)


@pytest.mark.parametrize(("largest", "moved"), [(1.0, 1.0), (4.9, 4.9), (5.1, 5.0), (1e9, 5.0)])
def test_a_gradient_is_clipped_to_its_norm(largest, moved):
    """By plain SGD: Adam hardly feels a factor."""
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    norm, sound, _ = clip_and_step(optimizer, CPU, largest, torch.zeros((), dtype=torch.float64))
    assert bool(sound)
    assert float(norm) == pytest.approx(5.0)
    assert float(torch.cat([p.detach() for p in parameters]).norm()) == pytest.approx(moved, rel=1e-5)
    assert parameters[0][0].item() == pytest.approx(-0.6 * moved, rel=1e-5), "the direction stays"
