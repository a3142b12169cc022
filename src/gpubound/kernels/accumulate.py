"""Gradients of weights: returned to autograd, or added in fp32 to the weight's accumulator.

A parameter may carry `weight.main_grad`, an fp32 tensor of its shape. Whoever computes that weight's gradient then adds it
there and hands autograd None, so `weight.grad` stays empty. Two gains: small gradients are not lost (in bf16, 256 + 1 is 256;
in fp32 it is 257), and the product adds as it writes, so no 16-bit gradient is stored, read and added in a pass of its own.

A weight whose record has an `opening` begins a new sum: whoever delivers first writes over what is there instead of adding,
which saves a memset and a read of all accumulators (1.7 GB each at 350m, 0.8 ms on an H200). `open_sums` says so, and
`close_sums` zeroes what nobody has delivered to. A CUDA graph bakes in whether a delivery writes. So if a sum is opened while a
graph is recorded, its first delivery belongs into the same recording, and else into none: `opens` refuses both.

These functions are for the `backward` of an autograd.Function, where autograd is off. Give them the Parameter itself, kept as
`ctx.weight = weight`: a view or cast of it carries no main_grad, nor does what `ctx.saved_tensors` returns under checkpointing.

Legend: N tokens, O outputs (the weight's rows), K inputs (its columns); g (N, O) is the output's gradient, x (N, K) the input.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import GraphError
from ..trace import fallback
from .add_rows import add_rows
from .side_stream import aside
from .tensor_state import ATTRIBUTE, Record, made_record, record_of


def weight_gradient(weight: Tensor, g: Tensor, x: Tensor) -> Tensor | None:
    """gᵀ x, the gradient of `weight` in y = x weightᵀ: returned in the weight's dtype, or added to its main_grad and None."""
    main = main_gradient(weight)
    if main is None:
        return product(g, x, weight.dtype)
    aside(weight, lambda: add_product(main, g, x, [weight]), g, x)
    return None


def weight_gradients(weights: Sequence[Tensor], g: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of several weights that were multiplied as one, stacked by rows: g holds their outputs side by side.

    One product when it can be: into the joined accumulators when these are consecutive row slices of one buffer, or, when no
    weight has an accumulator, into one result of which the gradients are views. Otherwise a product each.
    """
    rows = [weight.shape[0] for weight in weights]
    mains = [main_gradient(weight) for weight in weights]
    there = [main for main in mains if main is not None]
    if len(there) == len(mains) and (joined := join_rows(there)) is not None:
        aside(weights[0], lambda: add_product(joined, g, x, weights), g, x)
        return (None,) * len(mains)
    if not there and len({weight.dtype for weight in weights}) == 1:
        return product(g, x, weights[0].dtype).split(rows)
    return tuple(weight_gradient(weight, part, x) for weight, part in zip(weights, g.split(rows, 1)))


def bias_gradients(biases: Sequence[Tensor], wanted: Sequence[bool], g: Tensor) -> list[Tensor | None]:
    """The gradients of several biases whose outputs are adjacent in g; None for those that are not wanted."""
    if not any(wanted):
        return [None] * len(biases)
    sums = g.sum(0, dtype=torch.promote_types(g.dtype, torch.float32)).split([b.shape[0] for b in biases])
    return [deliver(b, s) if want else None for b, s, want in zip(biases, sums, wanted)]


def deliver_product(
    weights: Sequence[Tensor], multiply: Callable[[Tensor | None], Tensor], *reads: Tensor
) -> tuple[Tensor | None, ...]:
    """`deliver` of a product that can be written but not added to: multiply(out) gives the stacked gradient in fp32.

    Written straight into the joined accumulators where they begin a new sum, else made apart and added. `reads`: its factors.
    """
    mains = [main_gradient(weight) for weight in weights]
    there = [main for main in mains if main is not None]
    joined = join_rows(there) if len(there) == len(mains) else None
    if joined is None:
        parts = multiply(None).split([weight.shape[0] for weight in weights])
        return tuple(deliver(weight, part) for weight, part in zip(weights, parts))
    if opens(weights):
        aside(weights[0], lambda: multiply(joined), *reads)
    else:
        aside(weights[0], lambda: joined.add_(multiply(None)), *reads)
    return (None,) * len(mains)


def deliver(weight: Tensor, gradient: Tensor, factor: Tensor | None = None) -> Tensor | None:
    """A gradient that is computed already, times `factor`: in the weight's dtype, or None and added to its main_grad."""
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
    """`deliver` for many (weight, gradient) at once, all of them weights that have a main_grad: few launches for small ones."""
    written: list[tuple[Tensor, Tensor]] = []
    added: list[tuple[Tensor, Tensor]] = []
    recording = _recording(gradients[0][0]) if gradients else False
    for weight, gradient in gradients:
        if (main := accumulator(weight)) is not None:
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
    """The gradient of weight[ids] from that of its result, added to the rows of main_grad, which the weight must have."""
    table = accumulator(weight)
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
        (record if type(record) is Record else made_record(weight)).opening = recording


def close_sums(weights: Sequence[Tensor]) -> None:
    """Zero each main_grad that got no gradient since `open_sums`."""
    for weight in weights:
        record = getattr(weight, ATTRIBUTE, None)
        if record is not None and getattr(record, "opening", None) is not None and opens([weight]):
            weight.main_grad.zero_()  # type: ignore[attr-defined]


def opens(weights: Sequence[Tensor]) -> bool:
    """True when all of these begin a new sum, so that the caller's delivery writes. Mixed ones are zeroed, and it adds."""
    opening = [(w, record) for w in weights if (record := record_of(w)) is not None and record.opening is not None]
    if not opening:
        return False
    recording = _recording(weights[0])
    for _, record in opening:
        if record.opening is not recording:
            raise GraphError(
                "a gradient sum was opened on one side of a CUDA graph's border and is written on the other, so each replay "
                "would write over the sum or never begin a new one; open it, deliver and close it inside the graph, or zero it "
                "and add."
            )
        record.opening = None
    if len(opening) == len(weights):
        return True
    for weight, _ in opening:
        weight.main_grad.zero_()  # type: ignore[attr-defined]
    return False


def _recording(weight: Tensor) -> bool:
    """A replay does what was recorded: it writes each time where the recording wrote, whatever was opened meanwhile."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def main_gradient(weight: Tensor) -> Tensor | None:
    """The accumulator that a gradient goes into unseen. None where there is none, or a hook on the weight is to see it."""
    main = accumulator(weight)
    if main is None or torch.compiler.is_compiling() or not any(hooks_on(weight)):
        return main
    fallback("gradients: into their fp32 sums", "a hook on a parameter is to see its gradient, in the parameter's dtype")
    return None


class Taker:
    """A hook that takes what autograd has computed for a parameter into its main_grad. All others are to see it first."""

    def __call__(self, parameter: Tensor) -> None:
        raise NotImplementedError


def hooks_on(weight: Tensor) -> Iterator[Any]:
    """Yield the hooks that see this weight's gradient, or `weight.grad` after it."""
    yield from (weight._backward_hooks or {}).values()
    behind = weight._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]
    yield from (hook for hook in behind.values() if not isinstance(hook, Taker))


