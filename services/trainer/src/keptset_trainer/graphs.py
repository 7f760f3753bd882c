"""CUDA graphs of the body: a row's forward pass is one launch, its backward pass another one.

A step of a small model is thousands of kernels, which a host may launch slower than its GPU does them. Here
the body's kernels are recorded once for each layout of rows. Attention reads the borders from the device, so
what was recorded holds for all rows of the layout. Embedding, head and loss stay outside.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .attention import ragged_kernel
from .layout import Layout, filled
from .micro_batch import Sequences
from .model import Policy

RECORDED_KERNEL = "cudnn"
"""Of ragged rows in recordings: see `attention.RAGGED_KERNEL`."""
MOST = 32
"""Layouts that are recorded; rows of further ones are launched kernel by kernel."""

Work = Callable[[], list[Tensor | None]]
Record = Callable[[Work], tuple[Callable[[], None], list[Tensor | None]]]
"""Takes work down; gives what does it again, and the tensors that its results are in each time."""

log = logging.getLogger(__name__)


class BodyGraphs:
    """What was recorded of one policy's body."""

    def __init__(
        self,
        policy: Policy,
        record: Record | None = None,
        strict: bool = False,
        groups: Sequence[Sequence[nn.Module]] = (),
    ) -> None:
        """Nothing is recorded yet.

        Args:
            policy: whose body it is.
            record: what takes it down; None = CUDA graphs.
            strict: raise what goes wrong instead of logging it.
            groups: layers, from the last to the first, whose backward passes are recorded one by one.
        """
        self.policy, self.strict, self.groups = policy, strict, groups
        self.exchange: Callable[[int], None] | None = None
        """Called in the last row's backward pass when the gradients of a group, by its number, are there."""
        self.record = record or cuda_graphs()
        self.recorded: dict[Layout, Recorded] = {}
        self.seen: set[Layout] = set()
        self.refused: set[Layout] = set()

    def arranged(self, row: Sequences) -> Sequences:
        """A row of the host, filled up to a layout."""
        return filled(row, Layout.around(row))

    def hidden(self, row: Sequences, is_last: bool = False) -> Tensor:
        """As `Policy.hidden`; a layout is recorded when its second row comes. `is_last`: of a step's rows."""
        layout = Layout.exactly(row)
        embeds = self.policy.embedded(row.token_ids)
        wanted = layout in self.seen and layout not in self.recorded and layout not in self.refused
        if wanted and len(self.recorded) < MOST:
            self.try_to_record(layout, embeds, row)
        self.seen.add(layout)
        if layout not in self.recorded:
            return self.policy.body(embeds, row.positions, row.borders, row.longest)
        if not embeds.requires_grad:  # of a frozen embedding: the backward pass must come here all the same
            embeds = embeds.detach().requires_grad_()
        hidden: Tensor = _Replayed.apply(  # type: ignore[no-untyped-call]
            embeds, row.positions, row.borders, self.recorded[layout], self.exchange if is_last else None
        )
        return hidden

    def try_to_record(self, layout: Layout, embeds: Tensor, row: Sequences) -> None:
        """Record `layout`, or never try again."""
        tidy_up = after_failure(embeds.device)
        try:
            self.recorded[layout] = Recorded(self.policy, layout, embeds, row, self.record, self.groups)
        except Exception as error:
            tidy_up()
            if self.strict:
                raise
            log.warning(
                "trainer.cuda_graphs: rows of %s are launched kernel by kernel from here on, as recording "
                "them failed: %s: %s",
                layout,
                type(error).__name__,
                error,
            )
            self.refused.add(layout)


