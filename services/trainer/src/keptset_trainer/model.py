"""The model: a transformers causal LM, taken apart into body (tokens -> hidden) and head (the matrix W)."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from keptset_settings import is_absent_directory

from .attention import VARLEN, borders_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Policy:
    """A causal LM whose logits are softcap(hidden @ head.T), which `prove` has proved."""

    model: PreTrainedModel
    softcap: float | None
    """softcap * tanh(logits / softcap), where the architecture has one (Gemma 2)."""

    @property
    def head(self) -> Float[Tensor, "vocab hidden"]:
        """The output embedding; the input embedding itself where they are tied."""
        return self.model.get_output_embeddings().weight

    @property
    def vocab_size(self) -> int:
        """Rows of the head, which may be more than the tokenizer has ids."""
        return self.head.shape[0]

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers, in order.

        Raises:
            ValueError: the architecture does not say which of its modules they are.
        """
        names = self.model._no_split_modules or ()
        blocks = [module for module in self.model.modules() if type(module).__name__ in names]
        if not blocks:
            raise ValueError(
                f"trainer.model is a {type(self.model).__name__}, which does not name its layers "
                '(_no_split_modules); train it with ranks = 1, compile = "off" and no checkpointing'
            )
        return blocks

    def groups(self, count: int) -> list[list[nn.Module]]:
        """The layers in groups of about the same size, in the order in which a backward pass meets them.

        Raises:
            ValueError: there are not that many layers.
        """
        blocks = self.blocks
        if not 1 <= count <= len(blocks):
            raise ValueError(
                f"backward_groups = {count}: trainer.model has {len(blocks)} layers; a group has at least one"
            )
        borders = [len(blocks) * number // count for number in range(count + 1)]
        return [blocks[start:stop] for start, stop in pairwise(borders)][::-1]

    def hidden(
        self,
        token_ids: Int64[Tensor, " tokens"],
        positions: Int64[Tensor, " tokens"],
        borders: Int64[Tensor, " sequences_plus_1"],
        longest: int,
    ) -> Float[Tensor, "tokens hidden"]:
        """Hidden states of one packed row; hidden[n] predicts token n + 1.

        Args:
            token_ids: of all sequences, one behind the other.
            positions: restart at 0 with every sequence.
            borders: where they begin and end.
            longest: tokens of the longest sequence.

        With `attention = "sdpa"` transformers finds the borders itself, where positions restart, and masks
        attention across them, in full and in sliding-window layers, if it is given neither mask nor cache.
        """
        return self.body(self.embedded(token_ids), positions, borders, longest)

    def embedded(self, token_ids: Int64[Tensor, " tokens"]) -> Float[Tensor, "tokens hidden"]:
        """What the body gets of the tokens."""
        embeds: Tensor = self.model.get_input_embeddings()(token_ids)
        return embeds

    def body(
        self,
        embeds: Float[Tensor, "tokens hidden"],
        positions: Int64[Tensor, " tokens"],
        borders: Int[Tensor, " sequences_plus_1"],
        longest: int,
    ) -> Float[Tensor, "tokens hidden"]:
        """From `embedded` tokens on."""
        packed: dict[str, Any] = {}
        if self.model.config._attn_implementation == VARLEN:
            packed = borders_of(borders, longest)
        row = self.model.base_model(
            inputs_embeds=embeds[None], position_ids=positions[None], use_cache=False, **packed
        )
        hidden: Tensor = row.last_hidden_state[0]
        return hidden


def load_policy(directory: str, device: torch.device, dtype: str, attention: str = "auto") -> Policy:
    """Load the model in `directory` (or of that hub name) for training.

    Args:
        directory: with config.json and safetensors weights.
        device: where to.
        dtype: "float32", "bfloat16" or "auto": float32 on a CPU, as stored elsewhere.
        attention: "sdpa", "varlen" or "auto": varlen on CUDA in half precision.

    Raises:
        ValueError: no such model, one in float16, or an architecture that does not know the attention.
    """
    if is_absent_directory(directory):
        raise ValueError(
            f"trainer.model = {directory!r}: no such directory; name a model's directory or its hub name"
        )
    chosen = torch.float32 if dtype == "auto" and device.type == "cpu" else DTYPES.get(dtype, "auto")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=chosen, attn_implementation="sdpa", use_safetensors=True
        )
    except OSError as error:  # which does not always say what was looked for
        raise ValueError(f"trainer.model = {directory!r} cannot be loaded: {error}") from error
    if model.dtype == torch.float16:
        raise ValueError(
            f'trainer.dtype = "{dtype}": {directory} is stored in float16, in which the gradients of large '
            'batches vanish (the loss is not scaled); set trainer.dtype = "bfloat16" or "float32"'
        )
    model.to(device)
    model.eval()  # no dropout: ratios compare with a rollout that had none
    half = model.dtype in (torch.bfloat16, torch.float16)
    if attention == "varlen" or (attention == "auto" and device.type == "cuda" and half):
        model.set_attn_implementation(VARLEN)
    return Policy(model, getattr(model.config.get_text_config(), "final_logit_softcapping", None))


def prove(policy: Policy) -> None:
    """Try the model on a few tokens: does it compute what the loss counts on?

    Raises:
        ValueError: an architecture whose logits or whose packed rows are not what the loss counts on.
    """
    prove_head(policy)
    prove_packing(policy)


@torch.no_grad()
def prove_head(policy: Policy) -> None:
    """Compare the architecture's own logits with softcap(hidden @ head.T) on a few tokens.

    Raises:
        ValueError: they differ: a bias, a multiplier or another head that the loss does not know.
    """
    token_ids = probe(policy, 8)
    borders, positions = token_ids.new_tensor([0, 8]), torch.arange(8, device=token_ids.device)
    ours = policy.hidden(token_ids, positions, borders, 8) @ policy.head.T
    packed = borders_of(borders, 8) if policy.model.config._attn_implementation == VARLEN else {}
    theirs = policy.model(input_ids=token_ids[None], use_cache=False, **packed).logits[0]
    if policy.softcap is not None:
        ours = policy.softcap * torch.tanh(ours / policy.softcap)
    if (off := relative_difference(ours, theirs)) > tolerance(policy):
        raise ValueError(
            f"trainer.model is a {type(policy.model).__name__}, whose logits differ by {off:.1e} (relative) "
            "from softcap(hidden @ W.T): it scales its logits or adds a bias, which the kept-set loss does "
            "not know; choose another architecture"
        )


@torch.no_grad()
def prove_packing(policy: Policy) -> None:
    """Score a sequence alone and behind another one in the same row.

    Raises:
        ValueError: they differ: the architecture carries state across (linear attention, convolutions).
    """
    both = probe(policy, 8)
    positions = both.new_tensor([0, 1, 2, 0, 1, 2, 3, 4])
    packed = policy.hidden(both, positions, both.new_tensor([0, 3, 8]), 5)
    alone = policy.hidden(both[3:], positions[3:], both.new_tensor([0, 5]), 5)
    if (off := relative_difference(packed[3:], alone)) > tolerance(policy):
        raise ValueError(
            f"trainer.model is a {type(policy.model).__name__}, in which a sequence changes by {off:.1e} "
            "(relative) when another one stands before it in the same row; choose an architecture with "
            "attention only"
        )


def probe(policy: Policy, length: int) -> Int64[Tensor, " length"]:
    """Some token ids, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(policy.vocab_size, (length,), generator=generator).to(policy.head.device)


def relative_difference(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-12))


def tolerance(policy: Policy) -> float:
    return 1e-4 if policy.head.dtype == torch.float32 else 0.1  # a leak of state is no small difference
