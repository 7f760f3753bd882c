"""CPU time of the API process a token: from the engine's messages to the bytes of the answers. No GPU needed.

    python benchmarks/encode.py [--requests 256] [--tokens 256] [--output benchmarks/results/encode.json]

Everything that the process does with a sampled token but HTTP itself: the message of a step is decoded, the
output processor goes over it, and in the end each answer becomes bytes. Real parts of vLLM on both sides;
`stock` is its own route with `--return-sampling-mask` and logprobs=0.
"""

import argparse
import gc
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from fastapi.responses import JSONResponse
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    GenerateTokensChoice,
    GenerateTokensResponse,
)
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kept_tokens.messages import encode
from keptset_inference.capture.carried import carry, joined, spread
from keptset_inference.capture.csr import keep_csr
from keptset_inference.capture.flag import mark
from keptset_inference.capture.packed import pack_rows
from keptset_inference.errors import json_response
from keptset_inference.generate.binary_answer import binary_answer
from keptset_inference.generate.completion import completion
from keptset_inference.generate.json_answer import json_choice, usage
from keptset_inference.generate.logprobs import keep_logprob_rows
from keptset_inference.generate.sampling import Sampling

VOCABULARY = 151_936
PROMPT = 64

Answer = Callable[[str, CompletionOutput, Sampling], bytes]


def steps(
    requests: int, tokens: int, size: int, generator: np.random.Generator, packed: bool
) -> Iterator[list[bytes]]:
    """The messages of an engine that samples one token for every request in each step."""
    encoder = MsgpackEncoder()
    for step in range(tokens):
        outputs = []
        for request in range(requests):
            # Half of the published sets are singletons; sizes around the mean, ids ascending.
            count = size if size > 64 else 1 + int(generator.geometric(1 / max(size - 0.999, 1))) - 1
            ids = np.sort(generator.choice(VOCABULARY, max(count, 1), replace=False)).astype(np.int32)
            logprob = -generator.exponential(1, (1, 1)).astype(np.float32)
            sampled = int(ids[-1])
            logprobs = LogprobsLists(np.array([[sampled]], np.int32), logprob, np.array([1], np.int32))
            mask = SamplingMaskLists(ids)
            if packed:  # as our scheduler sends it
                mask = pack_rows(logprobs, mask._replace(offsets=np.array([0, len(ids)]))).slice_request(0, 1)
            outputs.append(
                EngineCoreOutput(
                    request_id=str(request),
                    new_token_ids=[sampled],
                    new_logprobs=None if packed else logprobs,
                    new_sampling_mask=mask,
                    finish_reason=FinishReason.LENGTH if step == tokens - 1 else None,
                )
            )
        if packed and requests > 1:
            carry(outputs, range(requests), joined([one.new_sampling_mask.token_ids for one in outputs]))
        message = encoder.encode(EngineCoreOutputs(outputs=outputs, weight_version="v000001"))
        yield [bytes(part) for part in message]


def stock_answer(request_id: str, output: CompletionOutput, sampling: Sampling) -> bytes:
    """As `ServingTokens.serve_tokens_full_generator` and its router."""
    choice = GenerateTokensChoice(
        index=output.index,
        logprobs=ServingTokens._create_tokens_logprobs(
            None, token_ids=output.token_ids, top_logprobs=output.logprobs, num_output_top_logprobs=0
        ),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        token_ids=list(output.token_ids),
        sampling_mask=output.sampling_mask.token_ids,
        weight_versions=output.weight_versions,
    )
    counts = UsageInfo(prompt_tokens=PROMPT, completion_tokens=len(output.token_ids), total_tokens=0)
    answer = GenerateTokensResponse(
        request_id=request_id, created=0, model="m", usage=counts, choices=[choice]
    )
    return JSONResponse(content=answer.model_dump()).body


def our_json(request_id: str, output: CompletionOutput, sampling: Sampling) -> bytes:
    """As our route with its default dialect."""
    choice = completion(output, sampling, VOCABULARY)
    head = {"request_id": request_id, "model": "m", "created": 0, "output_mode": "tokens"}
    choices = [json_choice(choice, "kept_tokens")]
    return json_response(head | {"usage": usage(PROMPT, len(choice.token_ids)), "choices": choices}).body


def our_msgpack(request_id: str, output: CompletionOutput, sampling: Sampling) -> bytes:
    """As our route for clients that accept MessagePack."""
    choices = [completion(output, sampling, VOCABULARY)]
    return encode(binary_answer(request_id, None, choices, candidates=False))


def measure(requests: int, tokens: int, messages: list[list[bytes]], answer: Answer, flat: bool) -> dict:
    """Microseconds of CPU a token, and bytes a token."""
    processor = OutputProcessor(None, log_stats=False)
    decoder = MsgpackDecoder(EngineCoreOutputs)
    params = SamplingParams(
        top_k=512,
        logprobs=0,
        max_tokens=tokens,
        detokenize=False,
        flat_logprobs=flat,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    if flat:
        mark(params)
    for request in range(requests):
        name = str(request)
        wanted = EngineCoreRequest(name, [1] * PROMPT, None, params, None, 0.0, None, None, None)
        wanted.external_req_id = name
        processor.add_request(wanted, None)
    total, size, spent = requests * tokens, 0, {"decode": 0.0, "process": 0.0, "answer": 0.0}
    for message in messages:
        times = [time.process_time()]
        outputs = decoder.decode(message)
        spread(outputs.outputs)
        times.append(time.process_time())
        done = processor.process_outputs(outputs.outputs, None, None, outputs.weight_version)
        times.append(time.process_time())
        for finished in done.request_outputs:
            size += len(answer(finished.request_id, finished.outputs[0], Sampling(params, True, 0)))
        times.append(time.process_time())
        for name, start, end in zip(spent, times, times[1:], strict=False):
            spent[name] += end - start
    microseconds = {name: round(1e6 * value / total, 3) for name, value in spent.items()}
    return microseconds | {
        "total": round(1e6 * sum(spent.values()) / total, 3),
        "bytes": round(size / total, 1),
    }


def main() -> None:
    """Measure in rounds and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 512])
    parser.add_argument("--repeat", type=int, default=5, help="rounds over all; the least of each counts")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    generator = np.random.default_rng(0)
    messages = {
        (size, packed): list(steps(args.requests, args.tokens, size, generator, packed))
        for size in args.sizes
        for packed in (False, True)
    }
    stock_lists = SamplingMaskLists.to_nested_list
    keep_logprob_rows()  # acts on requests with flat_logprobs only
    keep_csr()
    our_lists = SamplingMaskLists.to_nested_list
    arms: list[tuple[str, Answer, bool]] = [
        ("stock", stock_answer, False),
        ("JSON", our_json, True),
        ("MessagePack", our_msgpack, True),
    ]
    gc.collect()
    gc.freeze()  # as vLLM's server does after its start
    results: dict[str, dict] = {}
    for _ in range(args.repeat):
        for (name, answer, ours), size in itertools.product(arms, args.sizes):
            SamplingMaskLists.to_nested_list = our_lists if ours else stock_lists
            run = measure(args.requests, args.tokens, messages[size, ours], answer, ours)
            key = f"{name}, sets of {size}"
            results[key] = min(run, results.get(key, run), key=lambda one: one["total"])
    for key, best in results.items():
        print(f"{key:26} {best}", flush=True)
    if args.output is not None:
        head = {"requests": args.requests, "tokens": args.tokens, "unit": "microseconds of CPU a token"}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(head | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
