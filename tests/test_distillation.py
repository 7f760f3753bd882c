"""Orchestrator and trainer together: a reference under truncation, and where nothing is cut."""

import copy

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kept_loss import KeptSet, dense_kept_logprobs
from kept_tokens import KeptTokens
from kept_tokens.messages import TrainingBatch, TrainingSample, check_batch, decode, encode
from keptset_orchestrator import ReverseText
from keptset_orchestrator.algorithms import make_algorithm
from keptset_orchestrator.arrival import Completion
from keptset_orchestrator.batches import build_samples
from keptset_orchestrator.rollouts import Group
from keptset_orchestrator.sources import Prompt, Source
from keptset_settings import ClippedRatioLoss, GrpoAlgorithm, OpdAlgorithm
from keptset_trainer.full_scores import FullScores
from keptset_trainer.losses import loss_function
from keptset_trainer.master_weights import OwnWeights
from keptset_trainer.model import Policy
from keptset_trainer.packing import pack
from keptset_trainer.ranks import Ranks
from keptset_trainer.scorer import Scorer
from keptset_trainer.train_step import train_step

torch.set_num_threads(1)  # the suites of this repository share few cores

VOCAB, PROMPT = 40, [5, 6, 7]
ALGORITHMS = [OpdAlgorithm(), GrpoAlgorithm(reference_kl=0.3)]


def tiny(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, initializer_range=0.4, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def policy() -> Qwen3ForCausalLM:
    return tiny(0)


@pytest.fixture(scope="module")
def reference() -> Qwen3ForCausalLM:
    return tiny(1)


@torch.no_grad()
def rollout(policy, reference, seed: int, kept_ids: int | None) -> Completion:
    """Tokens sampled from the `kept_ids` likeliest ids, with what both models say of them."""
    generator = np.random.default_rng(seed)
    ids, logprobs, scores, rows = list(PROMPT), [], [], []
    for _ in range(12):
        row = torch.tensor(ids)[None]
        mine, theirs = (m(input_ids=row).logits[0, -1].double().log_softmax(-1) for m in (policy, reference))
        kept = torch.arange(VOCAB) if kept_ids is None else mine.topk(kept_ids).indices.sort().values
        over_kept = mine[kept] - mine[kept].logsumexp(-1)
        chosen = int(generator.choice(len(kept), p=over_kept.exp().numpy() / float(over_kept.exp().sum())))
        ids.append(int(kept[chosen]))
        logprobs.append(min(float(over_kept[chosen]), 0.0))
        scores.append(float(theirs[kept[chosen]]))
        rows.append(kept.tolist())
    return Completion(
        token_ids=np.array(ids[len(PROMPT) :], np.int32),
        logprobs=np.array(logprobs, np.float32),
        kept=None if kept_ids is None else KeptTokens.from_rows(rows),
        finish_reason="length",
        stop_token_id=None,
        weight_versions=[(0, 0, 12)],
        reference=np.array(scores, np.float32),
    )


def batch_of(policy, reference, algorithm, kept_ids: int | None, full_scores: bool) -> list[TrainingSample]:
    truncates, made = kept_ids is not None, make_algorithm(algorithm)
    source = Source("s", ReverseText(1, 2), {"temperature": 1.0}, truncates, 0, 0, 4, made)
    completions = [rollout(policy, reference, seed, kept_ids) for seed in range(4)]
    group = Group(Prompt(source, "s/1/0", "a", PROMPT, 0), completions, [0.0, 1.0, 0.5, 0.0])
    built = build_samples([group], vocab_size=VOCAB, full_scores=full_scores)
    batch = decode(encode(TrainingBatch.build(1, [one.sample for one in built])), TrainingBatch)
    check_batch(batch, VOCAB)
    return batch.samples


def one_step(
    changed: Policy,
    optimizer: torch.optim.Optimizer,
    samples: list[TrainingSample],
    scores: FullScores | None,
    max_grad_norm: float = 1e9,
) -> None:
    train_step(
        Scorer(changed),
        OwnWeights(changed.model),
        optimizer,
        Ranks(torch.device("cpu")),
        samples,
        pack(samples, 64),
        loss_function(ClippedRatioLoss()),
        max_grad_norm=max_grad_norm,
        entropy=None,
        ignore_masks=False,
        told_to_stop=lambda: False,
        full_scores=scores,
    )


def trained(policy, samples, scores: FullScores | None) -> list[torch.Tensor]:
    changed = Policy(copy.deepcopy(policy), None)
    optimizer = torch.optim.SGD(changed.model.parameters(), lr=1.0)
    one_step(changed, optimizer, samples, scores)
    before = policy.parameters()
    return [after.detach() - b.detach() for after, b in zip(changed.model.parameters(), before, strict=True)]


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: one.kind)
def test_truncated_algorithm_is_the_untruncated_one_where_nothing_is_cut(policy, reference, algorithm):
    """Kept sets of the whole vocabulary, compared by the trainer; no truncation, compared at arrival."""
    by_trainer = trained(
        policy, batch_of(policy, reference, algorithm, VOCAB, full_scores=True), FullScores()
    )
    by_rollout = trained(policy, batch_of(policy, reference, algorithm, None, full_scores=False), None)
    assert max(float(one.abs().max()) for one in by_rollout) > 1e-3
    assert distance(by_trainer, by_rollout) < 1e-5


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: one.kind)
def test_rollout_logprobs_give_another_step_under_truncation(policy, reference, algorithm):
    """The step that the refusal prevents is off by -log(kept mass) in the advantage of every token."""
    right = trained(policy, batch_of(policy, reference, algorithm, 8, full_scores=True), FullScores())
    wrong = trained(policy, batch_of(policy, reference, algorithm, 8, full_scores=False), None)
    assert distance(right, wrong) > 1e-3


