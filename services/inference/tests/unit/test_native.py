"""Native capture: vLLM's V2 samplers with ours in their place, and vLLM's own mask kernel in Triton's
interpreter. What the samplers compute is said by the test.
"""

import importlib.util
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm.triton_utils
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput, SamplingMaskLists
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample import output as vllm_output
from vllm.v1.worker.gpu.sample.output import SamplerOutput, SamplingMaskTensors
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from keptset_inference.capture import native
from keptset_inference.capture.masks import KeptMasks
from keptset_inference.capture.native import NativeRejectionSampler, NativeSampler
from keptset_inference.capture.native_rows import NativeRows
from keptset_inference.capture.packed import unpack_rows
from keptset_inference.capture.padding import KEY
from keptset_inference.capture.proven import Proof
from keptset_inference.capture.scheduler import move_columns, pack

from .engine_config import vllm_config
from .test_rows import marked

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the engine itself is asked"),
]
V = 40


@pytest.fixture(autouse=True)
def mask_kernel(monkeypatch):
    """VLLM takes Triton for missing on a CPU: its module once more, with Triton."""
    import triton

    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)  # no pinned memory here
    monkeypatch.setattr(vllm.triton_utils, "triton", triton)
    monkeypatch.setattr(vllm.triton_utils, "tl", triton.language)
    spec = importlib.util.spec_from_file_location("masks_in_the_interpreter", vllm_output.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, spec.name, module)
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # looked at when a kernel is defined
        spec.loader.exec_module(module)
    name = "_compact_sampling_mask_kernel"
    monkeypatch.setattr(vllm_output, name, getattr(module, name))


def logits_of(rows: list[list[int]]) -> torch.Tensor:
    """Finite at the ids of each row."""
    logits = torch.full((len(rows), V), -torch.inf)
    for row, ids in zip(logits, rows, strict=True):
        row[ids] = torch.randn(len(ids))
    return logits


class Vllms(Sampler):
    """Built without the states of a model runner."""

    def __init__(self, slots: int = 8):
        self.needs_logits_processing = np.zeros(slots, bool)
        self.sampling_states = SimpleNamespace(vocab_size=V)
        self.logprobs_mode = "processed_logprobs"
        self.return_sampling_mask = False
        self.logits_processors = []


@pytest.fixture
def sampler(monkeypatch) -> NativeSampler:
    """Ours, over a vLLM that returns the logits as they are and samples their best."""
    monkeypatch.setattr(Sampler, "add_request", lambda self, slot, params: None)
    monkeypatch.setattr(Sampler, "apply_staged_writes", lambda self: None)
    monkeypatch.setattr(Sampler, "sample", lambda self, logits: (logits.argmax(1), logits))

    def call(self, logits, batch):
        sampled, _ = self.sample(logits)
        return SamplerOutput(sampled.view(-1, 1), None, None, batch.num_sampled, None)

    monkeypatch.setattr(Sampler, "__call__", call)
    return NativeSampler.in_place_of(Vllms())


def batch(slots: list[int], num_sampled: list[int], cu_num_logits: list[int] | None = None):
    """As much of an InputBatch as the samplers read."""
    cu = list(range(len(slots) + 1)) if cu_num_logits is None else cu_num_logits
    return SimpleNamespace(
        idx_mapping=torch.tensor(slots, dtype=torch.int32),
        idx_mapping_np=np.array(slots),
        cu_num_logits=torch.tensor(cu, dtype=torch.int32),
        cu_num_logits_np=np.array(cu),
        num_sampled=torch.tensor(num_sampled, dtype=torch.int32),
        num_reqs=len(slots),
    )


def admit(sampler: NativeSampler, requests: dict[int, SamplingParams]) -> None:
    for slot, params in requests.items():
        sampler.add_request(slot, params)
    sampler.apply_staged_writes()


def rows_of(lists: SamplingMaskLists) -> list[list[int]]:
    return [lists.token_ids[a:b].tolist() for a, b in zip(lists.offsets, lists.offsets[1:], strict=False)]


def test_only_rows_that_want_sets_have_masks_and_they_are_as_wide_as_these_need(sampler):
    requests = {5: marked(top_k=3), 0: SamplingParams(temperature=0), 2: marked(top_k=4), 3: SamplingParams()}
    admit(sampler, requests)
    sampler.proof = Proof()
    sets = [[3, 17, 39], list(range(V)), [5], [1, 2, 30, 31], [8]]
    step = batch([5, 0, 2, 2, 3], [1, 1, 1, 0, 1])
    masks = sampler(logits_of(sets), step).sampling_mask_tensors
    assert masks.token_ids.shape == (5, 4), "wide as the widest top_k of those that want sets"
    lists = masks.to_cpu_nonblocking().tolists(np.array([1, 1, 1, 0, 1]))
    assert rows_of(lists) == [[3, 17, 39], [], [5], [], []], "the fourth is in the middle of its prompt"
    assert sampler.proof == Proof(right=2)
    assert sampler.processed is None


