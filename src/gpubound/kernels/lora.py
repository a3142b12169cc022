"""A low-rank adapter of a linear product: y = x weightᵀ + bias + h bᵀ with h = scale · drop(x) aᵀ, and its gradients.

The scale is applied once, to h: so with gh = scale · g b, which is `lora_down(g, b.t(), scale)`, the gradients are

    da = ghᵀ drop(x)    db = gᵀ h    and to dx is added drop(gh a), by the mask that x had: `lora_up(dx, gh, a.t(), drop)`

a and b may be fp32 under a 16-bit x. They are rounded to x's dtype as they are multiplied, and no fp32 copy of x is made.

Adapters of several weights that are multiplied as one are one adapter, too. Its a has the rows of all, one below the other, and
its b is block-diagonal; only the blocks are given, one below the other: `blocks` says how many of the outputs each has.

Legend: N rows (tokens), K inputs, O outputs, R ranks; x (N, K), weight (O, K), a (R, K), b (O, R), h and gh (N, R), g (N, O).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .adapter_routing import Owners, OwnRanks, check_own_ranks, check_rows, own_columns
from .dispatch import implementation
from .hash_dropout import Drop, dropped
from .lora_checks import (
    BLOCK,
    SHARED_SUMS,
    as_in_memory,
    check_blocks,
    check_drop,
    check_matrices,
    check_outputs,
)
from .plans.defaults import LARGE, WAVE
from .registry import definition, draw, frozen, ints


def lora_down(
    x: Tensor, a: Tensor, scale: float = 1.0, drop: Drop | None = None, out: Tensor | None = None,
    rows: Owners | None = None, blocks: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """h (N, R) = scale · drop(x) aᵀ, summed in fp32, in x's dtype; written into `out` if that is given.

    With `rows`, h keeps what the adapter of each row has made, and is zero elsewhere.
    With `blocks` it is g times a block-diagonal b, whose blocks' transposes lie side by side in `a`: h has R columns a block.
    """
    ranks = a.shape[0] * _count(blocks)
    check_drop("lora_down", drop, x)
    check_matrices("lora_down", x, a=(a, ("R", x.shape[-1])))
    check_blocks("lora_down", blocks, x.shape[-1])
    check_outputs("lora_down", x, out=(out, (x.shape[0], ranks)))
    check_rows("lora_down", rows, x, ranks)
    shape = (a.shape[0], drop is not None, rows is not None, _count(blocks), a.stride(-1) == 1)
    return implementation("lora_down", x, None, shape)(x, a, scale, drop, out, rows, blocks)


def _draw_down(
    g: torch.Generator, rank: int = 5, dropping: bool = True, routed: bool = False, blocks: int = 1, along: bool = True,
) -> tuple:  # fmt: skip
    ranks, columns = rank * blocks, 144  # more than a step along them has: a narrower x has another kernel
    a = draw(g, rank, columns) if along else draw(g, columns, rank).t()
    ids, owner = ints(0, -1, 1, 0, 5).long(), ints(*(i % 2 for i in range(ranks)))
    own = Owners(ids, owner, draw(g, ranks).detach()) if routed else None
    return draw(g, 80, columns), a, 1.7, _drop(dropping), None, own, _blocks(blocks, columns)


@definition(_draw_down)
@torch.no_grad()
def lora_down_reference(
    x: Tensor, a: Tensor, scale: float = 1.0, drop: Drop | None = None, out: Tensor | None = None,
    rows: Owners | None = None, blocks: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    wide = _wide(x)
    h = own_columns(scale * (dropped(x.to(wide), drop) @ _diagonal(a.t(), blocks).to(wide)), rows).to(x.dtype)
    return h if out is None else out.copy_(h)


def lora_up(y: Tensor, h: Tensor, b: Tensor, drop: Drop | None = None, blocks: Sequence[int] | None = None) -> Tensor:
    """y (N, O) += h bᵀ in place, with `drop` drop(h bᵀ); the sum is rounded once."""
    check_drop("lora_up", drop, y)
    check_blocks("lora_up", blocks, y.shape[-1])
    check_matrices("lora_up", y, b=(b, (y.shape[-1], "R")), h=(h, (y.shape[0], b.shape[-1] * _count(blocks))))
    check_outputs("lora_up", y, y=(y, (y.shape[0], y.shape[1])))
    return implementation("lora_up", y, None, (b.shape[1], drop is not None, _count(blocks)))(y, h, b, drop, blocks)


def _draw_up(g: torch.Generator, rank: int = 5, dropping: bool = True, blocks: int = 1) -> tuple:
    return draw(g, 64, 48).detach(), draw(g, 64, rank * blocks), draw(g, 48, rank), _drop(dropping), _blocks(blocks)


@definition(_draw_up)
@torch.no_grad()
def lora_up_reference(y: Tensor, h: Tensor, b: Tensor, drop: Drop | None = None, blocks: Sequence[int] | None = None) -> Tensor:
    wide = _wide(y)
    return y.copy_(y.to(wide) + dropped(h.to(wide) @ _diagonal(b, blocks).to(wide).t(), drop))


def lora_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, b: Tensor, drop: Drop | None = None,
    blocks: Sequence[int] | None = None, rows: OwnRanks | None = None,
) -> Tensor:  # fmt: skip
    """x weightᵀ + bias + h bᵀ, with `drop` + drop(h bᵀ), as one kernel.

    With g, weight.t(), None, gh and a.t() it is the gradient dx.

    rows  says where h may be other than zero: only that is multiplied
    """
    tokens, outputs = x.shape[0], weight.shape[0]
    check_drop("lora_product", drop, x)
    check_blocks("lora_product", blocks, outputs)
    check_matrices(
        "lora_product", x, weight=(weight, (outputs, x.shape[-1])), bias=(bias, (outputs,)), b=(b, (outputs, "R")),
        h=(h, (tokens, b.shape[-1] * _count(blocks))),
    )  # fmt: skip
    check_own_ranks("lora_product", rows, x, b.shape[-1])
    own = (0, 0) if rows is None else rows[1:]
    size = product_size(tokens, outputs)
    shape = (size, b.shape[1], drop is not None, weight.stride(-1) == 1, _count(blocks), bias is not None, *own)
    return implementation("lora_product", x, None, shape)(x, weight, bias, h, b, drop, blocks, rows)


def product_size(tokens: int, outputs: int) -> int:
    """Return the size class that a kernel's tiles depend on: 0 for less than a wave of them, 1 for one, 2 for many."""
    return (tokens * outputs >= WAVE) + (tokens * outputs >= LARGE)


