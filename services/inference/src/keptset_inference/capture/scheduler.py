"""Our schedulers: vLLM's, which move the kept sets into vLLM's own sampling-mask channel.

The scheduler is the place where a row of the batch becomes a request again. From here on the sets travel as
vLLM's native masks do: `EngineCoreOutput.new_sampling_mask`.
"""

from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from .carried import carry, joined, rows_of
from .columns import split_columns
from .flag import is_marked
from .packed import can_pack, pack_rows, without_head

logger = init_logger("vllm.keptset.scheduler")


class _WithKeptSets:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Not ModelConfig's switch: that one wants the V2 runner, and a top_k of every single request.
        self.return_sampling_mask = True
        # With drafts a step may have one token of a request or several: then nothing is packed, ever.
        self.packs = self.vllm_config.speculative_config is None

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        wants = {
            request_id: _wants(request)
            for request_id in scheduler_output.num_scheduled_tokens
            if (request := self.requests.get(request_id)) is not None
        }
        move_columns(model_runner_output)
        packed = self.packs and pack(model_runner_output)
        if packed and all(want is PACKED for want in wants.values()):
            return self._all_together(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client in outputs.values():
            together = []
            for place, output in enumerate(client.outputs):
                if wants.get(output.request_id, NOTHING) is NOTHING:
                    output.new_sampling_mask = None  # vLLM cut an empty one for every row of the step
                elif packed and output.new_sampling_mask is not None:
                    if wants[output.request_id] is PACKED:
                        output.new_logprobs = None
                        together.append(place)
                    else:
                        output.new_sampling_mask = without_head(output.new_sampling_mask)
            if len(together) > 1:
                sets = [client.outputs[place].new_sampling_mask.token_ids for place in together]
                carry(client.outputs, together, joined(sets))
        return outputs

    def _all_together(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """A step in which nobody wants anything but packed sets: vLLM cuts no request's part out."""
        sets, rows = model_runner_output.sampling_masks, model_runner_output.req_id_to_index
        model_runner_output.logprobs = model_runner_output.sampling_masks = None
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client in outputs.values():
            places = [place for place, output in enumerate(client.outputs) if output.new_token_ids]
            if places:
                of_client = [rows[client.outputs[place].request_id] for place in places]
                carry(client.outputs, places, rows_of(sets, of_client))
        return outputs


NOTHING, ALONE, PACKED = "nothing", "alone", "packed"
"""What a request wants of a step: no set; its set, and logprobs beside it; both in one array."""


def _wants(request: Request) -> str:
    """Looked up once for each request."""
    known: str | None = getattr(request, "keptset_wants", None)
    if known is None:
        params = request.sampling_params
        known = PACKED if can_pack(params) else ALONE if is_marked(params) else NOTHING
        request.keptset_wants = known
    return known


def pack(output: ModelRunnerOutput) -> bool:
    """Let one array carry sets, logprobs and ranks of each row, in place; not if a row may have sampled
    several tokens.
    """
    logprobs, masks = output.logprobs, output.sampling_masks
    if logprobs is None or masks is None or masks.cu_num_generated_tokens is not None:
        return False
    if logprobs.cu_num_generated_tokens is not None:
        return False
    output.sampling_masks = pack_rows(logprobs, masks)
    return True


def move_columns(output: ModelRunnerOutput) -> None:
    """From the columns behind the logprobs' ids to `sampling_masks`; in place.

    A row whose set is wrong gets an empty one, which makes its request fail where the answer is built: no
    other request of the batch suffers.
    """
    if output.logprobs is None:
        return
    sampled = np.array([ids[0] if ids else -1 for ids in output.sampled_token_ids], np.int64)
    output.logprobs, masks, problems = split_columns(output.logprobs, sampled)
    if masks is not None:  # without columns there are vLLM's own masks, or none
        output.sampling_masks = masks
    for problem in problems:
        logger.error("kept sets: %s; the request fails", problem)


class KeptScheduler(_WithKeptSets, Scheduler):
    """For synchronous scheduling."""


class KeptAsyncScheduler(_WithKeptSets, AsyncScheduler):
    """For asynchronous scheduling."""