class Recorded:
    """The body for one layout: its inputs are copied into place, its results are where they always are."""

    def __init__(
        self,
        policy: Policy,
        layout: Layout,
        embeds: Tensor,
        row: Sequences,
        record: Record,
        groups: Sequence[Sequence[nn.Module]],
    ) -> None:
        self.policy, self.layout, self.groups = policy, layout, groups
        self.count = max(1, len(groups))
        self.parameters: list[nn.Parameter] = [p for p in policy.model.parameters() if p.requires_grad]
        self.embeds = torch.empty_like(embeds).requires_grad_()
        self.positions = torch.empty_like(row.positions)
        self.borders = torch.empty_like(row.borders, dtype=torch.int32)
        self.load(embeds, row.positions, row.borders)
        self.gradient = torch.zeros_like(embeds)  # of the hidden states
        self.begins: list[Tensor] = []
        """Of each group, the first layers first: its input, a leaf of autograd's."""
        self.ends: list[Tensor] = []
        """Its output."""
        self.flow: Tensor | None = self.gradient
        """The gradient of the last one of `ends`."""
        with ragged_kernel(RECORDED_KERNEL):
            self.run_forward()  # whatever is made at first use, such as plans, is made before the recording
            for _ in range(self.count):
                self.run_backward()
            # else nodes of autograd would bind the recording to the stream that they were made on
            assert not self.ends
            assert not self.begins
            self.forward, (hidden,) = record(self.run_forward)
            backward = [record(self.run_backward) for _ in range(self.count)]
        assert hidden is not None
        # Not owned: the next layout's recording may use the memory, as no two are used at a time.
        self.hidden = borrowed(hidden)
        self.backward = [(again, self.by_parameter(gradients[1:])) for again, gradients in backward]
        of_embeds = backward[-1][1][0]
        assert of_embeds is not None
        self.of_embeds = borrowed(of_embeds)
        self.flow = None
        self.prove_groups()

    @torch.no_grad()
    def load(self, embeds: Tensor, positions: Tensor, borders: Tensor) -> None:
        """Put a row's inputs where they are read."""
        self.embeds.copy_(embeds)
        self.positions.copy_(positions)
        self.borders.copy_(borders)

    def run_forward(self) -> list[Tensor | None]:
        with torch.enable_grad():  # type: ignore[no-untyped-call]
            self.begins, self.ends, self.flow = [self.embeds], [], self.gradient
            with cut([group[0] for group in self.groups[:-1]], self.begins, self.ends):
                out = self.policy.body(self.embeds, self.positions, self.borders, self.layout.longest)
            self.ends.append(out)
        if len(self.ends) != self.count:
            raise ValueError(f"a layer does not run once: {UNGROUPED}")
        return [out.detach()]

    def run_backward(self) -> list[Tensor | None]:
        """Of the last group that had not its turn: gradients of its input and of all parameters."""
        inputs = [*self.begins, *self.parameters]
        found = torch.autograd.grad(self.ends.pop(), inputs, self.flow, allow_unused=True)
        *others, self.flow = found[: len(self.begins)]
        if self.flow is None or any(one is not None for one in others):
            raise ValueError(f"layers use more of those before than the last one's output: {UNGROUPED}")
        self.begins.pop()
        return [self.flow, *found[len(inputs) - len(self.parameters) :]]

    def by_parameter(self, gradients: Sequence[Tensor | None]) -> list[tuple[nn.Parameter, Tensor]]:
        """Those that there are."""
        pairs = zip(self.parameters, gradients, strict=True)
        return [(parameter, borrowed(gradient)) for parameter, gradient in pairs if gradient is not None]

    def prove_groups(self) -> None:
        """Every parameter has its whole gradient in one group, and that of a layer in the layer's.

        Raises:
            ValueError: it is not so.
        """
        home = {
            id(parameter): number
            for number, group in enumerate(self.groups)
            for block in group
            for parameter in block.parameters()
        }
        for number, (_, gradients) in enumerate(self.backward):
            if any(home.setdefault(id(parameter), number) != number for parameter, _ in gradients):
                raise ValueError(f"layers of two groups share parameters: {UNGROUPED}")


UNGROUPED = "their backward pass cannot be recorded in groups; set backward_groups = 1"


@contextmanager
def cut(blocks: Sequence[nn.Module], begins: list[Tensor], ends: list[Tensor]) -> Iterator[None]:
    """A while in which a block's input goes to `ends`; it gets a leaf instead, which goes to `begins`."""

    def begin(block: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if not arguments:
            raise ValueError(f"layers get their input by name: {UNGROUPED}")
        ends.append(arguments[0])
        begins.append(arguments[0].detach().requires_grad_())
        return (begins[-1], *arguments[1:])

    handles = [block.register_forward_pre_hook(begin) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Replayed(torch.autograd.Function):
    """Hidden states of a recorded layout. Its backward leaves the parameters' gradients in their `grad`.

    They stay there until the next backward pass: whoever adds up rows must have taken them (`add_up`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        embeds: Tensor,
        positions: Tensor,
        borders: Tensor,
        recorded: Recorded,
        exchange: Callable[[int], None] | None,
    ) -> Tensor:
        ctx.recorded, ctx.exchange = recorded, exchange
        recorded.load(embeds, positions, borders)
        recorded.forward()
        return recorded.hidden.view_as(recorded.hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        recorded: Recorded = ctx.recorded
        recorded.gradient.copy_(grad)
        for group, (again, gradients) in enumerate(recorded.backward):
            again()
            for parameter, gradient in gradients:
                assert parameter.grad is None, "the gradients of the row before were not taken"
                parameter.grad = gradient
            if ctx.exchange is not None:
                ctx.exchange(group)
        return recorded.of_embeds, None, None, None, None


def cuda_graphs() -> Record:
    """Recording into one pool of memory, of the largest layout's size, since no two are used at a time."""
    pool = torch.cuda.graph_pool_handle()

    def record(work: Work) -> tuple[Callable[[], None], list[Tensor | None]]:
        graph = torch.cuda.CUDAGraph()
        # relaxed: cuDNN makes its plans, which a capture need not know of
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="relaxed"):
            results = work()
        return graph.replay, results

    return record


def done_again(work: Work) -> tuple[Callable[[], None], list[Tensor | None]]:
    """A recording where there is no GPU, to try things: the work itself, its results copied into place."""
    first = work()

    def again() -> None:
        for place, result in zip(first, work(), strict=True):
            if place is not None and result is not None:
                place.copy_(result)

    return again, first


def after_failure(device: torch.device) -> Callable[[], None]:
    """What puts back the current stream and the generator as they are now, if a recording breaks off."""
    if device.type != "cuda":
        return lambda: None
    stream = torch.cuda.current_stream(device)
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.clone_state()

    def tidy_up() -> None:
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(state)

    return tidy_up


class _Memory:
    """Bytes of a tensor, for anyone who knows CUDA's array interface; without owning them."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 3,
        }  # fmt: skip


def borrowed(tensor: Tensor) -> Tensor:
    """The same numbers, in memory that somebody else may reuse."""
    if not tensor.is_cuda or tensor.numel() == 0:
        return tensor
    flat = torch.as_tensor(_Memory(tensor), device=tensor.device)
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
