"""The proof, before the server answers anything, that capture is in place: in the processes that sample."""

import asyncio
import logging
from typing import Any

import numpy as np
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.outputs import SamplingMaskLists

from .capture.csr import kept_tokens
from .capture.flag import mark
from .capture.packed import unpack_rows
from .capture_choice import Kind
from .errors import StartError
from .workers import ask_workers

logger = logging.getLogger("vllm.keptset")

SAMPLERS: dict[Kind, str] = {"v1": "CaptureSampler", "native": "NativeSampler"}
"""What samples where the capture is in place."""

PROBES: dict[Kind, tuple[dict[str, Any], ...]] = {
    "v1": ({"top_k": 2}, {"top_k": 2, "min_p": 1.0}),
    "native": ({"top_k": 2}, {"top_k": 2, "top_p": 0.9}, {"top_p": 0.9}),
}
"""What requests are sent.

Our own cut must come after vLLM's min_p, which at 1 leaves the most likely id, and others only as far as they
are just as likely: were it to come before, a set would have ids that could not be sampled. vLLM's own cuts,
from which native sets come, are one kernel for each of the three requests there, compiled when it is first
needed: now, and not while somebody waits. Masks are read behind all of them, and drafts allow no min_p.
"""

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
        for number, sampling in enumerate(PROBES[kind]):
            await _probe(engine, kind, rank, number, sampling)
    counts = await _everywhere(engine, "keptset_end_proof")
    right, wrong = (sum(count[i] for count in counts) for i in (0, 1))
    if wrong or right < 2 * ranks * len(PROBES[kind]):
        raise StartError(
            f"capture is not exact here: {right} rows of the proof's requests were recorded as they were "
            f"sampled from, {wrong} were not"
        )


async def _everywhere(engine: AsyncLLM, method: str) -> list[Any]:
    """One result for each worker of each data-parallel rank."""
    try:
        async with asyncio.timeout(PROOF_SECONDS):
            return await ask_workers(engine, method)
    except TimeoutError:
        raise StartError(f"no worker answered {method} within {PROOF_SECONDS:.0f} s") from None
    except Exception as error:
        raise StartError(f"capture is not in place: {method} failed in a worker: {error}") from error


async def _probe(engine: AsyncLLM, kind: Kind, rank: int, number: int, sampling: dict[str, Any]) -> None:
    params = SamplingParams(
        **sampling,
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
                tokens_input([0, 1]), params, f"keptset-proof-{rank}-{number}", data_parallel_rank=rank
            )
            async for answer in requests:
                output = answer.outputs[0]
    except TimeoutError:
        raise StartError(f"rank {rank} did not finish two tokens within {PROOF_SECONDS:.0f} s") from None
    sets = output.sampling_mask.token_ids if output is not None and output.sampling_mask is not None else []
    arrays = [chunk for chunk in sets if isinstance(chunk, SamplingMaskLists)]
    packed = engine.vllm_config.speculative_config is None
    if not are_two_sets(arrays, kind, sampling, packed=packed):
        raise StartError(
            f"capture is not in place: the scheduler of rank {rank} passed on {sets} for {sampling}, not two "
            "sets"
        )


def are_two_sets(
    chunks: list[SamplingMaskLists], kind: Kind, sampling: dict[str, Any], *, packed: bool
) -> bool:
    """Whether what arrived are the sets of two tokens that were sampled with the parameters of a probe.

    Args:
        chunks: of a token each, or of a step's where there are drafts.
        kind: what captured them.
        sampling: the probe's parameters.
        packed: whether the rank and the logprob are in front of each (`capture.packed`).
    """
    if not chunks:
        return False
    logprobs = None
    if packed:
        _, logprobs, kept = unpack_rows(chunks)
    else:
        kept = kept_tokens(chunks)
    # vLLM's own top-k, before native capture, leaves all that are tied at the k-th value.
    most = 2 if kind == "v1" else np.inf
    least = 1 if "top_p" in sampling or "min_p" in sampling else 2
    if len(kept.counts) != 2 or kept.counts.min() < least or kept.counts.max() > most:
        return False
    if sampling.get("min_p") == 1.0:  # all of a set are as likely as the best of them
        assert logprobs is not None, "there is no such probe beside drafts"
        return bool(np.allclose(logprobs, -np.log(kept.counts), rtol=0, atol=1e-4))
    return True


__all__ = ["PROBES", "PROOF_SECONDS", "are_two_sets", "prove_capture"]