def test_a_step_that_nobody_wants_sets_of_costs_nothing(sampler):
    admit(sampler, {1: SamplingParams(top_k=3), 2: marked(top_k=3)})
    assert sampler(logits_of([[1]]), batch([1], [1])).sampling_mask_tensors is None


def test_a_slot_that_is_used_again_is_its_new_requests(sampler):
    admit(sampler, {1: marked(top_k=3)})
    admit(sampler, {1: SamplingParams()})
    assert sampler(logits_of([[1]]), batch([1], [1])).sampling_mask_tensors is None
    admit(sampler, {1: marked(top_p=0.9)})
    assert sampler.widths[1] == V, "without a top_k a set may be the vocabulary"


def test_a_row_that_is_wider_than_its_top_k_arrives_whole(sampler):
    admit(sampler, {0: marked(top_k=2), 1: marked(top_k=2)})
    sampler.proof = Proof()
    masks = sampler(logits_of([[1, 4, 9, 33], [7]]), batch([0, 1], [1, 1])).sampling_mask_tensors
    assert rows_of(masks.to_cpu_nonblocking().tolists(np.array([1, 1]))) == [[1, 4, 9, 33], [7]]
    assert sampler.proof == Proof(right=2)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("wide", [False, True])
def test_our_lists_are_vllms(slots, wide):
    generator = np.random.default_rng(slots)
    counts = generator.integers(0, 4 + 3 * wide, 2 * slots).astype(np.int32)
    logits = logits_of([sorted(generator.choice(V, n, replace=False).tolist()) for n in counts])
    cu, num = torch.tensor([0, slots, 2 * slots]).int(), torch.tensor([slots, max(slots - 1, 1)]).int()
    ours = KeptMasks.from_logits(logits, cu, num, 3, slots).to_cpu_nonblocking()
    got, want = ours.tolists(num.numpy()), SamplingMaskTensors(*ours).tolists(num.numpy())
    assert got.token_ids.tolist() == want.token_ids.tolist()
    assert got.offsets.tolist() == want.offsets.tolist()
    assert got.cu_num_generated_tokens == want.cu_num_generated_tokens


def test_bits_stay_on_the_device_until_a_row_is_too_wide():
    class OnDevice:
        """A tensor that says where it is."""

        device = SimpleNamespace(type="cuda")

        def __init__(self, tensor):
            self.tensor, self.moved = tensor, 0

        def to(self, device, non_blocking):
            self.moved += 1
            return self.tensor

        def cpu(self):
            self.moved += 1
            return self.tensor

    ids, bits, counts = (OnDevice(torch.zeros(1, 2).int()), OnDevice(torch.tensor([[7]]).byte()),
                         OnDevice(torch.tensor([2]).int()))  # fmt: skip
    masks = KeptMasks(ids, bits, counts, 3, 1).to_cpu_nonblocking()
    masks.tolists(np.array([1]))
    assert (ids.moved, bits.moved, counts.moved) == (1, 0, 1)
    counts.tensor = torch.tensor([3]).int()
    assert rows_of(KeptMasks(ids, bits, counts, 3, 1).to_cpu_nonblocking().tolists(np.array([1]))) == [
        [0, 1, 2]
    ]
    assert bits.moved == 1


