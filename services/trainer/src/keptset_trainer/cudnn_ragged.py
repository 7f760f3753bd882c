"""cuDNN's attention over ragged rows, by NVIDIA's cudnn-frontend, if that is installed.

torch calls the same kernels, but plans each call anew, and its backward pass gives them a buffer of the wrong
length (pytorch #186142, mended after 2.11). Here a plan is made once for each shape.
"""

import functools
import importlib
import logging
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class Name(IntEnum):
    """Of a plan's tensors."""

    Q = 1
    K = 2
    V = 3
    OUT = 4
    STATS = 5
    GRAD = 6
    GRAD_Q = 7
    GRAD_K = 8
    GRAD_V = 9
    LENGTHS = 10
    Q_OFFSETS = 11
    K_OFFSETS = 12
    STATS_OFFSETS = 13


class Plan:
    """The forward or the backward pass for one shape."""

    def __init__(
        self,
        backward: bool,
        device: int,
        tokens: int,
        sequences: int,
        longest: int,
        heads: int,
        key_heads: int,
        size: int,
        scale: float,
        dtype: torch.dtype,
    ) -> None:
        cudnn = library()
        assert cudnn is not None
        half = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[dtype]
        single, whole = cudnn.data_type.FLOAT, cudnn.data_type.INT64
        self.handle = handle(device)
        self.graph = cudnn.pygraph(
            io_data_type=half, intermediate_data_type=single, compute_data_type=single, handle=self.handle
        )

        def column(name: Name, length: int, kind: Any) -> Any:
            return self.graph.tensor(
                name=name.name, dim=[length, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind, uid=int(name)
            )

        lengths = column(Name.LENGTHS, sequences, cudnn.data_type.INT32)
        offsets = {
            count: column(name, sequences + 1, whole)
            for count, name in offset_names(heads, key_heads).items()
        }
        of_stats = column(Name.STATS_OFFSETS, sequences + 1, whole)

        def shape(count: int) -> tuple[list[int], list[int]]:
            strides = [longest * count * size, size, count * size, 1]
            return [sequences, count, longest, size], strides

        def ragged(name: Name, count: int) -> Any:
            dim, stride = shape(count)
            tensor = self.graph.tensor(name=name.name, dim=dim, stride=stride, data_type=half, uid=int(name))
            tensor.set_ragged_offset(offsets[count])
            return tensor

        def given(tensor: Any, name: Name, count: int) -> None:
            dim, stride = shape(count)
            tensor.set_uid(int(name)).set_output(True).set_dim(dim).set_stride(stride).set_data_type(half)
            tensor.set_ragged_offset(offsets[count])

        dim, stride = [sequences, heads, longest, 1], [longest * heads, 1, heads, 1]
        options: dict[str, Any] = {
            "q": ragged(Name.Q, heads), "k": ragged(Name.K, key_heads), "v": ragged(Name.V, key_heads),
            "attn_scale": scale, "use_padding_mask": True, "seq_len_q": lengths, "seq_len_kv": lengths,
            "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "diagonal_band_right_bound": 0,
        }  # fmt: skip
        if backward:
            stats = self.graph.tensor(
                name="STATS", dim=dim, stride=stride, data_type=single, uid=int(Name.STATS)
            )
            stats.set_ragged_offset(of_stats)
            gradients = self.graph.sdpa_backward(
                **options, o=ragged(Name.OUT, heads), dO=ragged(Name.GRAD, heads), stats=stats,
                max_total_seq_len_q=tokens, max_total_seq_len_kv=tokens,
            )  # fmt: skip
            for tensor, name, count in zip(
                gradients, (Name.GRAD_Q, Name.GRAD_K, Name.GRAD_V), (heads, key_heads, key_heads), strict=True
            ):
                given(tensor, name, count)
        else:
            out, stats = self.graph.sdpa(**options, generate_stats=True)
            given(out, Name.OUT, heads)
            stats.set_uid(int(Name.STATS)).set_output(True).set_dim(dim).set_stride(stride)
            stats.set_data_type(single).set_ragged_offset(of_stats)
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A])
        self.graph.check_support()
        self.graph.build_plans()
        self.workspace: int = self.graph.get_workspace_size()
        self.elements = elements_a_token(heads, key_heads, size)
        self.factors = torch.tensor([*self.elements.values()], device=torch.device("cuda", device))

    def run(self, tensors: dict[Name, Tensor], borders: Tensor) -> None:
        """On the current stream; `borders` are integers [S + 1] on the device."""
        tensors |= {
            Name.LENGTHS: borders.diff().int(),
            **dict(zip(self.elements, offsets_of(borders, self.factors), strict=True)),
        }
        workspace = torch.empty(max(1, self.workspace), dtype=torch.uint8, device=borders.device)
        cudnn = library()
        assert cudnn is not None
        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream(borders.device).cuda_stream)
        self.graph.execute({int(name): x for name, x in tensors.items()}, workspace, handle=self.handle)


