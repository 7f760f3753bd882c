"""Models that are not ours, behind an OpenAI-compatible API: one says something, another scores what was
said.
"""

import os
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from kept_tokens.sample_checks import NO_EVIDENCE
from keptset_settings import EndpointSettings

from .errors import AnswerError
from .peers import Peer


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
    ) -> tuple[str, str]:
        """One answer of /chat/completions.

        Returns:
            Text and finish_reason, "stop" or "length".

        Raises:
            AnswerError: another finish_reason, no text, or no answer of that kind at all.
            TransientError, PeerRefusedError: as `Peer.call`.
        """
        body = {**parameters, "model": self.model, "messages": list(messages)}
        answer = await self._post("/chat/completions", body, _ChatAnswer, seconds, what)
        if len(answer.choices) != 1:
            raise AnswerError(f"{self.name}: {what}: {len(answer.choices)} choices where one was asked for")
        choice = answer.choices[0]
        if choice.finish_reason not in ("stop", "length") or choice.message.content is None:
            raise AnswerError(
                f"{self.name}: {what}: finish_reason {choice.finish_reason!r} with content of type "
                f"{type(choice.message.content).__name__}; a rollout is text that ends by stop or length"
            )
        return choice.message.content, choice.finish_reason

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
    except msgspec.MsgspecError as error:
        raise AnswerError(f"{peer.name}: {what}: the answer cannot be read: {error}") from error


class _Message(msgspec.Struct):
    content: str | None = None


class _ChatChoice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _ChatAnswer(msgspec.Struct):
    choices: list[_ChatChoice]


class _Logprob(msgspec.Struct):
    logprob: float | None = None


class _ScoreChoice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


class _ScoreAnswer(msgspec.Struct):
    choices: list[_ScoreChoice]
