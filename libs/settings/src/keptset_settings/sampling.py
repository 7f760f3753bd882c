"""The rules of a policy source's sampling (docs/kept-sets.md, rule 6), on plain values.

Only masks may act besides the temperature: what merely removes ids is recorded and replayed exactly, what
bends the remaining logits cannot be and is refused, whether or not the source truncates. Each rule is a
function that returns the problems it finds, their paths relative to the sampling table.
"""

from collections.abc import Callable, Mapping
from typing import Any

from .errors import Problem
from .inference import CAPTURE_WIDTH
from .rollout_sources import SamplingSettings
from .schema import has_null
from .suggest import suggestion

MIN_TEMPERATURE = 0.01
"""vLLM samples at this temperature whenever a lower one is asked for."""

MAX_TEMPERATURE = 2.0
"""vLLM refuses more."""

NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}


def inherit(source: SamplingSettings, train: SamplingSettings) -> SamplingSettings:
    """A source's sampling in full: its own values, else those of [orchestrator.train.sampling], else neutral.

    `extra_body` is inherited key by key.
    """
    values: dict[str, Any] = {}
    for name in SamplingSettings.model_fields:
        own, shared = getattr(source, name), getattr(train, name)
        values[name] = own if own is not None else shared if shared is not None else NEUTRAL.get(name)
    values["extra_body"] = {**train.extra_body, **source.extra_body}
    return SamplingSettings(**values)


def limits(sampling: SamplingSettings) -> list[str]:
    """The parameters that limit the support, none if it is whole; unset ones are taken as neutral."""
    top_p, top_k, min_p = sampling.top_p, sampling.top_k, sampling.min_p
    found = {
        "top_p": top_p is not None and top_p < 1,
        "top_k": top_k is not None and top_k > 0,
        "min_p": min_p is not None and min_p > 0,
        **{name: bool(sampling.extra_body.get(name)) for name in MASKS},
    }
    return [name for name, limited in found.items() if limited]


def is_truncating(sampling: SamplingSettings) -> bool:
    """Does it limit its support in any way? Then every token comes with a mask, or the run stops."""
    return bool(limits(sampling))


def check_sampling(s: SamplingSettings) -> list[Problem]:
    """All rules, on sampling that is complete (see `inherit`)."""
    assert s.temperature is not None
    assert s.top_p is not None
    assert s.top_k is not None
    assert s.min_p is not None
    return [
        *check_temperature(s.temperature),
        *check_top_p(s.top_p),
        *check_top_k(s.top_k),
        *check_min_p(s.min_p),
        *check_max_tokens(s.max_tokens),
        *check_seed(s.seed),
        *check_extra_body(s.extra_body, s.max_tokens),
    ]


def check_unreplayed_sampling(s: SamplingSettings, *, ours: bool) -> list[Problem]:
    """The rules of sampling that nobody replays: evaluation, and frozen generators.

    Anything may be sampled, greedily too; refused is what no server takes, or what has its own setting.

    Args:
        s: Unset values are not looked at.
        ours: It goes to our own inference servers, whose parameters are known here; a foreign endpoint may
            have any others.
    """
    problems = [*check_max_tokens(s.max_tokens), *check_seed(s.seed)]
    if s.temperature is not None and not 0 <= s.temperature <= MAX_TEMPERATURE:
        problems.append(Problem(("temperature",), f"must be 0.0 to {MAX_TEMPERATURE}", s.temperature))
    if s.top_p is not None:
        problems += check_top_p(s.top_p)
    if s.top_k is not None and s.top_k < -1:
        problems.append(Problem(("top_k",), "must be at least 1; -1 switches it off", s.top_k))
    if s.min_p is not None:
        problems += check_min_p(s.min_p)
    if ours:
        return [*problems, *check_extra_body(s.extra_body, s.max_tokens, replayed=False)]
    return [*problems, *check_foreign_body(s.extra_body)]


def check_temperature(temperature: float) -> list[Problem]:
    """Greedy decoding teaches nothing, and what vLLM clamps or refuses cannot be replayed."""
    path = ("temperature",)
    if temperature == 0:
        why = "is greedy: every rollout of a prompt is the same, no advantage, no gradient, and no masks"
    elif temperature < 0:
        why = "is negative"
    elif temperature < MIN_TEMPERATURE:
        why = f"is sampled at {MIN_TEMPERATURE} by vLLM, so the trainer would divide by another one"
    elif temperature > MAX_TEMPERATURE:
        why = f"is more than vLLM takes ({MAX_TEMPERATURE})"
    else:
        return []
    return [Problem(path, f"{why}; set {MIN_TEMPERATURE} to {MAX_TEMPERATURE}, 1.0 is neutral", temperature)]


def check_top_p(top_p: float) -> list[Problem]:
    """A probability above 0."""
    if 0 < top_p <= 1:
        return []
    return [Problem(("top_p",), "must be above 0 and at most 1; 1.0 switches it off", top_p)]


