"""Our worker: installs the capture in the process that samples, right after the model runner exists."""

import signal
from typing import Any

import torch
from vllm.platforms import current_platform

from ..cpu_heads import pack_heads
from ..cpu_seeds import guard_seeds
from . import v1

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Base
else:
    from vllm.v1.worker.gpu_worker import Worker as Base


class KeptsetWorker(Base):  # type: ignore[misc, valid-type]
    """vLLM's worker of this platform, with capture."""

    def init_device(self) -> None:
        """As vLLM's, then install."""
        super().init_device()
        v1.install(self.model_runner)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which drains first
        if current_platform.is_cpu():
            guard_seeds(self.model_runner)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; on a CPU a tied head follows its embedding."""
        super().reload_weights(*args, **kwargs)
        if current_platform.is_cpu():
            pack_heads(self.get_model())

    def keptset_report(self) -> dict[str, Any]:
        """For the proof at start-up."""
        return {"rank": self.rank, **v1.report(self.model_runner)}

    def keptset_keep_random_state(self) -> None:
        """Remember the random state, so that the proof's requests leave no trace in what is sampled later."""
        self._random_state = torch.get_rng_state()
        self._device_random_state = (
            None if current_platform.is_cpu() else torch.cuda.get_rng_state(self.device)
        )

    def keptset_put_random_state_back(self) -> None:
        """Undo what the proof's requests drew."""
        torch.set_rng_state(self._random_state)
        if self._device_random_state is not None:
            torch.cuda.set_rng_state(self._device_random_state, self.device)
