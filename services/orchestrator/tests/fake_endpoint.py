"""A small OpenAI-compatible server that is not ours: it chats, and scores token ids as vLLM does."""

import random
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from .served import Served


def logprob_of(position: int, token: int) -> float:
    """What this model thinks of a token, wherever it stands."""
    return -random.Random(f"{position}/{token}").uniform(0.01, 5)


class FakeEndpoint(Served):
    """A model of its own, at `url`.

    Attributes:
        says: The answer to a conversation and a seed (0 if none came).
        finish_reason: Of all answers.
        stop_reason: {"stop_reason": ...} as vLLM has it in all answers, or nothing.
        takes_seed: Whether it refuses a seed, as some do.
        faults: Status codes that the next requests are answered with.
        key: If set, the bearer token that every request must carry.
        change: Changes the logprob entries of a scored prompt before they leave.
        chats, scored: Bodies of the requests that came.
    """

    def __init__(self) -> None:
        self._begin()
        super().__init__(self._app())
        self.url = f"{self.url}/v1"

    def reset(self) -> None:
        """As after its first start."""
        self._begin()

    def _begin(self) -> None:
        self.says: Callable[[list[dict[str, str]], int], str] = lambda messages, seed: "said"
        self.finish_reason = "stop"
        self.stop_reason: dict[str, Any] = {}
        self.takes_seed = True
        self.faults: list[int] = []
        self.key: str | None = None
        self.change: Callable[[list[Any]], list[Any]] = lambda entries: entries
        self.chats: list[dict[str, Any]] = []
        self.scored: list[dict[str, Any]] = []

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            body = await request.json()
            self.chats.append(body)
            if (refusal := self._refusal(request)) is not None:
                return refusal
            if "seed" in body and not self.takes_seed:
                return JSONResponse({"error": {"message": "Unrecognized request argument: seed"}}, 400)
            said = self.says(body["messages"], body.get("seed", 0))
            message = {"role": "assistant", "content": said}
            choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
            choice |= self.stop_reason
            return JSONResponse({"id": "chat-1", "object": "chat.completion", "choices": [choice]})

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            body = await request.json()
            self.scored.append(body)
            if (refusal := self._refusal(request)) is not None:
                return refusal
            return JSONResponse(
                {"choices": [{"index": 0, "text": "x", "prompt_logprobs": self._score(body)}]}
            )

        return app

    def _score(self, body: dict[str, Any]) -> list[Any]:
        assert body["prompt_logprobs"] == 0
        entries: list[Any] = [None]
        for position, token in enumerate(body["prompt"][1:], 1):
            entries.append({str(token): {"logprob": logprob_of(position, token), "rank": 7}})
        return self.change(entries)

    def _refusal(self, request: Request) -> Response | None:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no key"}}, 401)
        if self.faults:
            code = self.faults.pop(0)
            return JSONResponse({"error": {"message": f"told to answer {code}"}}, code)
        return None