def check_top_k(top_k: int) -> list[Problem]:
    """Off, or no wider than the capture: any top_k limits the support and so needs masks."""
    if top_k < -1:
        return [Problem(("top_k",), f"must be 1 to {CAPTURE_WIDTH}; -1 switches it off", top_k)]
    if top_k > CAPTURE_WIDTH:
        why = f"is more than a mask holds; set at most {CAPTURE_WIDTH}, or -1 and nothing else that truncates"
        return [Problem(("top_k",), why, top_k)]
    return []


def check_min_p(min_p: float) -> list[Problem]:
    """A share of the largest probability, less than all of it."""
    if 0 <= min_p < 1:
        return []
    return [Problem(("min_p",), "must be at least 0 and less than 1; 0.0 switches it off", min_p)]


def check_max_tokens(max_tokens: int | None) -> list[Problem]:
    """At least one token."""
    if max_tokens is None or max_tokens >= 1:
        return []
    return [
        Problem(("max_tokens",), "must be at least 1; leave it out for the rest of the context", max_tokens)
    ]


def check_seed(seed: int | None) -> list[Problem]:
    """Nothing negative: -1 means unseeded to vLLM, and here every rollout has a seed."""
    if seed is None or seed >= 0:
        return []
    return [Problem(("seed",), "must be at least 0; leave it out to take orchestrator.seed", seed)]


def check_extra_body(
    extra_body: Mapping[str, Any], max_tokens: int | None, *, replayed: bool = True
) -> list[Problem]:
    """Only what is known passes; everything else says where it belongs or why it cannot be.

    Args:
        extra_body: For our own inference servers.
        max_tokens: Of the same sampling.
        replayed: The trainer replays it, so that what bends logits is refused.
    """
    problems = []
    for name, value in extra_body.items():
        path = ("extra_body", name)
        if has_null(value):
            problems.append(Problem(path, "holds a null, which TOML has not; leave it out for the default"))
        elif name in ELSEWHERE:
            problems.append(Problem(path, f"does not belong here; {ELSEWHERE[name]}", value))
        elif name in BENDING:
            if replayed and not any(
                value == neutral and _truth(value) == _truth(neutral) for neutral in BENDING[name]
            ):
                problems.append(Problem(path, _BENDS, value))
            elif not replayed and not BENDING_FORMS[name][1](value):
                problems.append(Problem(path, f"must be {BENDING_FORMS[name][0]}", value))
        elif name in OURS:
            problems.append(Problem(path, f"is decided by Keptset: {OURS[name]}; remove it", value))
        elif name in HARMLESS:
            wanted, fits = HARMLESS[name]
            if not fits(value):
                problems.append(Problem(path, f"must be {wanted}", value))
            elif name == "min_tokens" and max_tokens is not None and value > max_tokens:
                problems.append(Problem(path, f"is more than max_tokens = {max_tokens}; lower it", value))
        else:
            hint = suggestion(name, [*HARMLESS, *ELSEWHERE])
            problems.append(Problem(path, f"unknown sampling parameter, {hint}", value))
    return problems


def check_foreign_body(extra_body: Mapping[str, Any]) -> list[Problem]:
    """Further parameters of an endpoint that is not ours: all but those that Keptset sets itself."""
    problems = []
    for name, value in extra_body.items():
        path = ("extra_body", name)
        if has_null(value):
            problems.append(Problem(path, "holds a null, which TOML has not; leave it out for the default"))
        elif name in FOREIGN_ELSEWHERE:
            problems.append(Problem(path, f"does not belong here; {FOREIGN_ELSEWHERE[name]}", value))
        elif name in FOREIGN_OURS:
            problems.append(Problem(path, f"is decided by Keptset: {FOREIGN_OURS[name]}; remove it", value))
    return problems


def bounded_top_k(top_k: int, limited_by: list[str]) -> tuple[int, str | None]:
    """The top_k of a source that is limited by these parameters, and what to tell if it was chosen here."""
    if not limited_by or top_k > 0:
        return top_k, None
    return CAPTURE_WIDTH, (
        f"sets no bound, but {', '.join(limited_by)} truncates and a mask holds {CAPTURE_WIDTH} ids: "
        f"{CAPTURE_WIDTH} is used; write top_k = {CAPTURE_WIDTH} (or less) to say so yourself"
    )


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _list_of(item: Callable[[Any], bool], least: int = 0) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) >= least and all(map(item, value))


def _text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


MASKS = ("min_tokens", "bad_words", "allowed_token_ids", "structured_outputs")
"""Keys of extra_body that remove ids, and so truncate."""

_BENDS = (
    "bends the logits of the tokens that stay, which the trainer cannot replay, so every ratio would be "
    "wrong, also without truncation; remove it"
)

BENDING: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "thinking_token_budget": (),
    "watermarking": (False,),
}
"""Keys that change logits, and the values with which they do not."""