def test_accepted_drafts_have_the_targets_support_at_their_place(sampler, monkeypatch):
    admit(sampler, {4: marked(top_k=3), 6: SamplingParams(), 7: marked(top_k=1)})
    sets = [[1, 2], [3], [9], [4, 5], [6, 7, 8], [11], [12]]
    num_sampled = torch.tensor([2, 1, 3], dtype=torch.int32)

    def verify(self, logits, draft_logits, draft_sampled, pos, cu, idx, idx_np, *rest):
        first = [4, 6, 7].index(int(idx[0]))
        return logits, torch.zeros(len(idx), 3), num_sampled[first : first + len(idx)]

    monkeypatch.setattr(RejectionSampler, "_verify", verify)
    monkeypatch.setattr(RejectionSampler, "_get_logprobs_tensors", lambda self, *args: None)

    def call(self, logits, step, most):
        rest = torch.zeros(len(logits))
        _, num, _, masks = self._verify_in_chunks(logits, step, None, rest, rest, most, 0)
        assert masks is None, "vLLM's own switch is off"
        return SamplerOutput(torch.zeros(3, 3), None, None, num, None)

    monkeypatch.setattr(RejectionSampler, "__call__", call)
    vllms = RejectionSampler.__new__(RejectionSampler)
    vllms.__dict__ |= {"sampler": "vLLM's", "num_speculative_steps": 2, "enable_adaptive_verification": False}
    ours = NativeRejectionSampler.in_place_of(vllms, sampler)
    step = batch([4, 6, 7], [2, 1, 3], [0, 3, 4, 7])
    step.expanded_idx_mapping = step.expanded_local_pos = torch.zeros(7)
    step.seq_lens_cpu_upper_bound = torch.zeros(3)
    for most in (100, 4):  # in one chunk and in several
        lists = ours(logits_of(sets), step, most).sampling_mask_tensors.tolists(np.array([2, 1, 3]))
        assert lists.cu_num_generated_tokens == [0, 2, 3, 6]
        assert rows_of(lists) == [[1, 2], [3], [], [6, 7, 8], [11], [12]]


def test_vllms_masks_take_the_same_way_to_the_request(sampler):
    admit(sampler, {0: marked(top_k=3), 1: SamplingParams()})
    masks = sampler(logits_of([[3, 17], [5, 6]]), batch([0, 1], [1, 1])).sampling_mask_tensors
    output = ModelRunnerOutput(req_ids=["a", "b"], req_id_to_index={"a": 0, "b": 1})
    output.sampled_token_ids = [[17], [5]]
    ids, values = np.array([[17], [5]]), np.array([[-0.5], [-1.0]], np.float32)
    output.logprobs = LogprobsLists(ids, values, np.array([1, 2]))
    output.sampling_masks = masks.tolists(np.array([1, 1]))
    move_columns(output)
    assert pack(output)
    ranks, logprobs, kept = unpack_rows([output.sampling_masks.slice_request(0, 1)])
    assert (ranks.tolist(), logprobs.tolist(), kept.rows()) == ([1], [-0.5], [[3, 17]])


def runner(**changes) -> SimpleNamespace:
    fields = {"sampler": Vllms(), "rejection_sampler": None, "batch_sharder": None}
    found = SimpleNamespace(**fields | changes)
    if type(found.sampler) is Vllms:
        found.sampler.__class__ = Sampler
    return found


def test_it_takes_the_place_of_the_samplers_that_are_known():
    rejection = RejectionSampler.__new__(RejectionSampler)
    rejection.sampler = None
    there = runner(rejection_sampler=rejection)
    native.install(there)
    assert type(there.sampler) is NativeSampler
    assert there.rejection_sampler.sampler is there.sampler
    report = native.report(there)
    assert (report["sampler"], report["rows"], report["foreign"]) == ("NativeSampler", 0, [])
    there.sampler.logits_processors = [NativeRows.__new__(NativeRows), SimpleNamespace()]
    report = native.report(there)
    assert (report["rows"], report["foreign"]) == (1, ["types:SimpleNamespace"])


def test_others_are_refused():
    raw = Vllms()
    raw.logprobs_mode = "raw_logprobs"
    for changes in (
        {"sampler": SimpleNamespace()},
        {"sampler": raw},
        {"rejection_sampler": SimpleNamespace()},
        {"batch_sharder": object()},
    ):
        with pytest.raises(RuntimeError, match="native capture"):
            native.install(runner(**changes))


def test_ids_that_the_tokenizer_does_not_have_are_masked_in_marked_rows():
    config = vllm_config(V)
    config.additional_config = {KEY: 30}
    rows = NativeRows(config, SimpleNamespace(vocab_size=V, max_num_reqs=8))
    assert rows.add_request(3, marked(top_k=4))
    assert not rows.add_request(5, SamplingParams(top_k=4))
    rows.apply_staged_writes()
    context = batch([5, 3], [1, 1])
    context.expanded_idx_mapping = context.idx_mapping
    logits = rows.apply(torch.zeros(2, V), context)
    assert torch.isfinite(logits).sum(1).tolist() == [V, 30]
    rows.limit = V
    assert not rows.add_request(3, marked(top_k=4)), "nothing to mask"
    NativeRows.validate_params(marked(top_k=3))
    with pytest.raises(ValueError, match="private"):
        NativeRows.validate_params(SamplingParams(extra_args={"keptset_kept_tokens": 1}))
