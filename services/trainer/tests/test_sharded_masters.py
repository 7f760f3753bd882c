"""Two ranks (gloo, on the CPU) make the same steps to the bit however gradients and weights are exchanged."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen3ForCausalLM

from kept_tokens.messages import TrainingBatch
from keptset_trainer.graphs import BodyGraphs, done_again
from keptset_trainer.model import Policy, load_policy
from keptset_trainer.optimizer import adamw
from keptset_trainer.packing import pack
from keptset_trainer.prepare import prepare
from keptset_trainer.ranks import Ranks
from keptset_trainer.train_step import NotFinite
from keptset_trainer.warm_start.tokenizer import byte_tokenizer

from .conftest import tiny_config
from .one_step import one_step
from .test_ranks import on_ranks

CPU = torch.device("cpu")
LAYERS = 4


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Of a model of four layers, whose embeddings are tied or not."""
    found = {}
    for tied in (True, False):
        found[tied] = tmp_path_factory.mktemp(f"four-layers-{tied}")
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(tiny_config(num_hidden_layers=LAYERS, tie_word_embeddings=tied))
        model.save_pretrained(found[tied])
        byte_tokenizer().save_pretrained(found[tied], save_jinja_files=False)
    return found


KINDS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, all computed again": {"tied": False, "checkpointing": "full"},
    "parts frozen, others not used; deterministic": {"tied": False, "frozen": True, "deterministic": True},
}
WAYS: list[dict[str, Any]] = [
    {},
    {"gather_in_place": True, "backward_groups": 2},
    {"backward_groups": 3},
]


def freeze(policy: Policy) -> None:
    """The embedding, a whole layer and parts of another one. And nobody uses two parameters."""
    model = policy.model.model
    for module in (model.embed_tokens, model.layers[0], model.layers[2].mlp):
        module.requires_grad_(False)
    for number, shape in ((1, (3, 5)), (3, (7,))):
        model.layers[number].unused = nn.Parameter(torch.ones(shape, dtype=policy.head.dtype))


def steps(
    ranks: Ranks, directory: Path, batches: list[Any], way: dict[str, Any], kind: dict[str, Any]
) -> tuple[Any, list[int]]:
    """Metrics, weights and what a step that is not finite says; which groups were reduced early."""
    policy = load_policy(str(directory), ranks.device, "bfloat16", "varlen")
    if kind.get("frozen"):
        freeze(policy)
    scorer, weights = prepare(
        policy,
        ranks,
        checkpointing=kind.get("checkpointing", "off"),
        compiled=False,
        sharding="optimizer",
        graphs="on",
        record=done_again,
        **way,
    )
    early: list[int] = []
    if scorer.graphs.exchange is not None:
        exchange = scorer.graphs.exchange
        scorer.graphs.exchange = lambda group: (early.append(group), exchange(group))
    optimizer = adamw(weights, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=1.0)
    before = {name: weights.whole(name).clone() for name in weights.named}
    step = partial(one_step, scorer, weights, optimizer, ranks)
    metrics = [step(batch.samples) for batch in batches[:-1]]
    changed = {name for name in before if not torch.equal(before[name], weights.whole(name))}
    frozen = {name for name, parameter in weights.model.items() if not parameter.requires_grad}
    assert changed == before.keys() - frozen
    with pytest.raises(NotFinite) as error:
        step(batches[-1].samples)
    after = {name: weights.whole(name).float().numpy().tobytes() for name in weights.named}
    return (metrics, after, str(error.value)), early


def in_all_ways(ranks: Ranks, directory: Path, batches: list[Any], kind: dict[str, Any]) -> Any:
    torch.use_deterministic_algorithms(kind.get("deterministic", False))
    return [steps(ranks, directory, batches, way, kind) for way in WAYS]


def broken(batch: TrainingBatch) -> TrainingBatch:
    """No ratio can be formed with the logprobs of its second sample."""
    samples = list(batch.samples)
    logprobs = np.where(samples[1].arrays().loss_mask, -2000, 0)
    samples[1] = msgspec.structs.replace(samples[1], logprobs=logprobs.astype("<f4").tobytes())
    return TrainingBatch.build(batch.step, samples)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_the_same_bit_for_bit(kind, directories, make_batch, tmp_path):
    options = KINDS[kind]
    # with a single sample one rank has an empty row, and there is none before the last
    batches = [make_batch(1), *[make_batch(3, samples=1)] * 2, broken(make_batch(4, samples=8))]
    assert len(pack(batches[0].samples, 64, 0, 2)) > 1, "no row but the last one"
    directory = directories[options.get("tied", True)]
    for answers in on_ranks(2, in_all_ways, tmp_path, directory, batches, options):
        plain, _ = answers[0]
        assert "sample 1 (id '4/1') at position" in plain[2]
        for way, (found, early) in zip(WAYS, answers, strict=True):
            assert found == plain, way
            groups = way.get("backward_groups", 1)
            last_rows, rest = divmod(len(early), groups) if groups > 1 else (0, len(early))
            assert early == [*range(groups)] * last_rows, way
            assert rest == 0
            assert (last_rows >= 2) == (groups > 1), "last rows were not replayed"


