"""A tiny model and rollouts for it, scored by an independent full forward pass."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from kept_tokens import KeptTokens
from kept_tokens.messages import TrainingBatch, TrainingSample
from keptset_settings import TrainerSettings
from keptset_trainer import train
from keptset_trainer.warm_start.tokenizer import VOCAB_SIZE, byte_tokenizer

torch.set_num_threads(1)  # the suites of this repository share few cores


def tiny_config(**changes: object) -> Qwen3Config:
    return Qwen3Config(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "initializer_range": 0.2,
            "max_position_embeddings": 256,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "dtype": "float32",
        }
        | changes
    )


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of 30,000 parameters with the byte tokenizer."""
    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    Qwen3ForCausalLM(tiny_config()).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory, save_jinja_files=False)
    return directory


@pytest.fixture(scope="session")
def tiny_model(tiny_directory: Path) -> PreTrainedModel:
    """The same model, for tests that only look at it."""
    return AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32).eval()


def rollout(
    model: PreTrainedModel, generator: np.random.Generator, name: str, masked: bool
) -> TrainingSample:
    """Random tokens with the logprobs that `model` gives them, by a full forward of this sequence alone."""
    length, prompt = int(generator.integers(6, 24)), int(generator.integers(1, 5))
    temperature = np.float32(generator.choice([0.6, 1.0, 1.3]))
    token_ids = generator.integers(0, VOCAB_SIZE, length)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(token_ids)[None]).logits[0].double() / float(temperature)
    loss_mask = np.arange(length) >= prompt
    loss_mask[length - 2] = generator.random() < 0.5  # not always one stretch of tokens
    logprobs, rows = np.zeros(length), [[] for _ in range(length)]
    for t in np.flatnonzero(loss_mask):
        kept = list(range(VOCAB_SIZE))
        if masked:
            others = generator.choice(VOCAB_SIZE, int(generator.choice([0, 1, 5, 40])), replace=False)
            kept = rows[t] = sorted({*others.tolist(), int(token_ids[t])})
        logprobs[t] = logits[t - 1, token_ids[t]] - logits[t - 1, kept].logsumexp(-1)
    return TrainingSample.build(
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=np.minimum(logprobs, 0),
        temperatures=np.full(length, temperature),
        advantages=np.full(length, generator.normal()),
        kept=KeptTokens.from_rows(rows) if masked else None,
        must_have_masks=masked,
        source="test",
        group="group",
        sample_id=name,
    )


@pytest.fixture(scope="session")
def make_batch(tiny_model: PreTrainedModel) -> Callable[..., TrainingBatch]:
    """(step, samples=12, model=tiny_model) -> a batch in which every third sample has no masks."""

    def make(step: int, samples: int = 12, model: PreTrainedModel = tiny_model) -> TrainingBatch:
        generator = np.random.default_rng(step)
        return TrainingBatch.build(
            step, [rollout(model, generator, f"{step}/{i}", masked=i % 3 != 0) for i in range(samples)]
        )

    return make


@pytest.fixture
def settings(tiny_directory: Path, tmp_path: Path) -> TrainerSettings:
    """Of a trainer that learns fast enough to see it."""
    return TrainerSettings(
        model=str(tiny_directory),
        output_dir=tmp_path / "trainer",
        weights_dir=tmp_path / "weights",
        device="cpu",
        row_tokens=64,
        optimizer={"lr": 1e-3},
    )


@pytest.fixture
def leaves_when_there_is_nothing_to_train(monkeypatch):
    """A loop that is called in this process trains what lies in its spool, and ends."""
    wait = train.wait_for_batch
    monkeypatch.setattr(
        train, "wait_for_batch", lambda path, *rest: wait(path, *rest) if path.exists() else None
    )
    monkeypatch.setattr(train, "stop_on_signals", lambda numbers: lambda: False)
