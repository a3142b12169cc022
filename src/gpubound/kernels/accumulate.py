"""Gradients of weights: returned to autograd, or added in fp32 to the weight's accumulator.

A parameter may carry `weight.main_grad`, an fp32 tensor of its shape. Code that computes the weight's gradient then adds it
there and returns None to autograd, so `weight.grad` stays empty. Two gains: small gradients are not lost (in bf16, 256 + 1 is
256; in fp32 it is 257), and the product adds as it writes, so no 16-bit gradient is stored, read and added in a separate pass.

A weight whose tensor state has an `opening` begins a new sum: the first gradient overwrites main_grad instead of adding, which
saves a memset and a read of all accumulators (1.7 GB each at 350m, 0.8 ms on an H200). `open_sums` marks the weights, and
`close_sums` zeroes those that got no gradient. A CUDA graph records whether an addition overwrites. So if a sum is opened in a
capture, its first gradient must be in the same capture, and otherwise in none: `opens` refuses both.

Gradients may be added on a side stream. Backward is a chain of input gradients, of which weight gradients are no part. A small
model's kernels leave most of the GPU idle, so weight gradients can run at the same time; in a captured step the side stream is
a branch of the graph. All additions of one backward run on one stream, so their order, and every bit, is the same as without
it. The tensors they read belong to the main stream, whose allocator would reuse their memory as soon as autograd releases them.
They are kept until the main stream has waited for the reader: at the end, or as soon as more than HELD_BYTES are kept.

These functions are for the `backward` of an autograd.Function, where autograd is off. Pass the Parameter itself, kept as
`ctx.weight = weight`: a view or cast of it carries no main_grad, and neither do `ctx.saved_tensors` under checkpointing.

Legend: N tokens, O outputs (the weight's rows), K inputs (its columns); g (N, O) is the output's gradient, x (N, K) the input.

The library attaches its state to a tensor: one record, as one attribute, with declared fields.

`main_grad`, a parameter's fp32 accumulator, is a separate attribute, by a convention that other libraries share. All other
state is a field here.

A record, and a main_grad next to one, belong to this process. A pickled or deep-copied tensor has an empty OrderedDict instead,
which torch.load accepts by default; `record_of` removes it together with the main_grad, which would collect gradients that no
optimizer reads.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import GraphError
from ..trace import fallback
from .row_ops import add_rows

ATTRIBUTE = "gpubound"


@dataclass(slots=True)
class Record:
    # of a parameter: the format of its product, and the destination of its gradient
    format: Any = None  # a Format of layers/linear_product.py; None: dense
    # The next delivery to main_grad begins a new sum, so it writes: True where a CUDA graph records that, whose replays then
    # begin the sum again, False where none does. None: it adds.
    opening: bool | None = None
    side: Any = None  # aside.Side: the stream on which deliveries run while a backward has it open; None: on the current stream
    arrivals: Any = None  # int32 zeros: counters of programs that share a sum of its gradient
    # of a parameter sharded by rows: the gathered Parameter that products use. Both have this record
    gathered: Any = field(default=None, compare=False)
    # of what a forward computed
    recipe: Any = None  # how backward computes it again, a RecomputeRecipe of layers/linear_product.py
    # of a quantised state: (bytes of its storage, device) -> its numbers there, part by part, for comparison by a certificate
    numbers: Any = None

    def __reduce__(self):
        return OrderedDict, ()

    @property
    def empty(self) -> bool:
        return self == Record()


def record_of(tensor: Tensor) -> Record | None:
    """Return the tensor's record, if it has one."""
    record = getattr(tensor, ATTRIBUTE, None)
    if record is None or type(record) is Record:
        return record
    for name in {ATTRIBUTE, "main_grad"} & vars(tensor).keys():  # it was pickled or copied
        delattr(tensor, name)
    return None


def ensure_record(tensor: Tensor) -> Record:
    """Return the tensor's record, a new one if it has none."""
    record = record_of(tensor)
    if record is None:
        record = Record()
        setattr(tensor, ATTRIBUTE, record)
    return record


def drop_record(tensor: Tensor) -> None:
    """Remove the record if all of its fields have their defaults."""
    record = record_of(tensor)
    if record is not None and record.empty and record.gathered is None:
        delattr(tensor, ATTRIBUTE)


