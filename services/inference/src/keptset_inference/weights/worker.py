"""What is added to vLLM's worker for weights: whole loads, and receiving within bounds.

Called by `collective_rpc`. What goes wrong is returned, not raised: of several workers vLLM's executor reads
the answers up to the first error, and takes those that it left for answers to the next call.
"""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from vllm.config import set_current_vllm_config
from vllm.logger import init_logger

from .lease import Watched

logger = init_logger("vllm.keptset.weights")

P = ParamSpec("P")

JOIN_GRACE = 10.0
"""Seconds in which NCCL may notice by itself that a peer is gone, while the group is formed."""
LEAVE_GRACE = 15.0
"""Seconds until a collective returns whose group was left; vLLM gives the leaving itself 5."""


def _told(work: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], str | None]:
    @functools.wraps(work)
    def told(self: Any, *args: P.args, **kwargs: P.kwargs) -> str | None:
        try:
            work(self, *args, **kwargs)
        except Exception as error:
            logger.exception("weights: %s", work.__name__)
            return f"{type(error).__name__}: {error}"
        return None

    return told


class ReceivesWeights:
    """Each of these returns None, or what went wrong.

    VLLM's own calls wait for the trainer without a bound, and a worker that waits takes no other call. Here a
    second thread leaves the NCCL group in time (`ncclCommAbort`), which lets the waiting one go.
    """

    @_told
    def keptset_reload(self: Any, weights_path: str) -> None:
        """Load all weights from files, whatever a load or transfer before has left half done.

        VLLM counts for each layer what was loaded. What a failed load has left there would count in this one:
        layers would be put in place before their last weights have come.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._weight_update_active:
            self.finish_weight_update()
        else:
            with set_current_vllm_config(self.vllm_config):
                finalize_layerwise_reload(self.get_model(), self.model_config)
        self.reload_weights(weights_path=weights_path)

    @_told
    def keptset_join(self: Any, init_info: dict[str, Any], lease: str, seconds: float) -> None:
        """Leave the group of before and join the trainer's new one. Who waits there cannot be called off: a
        process that waits too long is ended.
        """
        waiting_for = "the trainer and all others to join the workers' group"
        with Watched(lease, seconds, waiting_for, lambda: None, JOIN_GRACE):
            self.weight_transfer_engine.shutdown()
            self.init_weight_transfer_engine(init_info)

    @_told
    def keptset_receive(self: Any, update_info: dict[str, Any], lease: str, seconds: float) -> None:
        """Receive all weights and put them in place. After a failure they are unknown until others are
        loaded, and this worker is in no group.
        """
        leave = self.weight_transfer_engine.shutdown
        try:
            with Watched(lease, seconds, "the trainer to send all weights", leave, LEAVE_GRACE):
                self.start_weight_update()
                # After the group was left vLLM takes what is in its buffers for weights, and says nothing.
                self.update_weights(update_info)
        except Exception:
            leave()
            raise
        self.finish_weight_update()


__all__ = ["ReceivesWeights"]
