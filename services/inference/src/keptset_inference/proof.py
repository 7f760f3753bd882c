"""The proof, before the server answers anything, that capture is in place: in the processes that sample."""

import asyncio
import logging
from typing import Any

from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.outputs import SamplingMaskLists

from .capture.flag import mark
from .capture.packed import unpack_rows
from .capture_choice import Kind
from .errors import StartError

logger = logging.getLogger("vllm.keptset")

SAMPLERS: dict[Kind, str] = {"v1": "CaptureSampler", "native": "NativeSampler"}
"""What samples where the capture is in place."""

PROOF_SECONDS = 120.0
"""The longest that a worker's report or a probe request may take."""


async def prove_capture(engine: AsyncLLM, kind: Kind) -> None:
    """Ask every worker what it samples with, then send a request through every data-parallel rank.

    Only the requests show that the scheduler, in a process of its own, passes the sets on. What they draw
    from the random state is undone.

    Raises:
        StartError: capture is not in place somewhere.
    """
    for report in await _everywhere(engine, "keptset_report"):
        if (
            report["sampler"] != SAMPLERS[kind]
            or report["rows"] != 1
            or report["foreign"]
            or report["waits_for_ids"]
        ):
            raise StartError(f"capture is not in place in worker {report['rank']}: {report}")
        logger.info("capture %s is in place in worker %s: %s", kind, report["rank"], report)
    await _everywhere(engine, "keptset_begin_proof")
    ranks = engine.vllm_config.parallel_config.data_parallel_size
    for rank in range(ranks):
        await _probe(engine, rank)
    counts = await _everywhere(engine, "keptset_end_proof")
    right, wrong = (sum(count[i] for count in counts) for i in (0, 1))
    if wrong or right < 2 * ranks:
        raise StartError(
            f"capture is not exact here: {right} rows of the proof's requests were recorded as they were "
            f"sampled from, {wrong} were not"
        )


async def _everywhere(engine: AsyncLLM, method: str) -> list[Any]:
    """One result for each worker of each data-parallel rank; `AsyncLLM.collective_rpc` returns the first
    rank's.
    """
    core = engine.engine_core
    try:
        async with asyncio.timeout(PROOF_SECONDS):
            if not hasattr(core, "call_utility_all_async"):
                return list(await engine.collective_rpc(method))
            ranks = await core.call_utility_all_async("collective_rpc", method, None, (), None)
            return [result for rank in ranks for result in rank]
    except TimeoutError:
        raise StartError(f"no worker answered {method} within {PROOF_SECONDS:.0f} s") from None
    except Exception as error:
        raise StartError(f"capture is not in place: {method} failed in a worker: {error}") from error


async def _probe(engine: AsyncLLM, rank: int) -> None:
    params = SamplingParams(
        top_k=2,
        max_tokens=2,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    mark(params)
    output = None
    try:
        async with asyncio.timeout(PROOF_SECONDS):
            requests = engine.generate(
                tokens_input([0, 1]), params, f"keptset-proof-{rank}", data_parallel_rank=rank
            )
            async for answer in requests:
                output = answer.outputs[0]
    except TimeoutError:
        raise StartError(f"rank {rank} did not finish two tokens within {PROOF_SECONDS:.0f} s") from None
    sets = output.sampling_mask.token_ids if output is not None and output.sampling_mask is not None else []
    arrays = [chunk for chunk in sets if isinstance(chunk, SamplingMaskLists)]
    if len(arrays) != 2 or unpack_rows(arrays)[2].counts.tolist() != [2, 2]:
        raise StartError(
            f"capture is not in place: the scheduler of rank {rank} passed on {sets}, not two sets of 2"
        )


__all__ = ["PROOF_SECONDS", "prove_capture"]
