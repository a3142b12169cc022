"""A low-rank adapter's products (kernels/lora.py): three that memory bounds, and the frozen product with the adapter in it.

Each of the three reads its tall matrix once: down (x, gives h), up (y, changed in place), and both gradients in one launch,
whose programs own columns of x or of g and walk along the rows. Where columns are too few to fill the GPU, some programs share
a sum; the last of them adds up all their parts in one order, so the bits are the same in every run.

Adapters of several weights that are multiplied as one are one adapter: a has the rows of all, and b is block-diagonal. Its
blocks lie one behind the other, and no tile spans two of them.

The four may overlap by programmatic dependent launch: `down` lets its successor in at once. The product multiplies x by weight
meanwhile, and waits for h when it comes to add h bᵀ; `dependent` says that the kernel before it made h.

The product is one kernel (_lora_product.py). Where neither of its forms is the faster one, cuBLAS makes the product and `up`
adds to it.

Ranks are padded to a power of two, and taken 128 at a time. Legend as in kernels/lora.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..accumulate import bias_gradients, weight_gradient
from ..adapters import adapter_gradients, fresh_arrivals
from ..dropping import Drop
from ..lora_checks import SHARED_SUMS
from ..plans import cdiv, job_of, power_of_two
from ..plans.kinds import ProductPlan
from ..rows import Owners, OwnRanks
from ._launch import bump_versions, first_order_only, launch, options
from ._lora_narrow import _lora_down_kernel, _lora_gradients_kernel, _lora_up_kernel
from ._lora_product import FP32_RANKS, _fit, _product, _taken, _way
from ._lora_tiles import _arithmetic, _dense, _early, _edges, _masked, _ranks, _rows, _upscale, _within


@torch.no_grad()
def lora_down(
    x: Tensor, a: Tensor, scale: float = 1.0, drop: Drop | None = None, out: Tensor | None = None,
    rows: Owners | None = None, blocks: Sequence[int] | None = None, arrivals: Tensor | None = None,
) -> Tensor:  # fmt: skip
    x, (count, columns), rank, of_blocks = _dense(x), x.shape, a.shape[0], len(blocks or (0,))
    h = torch.empty(count, of_blocks * rank, device=x.device, dtype=x.dtype) if out is None else out
    job = job_of("lora", "down", (_rows(count), columns, _ranks(rank)), x)
    own = (None, None, None, 1, 1) if rows is None else (*rows, max(count // max(len(rows.ids), 1), 1), rows.ids.stride(0))

    def run(plan: ProductPlan) -> None:
        _lora_down_kernel[(cdiv(count, plan.rows), cdiv(rank, plan.columns), of_blocks)](
            x, a, h, arrivals, *_masked(drop), scale * _upscale(drop), *own, count, columns, rank, *_edges(blocks, columns),
            x.stride(0), *a.stride(), h.stride(0), EARLY=_early(job), BLOCKS=of_blocks, BLOCK=plan.rows, COUNTS=SHARED_SUMS,
            DEPTH=min(plan.depth, max(16, power_of_two(columns))), RANKS=plan.columns, **_arithmetic(), num_warps=plan.warps,
            num_stages=plan.stages,
        )  # fmt: skip

    launch(job, run)
    if arrivals is not None and not count:  # a grid of no programs
        arrivals.zero_()
    return h


@torch.no_grad()
def lora_up(y: Tensor, h: Tensor, b: Tensor, drop: Drop | None = None, blocks: Sequence[int] | None = None) -> Tensor:
    h, (rows, columns), rank = _dense(h).to(y.dtype), y.shape, b.shape[1]

    def run(plan: ProductPlan) -> None:
        width = _within(plan.columns, blocks)
        _lora_up_kernel[(cdiv(columns, width), cdiv(rows, plan.rows))](
            y, h, b, *_masked(drop), _upscale(drop), rows, columns, rank, *_edges(blocks, columns), y.stride(0), h.stride(0),
            *b.stride(), BLOCK=plan.rows, COLUMNS=width, RANKS=plan.depth, **_arithmetic(),
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip

    launch(job_of("lora", "up", (_rows(rows), columns, _ranks(rank)), y), run)
    bump_versions(y)
    return y


@torch.no_grad()
def lora_gradients(
    x: Tensor, gh: Tensor, g: Tensor, h: Tensor, da: Tensor | None, db: Tensor | None, drop: Drop | None = None,
    begins: tuple[bool, bool] = (True, True), blocks: Sequence[int] | None = None, arrivals: Tensor | None = None,
    dependent: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    x, gh, g, h = (_dense(t).to(x.dtype) for t in (x, gh, g, h))
    (rows, inputs), outputs, ranks = x.shape, g.shape[1], h.shape[1]
    rank = ranks // len(blocks or (0,))
    given = (0 if da is None else inputs, 0 if db is None else outputs)
    job = job_of("lora", "gradients", (_rows(rows), sum(given), _ranks(ranks)), x)

    def run(plan: ProductPlan) -> None:
        width = _within(plan.rows, blocks)
        of_a, of_b = (cdiv(columns, width) for columns in given)
        grid = of_a + of_b, cdiv(ranks, plan.columns)
        splits = plan.splits if arrivals is not None and grid[0] * grid[1] <= arrivals.numel() else 1
        share = cdiv(cdiv(rows, splits), plan.depth) * plan.depth
        parts = x.new_empty(grid[0] * grid[1] * splits * width * plan.columns, dtype=torch.float32) if splits > 1 else None
        _lora_gradients_kernel[(*grid, splits)](
            x, gh, g, h, da, db, parts, arrivals, *_masked(drop), _upscale(drop), of_b, share, rows, inputs, outputs, ranks,
            rank, *_edges(blocks, outputs), *(t.stride(0) for t in (x, gh, g, h)), *((0, 0) if da is None else da.stride()),
            *((0, 0) if db is None else db.stride()), *map(int, begins), SPLITS=splits, BLOCK=width, DEPTH=plan.depth,
            RANKS=plan.columns, **_arithmetic(), num_stages=plan.stages, **options(plan.warps, dependent * _early(job)),
        )  # fmt: skip

    if any(given):
        launch(job, run)
    bump_versions(da, db)
    return da, db


@torch.no_grad()
def lora_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, b: Tensor, drop: Drop | None = None,
    blocks: Sequence[int] | None = None, dependent: bool = False, rows: OwnRanks | None = None,
) -> Tensor:  # fmt: skip
    given = x, h, weight, b
    x, h, weight = _dense(x), _dense(h).to(x.dtype), weight.to(x.dtype)
    own = _fit(rows, x.shape[0])
    taken = _taken(b.shape[1], own)
    way = _way(x, weight, taken, drop, blocks)
    if way is None:
        bias = None if bias is None else bias.to(x.dtype)
        return lora_up(torch.nn.functional.linear(x, weight, bias), h, b, drop, blocks)
    if taken > FP32_RANKS:
        b = b.to(x.dtype)
    copied = any(one is not other for one, other in zip((x, h, weight, b), given))  # by the kernel before this one
    return _product(x, weight, bias, h, b, way == "described", blocks, dependent and not copied, own)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scale, drop):
        rows = _dense(x.reshape(-1, x.shape[-1]))
        h = lora_down(rows, a, scale, drop)
        ctx.save_for_backward(rows, h, weight, a, b)  # for backward to see that nobody has changed the last three
        ctx.owners, ctx.scale, ctx.drop, ctx.shape = (weight, bias, a, b), scale, drop, x.shape
        return lora_product(rows, weight, bias, h, b, dependent=True).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, g):
        first_order_only("lora_linear")
        x, h, weight, a, b = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *wanted, _, _ = ctx.needs_input_grad
        g = _dense(g.reshape(-1, g.shape[-1]))
        w, down, up = weight, a, b.t()
        weight, bias, a, b = ctx.owners  # with their accumulators
        made = wants_x or wanted[0]
        arrivals = fresh_arrivals([a, b]) if made else None
        gh = lora_down(g, up, ctx.scale, arrivals=arrivals) if made else h
        # Before dx, whose product runs beside this: it needs no h until its end.
        ours = adapter_gradients([a], [b], x, gh, g, h, ctx.drop, wanted, dependent=True, arrivals=arrivals)
        dx = lora_product(g, w.t(), None, gh, down.t(), ctx.drop, None, True).view(ctx.shape) if wants_x else None
        dw = weight_gradient(weight, g, x) if wants_weight else None
        (db,) = bias_gradients([bias], [wants_bias], g) if bias is not None else (None,)
        return dx, dw, db, *ours, None, None


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float = 1.0, drop: Drop | None = None
) -> Tensor:
    return _LoraLinear.apply(x, weight, bias, a, b, scale, drop)