def accumulator(weight: Tensor) -> Tensor | None:
    """The weight's fp32 accumulator, if it has one."""
    if getattr(weight, "main_grad", None) is None:
        return None
    record_of(weight)  # removes the main_grad of a parameter that was pickled
    main = getattr(weight, "main_grad", None)
    if main is None:
        return None
    if main.dtype != torch.float32 or main.shape != weight.shape or main.device != weight.device:
        raise ValueError(
            f"main_grad: must be torch.float32 {tuple(weight.shape)} on {weight.device} like its weight, "
            f"got {main.dtype} {tuple(main.shape)} on {main.device}; "
            f"make it with torch.zeros_like(weight, dtype=torch.float32)."
        )
    return main


def product(g: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """gᵀ x in `dtype`; for an fp32 weight under 16-bit activations, without rounding to 16 bits on the way."""
    if g.dtype == x.dtype == dtype:
        return g.t() @ x
    if dtype != torch.float32 or not _has_fp32_product(g, x):
        return g.t().to(dtype) @ x.to(dtype)
    return (g.t() @ x).float() if torch.compiler.is_compiling() else torch.mm(g.t(), x, out_dtype=torch.float32)


def add_product(main: Tensor, g: Tensor, x: Tensor, owners: Sequence[Tensor] = ()) -> None:
    """main += gᵀ x, summed and added in fp32. `owners`: the weights whose main_grad it is, joined if they are several.

    Under torch.compile the product is rounded to 16 bits before it is added: inductor lowers no `out_dtype` (pytorch #163880).
    """
    beta = 0 if owners and opens(owners) else 1  # with 0 the product does not read what it writes over
    if not _has_fp32_product(g, x):
        main.addmm_(g.t().to(main.dtype), x.to(main.dtype), beta=beta)
    elif torch.compiler.is_compiling():
        main.mul_(beta).add_(g.t() @ x)
    else:
        torch.addmm(main, g.t(), x, beta=beta, out_dtype=torch.float32, out=main)


def _has_fp32_product(g: Tensor, x: Tensor) -> bool:
    """True when cuBLAS multiplies g and x as they are and gives fp32. With no rows there is nothing for it to multiply."""
    return g.is_cuda and g.dtype == x.dtype and g.dtype in (torch.bfloat16, torch.float16) and g.shape[0] > 0


def join_rows(slices: Sequence[Tensor]) -> Tensor | None:
    """Return one tensor over all of `slices` if they are adjacent in one storage and contiguous; else None."""
    first = slices[0]
    end = first.data_ptr()
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
    rows = sum(part.shape[0] for part in slices)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def join(parts: Sequence[Tensor], beside: bool) -> Tensor | None:
    """`join_rows`, or, `beside`, of matrices that lie side by side: each is the transpose of what memory has then."""
    if not beside:
        return join_rows(parts)
    joined = join_rows([part.t() for part in parts])
    return None if joined is None else joined.t()


def one_matrix(parts: Sequence[Tensor], beside: bool = False) -> Tensor:
    """`join`, through a copy where memory does not have them so. It carries no gradient."""
    parts = [part.detach() for part in parts]
    joined = join(parts, beside)
    return torch.cat(list(parts), int(beside)) if joined is None else joined


def widened(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """weight.to(dtype) for plain differentiable code: its gradient goes, still in `dtype`, where main_grad says."""
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
