"""Small Qwen3 models with random weights, made in a second, the same for the same seed."""

from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from .tokenizer import END, VOCABULARY, save_tokenizer

LARGE_VOCABULARY = 151_936


def tiny_model(seed: int, *, sharpness: float = 3.0) -> Qwen3ForCausalLM:
    """261 ids, tied embeddings. `sharpness` is the standard deviation of the logits, roughly."""
    return _model(seed, VOCABULARY, tied=True, sharpness=sharpness)


def large_vocabulary_model(seed: int, *, sharpness: float = 8.0) -> Qwen3ForCausalLM:
    """151,936 ids, a head of its own; at the default sharpness top_p = 0.95 keeps about 8 ids."""
    return _model(seed, LARGE_VOCABULARY, tied=False, sharpness=sharpness)


def padded_model(seed: int) -> Qwen3ForCausalLM:
    """261 ids of the tokenizer and 39 rows of the head beyond them, as likely as any."""
    return _model(seed, VOCABULARY + 39, tied=False, sharpness=2.0)


def _model(seed: int, vocabulary: int, *, tied: bool, sharpness: float) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    hidden = 32  # few terms in every sum: float32 logits of two programs agree to a few millionths
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.05,
        tie_word_embeddings=tied,
        eos_token_id=END,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name and "lm_head" not in name:
                weight.mul_(3.0)  # what the layers add outweighs the embedding: no token just repeats itself
        head = model.get_output_embeddings().weight
        # the final norm yields entries of size 1, so a logit has deviation scale * std * sqrt(hidden)
        model.model.norm.weight.fill_(sharpness / (float(head.std()) * hidden**0.5))
    # a trap: none of this may reach a request that leaves a parameter unset
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.3, eos_token_id=END
    )
    return model


def tie_rows(model: Qwen3ForCausalLM, distinct: int) -> None:
    """Give id i the head row of id i % distinct: every logit is shared by V / distinct ids, exactly."""
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head.copy_(head[torch.arange(len(head)) % distinct])


def save_model(model: Qwen3ForCausalLM, directory: Path) -> Path:
    """Write weights, config, generation config and tokenizer as `from_pretrained` reads them."""
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory
