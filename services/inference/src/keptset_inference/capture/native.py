"""Capture on the V2 model runner: vLLM's own masks, for the requests that want sets and for no other.

vLLM's switch (`return_sampling_mask`) is for the whole engine: with it every request needs a temperature and
a top_k, and every row costs a mask. Ours is a sampler that asks vLLM's mask kernel for the marked rows only:
to it the others are rows that sampled nothing. Sets of any width arrive exact.
"""

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from .bounds import widest_set
from .flag import is_marked
from .masks import KeptMasks
from .native_rows import NativeRows
from .proven import Proof


class NativeSampler(Sampler):
    """vLLM's V2 sampler, which adds the masks of marked rows to what it returns."""

    widths: np.ndarray
    """int32 [slots]: the most ids that a set of this slot's request should have; 0 = wants none."""
    wanted: UvaBackedTensor
    """int32 [slots] on the device: 1 = wants sets."""
    processed: Tensor | None = None  # the logits of a step, from when they are sampled to when they are read
    proof: Proof | None = None

    @classmethod
    def in_place_of(cls, sampler: Sampler) -> "NativeSampler":
        """The same sampler, with all its state."""
        ours = cls.__new__(cls)
        vars(ours).update(vars(sampler))
        slots = len(sampler.needs_logits_processing)
        ours.widths = np.zeros(slots, np.int32)
        ours.wanted = UvaBackedTensor(slots, dtype=torch.int32)
        return ours

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """As vLLM's; slots are used again, so every request writes its own."""
        super().add_request(req_idx, sampling_params)
        marked = is_marked(sampling_params)
        vocabulary = self.sampling_states.vocab_size
        self.widths[req_idx] = widest_set(sampling_params, vocabulary) if marked else 0
        self.wanted.np[req_idx] = marked

    def apply_staged_writes(self) -> None:
        """As vLLM's."""
        super().apply_staged_writes()
        self.wanted.copy_to_uva()

    def sample(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As vLLM's; what it returns second are the logits that were sampled from."""
        sampled, self.processed = super().sample(*args, **kwargs)
        return sampled, self.processed

    def __call__(self, logits: Tensor, input_batch: InputBatch) -> SamplerOutput:
        """As vLLM's, with masks."""
        output = super().__call__(logits, input_batch)
        processed, self.processed = self.processed, None
        width = self.width_of(input_batch)
        if width:
            assert processed is not None
            output.sampling_mask_tensors = self.masks(
                processed, input_batch.cu_num_logits, output.num_sampled, input_batch.idx_mapping, width, 1
            )
        return output

    def width_of(self, input_batch: InputBatch) -> int:
        """The widest set that a row of this step should have; 0 = nobody wants any."""
        return int(self.widths[input_batch.idx_mapping_np].max(initial=0))

    def masks(
        self,
        processed: Tensor,
        cu_num_logits: Tensor,
        num_sampled: Tensor,
        idx_mapping: Tensor,
        width: int,
        rows_per_request: int,
    ) -> KeptMasks:
        """Of the requests that want sets; to vLLM's kernel the others sampled nothing."""
        counted = num_sampled * self.wanted.gpu[idx_mapping]
        masks = KeptMasks.from_logits(processed, cu_num_logits, counted, width, rows_per_request)
        if self.proof is not None:
            self.proof.compare_masks(processed, cu_num_logits, counted, masks)
        return masks


class NativeRejectionSampler(RejectionSampler):
    """vLLM's verification of drafts; the set of an accepted token is the target's support at its place."""

    sampler: NativeSampler
    width: int = 0
    parts: list[KeptMasks]

    @classmethod
    def in_place_of(cls, rejection: RejectionSampler, sampler: NativeSampler) -> "NativeRejectionSampler":
        """The same, on our sampler."""
        ours = cls.__new__(cls)
        vars(ours).update(vars(rejection))
        ours.sampler, ours.parts = sampler, []
        return ours

    def _verify(
        self,
        logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        processed, sampled, num_sampled = super()._verify(
            logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, *args, **kwargs
        )
        if self.width:
            rows = self.num_speculative_steps + 1
            self.parts.append(
                self.sampler.masks(processed, cu_num_logits, num_sampled, idx_mapping, self.width, rows)
            )
        return processed, sampled, num_sampled

    def __call__(self, logits: Tensor, input_batch: InputBatch, *args: Any, **kwargs: Any) -> SamplerOutput:
        """As vLLM's, with masks."""
        self.width, self.parts = self.sampler.width_of(input_batch), []
        output = super().__call__(logits, input_batch, *args, **kwargs)
        parts, self.parts = self.parts, []
        if parts:
            output.sampling_mask_tensors = parts[0] if len(parts) == 1 else KeptMasks.cat(parts)
        return output


def install(runner: Any) -> None:
    """Replace the samplers of a V2 model runner that has loaded its model.

    Raises:
        RuntimeError: they are not those that we know how to replace.
    """
    sampler, rejection = runner.sampler, runner.rejection_sampler
    if type(sampler) is not Sampler or sampler.logprobs_mode != "processed_logprobs":
        mode = getattr(sampler, "logprobs_mode", None)
        raise RuntimeError(f"native capture cannot replace {type(sampler).__name__} in mode {mode!r}")
    if rejection is not None and type(rejection) is not RejectionSampler:
        raise RuntimeError(f"native capture cannot replace {type(rejection).__name__}")
    if runner.batch_sharder is not None:
        raise RuntimeError("native capture does not serve batch-sharded sampling")
    runner.sampler = NativeSampler.in_place_of(sampler)
    if rejection is not None:
        runner.rejection_sampler = NativeRejectionSampler.in_place_of(rejection, runner.sampler)


def warm_up(runner: Any) -> None:
    """Compile vLLM's mask kernel for the widths that Triton tells apart: 1, multiples of 16, and others."""
    rows = 1 if runner.rejection_sampler is None else runner.num_speculative_steps + 1
    logits = torch.zeros(rows, runner.model_config.get_vocab_size(), device=runner.device)
    cu_num_logits = torch.tensor([0, rows], dtype=torch.int32, device=runner.device)
    sampled = torch.ones(1, dtype=torch.int32, device=runner.device)
    for width in (1, 2, 16):
        for rows_per_request in {1, rows}:
            KeptMasks.from_logits(logits, cu_num_logits, sampled, width, rows_per_request)


def report(runner: Any) -> dict[str, Any]:
    """What samples in this process, for the proof at start-up."""
    processors = runner.sampler.logits_processors
    foreign = [p for p in processors if not isinstance(p, NativeRows) and not _vllms(p)]
    return {
        "pid": os.getpid(),
        "runner": type(runner).__name__,
        "sampler": type(runner.sampler).__name__,
        "rows": sum(isinstance(p, NativeRows) for p in processors),
        "foreign": [f"{type(p).__module__}:{type(p).__qualname__}" for p in foreign],
        "waits_for_ids": False,
    }


def _vllms(processor: Any) -> bool:
    return type(processor).__module__.startswith("vllm.")


__all__ = ["NativeRejectionSampler", "NativeSampler", "install", "report"]
