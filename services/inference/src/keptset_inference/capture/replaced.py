"""Every piece of vLLM 0.32 that we replace, override or rely on beyond its documented hooks, in one place.

A test pins the source of each: an upgrade of vLLM fails there first, and says what to look at again.
"""

from dataclasses import dataclass

NATIVE = "native masks (`return_sampling_mask`) per request, on the runner that is used, exact under ties"
PER_REQUEST = "`return_sampling_mask` per request"


@dataclass(frozen=True)
class Piece:
    """One function or class of vLLM's."""

    target: str
    """`module:qualified.name`."""
    how: str
    """What we do with it: replace, override, or rely on."""
    reason: str
    ends_with: str
    """The change of vLLM's that makes this unnecessary."""


PIECES = (
    # How a row is cut and its set is read.
    Piece(
        "vllm.v1.sample.sampler:Sampler.__init__",
        "called by CaptureSampler, which takes the place of a Sampler of the same arguments",
        "vLLM has no hook for the sampler",
        NATIVE,
    ),
    Piece(
        "vllm.v1.sample.sampler:Sampler.forward",
        "overridden by CaptureSampler",
        "appends the sets to the ids of the logprobs, whose copy to the host happens anyway",
        NATIVE,
    ),
    Piece(
        "vllm.v1.sample.sampler:Sampler.sample",
        "overridden by CaptureSampler; min_p, our KeptRows, then top-k and top-p, on one tensor",
        "KeptRows has cut the marked rows exactly; vLLM's own cuts are kept from them",
        NATIVE,
    ),
    Piece(
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.__init__",
        "relied on: takes forward_native, or forward_cpu, wherever processed logprobs are wanted",
        "kernels that cut and sample in one go would sample from what nobody sees",
        NATIVE,
    ),
    Piece(
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_native",
        "relied on: cuts nothing at top_k = V and top_p = 1, returns the logprobs of what it samples from",
        "the same",
        NATIVE,
    ),
    Piece(
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu",
        "relied on: returns the processed logprobs of what it samples from",
        "the same, on a CPU",
        NATIVE,
    ),
    Piece(
        "vllm.v1.sample.sampler:Sampler.gather_logprobs",
        "relied on: column 0 is the sampled token",
        "the columns of a set follow those of the logprobs",
        NATIVE,
    ),
    Piece(
        "vllm.v1.sample.logits_processor.interface:LogitsProcessor",
        "subclassed by KeptRows (official hook)",
        "knows which rows want a set",
        NATIVE,
    ),
    Piece(
        "vllm.v1.sample.logits_processor.interface:BatchUpdate",
        "relied on: removed, added, moved, in this order",
        "the same",
        NATIVE,
    ),
    Piece(
        "vllm.v1.sample.logits_processor:build_logitsprocs",
        "relied on: ours is built once, after the built-in ones",
        "the same",
        NATIVE,
    ),
    # Native capture, on the V2 model runner.
    Piece(
        "vllm.v1.worker.gpu.sample.sampler:Sampler.__call__",
        "extended by NativeSampler: masks of marked rows, with vLLM's own switch off",
        "that switch is for every request of the engine",
        PER_REQUEST,
    ),
    Piece(
        "vllm.v1.worker.gpu.sample.sampler:Sampler.sample",
        "extended by NativeSampler; relied on: returns the logits that it samples from",
        "the masks are read off them",
        PER_REQUEST,
    ),
    Piece(
        "vllm.v1.worker.gpu.sample.sampler:Sampler.add_request",
        "extended by NativeSampler, and apply_staged_writes with it",
        "knows which slots want sets",
        PER_REQUEST,
    ),
    Piece(
        "vllm.v1.worker.gpu.sample.sampler:Sampler.__init__",
        "relied on: NativeSampler takes over all that it has set",
        "vLLM has no hook for the sampler",
        PER_REQUEST,
    ),
    Piece(
        "vllm.v1.worker.gpu.sample.sampler:Sampler._sample_random",
        "relied on: cuts before it samples wherever processed logprobs are wanted",
        "the masks are read off what was sampled from",
        PER_REQUEST,
    ),
    Piece(
        "vllm.v1.worker.gpu.sample.output:SamplingMaskTensors",
        "subclassed by KeptMasks, which leaves the bitmask on the device and takes all rows at once",
        "5 MB a step, and a loop over rows on the host",
        "a bitmask that is copied only if it is needed",
    ),
    Piece(
        "vllm.v1.worker.gpu.sample.output:_compact_sampling_mask_kernel",
        "relied on: writes nothing for requests that sampled nothing",
        "rows that want no set cost nothing",
        PER_REQUEST,
    ),
    Piece(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler._verify",
        "extended by NativeRejectionSampler",
        "masks of accepted drafts, of marked requests only",
        PER_REQUEST,
    ),
    Piece(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler._verify_in_chunks",
        "relied on: calls _verify once for each chunk, in order",
        "the same",
        PER_REQUEST,
    ),
    Piece(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__",
        "extended by NativeRejectionSampler",
        "the same",
        PER_REQUEST,
    ),
    Piece(
        "vllm.v1.worker.gpu.async_utils:AsyncOutput",
        "relied on: keeps what is on the device alive until the lists are made",
        "the bitmask is copied then, if at all",
        "a bitmask that is copied only if it is needed",
    ),
    Piece(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample",
        "relied on: calls runner.sampler, or runner.rejection_sampler where there are drafts",
        "both are replaced after load_model",
        PER_REQUEST,
    ),
    Piece(
        "vllm.v1.worker.gpu_worker:Worker.load_model",
        "extended by our worker: the V2 runner has its samplers only after it",
        "the same",
        PER_REQUEST,
    ),
    Piece(
        "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
        "extended by our worker: compiles the kernels of the capture first",
        "vLLM watches from its end on for what is compiled while requests wait",
        NATIVE,
    ),
    Piece(
        "vllm.v1.worker.gpu.sample.logits_processor.interface:LogitsProcessor",
        "subclassed by NativeRows (official hook)",
        "who may ask for sets, and which ids such requests never sample",
        "padded ids that are never sampled",
    ),
    Piece(
        "vllm.config.vllm:VllmConfig._verify_sampling_replay_config",
        "not called for us, because vLLM's switch is off; arguments.py refuses the same",
        "that switch is for every request of the engine",
        PER_REQUEST,
    ),
    Piece(
        "vllm.v1.sample.ops.topk_topp_sampler:flashinfer_sampler_supported",
        "relied on: VLLM_USE_FLASHINFER_SAMPLER=0 (environment) leaves FlashInfer's sampler out",
        "it is compiled at the first request that takes it, and the engine dies where that is impossible",
        "an answer that looks for nvcc, as has_flashinfer does",
    ),
    # How the sets reach the request.
    Piece(
        "vllm.v1.outputs:LogprobsTensors.to_cpu_nonblocking",
        "relied on: copies ids that are wider than the logprobs",
        "the sets ride along",
        NATIVE,
    ),
    Piece(
        "vllm.v1.outputs:LogprobsTensors.tolists",
        "relied on: converts ids that are wider than the logprobs",
        "the sets ride along",
        NATIVE,
    ),
    Piece(
        "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput.get_output",
        "relied on: one row of logprobs for each request, also where all that it sampled is thrown away",
        "the columns of a row are held against the ids that it sampled",
        NATIVE,
    ),
    Piece(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        "overridden by KeptScheduler and KeptAsyncScheduler (official hook scheduler_cls)",
        "moves the columns into `sampling_masks`, from where vLLM cuts each request's",
        NATIVE,
    ),
    Piece(
        "vllm.v1.outputs:SamplingMaskLists",
        "filled by us; its `to_nested_list` is replaced in the process of the API",
        "a list of Python ints costs 6 us a token of 512 ids; arrays are what we answer with",
        "masks that reach CompletionOutput as arrays",
    ),
    Piece(
        "vllm.v1.engine.core_client:AsyncMPClient.get_output_async",
        "extended in the process of the API: spreads the sets of a step, which one array has carried",
        "an array of its own for every request costs both processes a millisecond a step",
        "engine messages that are columns",
    ),
    Piece(
        "vllm.v1.engine.output_processor:RequestState._new_completion_output",
        "relied on: concatenates what `to_nested_list` returns",
        "the same",
        "masks that reach CompletionOutput as arrays",
    ),
    Piece(
        "vllm.logprobs:create_sample_logprobs",
        "replaced in the process of the API: makes LogprobRows for requests with flat_logprobs",
        "Python objects of every token cost 5 us each; arrays are what we answer with",
        "logprobs that reach CompletionOutput as arrays",
    ),
    Piece(
        "vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs",
        "replaced in the process of the API, for requests with LogprobRows",
        "the same",
        "logprobs that reach CompletionOutput as arrays",
    ),
    Piece(
        "vllm.v1.engine.logprobs:LogprobsProcessor.from_new_request",
        "relied on: asks create_sample_logprobs for the container",
        "the same",
        "logprobs that reach CompletionOutput as arrays",
    ),
    Piece(
        "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        "relied on: takes sets without logprobs, as `capture.packed` sends them",
        "one array a token instead of four",
        "engine messages that are columns",
    ),
    Piece(
        "vllm.outputs:RequestOutput.add",
        "relied on: merges the chunks of a slow reader by extending lists",
        "the same",
        "masks that reach CompletionOutput as arrays",
    ),
    Piece(
        "vllm.v1.engine.output_processor:OutputProcessor._trim_surplus_tokens",
        "relied on: ids, logprobs and masks are trimmed together at a stop string",
        "they must line up",
        "nothing to end",
    ),
    # CPU only.
    Piece(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
        "wrapped on the instance, on a CPU only (cpu_seeds)",
        "a seed together with chunked prefill kills the CPU engine",
        "a rewind of generators in _bookkeeping_sync that CPU generators have",
    ),
    Piece(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
        "wrapped on the instance, on a CPU only (cpu_seeds)",
        "the same",
        "the same",
    ),
    Piece(
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        "called again after weights are loaded, on a CPU only (cpu_heads)",
        "the packed copy of a tied head stays that of the old weights",
        "a reload_weights that packs tied heads",
    ),
    Piece(
        "vllm.v1.worker.gpu_worker:Worker.reload_weights",
        "overridden by our workers, on a CPU only (cpu_heads)",
        "the same",
        "the same",
    ),
    # How the engine is told, and how it is served.
    Piece(
        "vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker",
        "relied on: builds the class that worker_cls names (official hook)",
        "installs capture in the process that samples",
        NATIVE,
    ),
    Piece(
        "vllm.v1.engine.input_processor:InputProcessor._validate_params",
        "relied on: calls our validate_params for every request of every route",
        "nobody but our route may mark a request",
        NATIVE,
    ),
    Piece(
        "vllm.v1.engine.core:EngineCoreProc.pause_scheduler",
        "relied on: `keep` puts running requests back, and clears the caches once idle",
        "weights change under running requests",
        "nothing to end",
    ),
    Piece(
        "vllm.v1.engine.core:EngineCore._finish_pause",
        "relied on: waits for the device, then clears the caches",
        "nothing that was computed with old weights may be read under new ones",
        "nothing to end",
    ),
    Piece(
        "vllm.v1.engine.core:EngineCore._reset_caches",
        "relied on: clears the prefix cache and a connector's, or raises",
        "the same",
        "nothing to end",
    ),
    Piece(
        "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache",
        "relied on: puts running requests back and drops what is under way of them, or raises",
        "the same",
        "nothing to end",
    ),
    Piece(
        "vllm.model_executor.model_loader.reload.inplace:reload_weights",
        "relied on: loads a directory in place",
        "weights change under running requests",
        "nothing to end",
    ),
    Piece(
        "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_processing",
        "called before each load from files (weights.worker)",
        "what a load that failed has left is counted in the next one, which is then not whole",
        "a load that begins anew",
    ),
    Piece(
        "vllm.v1.worker.gpu_worker:Worker.update_weights",
        "called under a watch (weights.worker); relied on: after an error no update is active",
        "it waits for the trainer without a bound",
        "a bound of its own, and an error where the group was left meanwhile",
    ),
    Piece(
        "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.destroy",
        "called by a second thread while the first one waits for the group (weights.worker)",
        "ncclCommAbort ends what waits; afterwards collectives do nothing, and say nothing",
        "the same",
    ),
    Piece(
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor.collective_rpc",
        "relied on, with answers in place of errors (weights.worker)",
        "after one worker's error the answers of the others are left for the next call",
        "all answers read before one of them is raised",
    ),
    Piece(
        "vllm.v1.engine.core:EngineCore.wake_up",
        "relied on: memory comes back by tags, requests are scheduled once all of it is there",
        "weights are loaded between the two parts of waking",
        "nothing to end",
    ),
    Piece(
        "vllm.device_allocator.sleep_mode_backend:CuMemBackend.suspend",
        "relied on: level 1 keeps weights, run-time state and graphs in the host's memory",
        "what is no parameter comes back as it was, our own tensors never leave",
        "nothing to end",
    ),
    Piece(
        "vllm.entrypoints.launchers.app:build_app",
        "relied on: vLLM's routes and its middleware stack",
        "our routes are put in front of it, our guards around it",
        "nothing to end",
    ),
    Piece(
        "vllm.entrypoints.launchers.launcher:serve_http",
        "relied on: at a signal calls the engine's shutdown in a thread, where requests end first (stopping)",
        "uvicorn's own server would leave the engine's processes behind",
        "nothing to end",
    ),
    Piece(
        "vllm.v1.engine.async_llm:AsyncLLM.shutdown",
        "called when its output handler is gone (stopping)",
        "it closes what the handler listens to, which may report a dead engine before it is cancelled",
        "a shutdown that cancels the handler first",
    ),
    Piece(
        "vllm.entrypoints.serve.utils.api_utils:with_cancellation",
        "relied on: cancels what waits for the engine when the client leaves",
        "a client that leaves must free its sequences",
        "nothing to end",
    ),
)

__all__ = ["NATIVE", "PER_REQUEST", "PIECES", "Piece"]
