"""An engine in this process, and a trainer that falls silent after some of its tensors, at each in turn.

Prints one JSON object a line. The trainer is played; workers, loads and sampling are vLLM's and ours.
"""

import argparse
import json
import threading
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from keptset_inference.arguments import WORKER_EXTENSION
from keptset_inference.weights.lease import Lease

EARLY = 0.1
"""Seconds until a silent trainer is given up."""


class PlayedTransfer(NCCLWeightTransferEngine):
    """As vLLM's after `ncclCommAbort`: whatever was not sent is garbage, and nothing is said of it."""

    def __init__(self, worker: Any, new: Path) -> None:
        config = WeightTransferConfig(backend="nccl")
        super().__init__(config, worker.vllm_config, worker.device, worker.get_model())
        self.tensors = list(load_file(new / "model.safetensors").items())
        self.silent_after = len(self.tensors)
        self.left = threading.Event()

    def parse_update_info(self, update_info: dict[str, Any]) -> Any:
        return update_info

    def receive_weights(self, update_info: Any) -> None:
        self.left.clear()
        self.model.load_weights(iter(self.tensors[: self.silent_after]))
        if self.silent_after < len(self.tensors):
            assert self.left.wait(60), "nobody calls the worker off"
            garbage = [(name, values * 0 + 7) for name, values in self.tensors[self.silent_after :]]
            self.model.load_weights(iter(garbage))

    def shutdown(self) -> None:
        self.left.set()


def main() -> None:
    """Receive, fail, go back, sample."""
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("new", type=Path)
    directories = parser.parse_args()
    llm = LLM(
        str(directories.base),
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        load_format="safetensors",
        use_tqdm_on_load=False,
        worker_extension_cls=WORKER_EXTENSION,
    )
    worker = llm.llm_engine.model_executor.driver_worker.worker
    transfer = worker.weight_transfer_engine = PlayedTransfer(worker, directories.new)

    def sampled() -> list[Any]:
        llm.reset_prefix_cache()
        params = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
        (answer,) = llm.generate([{"prompt_token_ids": [9, 8, 7, 6]}], params, use_tqdm=False)
        return [*answer.outputs[0].token_ids, round(answer.outputs[0].cumulative_logprob, 4)]

    def ask(method: str, **kwargs: Any) -> str | None:
        (answer,) = llm.collective_rpc(method, kwargs=kwargs)
        return answer

    def receive(seconds: float) -> str | None:
        return ask("keptset_receive", update_info={}, lease=lease.name, seconds=seconds)

    lease = Lease()
    tell(base=sampled())
    for cut in range(len(transfer.tensors)):
        transfer.silent_after = cut
        if cut == 1:  # not late, but called off
            threading.Timer(EARLY, lease.end).start()
        said = receive(60 if cut == 1 else EARLY)
        tell(
            cut=cut, said=said, back=ask("keptset_reload", weights_path=str(directories.base)), now=sampled()
        )
    lease = Lease()
    transfer.silent_after = len(transfer.tensors)
    tell(whole=receive(60), now=sampled())
    ask("keptset_reload", weights_path=str(directories.new))
    tell(new=sampled())
    # vLLM's own: what it leaves behind spoils the next load
    failures = 0
    for cut in range(len(transfer.tensors)):
        with set_current_vllm_config(worker.vllm_config):
            transfer.start_weight_update()
            worker.get_model().load_weights(iter(transfer.tensors[:cut]))
        try:
            worker.reload_weights(weights_path=str(directories.base))
        except Exception:
            failures += 1
        ask("keptset_reload", weights_path=str(directories.new))
    tell(vllm_fails=failures, now=sampled())


def tell(**facts: Any) -> None:
    print("told", json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