BENDING_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "presence_penalty": ("a number from -2 to 2", lambda v: _number(v) and -2 <= v <= 2),
    "frequency_penalty": ("a number from -2 to 2", lambda v: _number(v) and -2 <= v <= 2),
    "repetition_penalty": ("a finite number above 0", lambda v: _number(v) and 0 < v < float("inf")),
    "logit_bias": (
        "a table of numbers by token id",
        lambda v: isinstance(v, dict) and all(key.isdecimal() and _number(v[key]) for key in v),
    ),
    "thinking_token_budget": ("a whole number of at least -1, which is no bound", _whole(-1)),
    "watermarking": ("true or false", _truth),
}
"""What they must be where they may act: in an evaluation, which would stop the run when its turn comes."""

_FIELD = "set {} in the sampling table itself"
_GROUP = "set group_size of the source, or orchestrator.train.group_size for all that are trained on"

ELSEWHERE: dict[str, str] = {
    **{name: _FIELD.format(name) for name in (*NEUTRAL, "max_tokens", "seed")},
    "max_completion_tokens": _FIELD.format("max_tokens"),
    "n": _GROUP,
    "best_of": _GROUP,
    "model": "set inference.model",
    "response_format": "set structured_outputs",
    "guided_json": "set structured_outputs",
    "guided_regex": "set structured_outputs",
    "guided_choice": "set structured_outputs",
    "guided_grammar": "set structured_outputs",
}
"""Keys that have a setting of their own."""

FOREIGN_ELSEWHERE: dict[str, str] = {
    **{name: ELSEWHERE[name] for name in (*NEUTRAL, "max_tokens", "seed", "n", "best_of")},
    "model": "set model in [generator]",
}
"""The same for an endpoint that is not ours, which may know max_completion_tokens or response_format only."""

FOREIGN_OURS: dict[str, str] = {
    "messages": "they are the prompt of the environment",
    "prompt": "it is that of the environment",
    "stream": "rollouts are asked for in one piece",
    "stream_options": "rollouts are asked for in one piece",
}
"""Keys of a request to an endpoint that is not ours which would replace what it is about."""

_MASKS_ASKED = "truncation asks for masks by itself, and an evaluation for none"

_TEXT = "rollouts are token ids, and a reward sees the text of all that were sampled"

OURS: dict[str, str] = {
    "logprobs": "the sampled token's logprob comes with every rollout",
    "prompt_logprobs": "prompts are not trained on",
    "prompt_logprob_token_ids": "prompts are not trained on",
    "prompt_logprob_start": "prompts are not trained on",
    "logprob_token_ids": "the sampled token's logprob comes with every rollout",
    "top_logprobs": "the sampled token's logprob comes with every rollout",
    "flat_logprobs": "it is a matter between inference and the engine",
    "detokenize": "rollouts are token ids",
    "include_stop_str_in_output": f"{_TEXT}, the stop string with them",
    "skip_special_tokens": f"{_TEXT}, special ones with their names",
    "spaces_between_special_tokens": f"{_TEXT}, without spaces between special ones",
    "logits_processors": "requests bring none, and those of the engine could not be replayed",
    "output_kind": "rollouts are asked for in one piece",
    "stream": "rollouts are asked for in one piece",
    "stream_interval": "rollouts are asked for in one piece",
    "skip_clone": "it is a matter between inference and the engine",
    "extra_args": "it carries the request for masks",
    "vllm_xargs": "it carries the request for masks",
    "kept_tokens": _MASKS_ASKED,
    "return_sampling_mask": _MASKS_ASKED,
    "token_ids": "they are the prompt of the environment",
    "request_id": "it names the rollout",
}
"""Keys that the orchestrator or inference sets, or must not be set, and why."""

HARMLESS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "stop": ("text or a list of texts, none empty", lambda v: _text(v) or _list_of(_text)(v)),
    "stop_token_ids": ("a list of token ids", _list_of(_whole(0))),
    "ignore_eos": ("true or false", _truth),
    "skip_reading_prefix_cache": ("true or false", _truth),
    "repetition_detection": (
        "a table of max_pattern_size, min_pattern_size and min_count, whole numbers of at least 0",
        lambda v: (
            isinstance(v, dict)
            and v.keys() <= {"max_pattern_size", "min_pattern_size", "min_count"}
            and all(map(_whole(0), v.values()))
        ),
    ),
    "min_tokens": ("a whole number of at least 0", _whole(0)),
    "bad_words": ("a list of texts, none empty", _list_of(_text)),
    "allowed_token_ids": ("a list of at least one token id", _list_of(_whole(0), 1)),
    "structured_outputs": (
        "a table with one of json, regex, choice, grammar, json_object, structural_tag",
        lambda v: (
            isinstance(v, dict)
            and len(v.keys() & {"json", "regex", "choice", "grammar", "json_object", "structural_tag"}) == 1
        ),
    ),
}
"""vLLM's sampling parameters that end a rollout or remove ids and do nothing else, and what they must be."""