def elements_a_token(heads: int, key_heads: int, size: int) -> dict[Name, int]:
    """How many elements a token has in the tensors that each of the offsets is for."""
    of_heads = {name: count * size for count, name in offset_names(heads, key_heads).items()}
    return {Name.STATS_OFFSETS: heads, **of_heads}


def offsets_of(borders: Tensor, factors: Tensor) -> list[Tensor]:
    """`borders` times each of the factors: int64, in one launch, each as aligned as memory of its own."""
    count = len(borders)
    room = -(-count // ALIGNED) * ALIGNED
    table = factors.new_empty(len(factors), room)[:, :count]
    torch.mul(borders, factors[:, None], out=table)
    return list(table)


ALIGNED = 16
"""Numbers of 8 bytes; a row of so many begins where torch would let a tensor begin that cuDNN reads."""


def offset_names(heads: int, key_heads: int) -> dict[int, Name]:
    """By number of heads: where sequences begin in tensors of so many."""
    return {heads: Name.Q_OFFSETS} | ({} if heads == key_heads else {key_heads: Name.K_OFFSETS})


plan = functools.cache(Plan)


def forward(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each sequence: ([L, heads, D], logsumexp [L, heads] float32)."""
    tokens, heads, size = q.shape
    key_heads = k.shape[1]
    out, stats = torch.empty_like(q), q.new_empty(tokens, heads, dtype=torch.float32)
    made = plan(
        False, q.device.index, tokens, len(borders) - 1, longest, heads, key_heads, size, scale, q.dtype
    )
    tensors = {Name.Q: q, Name.K: k, Name.V: v, Name.OUT: out, Name.STATS: stats}
    made.run(tensors, borders)
    return out, stats


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    borders: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; all are contiguous."""
    tokens, heads, size = q.shape
    key_heads = k.shape[1]
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    made = plan(
        True, q.device.index, tokens, len(borders) - 1, longest, heads, key_heads, size, scale, q.dtype
    )
    tensors = {
        Name.Q: q, Name.K: k, Name.V: v, Name.OUT: out, Name.STATS: stats, Name.GRAD: grad,
        Name.GRAD_Q: grads[0], Name.GRAD_K: grads[1], Name.GRAD_V: grads[2],
    }  # fmt: skip
    made.run(tensors, borders)
    return grads


@functools.cache
def library() -> Any:
    """cudnn-frontend, or None where it is not installed."""
    try:
        return importlib.import_module("cudnn")
    except ImportError:
        return None


@functools.cache
def handle(device: int) -> Any:
    """cuDNN's, of one GPU; forward and backward pass use it in turn."""
    with torch.cuda.device(device):
        return library().create_handle()


@functools.cache
def is_exact(device: int, heads: int, key_heads: int, size: int, dtype: torch.dtype) -> bool:
    """Whether it is there and gives what FlashAttention gives, on a row with short and with empty sequences.

    Versions of cuDNN differ in what of ragged rows they get right.
    """
    if library() is None:
        return False
    lengths = [300, 1, 129, 0, 64, 18, 0, 0]
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(sum(lengths), n, size, dtype=dtype, device=device, generator=generator)
        for n in (heads, key_heads, key_heads, heads)
    )
    borders = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    scale = size**-0.5
    try:
        out, stats = forward(q, k, v, borders, 512, scale)
        got = [out, stats, *backward(grad, q, k, v, out, stats, borders, 512, scale)]
    except Exception as error:  # of its own kinds, which differ between versions
        log.warning("cuDNN's attention over ragged rows does not run, FlashAttention does it: %s", error)
        return False
    true, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, borders, borders, 512, 512, 0.0, True, False, scale=scale
    )
    nothing = torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
    want = [
        true, lse.T,
        *torch.ops.aten._flash_attention_backward(
            grad, q, k, v, true, lse, borders, borders, 512, 512, 0.0, True, *nothing, scale=scale
        ),
    ]  # fmt: skip
    errors = [
        float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(got, want, strict=True)
    ]
    exact = max(errors) < BOUND  # NaN is not
    if not exact:
        log.warning("cuDNN's attention over ragged rows is off by %s, FlashAttention does it", errors)
    return exact


BOUND = 1e-2
"""Relative, by norm: two roundings to bfloat16 differ by 3e-3."""
