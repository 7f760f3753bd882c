"""The rules of `[inference.vllm]`: engine arguments that would bias the rollouts or that have a setting here.

Which arguments there are is written down in `vllm_names.py`; this library never imports vLLM.
"""

from collections.abc import Mapping
from typing import Any

from .errors import Problem
from .schema import has_null
from .suggest import nearest
from .vllm_names import ENGINE_ARGUMENTS

_FOREIGN_LOGITS = "changes logits in ways that the trainer cannot replay"
_SPECULATION = "our capture reads the set where one token is sampled, not where several are verified"

ELSEWHERE: dict[str, str] = {
    "model": "set model in [inference]",
    "host": "set host in [inference]",
    "port": "set port in [inference]",
    "api_key": "set api_key in [inference], better by the variable KEPTSET_INFERENCE__API_KEY",
    "hf_token": "it is a secret; set the variable HF_TOKEN",
    "return_sampling_mask": "set enable_return_sampling_mask in [inference]",
    "enable_return_sampling_mask": "set enable_return_sampling_mask in [inference]",
}
"""Arguments that have a setting of their own."""

BIASED: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "logprobs_mode": (
        ("processed_logprobs",),
        "the ratio needs logprobs of what was sampled from, after temperature and truncation",
        'remove it or set "processed_logprobs"',
    ),
    "generation_config": (
        ("vllm",),
        "the model's own sampling defaults (penalties among them) would act unseen",
        'remove it or set "vllm"',
    ),
    "override_generation_config": (
        ({},),
        "sampling defaults would act unseen",
        "remove it and write them into [orchestrator.train.sampling]",
    ),
    "logits_processors": (([],), _FOREIGN_LOGITS, "remove it"),
    "watermark": ((False, {}), _FOREIGN_LOGITS, "remove it"),
    "watermark_config": (({},), _FOREIGN_LOGITS, "remove it"),
    "worker_extension_cls": (("",), "ours loads weights, and vLLM takes one", "remove it"),
}
"""Arguments that make ratios or weights wrong with or without capture: harmless values, why, way out."""

UNCAPTURABLE: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "speculative_config": (({},), _SPECULATION, "remove it"),
    "spec_method": ((), _SPECULATION, "remove it"),
    "spec_model": ((), _SPECULATION, "remove it"),
    "spec_tokens": ((0,), _SPECULATION, "remove it"),
}
"""Arguments that our own capture excludes: harmless values, why, way out."""

REPLACED: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "worker_cls": (("auto",), "capture brings its own worker", "remove it"),
    "scheduler_cls": ((), "capture brings its own scheduler", "remove it"),
    "pipeline_parallel_size": ((1,), "capture does not serve pipeline parallel", "set 1"),
}
"""Arguments that either capture excludes, vLLM's native one too: harmless values, why, way out."""

_WITHOUT_CAPTURE = ", or, where no source truncates, enable_return_sampling_mask = false"


def check_engine_arguments(vllm: Mapping[str, Any], capture: bool, own_capture: bool) -> list[Problem]:
    """The problems of `[inference.vllm]`, paths relative to it.

    Args:
        vllm: The table.
        capture: Kept sets are captured.
        own_capture: By our own capture, not vLLM's native one.
    """
    problems = []
    for name, value in vllm.items():
        path = (name,)
        if "-" in name or name != name.lower():
            spelled = name.replace("-", "_").lower()
            problems.append(Problem(path, f"engine arguments have their Python names here; write {spelled}"))
        elif name in ELSEWHERE:
            problems.append(Problem(path, f"does not belong here; {ELSEWHERE[name]}"))
        elif name not in ENGINE_ARGUMENTS:
            near = nearest(name, ENGINE_ARGUMENTS)
            meant = f"did you mean {' or '.join(near)}?" if near else "`vllm serve --help` names them"
            problems.append(Problem(path, f"vLLM has no such engine argument, {meant}"))
        elif has_null(value):
            problems.append(Problem(path, "holds a null, which TOML has not; leave it out for the default"))
        else:
            problems += _refused(path, value, BIASED, "")
            if capture:
                problems += _refused(path, value, REPLACED, "with capture on, ", _WITHOUT_CAPTURE)
            if own_capture:
                others = f', or set capture = "native"{_WITHOUT_CAPTURE}'
                problems += _refused(path, value, UNCAPTURABLE, "with capture on, ", others)
    return problems


def _refused(
    path: tuple[str],
    value: Any,
    rules: Mapping[str, tuple[tuple[Any, ...], str, str]],
    when: str,
    otherwise: str = "",
) -> list[Problem]:
    if path[0] not in rules:
        return []
    harmless, why, way_out = rules[path[0]]
    if value in harmless:
        return []
    return [Problem(path, f"is refused {when}because {why}; {way_out}{otherwise}", value)]
