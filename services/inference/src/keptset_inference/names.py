"""Names that do not exist: what may have been meant."""

import difflib
from collections.abc import Iterable

_TEXT = "this route takes token ids: send them as token_ids; POST /tokenize gives those of a text or messages"
_IDS = "the prompt is called token_ids here"
_STRUCTURED = "send it as sampling_params.structured_outputs"

FIELDS = {
    "prompt": _TEXT,
    "messages": _TEXT,
    "input": _TEXT,
    "text": _TEXT,
    "prompt_token_ids": _IDS,
    "input_ids": _IDS,
    "return_sampling_mask": "send kept_tokens = true",
}
"""What other routes call the fields of a request."""

PARAMETERS = {
    "response_format": f'{_STRUCTURED} = {{"json": SCHEMA}} or {{"json_object": true}}',
    "guided_json": f'{_STRUCTURED} = {{"json": SCHEMA}}',
    "guided_regex": f'{_STRUCTURED} = {{"regex": "..."}}',
    "guided_choice": f'{_STRUCTURED} = {{"choice": [...]}}',
    "guided_grammar": f'{_STRUCTURED} = {{"grammar": "..."}}',
    "max_completion_tokens": "send it as sampling_params.max_tokens",
    "max_new_tokens": "send it as sampling_params.max_tokens",
    "top_logprobs": "send how many as sampling_params.logprobs",
}
"""What other routes call the parameters of sampling, wherever they are sent."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """The end of a sentence about an unknown name: the nearest known ones, or else all of them."""
    names = sorted(known)
    found = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    if found:
        return f"did you mean {' or '.join(found)}?"
    return otherwise or f"known here: {', '.join(names)}"


__all__ = ["FIELDS", "PARAMETERS", "did_you_mean"]
