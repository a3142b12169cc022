"""Linear products y = x Wᵀ + b, of one weight or of several that are adjacent in memory.

Three things vary, and compose inside one autograd.Function:

    format        how the weights are stored and multiplied: y from x, and dx and dW from dy           Format
    accumulator   where dW goes: nowhere (frozen), to .grad, or into main_grad in fp32                 kernels/accumulate.py
    adapters      low-rank terms added to y, with their own gradients and their part of dx             lora/adapter.py

A weight's record (kernels/accumulate.py) names its format; adapters are arguments of a call. A new format is a subclass of
`Format`.

x may be the result of a cheap pass over memory, such as a norm, which backward can compute again. Of a block's saved
activations at 350m (625 MB at 16,384 tokens) 134 are the gated activation's result and 67 the two norms'. Each is a function of
tensors that are saved anyway, so the bits do not change. It costs 2 % of the step there (86.6 to 88.3 ms) for 4.5 GiB. Small
results are saved: at 135m and 1,024 tokens 60 more launches are 3 % (6.65 to 6.83 ms) for 0.2 GiB.

Legend: N tokens, O outputs (a weight's rows), K inputs (its columns).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import device as facts
from ..kernels import swiglu_product, swiglu_product_backward
from ..kernels.accumulate import ATTRIBUTE, bias_gradients, ensure_record, join_rows, record_of, weight_gradients
from ..kernels.dispatch import KERNEL_DTYPES, can_launch, transformed, verdict
from ..kernels.gated import LEAST_ROWS, PRODUCT
from ..kernels.lora import Drop, OwnRanks, lora_product
from ..trace import fallback
from .invariant import CONTEXT

LEAST_BYTES: float = 8 << 20  # of a result that is recomputed
KEEP_ALL = float("inf")


class Joined(NamedTuple):
    """Operands of a product: the parameters, and tensors over all of their memory, which have no gradient."""

    weight: Tensor
    bias: Tensor | None
    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    adapters: Sequence[Sequence[Any]] = ()  # of each weight, LowRank of lora/adapter.py


class Format:
    """Format of weights: how they are stored and multiplied. This one is dense, in x's dtype."""

    reads_input = True  # weight gradients need the unchanged x, which is then saved for backward
    coded = False  # the weight's elements are codes, not values

    def select(self, x: Tensor, weights: Sequence[Tensor]) -> "Format":
        """Return the format of this product: itself, or another one, where it cannot take x or all of the weights or is for
        training alone."""
        return self

    def shape(self, weight: Tensor) -> tuple[int, ...]:
        """Return the shape (O, K) of the dequantised weight."""
        return tuple(weight.shape)

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute y in differentiable torch, for torch.compile and torch.func, which cannot trace our autograd.Function."""
        return F.linear(x, weight, bias)

    def forward(self, x: Tensor, joined: Joined) -> tuple[Tensor, Sequence[Tensor]]:
        """Return y and the tensors to save, which `backward` finds at the beginning of `saved`."""
        bias = joined.bias
        return F.linear(x, joined.weight.to(x.dtype), None if bias is None else bias.to(x.dtype)), ()

    def backward(
        self, g: Tensor, x: Tensor | None, saved: Sequence[Tensor], joined: Joined, wants_dx: bool, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Return dx and the gradients of the wanted weights, None where one was delivered, from g (N, O).

        x (N, K) is passed if `reads_input` and a weight is trained.
        """
        dx = g @ joined.weight.to(g.dtype) if wants_dx else None
        if x is None or not any(wanted):  # x may be saved for an adapter alone
            return dx, [None] * len(wanted)
        weights = joined.weights
        if all(wanted):
            return dx, weight_gradients(weights, g, x)
        parts = g.split([w.shape[0] for w in weights], 1)
        return dx, [weight_gradients([w], part, x)[0] if want else None for w, part, want in zip(weights, parts, wanted)]

    def gated(self, x: Tensor, gates: Joined, down: Joined, least: float) -> Tensor | None:
        """Compute down(silu(gate) · up) as one function, called on down's format. None: the caller computes its parts.

        least: bytes of an h that is recomputed in backward, not saved, where no kernel computes it with a product anyway
        """
        if self is not DENSE or format_of(gates.weights[0]) is not DENSE or gates.bias is not None or not can_launch(x.device):
            return None
        if torch.compiler.is_compiling() or transformed() or getattr(CONTEXT, "mode", None) is not None:
            return None
        rows, dtype = x.numel() // x.shape[-1], product_dtype(x)
        if dtype not in KERNEL_DTYPES or (rows < LEAST_ROWS and rows * down.weight.shape[1] * dtype.itemsize < least):
            return None
        for op in ("swiglu_product", "swiglu_product_backward"):  # their definitions multiply in fp32
            if why := verdict(op, x.device, dtype, PRODUCT if x.is_cuda else ()):
                fallback(op, f"{why}; a product and a pass are taken")
                return None
        x = x if x.dtype == dtype else x.to(dtype)
        check_dtypes(x, *gates.weights, *down.weights)
        return _GatedMLP.apply(x, gates, down, *gates.weights, *down.weights)


