"""A tied head is packed anew after weights were loaded, and proven to compute with them."""

import pytest
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from keptset_inference import cpu_heads
from keptset_inference.cpu_heads import pack_heads


class Model(torch.nn.Module):
    """As much of a model as is looked at: a head made without vLLM's process groups."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.head = ParallelLMHead.__new__(ParallelLMHead)
        torch.nn.Module.__init__(self.head)
        self.head.weight = torch.nn.Parameter(torch.randn(12, 4).to(dtype), requires_grad=False)
        self.head.quant_method = UnquantizedEmbeddingMethod()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head.quant_method.apply(self.head, hidden)


@pytest.fixture
def packing(monkeypatch):
    """VLLM's packing in a few lines: a copy of the weight, which does not follow it."""

    def pack(layer, remove_weight):
        assert not remove_weight, "the embedding needs it"
        copy = layer.weight.detach().clone()
        layer.cpu_linear = lambda x, weight, bias: x @ copy.T

    monkeypatch.setattr(cpu_heads, "dispatch_cpu_unquantized_gemm", pack)
    monkeypatch.setattr(
        UnquantizedEmbeddingMethod, "apply", lambda self, layer, x: layer.cpu_linear(x, layer.weight, None)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_computes_with_what_was_loaded_last(packing, dtype):
    model = Model(dtype)
    pack_heads(model)
    hidden = torch.randn(3, 4).to(dtype)
    model.head.weight.copy_(torch.randn(12, 4))
    assert not torch.equal(model.logits(hidden), hidden @ model.head.weight.T), "the copy is stale"
    pack_heads(model)
    assert torch.equal(model.logits(hidden), hidden @ model.head.weight.T)


def test_a_head_that_stays_stale_is_an_error(packing, monkeypatch):
    model = Model()
    pack_heads(model)
    model.head.weight.add_(1)
    monkeypatch.setattr(cpu_heads, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: None)
    with pytest.raises(RuntimeError, match=r"head does not compute with the weights.*restart"):
        pack_heads(model)
    model.head.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="head"):
        pack_heads(model)


def test_a_model_without_a_head_of_its_own_is_fine():
    pack_heads(torch.nn.Linear(2, 2))
