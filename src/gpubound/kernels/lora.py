"""Low-rank adapter of a linear product: y = x weightᵀ + bias + h bᵀ with h = scale · drop(x) aᵀ, and its gradients.

The scale is applied once, to h: so with gh = scale · g b, which is `lora_down(g, b.t(), scale)`, the gradients are

    da = ghᵀ drop(x)    db = gᵀ h    and to dx is added drop(gh a), by the mask that x had: `lora_up(dx, gh, a.t(), drop)`

a and b may be fp32 under a 16-bit x. They are rounded to x's dtype as they are multiplied, and no fp32 copy of x is made.

Adapters of several weights that are multiplied as one form one adapter. Its a has the rows of all, and its b is block-diagonal:
the argument b holds the blocks, stacked by rows, and `blocks` the number of outputs of each.

Legend: N rows (tokens), K inputs, O outputs, R ranks; x (N, K), weight (O, K), a (R, K), b (O, R), h and gh (N, R), g (N, O).

Arguments of these ops: dropout by a hash, adapters by row, blocks of outputs, and their checks.

Legend: N tokens, the rows of x, of B sequences in a batch; R ranks, the columns of h.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..trace import fallback
from .accumulate import aside, ensure_record, join, main_gradient, opens
from .dispatch import implementation, matches, require, require_device
from .plans.defaults import LARGE, WAVE
from .registry import definition, draw, frozen, ints

WORD = 0xFFFFFFFF
BLOCKS, BLOCK = 3, 16  # an op takes at most 3 blocks; each has a multiple of 16 outputs
# Counters of one call, at most. Programs share sums where a GPU has more multiprocessors than there are tiles of columns, each
# of which may have up to four tiles of ranks.
SHARED_SUMS = 2048


class Drop(NamedTuple):
    """Dropout whose mask is a hash of each element's index: it is recomputed by each kernel, and never stored.

    Element i of a matrix, counted along its rows, is dropped where 31 bits of a hash of (seed, site, i) are below p · 2^31. The
    count wraps at 2^32 elements. Kernels and definition drop the same elements.
    """

    p: float
    seed: Tensor  # int64 (1,), on the device: a captured graph reads it at each replay
    site: int = 0  # sites that share a seed have different masks


def drawn(p: float, device: torch.device) -> Drop | None:
    """Return dropout with a new seed of `device`'s generator, also at each replay of a captured graph; None for p = 0."""
    if not 0 <= p < 1:
        raise ValueError(f"lora: dropout must be a probability from 0 up to, not including, 1, got {p}; 0 drops nothing.")
    return Drop(p, torch.randint(-(2**63), 2**63 - 1, (1,), device=device)) if p else None


def kept(drop: Drop, rows: int, columns: int) -> Tensor:
    """Return which elements of a matrix (rows, columns) `drop` keeps."""
    first, second = _keys(drop)
    i = torch.arange(rows * columns, device=drop.seed.device, dtype=torch.int64)
    return ((_hash(i, first, second) >> 1) >= threshold(drop.p)).view(rows, columns)


def threshold(p: float) -> int:
    return min(round(p * 2**31), 2**31 - 1)


def _keys(drop: Drop) -> tuple[Tensor, Tensor]:
    low, high = drop.seed & WORD, (drop.seed >> 32) & WORD
    first = _hash(low, drop.site, 0)
    return first, _hash(high, first, 0)


def _hash(i: Tensor, first: Tensor | int, second: Tensor | int) -> Tensor:
    """Hash i to 32 bits by Wellons' lowbias32 with two keys. In int64, whose products keep the low bits."""
    i = (i + first) & WORD
    i = ((i ^ (i >> 16)) * 0x21F0AAAD + second) & WORD
    i = ((i ^ (i >> 15)) * 0x735A2D97) & WORD
    return i ^ (i >> 15)


