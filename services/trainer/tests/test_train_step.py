"""One optimiser step: ratio 1, independence of packing, masks, errors that name the sample."""

import copy
import math

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from kept_tokens.messages import TrainingBatch, TrainingSample
from keptset_settings import ClippedRatioLoss, GeometricMeanLoss, SequenceProductLoss
from keptset_trainer.losses import loss_function
from keptset_trainer.master_weights import OwnWeights
from keptset_trainer.model import Policy, load_policy, prove, prove_head
from keptset_trainer.packing import pack
from keptset_trainer.ranks import Ranks
from keptset_trainer.scorer import Scorer
from keptset_trainer.train_step import Abandoned, NotFinite, train_step

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


def step(model, samples, loss=None, *, row_tokens=64, softcap=None, lr=1e-3, **changes):
    """One step on a copy of `model`: (metrics, copy)."""
    policy = Policy(copy.deepcopy(model), softcap)
    weights = OwnWeights(policy.model)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=lr)
    options = {"max_grad_norm": 1.0, "entropy": "full", "ignore_masks": False, "told_to_stop": lambda: False}
    metrics, grad_norm = train_step(
        Scorer(policy),
        weights,
        optimizer,
        CPU,
        samples,
        pack(samples, row_tokens),
        loss_function(loss or ClippedRatioLoss()),
        **options | changes,
    )
    ignored = (options | changes)["ignore_masks"]
    return metrics.result(grad_norm=grad_norm, lr=lr, seconds=0.0, ignored_masks=ignored), policy.model


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
    one_row, together = step(tiny_model, samples, loss, row_tokens=1024)
    many_rows, apart = step(tiny_model, samples[::-1], loss, row_tokens=24)
    assert one_row == pytest.approx(many_rows, rel=1e-4, abs=2e-6)
    for a, b in zip(together.parameters(), apart.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-5)


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
        train_step(
            Scorer(policy),
            OwnWeights(policy.model),
            optimizer,
            CPU,
            samples,
            pack(samples, 64),
            loss_function(ClippedRatioLoss()),
            max_grad_norm=1.0,
            entropy=None,
            ignore_masks=False,
            told_to_stop=lambda: False,
        )
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