def share_record(sharded: Tensor, gathered: Tensor) -> None:
    """Attach one record to a sharded parameter and its gathered tensor."""
    ensure_record(sharded).gathered = gathered
    setattr(gathered, ATTRIBUTE, record_of(sharded))


def seen(tensor: Tensor) -> Tensor:
    """Return the tensor that products multiply by: the gathered one of a sharded parameter."""
    record = record_of(tensor)
    return tensor if record is None or record.gathered is None else record.gathered


PENDING_BYTES = 256 << 20


class Side:
    """Side stream of one step's backwards, with the tensors that it may still read. `aside` uses it while it is open."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self._open = False
        self._pending: deque[tuple[torch.cuda.Event, int, tuple[Tensor, ...]]] = deque()
        self._bytes = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Run the work of `aside` on the side stream in the block; at its end, make the current stream wait for all of it."""
        self._open = True
        try:
            yield
        finally:
            self._open = False
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self._pending.clear()
            self._bytes = 0

    def run(self, work: Callable[[], object], reads: tuple[Tensor, ...]) -> None:
        if not self._open:
            work()
            return
        main = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            work()
        size = sum(t.nbytes for t in reads)
        self._pending.append((self.stream.record_event(), size, reads))
        self._bytes += size
        while self._bytes > PENDING_BYTES:
            read, size, _ = self._pending.popleft()
            main.wait_event(read)
            self._bytes -= size


def aside(weight: Tensor, work: Callable[[], object], *reads: Tensor) -> None:
    """Run `work`, an addition to the weight's accumulator that reads `reads`, on the weight's side stream, if it has one."""
    side = getattr(getattr(weight, ATTRIBUTE, None), "side", None)
    if side is None:
        work()
    else:
        side.run(work, reads)


def weight_gradient(weight: Tensor, g: Tensor, x: Tensor) -> Tensor | None:
    """Return gᵀ x, the gradient of `weight` in y = x weightᵀ, in its dtype; or add it to its main_grad and return None."""
    return weight_gradients([weight], g, x)[0]