DENSE = Format()
VERSION = attrgetter("_version")


class Factors(NamedTuple):
    """Factors of a term drop(h bᵀ) that is added to a product: h (N, R) and b (columns, R); the rest as in kernels/lora.py."""

    h: Tensor
    b: Tensor
    drop: Drop | None = None
    blocks: Sequence[int] | None = None
    rows: OwnRanks | None = None


class AdapterOutputs(NamedTuple):
    """An adapter and the range of y's columns that it adds to."""

    adapter: Any  # a LowRank of lora/adapter.py
    start: int
    stop: int


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, adapters: Sequence[Any] = ()) -> Tensor:
    """Compute x weightᵀ + bias in the weight's format, with its `adapters`; the gradient goes into its main_grad, if any.

    Without any of these it is torch's own product, unless x has a recompute recipe: torch would save x. As for torch, x, weight
    and bias have one dtype; under autocast each is cast.
    """
    dense = not adapters and getattr(weight, "main_grad", None) is None and format_of(weight) is DENSE
    if dense and recipe_of(x) is None:
        check_dtypes(x, weight, bias)
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling() or transformed():
        return _plain(x, weight, bias, adapters)
    detached, biases = (None, ()) if bias is None else (bias.detach(), (bias,))
    return multiply(x, Joined(weight.detach(), detached, (weight,), biases, (adapters,)))


def fused_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> Tensor:
    """Multiply x by several weights. Return (..., ΣO): one product where the weights are adjacent in memory."""
    _check(x, weights, biases)
    each = biases if biases is not None else [None] * len(weights)
    if torch.compiler.is_compiling() or transformed():
        return torch.cat([_plain(x, w, b) for w, b in zip(weights, each)], -1)
    weight = join_rows([w.detach() for w in weights])
    bias = None if biases is None else join_rows([b.detach() for b in biases])
    if weight is None or (biases is not None and bias is None):
        return torch.cat([linear(x, w, b) for w, b in zip(weights, each)], -1)
    return multiply(x, Joined(weight, bias, weights, biases or ()))


def multiply(x: Tensor, joined: Joined) -> Tensor:
    """Compute the product of `joined`, with its adapters."""
    weights, format = joined.weights, format_of(joined.weights[0])
    if (dtype := product_dtype(x)) != x.dtype:
        x = x.to(dtype)
    if not format.coded:
        check_dtypes(x, *weights, *joined.biases)
    if format is not DENSE:
        format = format.select(x, weights)
    if any(joined.adapters) and not torch.compiler.is_compiling() and _adds_plain_terms():
        return _with_plain_terms(x, joined)
    groups = group_adapters(joined) if any(joined.adapters) else ()
    if torch.is_grad_enabled():
        theirs: list[Tensor] = []
        for group in groups:
            theirs += group.parameters
        return _Product.apply(x, format, groups, joined, *weights, *joined.biases, *theirs)
    if groups and (fused := _fused_term(format, x, joined, groups)) is not None:
        return _product_and_term(x, joined.weight, joined.bias, fused[0])
    y, _ = format.forward(x, joined)
    for group in groups:
        group.forward(x, y[..., group.start : group.stop])
    return y


