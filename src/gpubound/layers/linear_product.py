"""A linear product as a site with parts: y = x Wᵀ + b, of one weight or of several that are adjacent in memory.

What the weights' records say (kernels/tensor_state.py) makes a site of three kinds of parts:

    format        how the weights are stored and multiplied: y from x, and dx and dW from dy           Format
    accumulator   where dW goes: nowhere (frozen), to .grad, or into main_grad in fp32                 kernels/accumulate.py
    adapters      what is added to y; dy gives their own gradients, and dx its share                   Adapter

All of them run inside one autograd.Function. Formats and adapters are described in linear_formats.py.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import device as facts
from ..kernels.accumulate import bias_gradients, join_rows
from ..kernels.dispatch import KERNEL_DTYPES, transformed
from ..kernels.lora import lora_product
from ..kernels.tensor_state import record_of
from . import recompute
from .linear_formats import AS_IT_IS, Adapter, Factors, Format, Joined, Spanning, adapters_of, format_of, rows_of, shape_of


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, extra: Sequence[Adapter] = ()) -> Tensor:
    """x weightᵀ + bias. The gradient goes into the weight's main_grad, if it has one, and what its record says takes part.

    Without any of these it is torch's own product, unless x has a recipe for recomputing it: torch would save x. As for torch,
    x, weight and bias have one dtype; under autocast each is cast.

    extra: adapters of this call alone
    """
    record = record_of(weight)
    silent = (record is None or record.empty) and getattr(weight, "main_grad", None) is None
    if not extra and silent and recompute.origin(x) is None:
        check_dtypes(x, weight, bias)
        return F.linear(x, weight, bias)
    if _seen_through():
        return _plain(x, weight, bias, extra)
    biases = [] if bias is None else [bias]
    return multiply(x, Joined(weight.detach(), None if bias is None else bias.detach(), [weight], biases, [extra]))


def fused_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> Tensor:
    """x times several weights, their outputs side by side (..., ΣO): one product where the weights are neighbours in memory."""
    _check(x, weights, biases)
    each = biases if biases is not None else [None] * len(weights)
    if _seen_through():
        return torch.cat([_plain(x, w, b) for w, b in zip(weights, each)], -1)
    full = join_rows([w.detach() for w in weights])
    whole_bias = None if biases is None else join_rows([b.detach() for b in biases])
    if full is None or (biases is not None and whole_bias is None):
        return torch.cat([linear(x, w, b) for w, b in zip(weights, each)], -1)
    return multiply(x, Joined(full, whole_bias, weights, biases or ()))


def multiply(x: Tensor, joined: Joined) -> Tensor:
    """The product at the site that the weights' records describe."""
    weights, format = joined.weights, format_of(joined.weights[0])
    if autocasts(x):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    elif not format.coded:
        check_dtypes(x, *weights, *joined.biases)
    adapters = _spanning(joined) if joined.adapted else ()
    if torch.is_grad_enabled():
        theirs = [p for spanning in adapters for p in spanning.adapter.parameters]
        return _Product.apply(x, format.taking(x, weights), adapters, joined, *weights, *joined.biases, *theirs)
    if (said := _said(format, x, joined, adapters)) is not None:
        return _added(x, joined.weight, joined.bias, said[0])
    y = format.evaluate(x, joined)
    for spanning in adapters:
        spanning.adapter.forward(x, spanning.of(y))
    return y


def autocasts(x: Tensor) -> bool:
    """Return whether autocast is on for x; it does not change float64."""
    return torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def check_dtypes(x: Tensor, *parameters: Tensor | None) -> None:
    """Refuse parameters of another dtype than x without autocast, as torch does: a cast copies a weight in each call."""
    for p in parameters:
        if p is not None and p.dtype != x.dtype and not autocasts(x):
            raise ValueError(
                f"linear: x is {x.dtype} and a parameter {p.dtype}; cast one of them to the other's dtype, or call the layer "
                f"under torch.autocast."
            )


def _said(format: Format, x: Tensor, joined: Joined, adapters: Sequence[Spanning]) -> tuple[Factors, Sequence[Tensor]] | None:
    """The only adapter's `factors`, where one kernel multiplies and adds: it reads and writes y once."""
    if len(adapters) != 1 or not _adds(format, x) or (adapters[0].start, adapters[0].stop) != (0, joined.weight.shape[0]):
        return None
    return adapters[0].adapter.factors(x)


def _adds(format: Format, x: Tensor) -> bool:
    """Return whether there is such a kernel. Without one, torch's product in x's dtype is faster than the definition."""
    return format is AS_IT_IS and (x.is_cuda or facts.interpreted()) and x.dtype in KERNEL_DTYPES


def _added(x: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors) -> Tensor:
    h, b, drop, blocks, rows = factors
    return lora_product(rows_of(x), weight, bias, h, b, drop, blocks, rows=rows).view(*x.shape[:-1], weight.shape[0])


