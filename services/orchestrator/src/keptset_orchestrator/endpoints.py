"""Models that are not ours, behind an OpenAI-compatible API: one says something, another scores what was
said.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from kept_tokens.layout import UNDECODABLE
from kept_tokens.sample_checks import NO_EVIDENCE
from keptset_settings import EndpointSettings

from .errors import AnswerError, PeerRefusedError
from .peers import Peer


@dataclass(frozen=True)
class Said:
    """One answer of a chat.

    Attributes:
        text: Without what ended it.
        finish_reason: "stop" or "length".
        ended: The model itself said that this is the end; False also where nobody can tell.
    """

    text: str
    finish_reason: str
    ended: bool


class Endpoint(Peer):
    """A model at a base URL.

    Raises:
        ValueError: the variable that should hold the API key is not set.
    """

    def __init__(self, kind: str, settings: EndpointSettings, client: httpx.AsyncClient) -> None:
        headers = {}
        if settings.api_key_env is not None:
            key = os.environ.get(settings.api_key_env)
            if not key:
                raise ValueError(
                    f"{kind} {settings.url}: api_key_env = {settings.api_key_env!r}, but no such environment "
                    "variable is set where the orchestrator runs"
                )
            headers = {"Authorization": f"Bearer {key}"}
        super().__init__(kind, settings.url, client, headers)
        self.model = settings.model

    async def chat(
        self, messages: Sequence[dict[str, str]], parameters: dict[str, Any], *, seconds: float, what: str
    ) -> Said:
        """One answer of /chat/completions.

        Raises:
            AnswerError: another finish_reason, no text, or no answer of that kind at all.
            TransientError, PeerRefusedError: as `Peer.call`.
        """
        body = {**parameters, "model": self.model, "messages": list(messages)}
        try:
            answer = await self._post("/chat/completions", body, _ChatAnswer, seconds, what)
        except PeerRefusedError as error:
            if "seed" not in parameters or not re.search(r"\bseeds?\b", error.said, re.IGNORECASE):
                raise
            way_out = "set send_seed = false in the source's generator if it takes no seed"
            raise PeerRefusedError(f"{error}; {way_out}", error.said) from error
        if len(answer.choices) != 1:
            raise AnswerError(f"{self.name}: {what}: {len(answer.choices)} choices where one was asked for")
        choice = answer.choices[0]
        if choice.finish_reason not in ("stop", "length") or choice.message.content is None:
            raise AnswerError(
                f"{self.name}: {what}: finish_reason {choice.finish_reason!r} with content of type "
                f"{type(choice.message.content).__name__}; a rollout is text that ends by stop or length"
            )
        ended = choice.finish_reason == "stop" and ended_by_itself(choice.stop_reason, parameters)
        return Said(choice.message.content, choice.finish_reason, ended)

    async def score(self, token_ids: Sequence[int], *, seconds: float, what: str) -> NDArray[np.float32]:
        """Logprob of each token given those before it, over the whole vocabulary at temperature 1.

        Args:
            token_ids: A whole sequence, at least one token.
            seconds: The bound.
            what: Names the request in errors.

        Returns:
            float32 [T]; 0 for the first token, which nothing predicts.

        Raises:
            AnswerError: a token without a finite logprob; the text names the position.
            TransientError, PeerRefusedError: as `Peer.call`.
        """
        return await score_tokens(self, "/completions", self.model, token_ids, seconds=seconds, what=what)

    async def _post(self, path: str, body: dict[str, Any], kind: type[Any], seconds: float, what: str) -> Any:
        return await _post(self, path, body, kind, seconds, what)


def ended_by_itself(stop_reason: Any, parameters: Mapping[str, Any]) -> bool:
    """Did an answer with finish_reason "stop" end where its model ends, not at something that was asked for?

    Args:
        stop_reason: vLLM's field: null at the eos token, else the text or the id that it stopped at, which is
            another end token of the model where the request names no such id. Other servers have no such
            field, and finish_reason tells a stop string from an end only if the request names none.
        parameters: Of the request.
    """
    if stop_reason is None:
        return True
    if isinstance(stop_reason, int):
        asked = parameters.get("stop_token_ids")
        return not (isinstance(asked, list) and stop_reason in asked)
    if isinstance(stop_reason, str):
        return False
    return not any(value for name, value in parameters.items() if name.startswith("stop"))


async def score_tokens(
    peer: Peer, path: str, model: str | None, token_ids: Sequence[int], *, seconds: float, what: str
) -> NDArray[np.float32]:
    """`Endpoint.score` at any peer with vLLM's completions route: our inference servers have it as well."""
    body: dict[str, Any] = {
        "prompt": list(token_ids),
        "max_tokens": 1,  # the fewest that there are
        "temperature": 0.0,
        "prompt_logprobs": 0,  # the token's own, no others
    }
    if model is not None:
        body["model"] = model
    answer = await _post(peer, path, body, _ScoreAnswer, seconds, what)
    entries = answer.choices[0].prompt_logprobs if len(answer.choices) == 1 else None
    if entries is None or len(entries) != len(token_ids):
        raise AnswerError(
            f"{peer.name}: {what}: no prompt_logprobs for each of {len(token_ids)} tokens; the reference "
            "must be "
            "a server that has them, such as vLLM"
        )
    scores = np.zeros(len(token_ids), np.float32)
    for position, token in enumerate(token_ids[1:], 1):
        # by its id: the first entry would be the likeliest token, not the one that is there
        entry = (entries[position] or {}).get(str(token))
        logprob = None if entry is None else entry.logprob
        if logprob is None or not np.isfinite(logprob) or logprob > 0 or logprob == NO_EVIDENCE:
            raise AnswerError(
                f"{peer.name}: {what}: token {token} at position {position} has logprob {logprob}, which is "
                "none: "
                "has the reference the policy's tokenizer?"
            )
        scores[position] = logprob
    return scores


async def _post(
    peer: Peer, path: str, body: dict[str, Any], kind: type[Any], seconds: float, what: str
) -> Any:
    response = await peer.call("POST", path, seconds=seconds, what=what, json=body)
    try:
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.ValidationError as error:  # whole, and of another kind: no accident of the way
        raise AnswerError(f"{peer.name}: {what}: the answer cannot be read: {error}") from error
    except UNDECODABLE as error:
        raise peer.unreadable(what, str(error)) from error


class _Message(msgspec.Struct):
    content: str | None = None


class _ChatChoice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    stop_reason: Any = msgspec.UNSET


class _ChatAnswer(msgspec.Struct):
    choices: list[_ChatChoice]


class _Logprob(msgspec.Struct):
    logprob: float | None = None


class _ScoreChoice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


class _ScoreAnswer(msgspec.Struct):
    choices: list[_ScoreChoice]
