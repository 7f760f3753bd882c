"""The task: strings of letters and their reverse, as conversations of token ids."""

import random
from difflib import SequenceMatcher
from string import ascii_lowercase

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .tokenizer import ASSISTANT, END, PAD, USER

IGNORED = -100
"""Label of positions that are not trained on, as torch's cross entropy has it."""


def strings(generator: random.Random, count: int, min_letters: int, max_letters: int) -> list[str]:
    """Random strings of the letters a-z."""
    return [
        "".join(generator.choices(ascii_lowercase, k=generator.randint(min_letters, max_letters)))
        for _ in range(count)
    ]


def prompt_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """`<|user|>text<|end|><|assistant|>`, which is what the chat template makes of one message."""
    return [USER, *letter_ids(tokenizer, text), END, ASSISTANT]


def letter_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """One id a letter: without merges a text is its bytes."""
    return tokenizer.convert_tokens_to_ids(list(text))


def training_batch(
    tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> tuple[Int64[Tensor, "texts length"], Int64[Tensor, "texts length"]]:
    """Token ids, padded on the right, and labels (already shifted): the reversed text and `<|end|>`."""
    rows, labels = [], []
    for text in texts:
        prompt = prompt_ids(tokenizer, text)
        answer = [*letter_ids(tokenizer, text[::-1]), END]
        rows.append(prompt + answer)
        labels.append([IGNORED] * (len(prompt) - 1) + answer + [IGNORED])
    length = max(map(len, rows))
    return (
        torch.tensor([row + [PAD] * (length - len(row)) for row in rows]),
        torch.tensor([row + [IGNORED] * (length - len(row)) for row in labels]),
    )


def reward(text: str, answer: str) -> float:
    """Similarity of the answer to the reversed text: difflib's ratio, 0 ... 1."""
    return SequenceMatcher(None, answer, text[::-1]).ratio()


@torch.no_grad()
def mean_reward(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: list[str], *, sample: bool, seed: int
) -> float:
    """Mean reward of one answer to each text, greedy or sampled at temperature 1 from all ids."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [prompt_ids(tokenizer, text) for text in texts]
    max_tokens = max(map(len, texts)) + 6
    length = max(map(len, prompts)) + max_tokens
    rows = torch.full((len(texts), length), PAD)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    starts = torch.tensor([len(prompt) for prompt in prompts])
    numbers = torch.arange(len(texts))
    for step in range(max_tokens):
        last = starts + step - 1
        logits = model(input_ids=rows[:, : int(last.max()) + 1], use_cache=False).logits[numbers, last]
        chosen = (
            torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
            if sample
            else logits.argmax(-1)
        )
        rows[numbers, last + 1] = chosen
    rewards = []
    for text, row, start in zip(texts, rows.tolist(), starts.tolist(), strict=True):
        answer = row[start : start + max_tokens]
        answer = answer[: answer.index(END)] if END in answer else answer
        rewards.append(reward(text, tokenizer.decode(answer, skip_special_tokens=False)))
    return sum(rewards) / len(rewards)
