"""Capture on the V1 model runner: a sampler that reads the kept set off the tensor it sampled from."""

import os
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from .cut import cut_rows
from .padding import known_ids
from .proven import Proof
from .rows import KeptRows


class CaptureSampler(Sampler):
    """vLLM's sampler; in steps with marked rows the sets ride behind the ids of the logprobs (`columns`)."""

    rows: KeptRows | None = None  # while a step with marked rows is sampled
    proof: Proof | None = None  # while requests are sampled to prove that this works

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any
    ) -> SamplerOutput:
        """As vLLM's, with columns appended."""
        processors = sampling_metadata.logitsprocs.argmax_invariant
        rows = next((p for p in processors if isinstance(p, KeptRows)), None)
        if rows is None or not rows.count:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        self.rows, rows.armed = rows, True
        try:
            output = super().forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            self.rows, rows.armed = None, False
            columns, rows.columns = rows.columns, None
        assert columns is not None
        assert output.logprobs_tensors is not None
        ids = torch.cat((output.logprobs_tensors.logprob_token_ids, columns), 1)
        output.logprobs_tensors = output.logprobs_tensors._replace(logprob_token_ids=ids)
        return output

    def sample(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As vLLM's, which sees no id that `KeptRows` masks out and cuts no row that it has cut."""
        rows = self.rows
        if rows is not None:
            rows.mask_unknown(logits)
            sampling_metadata = rows.without_cuts(sampling_metadata)
        sampled, logprobs = super().sample(logits, sampling_metadata, *args, **kwargs)
        if self.proof is not None and rows is not None:
            self.proof.compare(logprobs, rows.columns)
        return sampled, logprobs


def install(runner: Any) -> None:
    """Replace the sampler of a V1 model runner.

    Raises:
        RuntimeError: the runner's sampler is not the one we know how to replace.
    """
    sampler = runner.sampler
    if type(sampler) is not Sampler or sampler.logprobs_mode != "processed_logprobs":
        raise RuntimeError(
            f"capture cannot replace {type(sampler).__name__} in mode "
            f"{getattr(sampler, 'logprobs_mode', None)!r}"
        )
    runner.sampler = CaptureSampler(sampler.logprobs_mode, sampler.use_fp64_gumbel)
    # For any custom logits processor vLLM waits, before each step, until the previous step's ids are back on
    # the host, even under asynchronous scheduling. Ours reads no output ids.
    runner.input_batch.logitsprocs_need_output_token_ids = False


def warm_up(runner: Any) -> None:
    """Compile the kernels of the cut, on a GPU."""
    vocabulary = runner.model_config.get_vocab_size()
    logits = torch.zeros(2, vocabulary, device=runner.device)
    top_k = torch.ones(2, dtype=torch.int32, device=runner.device)
    cut_rows(logits, top_k, torch.ones(2, device=runner.device), known_ids(runner.vllm_config), 1)


def report(runner: Any) -> dict[str, Any]:
    """What samples in this process, for the proof at start-up."""
    processors = list(runner.input_batch.logitsprocs.all)
    ours = [p for p in processors if isinstance(p, KeptRows)]
    foreign = [
        p for p in processors if not isinstance(p, KeptRows) and not type(p).__module__.startswith("vllm.")
    ]
    return {
        "pid": os.getpid(),
        "runner": type(runner).__name__,
        "sampler": type(runner.sampler).__name__,
        "rows": len(ours),
        "foreign": [f"{type(p).__module__}:{type(p).__qualname__}" for p in foreign],
        "waits_for_ids": bool(runner.input_batch.logitsprocs_need_output_token_ids),
    }