def test_step_under_truncation_is_that_of_the_reverse_kl_over_the_kept_set():
    """In expectation, and exactly, as docs/sources.md says; it is not that of the whole reverse KL."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 8), torch.randn(VOCAB, 8)
    theirs, kept = torch.randn(VOCAB).log_softmax(-1), torch.arange(0, VOCAB, 5)
    weight.requires_grad_()

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, weight)[0]

    # every token of the set once, weighed by how often it is sampled
    n = len(kept)
    sets = KeptSet(kept.int().repeat(n), torch.arange(n + 1) * n)
    scored = dense_kept_logprobs(hidden.expand(n, -1), weight, kept, sets, torch.ones(n), full_logprobs=True)
    share = scored.logprobs.detach().exp()
    ours = gradient(-(share * (theirs[kept] - scored.full_logprobs) * scored.logprobs).sum())

    mine = (hidden @ weight.T)[0].log_softmax(-1)
    over_kept, theirs_over_kept = mine[kept].log_softmax(-1), theirs[kept].log_softmax(-1)
    over_set = gradient((over_kept.exp() * (over_kept - theirs_over_kept)).sum())
    mine = (hidden @ weight.T)[0].log_softmax(-1)
    whole = gradient((mine.exp() * (mine - theirs)).sum())
    torch.testing.assert_close(ours, over_set, atol=1e-5, rtol=1e-4)
    assert float((ours - whole).abs().max()) > 0.1


def test_distillation_under_truncation_brings_the_policy_towards_the_reference(policy, reference):
    """Many small steps of opd on truncated rollouts: the policy's reverse KL to the reference falls."""

    @torch.no_grad()
    def divergence(model) -> float:
        row = torch.tensor(PROMPT)[None]
        mine, theirs = (m(input_ids=row).logits[0, -1].double().log_softmax(-1) for m in (model, reference))
        return float((mine.exp() * (mine - theirs)).sum())

    changed = Policy(copy.deepcopy(policy), None)
    optimizer = torch.optim.SGD(changed.model.parameters(), lr=0.05)
    for _ in range(8):
        samples = batch_of(changed.model, reference, OpdAlgorithm(), 20, full_scores=True)
        one_step(changed, optimizer, samples, FullScores(), max_grad_norm=1.0)
    assert divergence(changed.model) < divergence(policy)