@contextmanager
def plain_terms() -> Iterator[None]:
    """Add adapters' terms in plain torch on this thread: a trial of few tokens would compile kernels that no step calls."""
    before, CONTEXT.plain_terms = getattr(CONTEXT, "plain_terms", False), True
    try:
        yield
    finally:
        CONTEXT.plain_terms = before


def _adds_plain_terms() -> bool:
    return getattr(CONTEXT, "mode", None) is not None or getattr(CONTEXT, "plain_terms", False)


def _with_plain_terms(x: Tensor, joined: Joined) -> Tensor:
    """Compute the product of `joined`, its adapters by separate products, which a BatchInvariant context replaces."""
    y, terms = multiply(x, joined._replace(adapters=())), []
    for weight, adapters in zip(joined.weights, joined.adapters):
        nothing = y.new_zeros(()).expand(*y.shape[:-1], weight.shape[0])
        terms.append(sum((adapter.plain(x) for adapter in adapters), nothing))
    return y + torch.cat(terms, -1)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which products read x: autocast's if that is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x.dtype


def check_dtypes(x: Tensor, *parameters: Tensor | None) -> None:
    """Raise for parameters of another dtype than x without autocast, as torch does: a cast copies a weight in each call."""
    for p in parameters:
        if p is None or p.dtype == x.dtype:
            continue
        if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):  # autocast does not change float64
            raise ValueError(
                f"linear: x is {x.dtype} and a parameter {p.dtype}; cast one of them to the other's dtype, or call the layer "
                f"under torch.autocast."
            )


def group_adapters(joined: Joined) -> Sequence[Any]:
    outputs, start = list[AdapterOutputs](), 0
    for weight, adapters in zip(joined.weights, joined.adapters):
        stop = start + weight.shape[0]
        for adapter in adapters:
            outputs.append(AdapterOutputs(adapter, start, stop))
        start = stop
    return outputs[0].adapter.group(outputs)


def _fused_term(format: Format, x: Tensor, joined: Joined, groups: Sequence[Any]) -> tuple[Factors, Sequence[Tensor]] | None:
    """Return the only group's `factors`, where one kernel multiplies and adds: it reads and writes y once."""
    if len(groups) != 1 or not has_fused_kernel(format, x) or groups[0].stop - groups[0].start != joined.weight.shape[0]:
        return None
    return groups[0].factors(x)


def has_fused_kernel(format: Format, x: Tensor) -> bool:
    """Return whether `lora_product` has a kernel here. Torch's product in x's dtype is faster than its definition."""
    return format is DENSE and x.dtype in KERNEL_DTYPES and (x.is_cuda or facts.interpreted())


def _product_and_term(x: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors) -> Tensor:
    h, b, drop, blocks, rows = factors
    return lora_product(rows_of(x), weight, bias, h, b, drop, blocks, rows=rows).view(*x.shape[:-1], weight.shape[0])


