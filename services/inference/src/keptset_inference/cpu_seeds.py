"""A request's own seed together with chunked prefill kills vLLM's CPU engine; this guards against it.

After each chunk of a prompt vLLM rewinds the generator of a seeded request by `set_offset`, which a CPU
generator has not ("CPU Generator does not use offset"): the engine dies as soon as the prompts of one step
exceed max_num_batched_tokens. Where stock vLLM lives, nothing changes.
"""

import types
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from .cpu_heads import pack_heads


def guard_seeds(runner: Any) -> None:
    """Keep the generators of rows that are in the middle of their prompt out of the step.

    Then nothing is drawn from them, and nothing needs rewinding. What such a row samples is discarded anyway.
    """
    sample, bookkeeping = runner._sample, runner._bookkeeping_sync
    set_aside: dict[int, Any] = {}

    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs]
        set_aside.update({row: generators.pop(row) for row in list(generators) if discarded[row]})
        return sample(*args, **kwargs)

    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = bookkeeping(*args, **kwargs)
        self.input_batch.generators.update(set_aside)
        set_aside.clear()
        return result

    runner._sample = types.MethodType(_sample, runner)
    runner._bookkeeping_sync = types.MethodType(_bookkeeping_sync, runner)


class SeedSafeCPUWorker(CPUWorker):
    """vLLM's CPU worker, which survives seeds and whose tied head follows; used where capture is off."""

    def init_device(self) -> None:
        """As vLLM's, then guard."""
        super().init_device()
        guard_seeds(self.model_runner)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; a tied head follows its embedding."""
        super().reload_weights(*args, **kwargs)
        pack_heads(self.get_model())