def dropped(x: Tensor, drop: Drop | None) -> Tensor:
    """Return drop(x) of a matrix: the elements that are kept, times 1 / (1 − p)."""
    return x if drop is None else torch.where(kept(drop, *x.shape), x / (1 - drop.p), 0.0)


class Owners(NamedTuple):
    """Adapters by row, computed as one adapter of rank R: in h, a row has the columns of its adapter, and zeros elsewhere.

    The matrices a of all adapters are stacked by rows and their b by columns, so the ops of one adapter compute all of them:
    where h and gh are zero, they add nothing to y, dx, da and db.
    """

    ids: Tensor  # int32 or int64 (B,), on the device: row i of the batch has adapter ids[i]; none if no column has it (-1)
    owner: Tensor  # int32 (R,): the adapter of each column of h
    scales: Tensor  # fp32 (R,): a scale for each column, in addition to that of the call


class OwnRanks(NamedTuple):
    """Nonzero columns of h for `Owners` whose adapters are in order and have equal ranks.

    Row i of the batch has columns ids[i] · ranks to (ids[i] + 1) · ranks of each `adapters` · ranks.
    """

    ids: Tensor  # see Owners
    ranks: int  # of each adapter
    adapters: int


def own_columns(h: Tensor, rows: Owners | None) -> Tensor:
    """Return h (N, R) with the columns of each row's adapter, scaled, and zeros elsewhere."""
    if rows is None:
        return h
    ids = rows.ids.repeat_interleave(h.shape[0] // max(len(rows.ids), 1))
    return torch.where(ids[:, None] == rows.owner, h * rows.scales.to(h.dtype), 0.0)


def check_call(
    op: str,
    x: Tensor,
    drop: Drop | None,
    blocks: Sequence[int] | None,
    columns: int,
    **tensors: tuple[Tensor | None, tuple[int | str, ...]],
) -> None:
    """Raise ValueError unless x is a float matrix, and each tensor a float tensor of the given shape on x's device.

    A name in a shape is any size from 1. `columns` is the number of outputs that `blocks` must add up to.
    """
    if drop is not None:
        require(op, "drop.seed", drop.seed, torch.int64, (1,), x.device, "make it once, and write each step's seed into it")
    if blocks is not None and (
        not 1 <= len(blocks) <= BLOCKS or sum(blocks) != columns or any(size < BLOCK or size % BLOCK for size in blocks)
    ):
        raise ValueError(
            f"{op}: blocks must be one to {BLOCKS} multiples of {BLOCK} that add up to {columns}, got {list(blocks)}; "
            f"multiply others separately."
        )
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(
            f"{op}: its first argument must be a floating-point matrix, got {x.dtype} {tuple(x.shape)}; reshape it."
        )
    for name, (t, shape) in tensors.items():
        if t is None:
            continue
        if t.dim() != len(shape) or not (t.shape == shape or matches(t, shape)) or not t.is_floating_point():
            raise ValueError(
                f"{op}: {name} must be a floating-point tensor ({', '.join(map(str, shape))}), got {t.dtype} {tuple(t.shape)}; "
                f"its sizes follow from the first argument and the rank."
            )
        if t.device != x.device:
            require_device(op, x, **{name: t})


def check_output(op: str, name: str, t: Tensor) -> None:
    """Raise ValueError unless the rows of the matrix `t`, which the op writes, are dense and do not overlap."""
    rows, columns = t.shape
    if t.numel() and ((columns > 1 and t.stride(1) != 1) or (rows > 1 and t.stride(0) < columns)):
        raise ValueError(
            f"{op}: {name} is written, so its rows must be dense and apart, got strides {t.stride()}; pass a contiguous one."
        )


def check_rows(op: str, rows: Owners, x: Tensor, rank: int) -> None:
    ids, owner, scales = rows
    _check_ids(op, ids, x)
    require(op, "rows.owner", owner, torch.int32, (rank,), x.device, "say of each column which adapter it belongs to")
    require(op, "rows.scales", scales, torch.float32, (rank,), x.device, "give each column the scale of its adapter")


def check_own_ranks(op: str, rows: OwnRanks, x: Tensor, rank: int) -> None:
    _check_ids(op, rows.ids, x)
    if rows.ranks < 1 or rows.adapters < 1 or rank % (rows.ranks * rows.adapters):
        raise ValueError(
            f"{op}: rows are of {rows.adapters} adapters of {rows.ranks} ranks, wanted a divisor of the {rank} ranks of b; "
            f"leave rows out where adapters have different ranks."
        )


def _check_ids(op: str, ids: Tensor, x: Tensor) -> None:
    tokens = x.shape[0]
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64) or (tokens % len(ids) if len(ids) else tokens):
        raise ValueError(
            f"{op}: rows.ids must be int32 or int64 (B,), one for each row of a batch of {tokens} tokens, "
            f"got {ids.dtype} {tuple(ids.shape)}; all rows have the same number of tokens."
        )
    require_device(op, x, **{"rows.ids": ids})


