"""Requests of every kind, and what the masks beside the cut leave of the vocabulary at each token."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import numpy as np

from ..models.tokenizer import END, byte_ids
from .answers import Sampled, of_events, of_json, of_msgpack
from .evidence import Evidence, check_masked, check_unmasked
from .reference import Cut

Allowed = Callable[[list[int], int], np.ndarray]
"""(completion, V) -> bool [T, V]: what may be sampled at each token."""

TRANSPORTS = ("json", "stream", "msgpack", "sampling_mask", "both")


@dataclass
class Case:
    """One request and what is known of its answer beforehand."""

    name: str
    prompt: list[int]
    sampling_params: dict
    body: dict = field(default_factory=dict)
    masked: bool = True
    allowed: Allowed | None = None
    transport: str = "json"

    async def send(self, client: httpx.AsyncClient) -> list[Sampled]:
        """The choices of the answer; a refusal is an error."""
        body = {"token_ids": self.prompt, "sampling_params": self.sampling_params, **self.body}
        headers = {}
        if self.transport == "msgpack":
            headers["Accept"] = "application/msgpack"
        elif self.transport in ("sampling_mask", "both"):
            headers["X-Kept-Tokens-Format"] = self.transport
        elif self.transport == "stream":
            body["stream"] = True
            async with client.stream("POST", "/inference/v1/generate", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                assert response.status_code == 200, f"{self.name}: {response.text}"
                return of_events([line async for line in response.aiter_lines()])
        response = await client.post("/inference/v1/generate", json=body, headers=headers)
        assert response.status_code == 200, f"{self.name}: {response.text}"
        if self.transport == "msgpack":
            assert response.headers["content-type"].startswith("application/msgpack")
            return of_msgpack(response.content)
        return of_json(response.json())

    def check(self, evidence: Evidence, references, choices: list[Sampled]) -> None:
        """Count, lengths, sets, logprobs."""
        params = self.sampling_params
        assert [choice.index for choice in choices] == list(range(params.get("n", 1))), self.name
        for choice in choices:
            assert choice.versions, f"{self.name}: no weight versions"
            assert choice.finish_reason in ("length", "stop", "repetition"), self.name
            if choice.finish_reason == "length":
                assert len(choice.token_ids) == params["max_tokens"], self.name
            else:
                assert 0 < len(choice.token_ids) <= params["max_tokens"], self.name
            cut = Cut.of(params)
            if not self.masked:
                check_unmasked(evidence, references, self.prompt, choice, cut)
                continue
            vocabulary = references["base"].vocab_size
            allowed = None if self.allowed is None else self.allowed(choice.token_ids, vocabulary)
            asked = params.get("logprobs")
            check_masked(evidence, references, self.prompt, choice, cut, allowed=allowed, logprobs=asked)
            evidence.count(f"sets by {self.transport}", len(choice.token_ids))


def only(ids: list[int]) -> Allowed:
    """allowed_token_ids."""

    def allowed(completion: list[int], vocabulary: int) -> np.ndarray:
        mask = np.zeros((len(completion), vocabulary), bool)
        mask[:, ids] = True
        return mask

    return allowed


def without_words(*words: str) -> Allowed:
    """bad_words: the last byte of a word is forbidden where the completion spells the rest."""

    def allowed(completion: list[int], vocabulary: int) -> np.ndarray:
        mask = np.ones((len(completion), vocabulary), bool)
        for word in words:
            *start, last = byte_ids(word)
            for t in range(len(start), len(completion)):
                if completion[t - len(start) : t] == start:
                    mask[t, last] = False
        return mask

    return allowed


def not_ending_before(tokens: int, ends: list[int]) -> Allowed:
    """min_tokens: nothing that ends the sequence among the first ones."""

    def allowed(completion: list[int], vocabulary: int) -> np.ndarray:
        mask = np.ones((len(completion), vocabulary), bool)
        mask[:tokens, ends] = False
        return mask

    return allowed


def digits_then_end(digits: int) -> Allowed:
    """structured_outputs = {"regex": "[0-9]{digits}"}."""

    def allowed(completion: list[int], vocabulary: int) -> np.ndarray:
        mask = np.zeros((len(completion), vocabulary), bool)
        mask[:digits, byte_ids("0123456789")] = True
        mask[digits:, END] = True
        return mask

    return allowed


def mixed_cases(seed: int, rounds: int, vocabulary: int, longest_prompt: int, most_tokens: int) -> list[Case]:
    """`rounds` requests of every kind, with random prompts, lengths, temperatures and transports."""
    draw, cases = random.Random(seed), []
    small = vocabulary <= 512
    letters = byte_ids("abcdefghijklmnopqrstuvwxyz")

    def add(name: str, body: dict | None = None, *, masked=True, allowed: Allowed | None = None, **params):
        params.setdefault("temperature", draw.choice([0.6, 1.0, 1.3]))
        params.setdefault("max_tokens", draw.randint(1, most_tokens))
        params.setdefault("ignore_eos", True)
        params.setdefault("logprobs", draw.choice([0, 1, 3]))
        prompt = [draw.randrange(5, 261) for _ in range(draw.randint(4, longest_prompt))]
        transport = draw.choice(TRANSPORTS)
        cases.append(Case(name, prompt, params, body or {}, masked, allowed, transport))

    for i in range(rounds):
        width = draw.choice([5, 50, 200]) if small else draw.choice([5, 50, 512])
        add("top_k", top_k=draw.choice([1, 2, width]))
        add("top_p", top_p=draw.choice([0.5, 0.9, 0.95]), top_k=512)
        add("top_k and top_p", top_k=width, top_p=draw.choice([0.5, 0.9, 0.97]))
        add("min_p", min_p=draw.choice([0.02, 0.2]), top_k=512)
        add("all three", min_p=0.01, top_k=width, top_p=0.95)
        add("seed", top_k=width, top_p=0.9, seed=i)
        add("n", top_k=50, top_p=0.95, n=3, seed=i, max_tokens=most_tokens // 2)
        add("no logprobs asked for", top_k=20)
        cases[-1].sampling_params.pop("logprobs")
        allowed = draw.sample(range(vocabulary), 40)
        add("allowed ids", allowed_token_ids=allowed, allowed=only(allowed), top_k=512, top_p=0.95)
        add("bad words", bad_words=["z", "ab", "~"], allowed=without_words("z", "ab", "~"), top_k=512)
        add("min_tokens", min_tokens=7, max_tokens=14, stop_token_ids=letters, ignore_eos=False,
            allowed=not_ending_before(7, [END, *letters]), top_k=50 if small else 512)  # fmt: skip
        add("structured", structured_outputs={"regex": "[0-9]{4}"}, allowed=digits_then_end(4), top_k=512,
            ignore_eos=False, max_tokens=9)  # fmt: skip
        add("greedy", masked=False, temperature=0.0)
        add("greedy with a cut", masked=False, temperature=0.0, top_k=5, top_p=0.5)
        add("untruncated", masked=False)
        add("evaluation", {"kept_tokens": False}, masked=False, top_k=50, top_p=0.9)
        add("evaluation, other knobs", {"kept_tokens": False}, masked=False, top_p=0.8)
        if small:
            add("whole vocabulary", {"kept_tokens": True})
            add("top_p alone", top_p=0.9, top_k=vocabulary)
    for case in cases:
        if not case.masked:
            case.sampling_params["logprobs"] = 0
    draw.shuffle(cases)
    return cases
