"""What only a GPU shows of capture: that no step waits for it; skipped where there is none."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor

from keptset_inference.capture.native_rows import NativeRows
from keptset_inference.capture.padding import KEY
from keptset_inference.capture.rows import KeptRows
from keptset_inference.capture.v1 import CaptureSampler

from .engine_config import vllm_config
from .test_rows import marked
from .test_sampler import VOCABULARY, metadata

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
REQUESTS = [marked(top_k=5, top_p=0.9), SamplingParams(top_k=5, logprobs=0), marked(top_k=3, min_p=0.1)]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device is an error."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def padded_config():
    config = vllm_config(VOCABULARY)
    config.additional_config = {KEY: 30}
    return config


def test_the_check_sees_a_wait():
    with no_waiting(), pytest.raises(RuntimeError):
        torch.ones(1, device="cuda").item()


def test_a_step_of_our_sampler_does_not_wait():
    device, update = torch.device("cuda"), [(i, p, None, []) for i, p in enumerate(REQUESTS)]
    processors = [kind(padded_config(), device, True) for kind in (MinPLogitsProcessor, KeptRows)]
    for one in processors:
        one.update_state(BatchUpdate(len(REQUESTS), [], update, []))
    step = metadata(REQUESTS)
    moved = {name: getattr(step, name).to(device) for name in ("temperature", "top_p", "top_k")}
    step = dataclasses.replace(step, **moved, logitsprocs=LogitsProcessors(processors))
    logits, sampler = (
        torch.randn(len(REQUESTS), VOCABULARY, device=device),
        CaptureSampler("processed_logprobs"),
    )
    sampler.forward(logits.clone(), step)  # compiles
    with no_waiting():
        output = sampler.forward(logits.clone(), step)
    sizes = output.logprobs_tensors.logprob_token_ids[:, 1].tolist()
    assert sizes[1] == -1
    assert 1 <= sizes[0] <= 5
    assert 1 <= sizes[2] <= 3


def test_the_rows_of_native_capture_do_not_wait():
    rows = NativeRows(padded_config(), SimpleNamespace(vocab_size=VOCABULARY, max_num_reqs=8))
    for slot, params in enumerate(REQUESTS):
        rows.add_request(slot, params)
    rows.apply_staged_writes()
    slots = torch.arange(len(REQUESTS), dtype=torch.int32)
    context = SimpleNamespace(idx_mapping_np=slots.numpy(), expanded_idx_mapping=slots.cuda())
    logits = torch.zeros(len(REQUESTS), VOCABULARY, device="cuda")
    with no_waiting():
        rows.apply(logits, context)
    assert torch.isfinite(logits).sum(1).tolist() == [30, VOCABULARY, 30]