class _Product(torch.autograd.Function):
    """A product with its adapters.

    Parameters are attributes of ctx: activation checkpointing returns detached copies of saved tensors, without main_grad and
    record. save_for_backward would detect writes in place; here `versions` do.
    """

    @staticmethod
    def forward(ctx, x, format, groups, joined, *parameters):
        if groups and (fused := _fused_term(format, x, joined, groups)) is not None:
            y, saved, ctx.starts = _product_and_term(x, joined.weight, joined.bias, fused[0]), fused[1], [0]
        else:
            y, saved = format.forward(x, joined)
            saved, ctx.starts = list(saved), []
            for group in groups:
                ctx.starts.append(len(saved))
                saved += group.forward(x, y[..., group.start : group.stop])
        reads_x = groups or (format.reads_input and any(ctx.needs_input_grad[4 : 4 + len(joined.weights)]))
        ctx.recompute, inputs = _input_for_backward(x, reads_x)
        ctx.inputs = len(inputs)
        ctx.save_for_backward(*inputs, *saved)
        ctx.format, ctx.groups, ctx.joined, ctx.parameters = format, groups, joined, parameters
        ctx.versions = [*map(VERSION, parameters)]
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        tensors = ctx.saved_tensors  # once: a checkpoint recomputes at each access
        inputs, saved = tensors[: ctx.inputs], tensors[ctx.inputs :]
        if [*map(VERSION, ctx.parameters)] != ctx.versions:
            raise changed_in_place()
        joined, groups = ctx.joined, ctx.groups
        wants_dx, _, _, _, *wanted = ctx.needs_input_grad
        weights, biases = len(joined.weights), len(joined.biases)
        x = inputs[0] if ctx.recompute is None else ctx.recompute(*inputs)
        x, rows = None if x is None else x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        factors = None
        if wants_dx and len(groups) == 1 and has_fused_kernel(ctx.format, rows):
            factors = groups[0].input_factors(rows[..., groups[0].start : groups[0].stop], saved)
        dx, dw = ctx.format.backward(rows, x, saved, joined, wants_dx and factors is None, wanted[:weights])
        if factors is not None:
            dx = _product_and_term(rows, joined.weight.t(), None, factors)
        db = bias_gradients(joined.biases, wanted[weights : weights + biases], rows) if biases else ()
        of_adapters: list[Tensor | None] = []
        for group, start, stop in zip(groups, ctx.starts, [*ctx.starts[1:], len(saved)]):
            of_adapters += group.backward(rows[..., group.start : group.stop], x, saved[start:stop], dx, factors)
        if dx is not None and g.dim() != 2:
            dx = dx.view(*g.shape[:-1], dx.shape[-1])
        return dx, None, None, None, *dw, *db, *of_adapters


def _input_for_backward(x: Tensor, reads_x: Any) -> tuple[Callable[..., Tensor] | None, Sequence[Tensor | None]]:
    """Return the op that recomputes x, or None, and what to save for it: its tensors, x itself, or None if x is not read."""
    recipe = recipe_of(x) if reads_x and hasattr(x, ATTRIBUTE) else None
    return (None, (x if reads_x else None,)) if recipe is None else (recipe.op, recipe.tensors)


class _GatedMLP(torch.autograd.Function):
    """down(silu(gate) · up), of which gate and up alone are saved. Parameters are attributes of ctx, as in _Product."""

    @staticmethod
    def forward(ctx, x, gates, down, *parameters):
        ctx.recompute, inputs = _input_for_backward(x, any(ctx.needs_input_grad[3 : 3 + len(gates.weights)]))
        ctx.gates, ctx.down, ctx.parameters = gates, down, parameters
        ctx.versions = [*map(VERSION, parameters)]
        gate_up, h = swiglu_product(rows_of(x), gates.weight.to(x.dtype))
        ctx.save_for_backward(gate_up, *inputs)
        return (h @ down.weight.to(x.dtype).t()).view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        gate_up, *inputs = ctx.saved_tensors
        if [*map(VERSION, ctx.parameters)] != ctx.versions:
            raise changed_in_place()
        # The last backward of a graph needs its saved tensors no longer. The peak of a step is here: by twice h less.
        last = not torch._C._autograd._get_current_graph_task_keep_graph()
        rows, (wants_dx, _, _, *wanted) = rows_of(g), ctx.needs_input_grad
        d_gate_up, h = swiglu_product_backward(rows, ctx.down.weight.to(g.dtype), gate_up, overwrite=last)
        d_down = weight_gradients(ctx.down.weights, rows, h)
        del gate_up, h
        x = inputs[0] if ctx.recompute is None else ctx.recompute(*inputs)
        x = None if x is None else rows_of(x)
        dx, d_gates = DENSE.backward(d_gate_up, x, (), ctx.gates, wants_dx, wanted[: len(ctx.gates.weights)])
        return None if dx is None else dx.view(*g.shape[:-1], -1), None, None, *d_gates, *d_down


def changed_in_place() -> RuntimeError:
    return RuntimeError(
        "a weight of a fused product was changed in place between forward and backward, so its gradient would be wrong; "
        "step the optimizer after backward."
    )


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Sequence[Any] = ()) -> Tensor:
    y = format_of(weight).plain(x, weight, bias)
    for adapter in adapters:
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