def lora_down(
    x: Tensor, a: Tensor, scale: float = 1.0, drop: Drop | None = None, out: Tensor | None = None,
    rows: Owners | None = None, blocks: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """h (N, R) = scale · drop(x) aᵀ, summed in fp32, in x's dtype; written into `out` if it is given.

    With `rows`, each row of h keeps the columns of its adapter, and is zero elsewhere.
    With `blocks` it is g times a block-diagonal b, whose blocks' transposes are adjacent in `a`: h has R columns a block.
    """
    count = len(blocks or (0,))
    ranks = a.shape[0] * count
    check_call(
        "lora_down", x, drop, blocks, x.shape[-1], a=(a, ("R", x.shape[-1])), out=(out, (x.shape[0], ranks)),
    )  # fmt: skip
    if out is not None:
        check_output("lora_down", "out", out)
    if rows is not None:
        check_rows("lora_down", rows, x, ranks)
    shape = (a.shape[0], drop is not None, rows is not None, count, a.stride(-1) == 1)
    return implementation("lora_down", x, None, shape)(x, a, scale, drop, out, rows, blocks)


def _draw_down(g, rank=5, dropping=True, routed=False, blocks=1, along=True):
    ranks, columns = rank * blocks, 144  # more than a step along them has: a narrower x has another kernel
    a = draw(g, rank, columns) if along else draw(g, columns, rank).t()
    ids, owner = ints(0, -1, 1, 0, 5).long(), ints(*(i % 2 for i in range(ranks)))
    own = Owners(ids, owner, draw(g, ranks).detach()) if routed else None
    return draw(g, 80, columns), a, 1.7, _drop(dropping), None, own, _blocks(blocks, columns)


@definition(_draw_down)
def lora_down_reference(x, a, scale=1.0, drop=None, out=None, rows=None, blocks=None):
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    a_t = a.t() if blocks is None else _diagonal(a.t(), blocks)
    h = scale * (dropped(x.to(compute_dtype), drop) @ a_t.to(compute_dtype))
    h = (h if rows is None else own_columns(h, rows)).to(x.dtype)
    return h if out is None else out.copy_(h)


def lora_up(y: Tensor, h: Tensor, b: Tensor, drop: Drop | None = None, blocks: Sequence[int] | None = None) -> Tensor:
    """y (N, O) += h bᵀ in place, with `drop` drop(h bᵀ); the sum is rounded once."""
    count = len(blocks or (0,))
    h_shape = y.shape[0], b.shape[-1] * count
    check_call("lora_up", y, drop, blocks, y.shape[-1], b=(b, (y.shape[-1], "R")), h=(h, h_shape))
    check_output("lora_up", "y", y)
    return implementation("lora_up", y, None, (b.shape[1], drop is not None, count, b.stride(-1) == 1))(y, h, b, drop, blocks)


def _draw_up(g, rank=5, dropping=True, blocks=1, along=True):
    """y has the dtype of the call: an fp32 product of 64 ranks spills 11 kB a thread, for which CUDA keeps 2.8 GB."""
    b = draw(g, 48, rank) if along else draw(g, rank, 48).t()
    return frozen(draw(g, 64, 48)), draw(g, 64, rank * blocks), b, _drop(dropping), _blocks(blocks)


@definition(_draw_up)
def lora_up_reference(y, h, b, drop=None, blocks=None):
    compute_dtype = torch.promote_types(y.dtype, torch.float32)
    b = b if blocks is None else _diagonal(b, blocks)
    return y.copy_(y.to(compute_dtype) + dropped(h.to(compute_dtype) @ b.to(compute_dtype).t(), drop))


def lora_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, b: Tensor, drop: Drop | None = None,
    blocks: Sequence[int] | None = None, rows: OwnRanks | None = None,
) -> Tensor:  # fmt: skip
    """x weightᵀ + bias + h bᵀ, with `drop` + drop(h bᵀ), as one kernel.

    With g, weight.t(), None, gh and a.t() it is the gradient dx.

    rows  the columns of h that may be nonzero: only these are multiplied
    """
    tokens, outputs, count = x.shape[0], weight.shape[0], len(blocks or (0,))
    check_call(
        "lora_product", x, drop, blocks, outputs, weight=(weight, (outputs, x.shape[-1])), bias=(bias, (outputs,)),
        b=(b, (outputs, "R")), h=(h, (tokens, b.shape[-1] * count)),
    )  # fmt: skip
    if rows is not None:
        check_own_ranks("lora_product", rows, x, b.shape[-1])
    own = (0, 0) if rows is None else rows[1:]
    size = product_size(tokens, outputs)
    shape = (size, b.shape[1], drop is not None, weight.stride(-1) == 1, count, bias is not None, *own)
    return implementation("lora_product", x, None, shape)(x, weight, bias, h, b, drop, blocks, rows)


