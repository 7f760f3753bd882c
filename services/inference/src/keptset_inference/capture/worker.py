"""Our worker: installs the capture in the process that samples, right after the model runner exists."""

from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform

from . import v1
from .proven import Proof

if current_platform.is_cpu():
    # Importing vLLM's CPU worker takes torch's streams, events and pinned memory away from the process.
    from vllm.v1.worker.cpu_worker import CPUWorker as Base

    from ..cpu_heads import pack_heads
    from ..cpu_seeds import guard_seeds
else:
    from vllm.v1.worker.gpu_worker import Worker as Base


class KeptsetWorker(Base):  # type: ignore[misc, valid-type]
    """vLLM's worker of this platform, with capture."""

    def init_device(self) -> None:
        """As vLLM's, then install."""
        super().init_device()
        if not self.use_v2_model_runner:
            v1.install(self.model_runner)
        if current_platform.is_cpu():
            guard_seeds(self.model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; the V2 runner has its sampler only after this."""
        super().load_model(*args, **kwargs)
        if self.use_v2_model_runner:
            from . import native  # needs Triton

            native.install(self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM's, which watches from its end on for kernels that are compiled while requests wait."""
        if not current_platform.is_cpu():
            if self.use_v2_model_runner:
                from . import native

                native.warm_up(self.model_runner)
            else:
                v1.warm_up(self.model_runner)
        return super().compile_or_warm_up_model()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; on a CPU a tied head follows its embedding."""
        super().reload_weights(*args, **kwargs)
        if current_platform.is_cpu():
            pack_heads(self.get_model())

    def keptset_report(self) -> dict[str, Any]:
        """For the proof at start-up."""
        if self.use_v2_model_runner:
            from . import native

            return {"rank": self.rank, **native.report(self.model_runner)}
        return {"rank": self.rank, **v1.report(self.model_runner)}

    def keptset_begin_proof(self) -> None:
        """Compare what is recorded from now on, and remember the random state: the proof leaves no trace."""
        self.model_runner.sampler.proof = Proof()
        self._random_state, self._seeds = torch.get_rng_state(), np.random.get_state()
        self._device_random_state = (
            None if current_platform.is_cpu() else torch.cuda.get_rng_state(self.device)
        )

    def keptset_end_proof(self) -> tuple[int, int]:
        """Undo what the proof's requests drew; how many rows were recorded right and wrong."""
        torch.set_rng_state(self._random_state)
        np.random.set_state(self._seeds)  # the V2 runner draws the seeds of requests from it
        if self._device_random_state is not None:
            torch.cuda.set_rng_state(self._device_random_state, self.device)
        proof, self.model_runner.sampler.proof = self.model_runner.sampler.proof, None
        return proof.right, proof.wrong