def format_of(weight: Tensor) -> Format:
    format = getattr(getattr(weight, ATTRIBUTE, None), "format", None)
    return DENSE if format is None else format


def shape_of(weight: Tensor) -> tuple[int, ...]:
    """Return the shape of the weight, or of its values where it is quantised."""
    return format_of(weight).shape(weight)


def size_of(weight: Tensor) -> int:
    """Return the number of values of the weight; a quantised one has fewer elements."""
    return math.prod(shape_of(weight))


def is_sharded(tensor: Tensor) -> bool:
    """Return whether it is a DTensor, a shard of rows on each rank (distributed/fsdp.py)."""
    return hasattr(tensor, "__create_chunk_list__")


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether any tensor is sharded; the result is equal on every rank."""
    return any(map(is_sharded, tensors))


def full_tensor(weight: Tensor) -> Tensor:
    """Return the unsharded tensor. All ranks must call this for a sharded one."""
    return weight.full_tensor() if is_sharded(weight) else weight  # type: ignore[attr-defined]


def rows_of(t: Tensor) -> Tensor:
    return t if t.dim() == 2 else t.reshape(-1, t.shape[-1])


class RecomputeRecipe(NamedTuple):
    """Recipe of a result: op(*tensors), as long as neither the result nor a tensor was written in place since."""

    op: Callable[..., Tensor]
    tensors: tuple[Tensor | None, ...]
    versions: tuple[int, ...]  # of the result and of the tensors


def attach_recipe(y: Tensor, least: float, op: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Attach a recipe to `y`, if it has `least` bytes or more: y = op(*tensors), of tensors that are saved for backward anyway.

    A linear layer that reads `y` then saves the tensors in its place.
    """
    if not torch.compiler.is_compiling() and y.requires_grad and y.nbytes >= least and not transformed():
        inputs = tuple(None if t is None else t.detach() for t in tensors)
        ensure_record(y).recipe = RecomputeRecipe(op, inputs, _versions(y, inputs))
    return y


def recipe_of(y: Tensor) -> RecomputeRecipe | None:
    """Return the recipe of `y`. None if it has none, or if `y` or an input was written in place since: op(*tensors) would be
    another tensor then."""
    record = record_of(y)
    recipe = None if record is None else record.recipe
    return recipe if recipe is None or recipe.versions == _versions(y, recipe.tensors) else None


def _versions(y: Tensor, tensors: Iterable[Tensor | None]) -> tuple[int, ...]:
    return tuple(t._version for t in (y, *tensors) if t is not None)


def multiply_by_records(model: nn.Module, everywhere: bool = False) -> Callable[[], None]:
    """Make plain linear layers multiply in their weight's format, which F.linear ignores. Return a function that undoes it.

    Projections of our modules do so without it. everywhere: change those, too, for code that calls them individually, such as
    the forward that a swapped module had before. Undoing keeps the forward of a layer whose weight still has a format: several
    callers may have asked for the same layer.
    """
    stacks = () if everywhere else [module for module in model.modules() if hasattr(module, "stacked")]
    projections = {id(child) for module in stacks for child in module.children()}
    changed = []
    for module in model.modules():
        if type(module) is not nn.Linear or id(module) in projections or format_of(module.weight) is DENSE:
            continue
        own = vars(module).get("forward")
        if own is not None and getattr(own, "func", None) is not _by_record:
            continue
        if own is None or own.args[0] is not module:  # a copied layer's; a forward that stays is no change to captured steps
            module.forward = partial(_by_record, module)  # type: ignore[method-assign]
        changed.append(module)

    def undo() -> None:
        for module in changed:
            if format_of(module.weight) is DENSE:
                vars(module).pop("forward", None)

    return undo


def _by_record(layer: Any, input: Tensor) -> Tensor:
    return linear(input, layer.weight, layer.bias)


FORWARDS: set[Callable[..., Tensor]] = {_by_record}
"""The functions that gpubound sets as a layer's forward, bound to the layer by functools.partial."""