def product_size(tokens: int, outputs: int) -> int:
    """Return the size class that a kernel's tiles depend on: 0 for less than a wave of them, 1 for one, 2 for many."""
    return (tokens * outputs >= WAVE) + (tokens * outputs >= LARGE)


def _draw_product(g, size=0, rank=5, dropping=False, along=True, blocks=1, biased=True, ranks=0, count=0):
    tokens, outputs = ((64, 64 * blocks), (2048, WAVE // 2048), (4096, LARGE // 4096))[size]
    weight, b = (draw(g, *shape) if along else draw(g, *reversed(shape)).t() for shape in ((outputs, 48), (outputs, rank)))
    bias = draw(g, outputs) if biased else None
    h, rows = draw(g, tokens, rank * blocks), OwnRanks(ints(count - 1, 0).long(), ranks, count) if count else None
    if rows is not None:
        adapter = torch.arange(rank * blocks, device="cpu") // ranks % count
        h = (h.detach() * (rows.ids.repeat_interleave(tokens // 2)[:, None] == adapter)).requires_grad_()
    # of large products the blocks are as wide as the widest tile: narrower ones would test a kernel that no call launches
    return draw(g, tokens, 48), weight, bias, h, b, _drop(dropping), _blocks(blocks, outputs, 256 if size else 64), rows


@definition(_draw_product)
def lora_product_reference(x, weight, bias, h, b, drop=None, blocks=None, rows=None):
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    b = b if blocks is None else _diagonal(b, blocks)
    y = x.to(compute_dtype) @ weight.to(compute_dtype).t() + dropped(h.to(compute_dtype) @ b.to(compute_dtype).t(), drop)
    return (y if bias is None else y + bias.to(compute_dtype)).to(x.dtype)


def lora_gradients(
    x: Tensor, gh: Tensor, g: Tensor, h: Tensor, da: Tensor | None, db: Tensor | None, drop: Drop | None = None,
    begins: tuple[bool, bool] = (True, True), blocks: Sequence[int] | None = None, arrivals: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """da (R, K) = ghᵀ drop(x) and db (O, R) = gᵀ h, written into the given tensors; one that is None is not computed.

    Summed in fp32, in the same order every time. With `blocks`, db has the blocks of bᵀ's diagonal alone, stacked by rows.

    begins      for da and for db: True overwrites, False adds to it, which then is fp32
    arrivals    int32 zeros, which the call leaves zero: with these counters programs may share a sum. No other launch may use
                them at the same time
    """
    count, rank = len(blocks or (0,)), h.shape[-1]
    tokens, inputs, outputs, db_rank = x.shape[0], x.shape[-1], g.shape[-1], rank // count
    # Gradients of several b that are stacked by columns have their columns as rows in memory.
    da_t, db_t = (t is not None and t.dim() == 2 and t.stride(0) == 1 < t.stride(1) for t in (da, db))
    check_call(
        "lora_gradients", x, drop, blocks, outputs, h=(h, (tokens, "R")), gh=(gh, (tokens, rank)), g=(g, (tokens, "O")),
        da=(da, (rank, inputs)), db=(db, (outputs, db_rank)),
    )  # fmt: skip
    for name, t, transposed in (("da", da, da_t), ("db", db, db_t)):
        if t is not None:
            check_output("lora_gradients", name, t.t() if transposed else t)
    low_precision = any(t is not None and t.dtype != torch.float32 for t in (da, db))
    shape = (inputs, outputs, db_rank, drop is not None, count, db_t, low_precision)
    run = implementation("lora_gradients", x, None, shape)
    return run(x, gh, g, h, da, db, drop, begins, blocks, arrivals)


def _draw_gradients(g, inputs=48, outputs=48, rank=5, dropping=True, blocks=1, transposed=False, low_precision=False):
    """low_precision: gradients in the dtype of the call, as autograd takes them, instead of fp32 sums."""
    inward, outward = ((draw(g, 64, columns), draw(g, 64, rank * blocks)) for columns in (inputs, outputs))
    da = draw(g, rank * blocks, inputs).detach()
    db = draw(g, rank, outputs).detach().t() if transposed else draw(g, outputs, rank).detach()
    if low_precision:
        da, db = frozen(da), frozen(db)
    last = 64 if outputs >= 64 * blocks else BLOCK  # real layers have blocks of many tiles
    each, counters = _blocks(blocks, outputs, last), ints(*[0] * SHARED_SUMS)
    return *inward, *outward, da, db, _drop(dropping), (True, low_precision), each, counters


@definition(_draw_gradients)
def lora_gradients_reference(x, gh, g, h, da, db, drop=None, begins=(True, True), blocks=None, arrivals=None):
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    for out, begin, left, right in ((da, begins[0], gh, x), (db, begins[1], g, h)):
        if out is not None:
            product = left.to(compute_dtype).t() @ dropped(right.to(compute_dtype), drop if right is x else None)
            if blocks is not None and out is db:
                rows, columns = product.split(list(blocks)), right.shape[1] // len(blocks)
                product = torch.cat([part.split(columns, 1)[i] for i, part in enumerate(rows)])
            out.copy_(product) if begin else out.add_(product)
    return da, db


def _diagonal(b: Tensor, blocks: Sequence[int]) -> Tensor:
    """Return the block-diagonal matrix whose blocks are stacked by rows in b."""
    return torch.block_diag(*b.split(list(blocks)))


def _blocks(count: int, columns: int = 48, last: int = BLOCK) -> list[int] | None:
    """Return the argument of an example."""
    return [columns - (count - 1) * last, *[last] * (count - 1)] if count > 1 else None


def _drop(dropping: bool) -> Drop | None:
    """Return the argument of an example."""
    return Drop(0.25, ints(7).long(), 3) if dropping else None


def blocks_of(b: Sequence[Tensor]) -> list[int] | None:
    """Return the `blocks` of these b as one matrix, if the ops take them so."""
    if len(b) == 1:
        return None
    sizes, ranks = [part.shape[0] for part in b], {part.shape[1] for part in b}
    return sizes if len(b) <= BLOCKS and len(ranks) == 1 and not any(size % BLOCK for size in sizes) else None


def adapter_gradients(
    a: Sequence[Tensor], b: Sequence[Tensor], x: Tensor, gh: Tensor, g: Tensor, h: Tensor, drop: Drop | None = None,
    wanted: Sequence[bool] = (True, True), same_outputs: bool = False,
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of adapters' parameters in their dtypes; or add them to their main_grads and return None.

    h holds the adapters' ranks by columns, and their b are the blocks of a block-diagonal matrix. With `same_outputs` all
    adapters have all outputs, and their b are concatenated along columns. The result and `wanted` are in the order a, b, a, b.
    """
    blocks = None if same_outputs else blocks_of(b)
    of_a, of_b = _destination(a, wanted[::2], False), _destination(b, wanted[1::2], same_outputs)
    if of_a is None or of_b is None or (len(b) > 1 and blocks is None and not same_outputs):
        ranks, outputs = [part.shape[0] for part in a], [part.shape[0] for part in b]
        gs = [g] * len(b) if same_outputs else g.split(outputs, 1)
        each = zip(a, b, gh.split(ranks, 1), gs, h.split(ranks, 1), wanted[::2], wanted[1::2])
        return [t for i, j, ghi, gi, hi, *want in each for t in adapter_gradients([i], [j], x, ghi, gi, hi, drop, want)]
    if of_a.out is None and of_b.out is None:
        return [None] * len(wanted)
    returned = of_a.returned or of_b.returned
    begins = of_a.out is None or of_a.returned or opens(a), of_b.out is None or of_b.returned or opens(b)
    arrivals = None if returned else _arrivals(a[0])

    def add() -> None:
        lora_gradients(x, gh, g, h, of_a.out, of_b.out, drop, begins, blocks, arrivals)

    if returned:
        add()
    else:
        aside(a[0], add, x, gh, g, h)
    das = of_a.out.split([p.shape[0] for p in a]) if of_a.out is not None and of_a.returned else [None] * len(a)
    if of_b.out is not None and of_b.returned:
        dbs: Sequence[Tensor | None] = of_b.out.split([p.shape[same_outputs] for p in b], int(same_outputs))
    else:
        dbs = [None] * len(b)
    return [gradient for pair in zip(das, dbs) for gradient in pair]


class _Destination(NamedTuple):
    out: Tensor | None  # one matrix for the gradients of several parameters; None: not needed
    returned: bool = False  # to autograd; otherwise `out` is the parameters' main_grad


def _destination(parameters: Sequence[Tensor], wanted: Sequence[bool], by_columns: bool) -> _Destination | None:
    """Return one matrix for all gradients, by rows or by columns; None if they do not fit one."""
    if not any(wanted):
        return _Destination(None)
    mains = [main for main in map(main_gradient, parameters) if main is not None]
    if not all(wanted) or 0 < len(mains) < len(parameters) or len({p.dtype for p in parameters}) > 1:
        return None
    if not mains:
        return _Destination(torch.cat([torch.empty_like(p) for p in parameters], int(by_columns)), True)
    joined = mains[0] if len(mains) == 1 else join(mains, by_columns)
    if joined is None:
        fallback("lora: gradients of several adapters", "their accumulators are not adjacent in memory")
        return None
    return _Destination(joined)


def _arrivals(a: Tensor) -> Tensor:
    """Return a parameter's counters, which no other launch may use at the same time.

    They are kept with the parameter, except those allocated during a capture, whose memory belongs to the graph.
    """
    record = ensure_record(a)
    counters = record.arrivals
    if counters is None or counters.device != a.device:
        counters = torch.zeros(SHARED_SUMS, dtype=torch.int32, device=a.device)
        if not (a.is_cuda and torch.cuda.is_current_stream_capturing()):
            record.arrivals = counters
    return counters