def test_what_no_step_has_written_is_given_back_as_it_was(directories, tmp_path):
    # on a GPU the optimiser writes the rounded weights: neither frozen ones nor any in a step that is not
    # finite, which may be the first one
    for wrong in on_ranks(2, changed_by_giving_back, tmp_path, directories[True]):
        assert wrong == {True: [], False: []}


def changed_by_giving_back(ranks: Ranks, directory: Path) -> dict[bool, list[str]]:
    """Names of the weights that are others after `give_back` of what the optimiser should have rounded."""
    wrong = {}
    for in_place in (True, False):
        policy = load_policy(str(directory), ranks.device, "bfloat16", "varlen")
        options = {"checkpointing": "off", "compiled": False, "sharding": "optimizer"}
        _, weights = prepare(policy, ranks, gather_in_place=in_place, **options)
        before = {name: weights.whole(name).clone() for name in weights.named}
        weights.give_back(rounded=True)
        wrong[in_place] = [name for name in before if not torch.equal(before[name], weights.whole(name))]
    return wrong


def test_new_weights_need_no_second_memory_where_they_can_go_into_the_model(directories, tmp_path):
    sizes = on_ranks(2, scratch_sizes, tmp_path, directories[True])
    assert sizes[0] == sizes[1]
    (in_place, whole), (copied, everything) = sizes[0]
    assert 0 < copied < everything / 4
    assert (in_place, whole) == (copied, everything)


def scratch_sizes(ranks: Ranks, directory: Path) -> Any:
    """Elements that are gathered beside the model; room for vectors and for rows that two ranks cannot halve,
    and for all.
    """
    sizes, rooms = [], [0, 0]
    for in_place in (True, False):
        policy = load_policy(str(directory), ranks.device, "bfloat16", "varlen")
        options = {"checkpointing": "off", "compiled": False, "sharding": "optimizer"}
        _, weights = prepare(policy, ranks, gather_in_place=in_place, **options)
        sizes.append(weights.gathered.numel())
    for parameter in policy.model.parameters():
        rows, columns = parameter.shape[0], parameter.shape[1:].numel()
        room = 2 * 64 * math.ceil(math.ceil(rows / 2) * columns / 64)
        rooms[0] += room * (parameter.dim() == 1 or rows % 2)
        rooms[1] += room
    return tuple(sizes), tuple(rooms)


def test_layers_in_groups_are_all_layers_from_the_last_to_the_first(directories):
    policy = load_policy(str(directories[True]), CPU, "bfloat16", "varlen")
    for count, sizes in ((1, [4]), (2, [2, 2]), (3, [2, 1, 1]), (4, [1, 1, 1, 1])):
        groups = policy.groups(count)
        assert [len(group) for group in groups] == sizes
        assert [block for group in groups[::-1] for block in group] == policy.blocks
    for count in (0, 5):
        with pytest.raises(ValueError, match=f"backward_groups = {count}: trainer.model has 4 layers"):
            policy.groups(count)


def around(policy: Policy) -> None:
    """The last layer gets what the first one gave, too."""
    first, last, given = policy.blocks[0], policy.blocks[-1], []
    first.register_forward_hook(lambda module, arguments, out: given.append(out))
    plain = last.forward
    last.forward = lambda hidden, **options: plain(hidden + given.pop(), **options)


def shared(policy: Policy) -> None:
    """Two layers of two groups have the same weights."""
    policy.blocks[-1].mlp = policy.blocks[0].mlp


def by_name(policy: Policy) -> None:
    """Layers are called with keywords only."""
    for block in policy.blocks:
        plain = type(block).__call__
        replacement = type(type(block).__name__, (type(block),), {})
        replacement.__call__ = lambda self, hidden, plain=plain, **options: plain(
            self, hidden_states=hidden, **options
        )
        block.__class__ = replacement


@pytest.mark.parametrize("change", [around, shared, by_name])
def test_a_model_whose_layers_are_no_chain_is_not_recorded_in_groups(change, directories, make_batch):
    policy = load_policy(str(directories[True]), CPU, "bfloat16", "varlen")
    change(policy)
    row = pack(make_batch(1).samples, 64)[0]
    for groups in ([], policy.groups(2)):
        body = BodyGraphs(policy, done_again, strict=True, groups=groups)
        full = body.arranged(row)
        body.hidden(full)
        if not groups:
            assert body.hidden(full).requires_grad
            continue
        with pytest.raises(ValueError, match="set backward_groups = 1"):
            body.hidden(full)