def weight_gradients(weights: Sequence[Tensor], g: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    """Return, or add, the gradients of weights that were multiplied as one, stacked by rows: g holds their outputs by columns.

    It is one product when it can be: into the joined accumulators if these are adjacent row slices of one buffer, or, if no
    weight has an accumulator, into one result of which the gradients are views. Otherwise it is one product for each.
    """
    joined, mains = _joined_mains(weights)
    if joined is not None:
        aside(weights[0], partial(add_product, joined, g, x, weights), g, x)
        return (None,) * len(weights)
    if len(weights) == 1:
        return (product(g, x, weights[0].dtype),)
    rows = [weight.shape[0] for weight in weights]
    if mains == 0 and len({weight.dtype for weight in weights}) == 1:
        return product(g, x, weights[0].dtype).split(rows)
    return tuple(weight_gradient(weight, part, x) for weight, part in zip(weights, g.split(rows, 1)))


def _joined_mains(weights: Sequence[Tensor]) -> tuple[Tensor | None, int]:
    """Return the weights' accumulators as one tensor, or None if one is missing or not adjacent; and how many there are."""
    mains = []
    for weight in weights:
        if (main := main_gradient(weight)) is not None:
            mains.append(main)
    if len(mains) < len(weights):
        return None, len(mains)
    return mains[0] if len(mains) == 1 else join_rows(mains), len(mains)


def bias_gradients(biases: Sequence[Tensor], wanted: Sequence[bool], g: Tensor) -> list[Tensor | None]:
    """Return, or add, the gradients of biases whose outputs are adjacent in g; None for those that are not wanted."""
    if not any(wanted):
        return [None] * len(biases)
    sums = g.sum(0, dtype=torch.promote_types(g.dtype, torch.float32)).split([b.shape[0] for b in biases])
    return [deliver(b, s) if want else None for b, s, want in zip(biases, sums, wanted)]


def deliver_product(
    weights: Sequence[Tensor], multiply: Callable[[Tensor | None], Tensor], *reads: Tensor
) -> tuple[Tensor | None, ...]:
    """`deliver` a product that can be written but not added to: multiply(out) returns the stacked gradient in fp32.

    It is written into the joined accumulators if they begin a new sum, else into a temporary, which is added. `reads`: its
    factors.
    """
    joined, _ = _joined_mains(weights)
    if joined is None:
        parts = multiply(None).split([weight.shape[0] for weight in weights])
        return tuple(deliver(weight, part) for weight, part in zip(weights, parts))
    if opens(weights):
        aside(weights[0], lambda: multiply(joined), *reads)
    else:
        aside(weights[0], lambda: joined.add_(multiply(None)), *reads)
    return (None,) * len(weights)


def deliver(weight: Tensor, gradient: Tensor, factor: Tensor | None = None) -> Tensor | None:
    """Return a computed gradient times `factor` in the weight's dtype; or add it to the weight's main_grad and return None."""
    main = main_gradient(weight)
    if main is None:
        gradient = gradient.to(weight.dtype)
        return gradient if factor is None else gradient * factor
    writes = opens([weight])

    def put() -> None:
        if factor is None:
            main.copy_(gradient) if writes else main.add_(gradient)
        else:
            torch.mul(gradient, factor, out=main) if writes else main.addcmul_(gradient, factor)

    aside(weight, put, gradient, *([] if factor is None else [factor]))
    return None


def deliver_all(gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
    """`deliver` many (weight, gradient) in few launches. All weights must have a main_grad."""
    written: list[tuple[Tensor, Tensor]] = []
    added: list[tuple[Tensor, Tensor]] = []
    recording = _recording(gradients[0][0]) if gradients else False
    for weight, gradient in gradients:
        if (main := main_gradient(weight, hooks_ran=True)) is not None:
            record: Any = getattr(weight, ATTRIBUTE, None)
            writes = record is not None and record.opening is not None
            if writes and record.opening is recording:
                record.opening = None
            elif writes:
                opens([weight])  # raises
            (written if writes else added).append((main, gradient))

    def put() -> None:
        for op, pairs in ((torch._foreach_copy_, written), (torch._foreach_add_, added)):
            if pairs:
                op([main for main, _ in pairs], [gradient for _, gradient in pairs])

    if gradients:
        aside(gradients[0][0], put, *[gradient for _, gradient in gradients])


def deliver_rows(weight: Tensor, ids: Tensor, rows: Tensor, without: int = -1) -> None:
    """Add the gradient of weight[ids], given that of its result, to the rows of main_grad, which the weight must have."""
    table = main_gradient(weight, hooks_ran=True)  # the forward found no hooks
    assert table is not None
    writes = opens([weight])

    def put() -> None:
        if writes:
            table.zero_()
        add_rows(table, ids, rows, without)

    aside(weight, put, ids, rows)


def open_sums(weights: Sequence[Tensor]) -> None:
    """Begin a new sum in every main_grad of `weights`, without a memset. `close_sums` must follow the last delivery."""
    recording = _recording(weights[0])
    for weight in weights:
        record = getattr(weight, ATTRIBUTE, None)
        (record if type(record) is Record else ensure_record(weight)).opening = recording


def close_sums(weights: Sequence[Tensor]) -> None:
    """Zero each main_grad that got no gradient since `open_sums`."""
    for weight in weights:
        record = getattr(weight, ATTRIBUTE, None)
        if record is not None and getattr(record, "opening", None) is not None and opens([weight]):
            weight.main_grad.zero_()  # type: ignore[attr-defined]


def opens(weights: Sequence[Tensor]) -> bool:
    """Return True when all of these begin a new sum, so that the caller overwrites it. Otherwise zero those that do."""
    opening: list[Tensor] = []
    for weight in weights:
        if getattr(getattr(weight, ATTRIBUTE, None), "opening", None) is not None:
            opening.append(weight)
    if not opening:
        return False
    recording = _recording(weights[0])
    for weight in opening:
        record = getattr(weight, ATTRIBUTE)
        if record.opening is not recording:
            raise GraphError(
                "a gradient sum was opened on one side of a CUDA graph's border and is written on the other, so each replay "
                "would write over the sum or never begin a new one; open it, deliver and close it inside the graph, or zero it "
                "and add."
            )
        record.opening = None
    if len(opening) == len(weights):
        return True
    for weight in opening:
        weight.main_grad.zero_()  # type: ignore[attr-defined]
    return False


def _recording(weight: Tensor) -> bool:
    """Return True during a capture. Each replay overwrites where the capture did, even if no sum was opened before it."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def main_gradient(weight: Tensor, hooks_ran: bool = False) -> Tensor | None:
    """Return the weight's fp32 accumulator. None if it has none, or if a hook on it must see the gradient first.

    hooks_ran: hooks have seen the gradient, so they do not count
    """
    main = getattr(weight, "main_grad", None)
    if main is None:
        return None
    record = getattr(weight, ATTRIBUTE, None)
    if record is not None and type(record) is not Record:  # a pickled parameter's: record_of removes its main_grad
        record_of(weight)
        return None
    if main.dtype != torch.float32 or main.shape != weight.shape or main.device != weight.device:
        raise ValueError(
            f"main_grad: must be torch.float32 {tuple(weight.shape)} on {weight.device} like its weight, "
            f"got {main.dtype} {tuple(main.shape)} on {main.device}; "
            f"make it with torch.zeros_like(weight, dtype=torch.float32)."
        )
    if hooks_ran or torch.compiler.is_compiling():
        return main
    hooked = bool(weight._backward_hooks)
    for hook in (weight._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
        hooked = hooked or not isinstance(hook, Taker)
    if not hooked:
        return main
    fallback("gradients: into their fp32 sums", "a hook on a parameter is to see its gradient, in the parameter's dtype")
    return None


class Taker:
    """Hook that adds the gradient that autograd has computed to main_grad. All other hooks of the parameter see it first."""

    def __call__(self, parameter: Tensor) -> None:
        raise NotImplementedError


def product(g: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gᵀ x in `dtype`; for an fp32 weight under 16-bit activations, without rounding it to 16 bits first."""
    if g.dtype == x.dtype == dtype:
        return g.t() @ x
    if dtype != torch.float32 or not _has_fp32_product(g, x):
        return g.t().to(dtype) @ x.to(dtype)
    return (g.t() @ x).float() if torch.compiler.is_compiling() else torch.mm(g.t(), x, out_dtype=torch.float32)


def add_product(main: Tensor, g: Tensor, x: Tensor, owners: Sequence[Tensor] = ()) -> None:
    """Compute main += gᵀ x in fp32. `owners`: the weights whose main_grads, joined if they are several, `main` is.

    Under torch.compile the product is rounded to 16 bits before it is added: inductor lowers no `out_dtype` (pytorch #163880).
    """
    beta = 0 if owners and opens(owners) else 1  # with 0 the product does not read `main`
    if not _has_fp32_product(g, x):
        main.addmm_(g.t().to(main.dtype), x.to(main.dtype), beta=beta)
    elif torch.compiler.is_compiling():
        main.mul_(beta).add_(g.t() @ x)
    else:
        torch.addmm(main, g.t(), x, beta=beta, out_dtype=torch.float32, out=main)


def _has_fp32_product(g: Tensor, x: Tensor) -> bool:
    """Return True when cuBLAS multiplies g and x in their dtype with an fp32 result. It takes no empty matrices."""
    return g.is_cuda and g.dtype == x.dtype and g.dtype in (torch.bfloat16, torch.float16) and g.shape[0] > 0


def join_rows(slices: Sequence[Tensor]) -> Tensor | None:
    """Return one tensor over all of `slices` if they are adjacent in one storage and contiguous; else None."""
    first = slices[0]
    end, rows = first.data_ptr(), 0
    for part in slices:
        if (
            part.data_ptr() != end
            or not part.is_contiguous()
            or part.dtype != first.dtype
            or part.shape[1:] != first.shape[1:]
            or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        ):
            return None
        end += part.numel() * part.element_size()
        rows += part.shape[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def join(parts: Sequence[Tensor], by_columns: bool) -> Tensor | None:
    """Return `join_rows(parts)`; `by_columns` of matrices that are concatenated along columns, transposed in memory."""
    if not by_columns:
        return join_rows(parts)
    joined = join_rows([part.t() for part in parts])
    return None if joined is None else joined.t()


def one_matrix(parts: Sequence[Tensor], by_columns: bool = False) -> Tensor:
    """Return `join(parts)`, or a copy where the parts are not adjacent in memory. It carries no gradient."""
    if len(parts) == 1 and parts[0].is_contiguous():
        return parts[0].detach()
    parts = [part.detach() for part in parts]
    joined = join(parts, by_columns)
    return torch.cat(list(parts), int(by_columns)) if joined is None else joined


def widened(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weight.to(dtype), differentiable: its gradient, in `dtype`, is added to main_grad if the weight has one."""
    return weight.to(dtype) if main_gradient(weight) is None else _Widened.apply(weight, dtype)


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, dtype):
        ctx.weight = weight
        return weight.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return deliver(ctx.weight, g), None
