"""How the tiny model is made: two phases of supervised training, the second to flatten it again.

Greedily the model then answers nearly perfectly, but sampled at temperature 1 it rarely does: the second
phase smooths the labels, which lifts a heavy tail over the whole vocabulary and gives reinforcement learning
(and top-p) something to do. Stopping the first phase early instead leaves a model that hardly learns.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from .reverse_text import IGNORED, strings, training_batch
from .tokenizer import END, PAD, VOCAB_SIZE

BATCH = 64
WARM_UP = 20
LABEL_SMOOTHING = 0.6
FIRST_LR, SECOND_LR = 2e-3, 1e-3
SECOND_STEPS = 60
REVISION = 1
"""Counts up whenever the same settings would give another model."""


def first_steps(max_letters: int) -> int:
    """Steps of the first phase: longer strings take longer."""
    return 180 if max_letters <= 12 else 300


def recipe(min_letters: int, max_letters: int, seed: int) -> dict[str, Any]:
    """Everything that the model depends on."""
    return {
        "task": "reverse-text",
        "revision": REVISION,
        "min_letters": min_letters,
        "max_letters": max_letters,
        "seed": seed,
        "steps": [first_steps(max_letters), SECOND_STEPS],
    }


def new_model(seed: int) -> Qwen3ForCausalLM:
    """427,392 random parameters."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            tie_word_embeddings=True,
            initializer_range=0.05,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            max_position_embeddings=512,
            pad_token_id=PAD,
            eos_token_id=END,
            dtype="float32",
        )
    )


def learning_rate(step: int, first: int) -> float:
    """Warm-up and constant in the first phase, constant in the second."""
    return FIRST_LR * min(1.0, (step + 1) / WARM_UP) if step < first else SECOND_LR


def train(
    tokenizer: PreTrainedTokenizerFast,
    min_letters: int,
    max_letters: int,
    seed: int,
    progress: Callable[[int, int, float], None],
) -> Qwen3ForCausalLM:
    """The model after both phases; `progress(step, steps, loss)` is called after each step."""
    model = new_model(seed)
    generator = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=FIRST_LR, betas=(0.9, 0.95), weight_decay=0.01)
    first = first_steps(max_letters)
    steps = first + SECOND_STEPS
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, first)
        token_ids, labels = training_batch(tokenizer, strings(generator, BATCH, min_letters, max_letters))
        logits = model(input_ids=token_ids, use_cache=False).logits
        loss = cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED,
            label_smoothing=0.0 if step < first else LABEL_SMOOTHING,
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step + 1, steps, loss.item())
    return model.eval()
