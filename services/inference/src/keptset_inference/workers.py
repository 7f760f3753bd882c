"""All workers of an engine, those of its data-parallel replicas too."""

from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM


async def ask_workers(engine: AsyncLLM, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
    """One answer of each; `AsyncLLM.collective_rpc` has those of the first replica only."""
    core = engine.engine_core
    if not hasattr(core, "call_utility_all_async"):
        return list(await engine.collective_rpc(method, kwargs=kwargs))
    replicas = await core.call_utility_all_async("collective_rpc", method, None, (), kwargs)
    return [answer for answers in replicas for answer in answers]


class WholeEngine:
    """What a weight update needs of an engine."""

    def __init__(self, engine: AsyncLLM) -> None:
        """Of vLLM."""
        self.engine = engine
        self.pause_generation = engine.pause_generation
        self.resume_generation = engine.resume_generation
        self.update_weight_version = engine.update_weight_version

    async def ask_workers(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        """As above."""
        return await ask_workers(self.engine, method, kwargs)


__all__ = ["WholeEngine", "ask_workers"]
