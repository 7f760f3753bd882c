"""The engine: started in this process, proven, and shut down with everything that it started."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logger import init_logger
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from kept_tokens.versions import BASE

from .arguments import resolved_config
from .capture.csr import keep_csr, spread_steps
from .capture.padding import mask_unknown_ids
from .capture_choice import Kind
from .connectors import check_connectors
from .generate.logprobs import keep_logprob_rows
from .proof import prove_capture

logger = init_logger("vllm.keptset.engine")


@asynccontextmanager
async def running_engine(
    arguments: AsyncEngineArgs, *, capture: Kind | None, mask_padded_ids: bool, weights_change: bool = False
) -> AsyncIterator[AsyncLLM]:
    """Start vLLM's engine and, with capture, prove it; shut it down at the end, whatever happened.

    Args:
        arguments: vLLM's.
        capture: what records kept sets.
        mask_padded_ids: keep requests with sets from ids that the tokenizer has not.
        weights_change: whether other weights may be loaded while it runs.

    Raises:
        StartError: see `arguments`, `connectors` and `proof`.
    """
    config = resolved_config(arguments, capture=capture)
    if weights_change:
        check_connectors(config.kv_transfer_config)
    if (
        capture is not None
        and mask_padded_ids
        and (known := mask_unknown_ids(config)) < (vocabulary := config.model_config.get_vocab_size())
    ):
        logger.info("requests with kept sets sample the tokenizer's %d ids of %d", known, vocabulary)
    keep_logprob_rows()
    if capture is not None:
        keep_csr()
        spread_steps()
    engine = AsyncLLM.from_vllm_config(
        config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=arguments.enable_log_requests,
        aggregate_engine_logging=arguments.aggregate_engine_logging,
        disable_log_stats=arguments.disable_log_stats,
    )
    try:
        await engine.reset_mm_cache()  # what warmed it up is no request of anybody's
        if capture is not None:
            await prove_capture(engine, capture)
        await engine.update_weight_version(BASE)
        yield engine
    finally:
        engine.shutdown(timeout=config.shutdown_timeout)


__all__ = ["running_engine"]
