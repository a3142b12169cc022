"""Where a weight's gradient goes: back to autograd, or added in fp32 to the weight's own accumulator.

A parameter may carry `weight.main_grad`, an fp32 tensor of its shape. Whoever computes that weight's gradient then adds it
there and hands autograd None, so `weight.grad` stays empty. Two gains: small gradients are not lost (in bf16, 256 + 1 is 256;
in fp32 it is 257), and the product adds as it writes, so no 16-bit gradient is stored, read and added in a pass of its own.

These functions are for the `backward` of an autograd.Function, where autograd is off. Give them the Parameter itself, kept as
`ctx.weight = weight`: a view or cast of it carries no main_grad, nor does what `ctx.saved_tensors` returns under checkpointing.

Legend: N tokens, O outputs (the weight's rows), K inputs (its columns); g (N, O) is the output's gradient, x (N, K) the input.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def weight_gradient(weight: Tensor, g: Tensor, x: Tensor) -> Tensor | None:
    """gᵀ x, the gradient of `weight` in y = x weightᵀ: returned in the weight's dtype, or added to its main_grad and None."""
    main = main_gradient(weight)
    if main is None:
        return product(g, x, weight.dtype)
    add_product(main, g, x)
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
        add_product(joined, g, x)
        return (None,) * len(mains)
    if not there and len({weight.dtype for weight in weights}) == 1:
        return product(g, x, weights[0].dtype).split(rows)
    return tuple(weight_gradient(weight, part, x) for weight, part in zip(weights, g.split(rows, 1)))


def deliver(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """A gradient that is already computed: returned in the weight's dtype, or added to its main_grad and None."""
    main = main_gradient(weight)
    if main is None:
        return gradient.to(weight.dtype)
    main.add_(gradient)
    return None


def main_gradient(weight: Tensor) -> Tensor | None:
    """The weight's fp32 accumulator, if it has one."""
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


def add_product(main: Tensor, g: Tensor, x: Tensor) -> None:
    """main += gᵀ x, summed and added in fp32.

    Under torch.compile the product is rounded to 16 bits before it is added: inductor lowers no `out_dtype` (pytorch #163880).
    """
    if not _has_fp32_product(g, x):
        main.addmm_(g.t().to(main.dtype), x.to(main.dtype))
    elif torch.compiler.is_compiling():
        main.add_(g.t() @ x)
    else:
        torch.addmm(main, g.t(), x, out_dtype=torch.float32, out=main)


def _has_fp32_product(g: Tensor, x: Tensor) -> bool:
    """True when cuBLAS multiplies g and x as they are and gives fp32. With no rows there is nothing for it to multiply."""
    return g.is_cuda and g.dtype == x.dtype and g.dtype in (torch.bfloat16, torch.float16) and g.shape[0] > 0


def join_rows(slices: Sequence[Tensor]) -> Tensor | None:
    """One tensor over all of `slices` when they lie one behind the other in one storage, each contiguous; else None."""
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