def _draw_product(
    g: torch.Generator, size: int = 0, rank: int = 5, dropping: bool = False, along: bool = True, blocks: int = 1,
    biased: bool = True, ranks: int = 0, count: int = 0,
) -> tuple:  # fmt: skip
    tokens, outputs = ((64, 64 * blocks), (2048, WAVE // 2048), (4096, LARGE // 4096))[size]
    weight, b = (draw(g, *shape) if along else draw(g, *reversed(shape)).t() for shape in ((outputs, 48), (outputs, rank)))
    bias = draw(g, outputs) if biased else None
    h, rows = draw(g, tokens, rank * blocks), OwnRanks(ints(count - 1, 0).long(), ranks, count) if count else None
    if rows is not None:
        adapter = torch.arange(rank * blocks, device="cpu") // ranks % count
        h = (h.detach() * (rows.ids.repeat_interleave(tokens // 2)[:, None] == adapter)).requires_grad_()
    return draw(g, tokens, 48), weight, bias, h, b, _drop(dropping), _blocks(blocks, outputs, 64), rows


@definition(_draw_product)
@torch.no_grad()
def lora_product_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, b: Tensor, drop: Drop | None = None,
    blocks: Sequence[int] | None = None, rows: OwnRanks | None = None,
) -> Tensor:  # fmt: skip
    wide = _wide(x)
    y = x.to(wide) @ weight.to(wide).t() + dropped(h.to(wide) @ _diagonal(b, blocks).to(wide).t(), drop)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


def lora_gradients(
    x: Tensor, gh: Tensor, g: Tensor, h: Tensor, da: Tensor | None, db: Tensor | None, drop: Drop | None = None,
    begins: tuple[bool, bool] = (True, True), blocks: Sequence[int] | None = None, arrivals: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """da (R, K) = ghᵀ drop(x) and db (O, R) = gᵀ h, written into what is given: None is not computed.

    Summed in fp32, in the same order every time. With `blocks`, db has those of bᵀ's diagonal alone, one below the other.

    begins      for da and for db: True writes over what is there, False adds to it, which then is fp32
    arrivals    int32 zeros, which the call leaves zero: with them programs may share a sum, and count there who has come.
                Nobody else may use them meanwhile
    """
    rank = h.shape[-1]
    check_drop("lora_gradients", drop, x)
    check_blocks("lora_gradients", blocks, g.shape[-1])
    check_matrices("lora_gradients", x, h=(h, (x.shape[0], "R")), gh=(gh, (x.shape[0], rank)), g=(g, (x.shape[0], "O")))
    outputs = as_in_memory(db, g.shape[-1], rank // _count(blocks))
    check_outputs("lora_gradients", x, da=as_in_memory(da, rank, x.shape[-1]), db=outputs)
    beside = db is not None and db.stride(0) == 1 < db.stride(1)
    narrow = any(t is not None and t.dtype != torch.float32 for t in (da, db))
    shape = (x.shape[1], g.shape[1], rank // _count(blocks), drop is not None, _count(blocks), beside, narrow)
    run = implementation("lora_gradients", x, None, shape)
    return run(x, gh, g, h, da, db, drop, begins, blocks, arrivals)


def _draw_gradients(
    g: torch.Generator, inputs: int = 48, outputs: int = 48, rank: int = 5, dropping: bool = True, blocks: int = 1,
    beside: bool = False, narrow: bool = False,
) -> tuple:  # fmt: skip
    """`narrow`: gradients in the call's own dtype, as autograd takes them, in place of sums in fp32."""
    inward, outward = ((draw(g, 64, columns), draw(g, 64, rank * blocks)) for columns in (inputs, outputs))
    da = draw(g, rank * blocks, inputs).detach()
    db = draw(g, rank, outputs).detach().t() if beside else draw(g, outputs, rank).detach()
    if narrow:
        da, db = frozen(da), frozen(db)
    last = 64 if outputs >= 64 * blocks else BLOCK  # real layers have blocks of many tiles
    return *inward, *outward, da, db, _drop(dropping), (True, narrow), _blocks(blocks, outputs, last), ints(*[0] * SHARED_SUMS)


@definition(_draw_gradients)
@torch.no_grad()
def lora_gradients_reference(
    x: Tensor, gh: Tensor, g: Tensor, h: Tensor, da: Tensor | None, db: Tensor | None, drop: Drop | None = None,
    begins: tuple[bool, bool] = (True, True), blocks: Sequence[int] | None = None, arrivals: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    wide = _wide(x)
    for out, begin, left, right in ((da, begins[0], gh, x), (db, begins[1], g, h)):
        if out is not None:
            product = left.to(wide).t() @ dropped(right.to(wide), drop if right is x else None)
            if blocks is not None and out is db:
                rows, columns = product.split(list(blocks)), right.shape[1] // len(blocks)
                product = torch.cat([part.split(columns, 1)[i] for i, part in enumerate(rows)])
            out.copy_(product) if begin else out.add_(product)
    return da, db


def _count(blocks: Sequence[int] | None) -> int:
    return 1 if blocks is None else len(blocks)


def _diagonal(b: Tensor, blocks: Sequence[int] | None) -> Tensor:
    """b whole."""
    return b if blocks is None else torch.block_diag(*b.split(list(blocks)))


def _blocks(count: int, columns: int = 48, last: int = BLOCK) -> list[int] | None:
    """For examples."""
    return [columns - (count - 1) * last, *[last] * (count - 1)] if count > 1 else None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _drop(dropping: bool) -> Drop | None:
    """For examples."""
    return Drop(0.25, ints(7).long(), 3) if dropping else None