def _spanning(joined: Joined) -> Sequence[Spanning]:
    kinds: dict[type[Adapter], list[Spanning]] = {}
    start = 0
    for weight, extra in zip(joined.weights, joined.extra or repeat(())):
        stop = start + weight.shape[0]
        for adapter in (*adapters_of(weight), *extra):
            kinds.setdefault(type(adapter), []).append(Spanning(adapter, start, stop))
        start = stop
    return [spanning for kind, members in kinds.items() for spanning in kind.join(members)]


class _Product(torch.autograd.Function):
    """The parameters are kept on ctx: of what is saved, activation checkpointing gives back detached copies, without
    main_grad and record. That nobody changed them meanwhile, which save_for_backward would have seen to, is checked here.
    """

    @staticmethod
    def forward(ctx, x, format, adapters, joined, *parameters):
        if (said := _said(format, x, joined, adapters)) is not None:
            y, kept, ctx.starts = _added(x, joined.weight, joined.bias, said[0]), said[1], [0]
        else:
            y, kept = format.forward(x, joined)
            kept, ctx.starts = list(kept), []
            for spanning in adapters:
                ctx.starts.append(len(kept))
                kept += spanning.adapter.forward(x, spanning.of(y))
        reads_x = adapters or (format.reads_input and any(ctx.needs_input_grad[4 : 4 + len(joined.weights)]))
        recipe = recompute.origin(x) if reads_x else None
        ctx.again = None if recipe is None else recipe.op
        made_of = recipe.tensors if recipe is not None else (x if reads_x else None,)
        ctx.made_of = len(made_of)
        ctx.save_for_backward(*made_of, *kept)
        ctx.format, ctx.adapters, ctx.joined, ctx.parameters = format, adapters, joined, parameters
        ctx.versions = [p._version for p in parameters]
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        saved = ctx.saved_tensors
        made_of, kept = saved[: ctx.made_of], saved[ctx.made_of :]
        check_unchanged(ctx)
        joined = ctx.joined
        wants_dx, _, _, _, *wanted = ctx.needs_input_grad
        last, bias = len(joined.weights), len(joined.weights) + len(joined.biases)
        x = made_of[0] if ctx.again is None else ctx.again(*made_of)
        x, rows = None if x is None else rows_of(x), rows_of(g)
        given: dict[str, Factors] = {}
        if wants_dx and len(ctx.adapters) == 1 and _adds(ctx.format, rows):
            (spanning,) = ctx.adapters
            if (share := spanning.adapter.share(spanning.of(rows), kept)) is not None:
                given = {"share": share}
        dx, dw = ctx.format.backward(rows, x, kept, joined, wants_dx and not given, wanted[:last])
        if given:
            dx = _added(rows, joined.weight.t(), None, share)
        db = bias_gradients(joined.biases, wanted[last:bias], rows) if joined.biases else ()
        more: list[Tensor | None] = []
        for spanning, start, stop in zip(ctx.adapters, ctx.starts, [*ctx.starts[1:], len(kept)]):
            more += spanning.adapter.backward(spanning.of(rows), x, kept[start:stop], dx, **given)
        if dx is not None and g.dim() != 2:
            dx = dx.view(*g.shape[:-1], dx.shape[-1])
        return dx, None, None, None, *dw, *db, *more


def check_unchanged(ctx: Any) -> None:
    """Raise if a parameter was written in place since `ctx.versions` was recorded in forward."""
    if [p._version for p in ctx.parameters] != ctx.versions:
        raise RuntimeError(
            "a weight of a fused product was changed in place between forward and backward, so its gradient would be wrong; "
            "step the optimizer after backward."
        )


def _seen_through() -> bool:
    """Return whether torch.compile or torch.func traces this call: they see through plain products alone."""
    return torch.compiler.is_compiling() or transformed()


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, extra: Sequence[Adapter] = ()) -> Tensor:
    y = format_of(weight).plain(x, weight, bias)
    for adapter in (*adapters_of(weight), *extra):
        y = y + adapter.plain(x)
    return y


def _check(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None) -> None:
    if not weights:
        raise ValueError("fused_linear: weights is empty; pass at least one.")
    for i, weight in enumerate(weights):
        if weight.ndim != 2 or shape_of(weight)[1] != x.shape[-1]:
            raise ValueError(
                f"fused_linear: weights[{i}] must have shape (outputs, {x.shape[-1]}) to match x, got {tuple(weight.shape)}; "
                f"each row holds one output's factors for x's last dimension."
            )
    if biases is not None and [b.shape for b in biases] != [w.shape[:1] for w in weights]:
        raise ValueError(
            f"fused_linear: biases must have shapes {[tuple(w.shape[:1]) for w in weights]} to match the weights, "
            f"got {[tuple(b.shape) for b in biases]}; pass one for each weight, or None."
        )
