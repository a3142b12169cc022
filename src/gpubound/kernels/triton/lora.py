"""A low-rank adapter's products (kernels/lora.py): three that memory bounds, and the frozen product with the adapter in it.

Each of the three reads its tall matrix once: down (x, gives h), up (y, changed in place), and both gradients in one launch,
whose programs own columns of x or of g and walk along the rows. Where columns are too few to fill the GPU, some programs share
a sum; the last of them adds up all their parts in one order, so the bits are the same in every run.

Adapters of several weights that are multiplied as one are one adapter: a has the rows of all, and b is block-diagonal. Its
blocks lie one behind the other, and no tile spans two of them.

The product is one kernel (_lora_product.py). Where neither of its forms is the faster one, cuBLAS makes the product and `up`
adds to it.

Ranks are padded to a power of two, and taken 128 at a time. Legend as in kernels/lora.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..adapter_routing import Owners, OwnRanks
from ..hash_dropout import Drop
from ..plans import cdiv, job_of, power_of_two
from ..plans.types import ProductPlan
from ._launch import bump_versions, launch
from ._lora_gemv import _lora_down_kernel, _lora_gradients_kernel, _lora_up_kernel
from ._lora_product import FP32_RANKS, _fit, _product, _taken, _way
from ._lora_tiles import _arithmetic, _dense, _edges, _masked, _ranks, _rows, _upscale, _within


@torch.no_grad()
def lora_down(
    x: Tensor, a: Tensor, scale: float = 1.0, drop: Drop | None = None, out: Tensor | None = None,
    rows: Owners | None = None, blocks: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    x, (count, columns), rank, of_blocks = _dense(x), x.shape, a.shape[0], len(blocks or (0,))
    h = torch.empty(count, of_blocks * rank, device=x.device, dtype=x.dtype) if out is None else out
    job = job_of("lora", "down", (_rows(count), columns, _ranks(rank)), x)
    own = (None, None, None, 1, 1) if rows is None else (*rows, max(count // max(len(rows.ids), 1), 1), rows.ids.stride(0))

    def run(plan: ProductPlan) -> None:
        _lora_down_kernel[(cdiv(count, plan.rows), cdiv(rank, plan.columns), of_blocks)](
            x, a, h, *_masked(drop), scale * _upscale(drop), *own, count, columns, rank, *_edges(blocks, columns),
            x.stride(0), *a.stride(), h.stride(0), BLOCKS=of_blocks, BLOCK=plan.rows,
            DEPTH=min(plan.depth, max(16, power_of_two(columns))), RANKS=plan.columns, **_arithmetic(), num_warps=plan.warps,
            num_stages=plan.stages,
        )  # fmt: skip

    launch(job, run)
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
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    x, gh, g, h = (_dense(t).to(x.dtype) for t in (x, gh, g, h))
    (rows, inputs), outputs, ranks = x.shape, g.shape[1], h.shape[1]
    rank = ranks // len(blocks or (0,))
    args = (0 if da is None else inputs, 0 if db is None else outputs)
    job = job_of("lora", "gradients", (_rows(rows), sum(args), _ranks(ranks)), x)

    def run(plan: ProductPlan) -> None:
        width = _within(plan.rows, blocks)
        of_a, of_b = (cdiv(columns, width) for columns in args)
        grid = of_a + of_b, cdiv(ranks, plan.columns)
        splits = plan.splits if arrivals is not None and grid[0] * grid[1] <= arrivals.numel() else 1
        share = cdiv(cdiv(rows, splits), plan.depth) * plan.depth
        parts = x.new_empty(grid[0] * grid[1] * splits * width * plan.columns, dtype=torch.float32) if splits > 1 else None
        _lora_gradients_kernel[(*grid, splits)](
            x, gh, g, h, da, db, parts, arrivals, *_masked(drop), _upscale(drop), of_b, share, rows, inputs, outputs, ranks,
            rank, *_edges(blocks, outputs), *(t.stride(0) for t in (x, gh, g, h)), *((0, 0) if da is None else da.stride()),
            *((0, 0) if db is None else db.stride()), *map(int, begins), SPLITS=splits, BLOCK=width, DEPTH=plan.depth,
            RANKS=plan.columns, **_arithmetic(), num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip

    if any(args):
        launch(job, run)
    bump_versions(da, db)
    return da, db


@torch.no_grad()
def lora_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, b: Tensor, drop: Drop | None = None,
    blocks: Sequence[int] | None = None, rows: OwnRanks | None = None,
) -> Tensor:  # fmt: skip
    x, h, weight = _dense(x), _dense(h).to(x.dtype), weight.to(x.dtype)
    own = _fit(rows, x.shape[0])
    taken = _taken(b.shape[1], own)
    way = _way(x, weight, taken, drop, blocks)
    if way is None:
        bias = None if bias is None else bias.to(x.dtype)
        return lora_up(torch.nn.functional.linear(x, weight, bias), h, b, drop, blocks)
    if taken > FP32_RANKS:
        b = b.to(x.dtype)
    return _product(x, weight, bias, h, b, way == "described", blocks, own)
