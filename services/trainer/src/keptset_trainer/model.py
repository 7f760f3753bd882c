"""The model: a transformers causal LM, taken apart into body (tokens -> hidden) and head (the matrix W)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Policy:
    """A causal LM whose logits are softcap(hidden @ head.T), which `load_policy` has proved."""

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

    def hidden(
        self, token_ids: Int64[Tensor, " tokens"], positions: Int64[Tensor, " tokens"]
    ) -> Float[Tensor, "tokens hidden"]:
        """Hidden states of one packed row; hidden[n] predicts token n + 1.

        A sequence begins wherever `positions` is 0. transformers finds these borders and masks attention
        across them, in full and in sliding-window layers, if it is given neither a mask nor a cache.
        """
        body = self.model.base_model
        row = body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        return row.last_hidden_state[0]


def load_policy(directory: str, device: torch.device, dtype: str) -> Policy:
    """Load the model in `directory` (or of that hub name) for training, attention by SDPA.

    Args:
        directory: with config.json and safetensors weights.
        device: where to.
        dtype: "float32", "bfloat16" or "auto": float32 on a CPU, as stored elsewhere.

    Raises:
        ValueError: an architecture whose logits or whose packed rows are not what the loss counts on.
    """
    chosen = torch.float32 if dtype == "auto" and device.type == "cpu" else DTYPES.get(dtype, "auto")
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=chosen, attn_implementation="sdpa", use_safetensors=True
    ).to(device)
    model.eval()  # no dropout: ratios compare with a rollout that had none
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    policy = Policy(model, softcap)
    prove_head(policy)
    prove_packing(policy)
    return policy


@torch.no_grad()
def prove_head(policy: Policy) -> None:
    """Compare the architecture's own logits with softcap(hidden @ head.T) on a few tokens.

    Raises:
        ValueError: they differ: a bias, a multiplier or another head that the loss does not know.
    """
    token_ids = probe(policy, 8)
    positions = torch.arange(8, device=token_ids.device)
    theirs = policy.model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False).logits[0]
    ours = policy.hidden(token_ids, positions) @ policy.head.T
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
    first, second = probe(policy, 8).split([3, 5])
    steps = torch.arange(8, device=first.device)
    packed = policy.hidden(torch.cat([first, second]), torch.cat([steps[:3], steps[:5]]))
    alone = policy.hidden(second, steps[:5])
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
    return 1e-4 if policy.head.dtype == torch.float32 else 3e-2
