"""The model and the batches that the benchmarks of the trainer use: Qwen3-0.6B's shape, random weights."""

import importlib.util
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from kept_tokens import KeptTokens
from kept_tokens.messages import TrainingSample
from keptset_trainer.attention import VARLEN
from keptset_trainer.model import Policy

REPOSITORY = Path(__file__).parents[3]
TOKENS = 16_384


def head_benchmark() -> ModuleType:
    """kept_loss's benchmark of heads, for its sets and the heads of others."""
    path = REPOSITORY / "libs/kept_loss/benchmarks/heads.py"
    spec = importlib.util.spec_from_file_location("head_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Size:
    """Of the model, and how many tokens a row has."""

    hidden: int = 1024
    layers: int = 28
    heads: int = 16
    key_heads: int = 8
    head_dim: int = 128
    intermediate: int = 3072
    vocabulary: int = 151_936
    tokens: int = TOKENS

    def config(self) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=self.head_dim,
            tie_word_embeddings=True,
            max_position_embeddings=40_960,
        )

    def policy(self, device: torch.device, dtype: torch.dtype, attention: str = VARLEN) -> Policy:
        """Random weights, the same on every rank."""
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(
                self.config(), dtype=dtype, attn_implementation=attention
            )
        return Policy(model.eval(), None)

    def flops(self, model: torch.nn.Module, lengths: list[int]) -> float:
        """Of one step, without any head: 6 a parameter and token, and causal attention."""
        embeddings = self.vocabulary * self.hidden
        body = sum(parameter.numel() for parameter in model.parameters()) - embeddings
        attention = 6 * sum(length**2 for length in lengths) * self.heads * self.head_dim * self.layers
        return 6.0 * body * sum(lengths) + attention


TINY = Size(
    hidden=32, layers=8, heads=4, key_heads=2, head_dim=16, intermediate=64, vocabulary=2048, tokens=256
)


def lengths_of(shape: str, tokens: int, seed: int = 0) -> list[int]:
    """Of the sequences of one row: "16x", "4x" = equally long, "1x" = many that differ (lognormal)."""
    if shape != "1x":
        count = int(shape.removesuffix("x"))
        return [tokens // count] * count
    generator = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        drawn = math.exp(generator.normal(math.log(tokens / 20), 0.8))
        lengths.append(int(min(max(drawn, tokens // 256), tokens // 4, tokens - sum(lengths))))
    return lengths


def samples_of(lengths: list[int], vocabulary: int, seed: int = 0) -> list[TrainingSample]:
    """Rollouts with kept sets as published ones are; every token but the first is trained on."""
    heads = head_benchmark()
    generator = torch.Generator().manual_seed(seed)
    numbers = np.random.default_rng(seed)
    samples = []
    for index, length in enumerate(lengths):
        widths = heads.published_widths(length, generator).clamp(max=vocabulary // 4)
        ids, offsets, labels = heads.draw_sets(widths, vocabulary, generator)
        counts = widths.numpy().astype(np.int32)
        counts[0], ids = 0, ids[int(offsets[1]) :]  # the first token was not sampled
        loss_mask = np.arange(length) > 0
        samples.append(
            TrainingSample.build(
                token_ids=labels.numpy(),
                loss_mask=loss_mask,
                logprobs=np.where(loss_mask, -np.log(widths.numpy()), 0).astype(np.float32),
                temperatures=np.ones(length, np.float32),
                advantages=np.full(length, numbers.normal(), np.float32),
                kept=KeptTokens(sorted_rows(ids.numpy(), counts), counts),
                must_have_masks=True,
                source="benchmark",
                group="benchmark",
                sample_id=str(index),
            )
        )
    return samples


def sorted_rows(ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Ids of each row ascending."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return ids[np.lexsort((ids, rows))]
