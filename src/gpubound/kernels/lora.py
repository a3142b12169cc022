"""A low-rank adapter of a linear product: y = x weightᵀ + bias + h bᵀ with h = scale · drop(x) aᵀ, and its gradients.

The scale is applied once, to h: so with gh = scale · g b, which is `lora_down(g, b.t(), scale)`, the gradients are

    da = ghᵀ drop(x)    db = gᵀ h    and to dx is added drop(gh a), by the mask that x had: `lora_up(dx, gh, a.t(), drop)`

a and b may be fp32 under a 16-bit x. They are rounded to x's dtype as they are multiplied, and no fp32 copy of x is made.

Legend: N rows (tokens), K inputs, O outputs, R ranks; x (N, K), weight (O, K), a (R, K), b (O, R), h and gh (N, R), g (N, O).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .accumulate import main_gradient, opens
from .aside import aside
from .checks import require, require_device, require_last
from .choose import implementation
from .ops import definition, draw, ints
from .plans.rules import LARGE
from .record import record_of
from .rows import Owners, check_rows, own_columns

WORD = 0xFFFFFFFF


class Drop(NamedTuple):
    """Dropout whose mask is a function of numbers: computed again wherever it is needed, and never stored.

    Element i of a matrix, counted along its rows, is dropped where 31 bits of a hash of (seed, site, i) are below p · 2^31. The
    count wraps at 2^32 elements. Kernels and definition drop the same elements.
    """

    p: float
    seed: Tensor  # int64 (1,), on the device: a captured graph reads what lies there at each replay
    site: int = 0  # sites that share a seed have masks of their own


def drawn(p: float, device: torch.device) -> Drop | None:
    """Dropout by a new seed from torch's generator of `device`, also at each replay of a captured graph; None for p = 0."""
    if not 0 <= p < 1:
        raise ValueError(f"lora: dropout must be a probability from 0 up to, not including, 1, got {p}; 0 drops nothing.")
    return Drop(p, torch.randint(-(2**63), 2**63 - 1, (1,), device=device)) if p else None


def kept(drop: Drop, rows: int, columns: int) -> Tensor:
    """Which elements of a matrix (rows, columns) `drop` keeps."""
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
    """32 bits of i, by a product-and-shift hash (Wellons' lowbias32) with a key before it and one within. In int64, of which
    products keep the low bits."""
    i = (i + first) & WORD
    i = ((i ^ (i >> 16)) * 0x21F0AAAD + second) & WORD
    i = ((i ^ (i >> 15)) * 0x735A2D97) & WORD
    return i ^ (i >> 15)


def dropped(x: Tensor, drop: Drop | None) -> Tensor:
    """drop(x) of a matrix: what is kept, times 1 / (1 − p)."""
    return x if drop is None else torch.where(kept(drop, *x.shape), x / (1 - drop.p), 0.0)


def lora_down(
    x: Tensor, a: Tensor, scale: float = 1.0, drop: Drop | None = None, out: Tensor | None = None, rows: Owners | None = None
) -> Tensor:
    """h (N, R) = scale · drop(x) aᵀ, summed in fp32, in x's dtype; written into `out` if that is given.

    With `rows`, h keeps what the adapter of each row has made, and is zero elsewhere.
    """
    _check_drop("lora_down", drop, x)
    _check("lora_down", x, a=(a, ("R", x.shape[-1])))
    _check_outputs("lora_down", x, out=(out, (x.shape[0], a.shape[0])))
    check_rows("lora_down", rows, x, a.shape[0])
    shape = (_like(x.shape[0]), a.shape[0], drop is not None, rows is not None)
    return implementation("lora_down", x, None, shape)(x, a, scale, drop, out, rows)


def _draw_down(
    g: torch.Generator, rows: int = 50, rank: int = 5, dropping: bool = True, routed: bool = False
) -> tuple[Tensor | Drop | Owners | float | None, ...]:
    own = Owners(ints(0, -1, 1, 0, 5) if routed else ints(), ints(*(i % 2 for i in range(rank))), draw(g, rank).detach())
    count = rows - rows % len(own.ids) if routed else rows
    return draw(g, count, 48), draw(g, rank, 48), 1.7, _drop(dropping), None, own if routed else None


@definition(_draw_down)
@torch.no_grad()
def lora_down_reference(
    x: Tensor, a: Tensor, scale: float = 1.0, drop: Drop | None = None, out: Tensor | None = None, rows: Owners | None = None
) -> Tensor:
    wide = _wide(x)
    h = own_columns(scale * (dropped(x.to(wide), drop) @ a.to(wide).t()), rows).to(x.dtype)
    return h if out is None else out.copy_(h)


def lora_up(y: Tensor, h: Tensor, b: Tensor, drop: Drop | None = None) -> Tensor:
    """y (N, O) += h bᵀ in place, with `drop` drop(h bᵀ); the sum is rounded once."""
    _check_drop("lora_up", drop, y)
    _check("lora_up", y, h=(h, (y.shape[0], "R")), b=(b, (y.shape[-1], h.shape[-1])))
    _check_outputs("lora_up", y, y=(y, (y.shape[0], y.shape[1])))
    return implementation("lora_up", y, None, (h.shape[1], drop is not None))(y, h, b, drop)


@definition(lambda g, rank=5, dropping=True: (draw(g, 50, 48).detach(), draw(g, 50, rank), draw(g, 48, rank), _drop(dropping)))
@torch.no_grad()
def lora_up_reference(y: Tensor, h: Tensor, b: Tensor, drop: Drop | None = None) -> Tensor:
    wide = _wide(y)
    return y.copy_(y.to(wide) + dropped(h.to(wide) @ b.to(wide).t(), drop))


def lora_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, b: Tensor, drop: Drop | None = None, dependent: bool = False
) -> Tensor:
    """x weightᵀ + bias + h bᵀ, with `drop` + drop(h bᵀ), as one kernel.

    With g, weight.t(), None, gh and a.t() it is the gradient dx.

    dependent   the kernel before this one in the stream made h, and all else was there before that one began: this may start
                while it still runs (programmatic dependent launch)
    """
    rows, outputs = x.shape[0], weight.shape[0]
    _check_drop("lora_product", drop, x)
    _check(
        "lora_product", x, weight=(weight, (outputs, x.shape[-1])), bias=(bias, (outputs,)), h=(h, (rows, "R")),
        b=(b, (outputs, h.shape[-1])),
    )  # fmt: skip
    shape = (rows * outputs >= LARGE, h.shape[1], drop is not None, weight.stride(-1) == 1)
    return implementation("lora_product", x, None, shape)(x, weight, bias, h, b, drop, dependent)


def _draw_product(g: torch.Generator, large: bool = False, rank: int = 5, dropping: bool = False, along: bool = True) -> tuple:
    rows, outputs = (4096, LARGE // 4096) if large else (50, 40)
    weight, b = (draw(g, *shape) if along else draw(g, *reversed(shape)).t() for shape in ((outputs, 48), (outputs, rank)))
    return draw(g, rows, 48), weight, draw(g, outputs) if along else None, draw(g, rows, rank), b, _drop(dropping)


@definition(_draw_product)
@torch.no_grad()
def lora_product_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, b: Tensor, drop: Drop | None = None, dependent: bool = False
) -> Tensor:
    wide = _wide(x)
    y = x.to(wide) @ weight.to(wide).t() + dropped(h.to(wide) @ b.to(wide).t(), drop)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


def lora_gradients(
    x: Tensor, gh: Tensor, g: Tensor, h: Tensor, da: Tensor | None, db: Tensor | None, drop: Drop | None = None,
    begins: tuple[bool, bool] = (True, True), dependent: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """da (R, K) = ghᵀ drop(x) and db (O, R) = gᵀ h, written into what is given: None is not computed.

    Summed in fp32, in the same order every time.

    begins      for da and for db: True writes over what is there, False adds to it, which then is fp32
    dependent   as of `lora_product`, gh being what the kernel before this one made
    """
    rank = h.shape[-1]
    _check_drop("lora_gradients", drop, x)
    _check(
        "lora_gradients", x, h=(h, (x.shape[0], "R")), gh=(gh, (x.shape[0], rank)), g=(g, (x.shape[0], "O"))
    )  # fmt: skip
    _check_outputs("lora_gradients", x, da=_as_in_memory(da, rank, x.shape[-1]), db=_as_in_memory(db, g.shape[-1], rank))
    shape = (x.shape[1], g.shape[1], rank, drop is not None)
    return implementation("lora_gradients", x, None, shape)(x, gh, g, h, da, db, drop, begins, dependent)


def _draw_gradients(
    g: torch.Generator, inputs: int = 48, outputs: int = 40, rank: int = 5, dropping: bool = True
) -> tuple[Tensor | Drop | tuple | None, ...]:
    inward, outward = ((draw(g, 50, columns), draw(g, 50, rank)) for columns in (inputs, outputs))
    da, db = draw(g, rank, inputs).detach(), draw(g, outputs, rank).detach()
    return *inward, *outward, da, db, _drop(dropping), (True, False)


@definition(_draw_gradients)
@torch.no_grad()
def lora_gradients_reference(
    x: Tensor, gh: Tensor, g: Tensor, h: Tensor, da: Tensor | None, db: Tensor | None, drop: Drop | None = None,
    begins: tuple[bool, bool] = (True, True), dependent: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    wide = _wide(x)
    for out, begin, left, right in ((da, begins[0], gh, x), (db, begins[1], g, h)):
        if out is not None:
            product = left.to(wide).t() @ dropped(right.to(wide), drop if right is x else None)
            out.copy_(product) if begin else out.add_(product)
    return da, db


def adapter_gradients(
    a: Tensor, b: Tensor, x: Tensor, gh: Tensor, g: Tensor, h: Tensor, drop: Drop | None = None,
    wanted: Sequence[bool] = (True, True), dependent: bool = False,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of the parameters a and b, where they go: into their main_grad and None, or tensors of their dtypes.

    `dependent` as of `lora_gradients`; it holds for deliveries on the current stream.
    """
    mains = [main_gradient(p) if want else None for p, want in zip((a, b), wanted)]
    begins = [main is None or opens([p]) for p, main in zip((a, b), mains)]
    made = [torch.empty_like(p) if want and main is None else None for p, want, main in zip((a, b), wanted, mains)]
    da, db = (made[i] if mains[i] is None else mains[i] for i in (0, 1))

    def put(follows: bool = False) -> None:
        lora_gradients(x, gh, g, h, da, db, drop, (begins[0], begins[1]), follows)

    record = record_of(a)
    if not any(wanted):
        return made
    if any(t is not None for t in made) or record is None or record.side is None:
        put(dependent)
    else:
        aside(a, put, x, gh, g, h)
    return made


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float = 1.0, drop: Drop | float | None = None
) -> Tensor:
    """x weightᵀ + bias + scale · (drop(x) aᵀ) bᵀ of x (..., K), with the gradients of all of them.

    Those of a and b go into their main_grad, if they have one (docs/kernels-lora.md). A number as `drop` is the probability of
    a dropout by a seed drawn for this call.
    """
    require_last("lora_linear", "x", x, "(..., K)")
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if isinstance(drop, (int, float)):
        drop = drawn(drop, x.device)
    outputs = weight.shape[0]
    _check_drop("lora_linear", drop, x)
    _check(
        "lora_linear", x.reshape(-1, x.shape[-1]), weight=(weight, (outputs, x.shape[-1])), bias=(bias, (outputs,)),
        a=(a, ("R", x.shape[-1])), b=(b, (outputs, a.shape[0])),
    )  # fmt: skip
    if torch.compiler.is_compiling():  # inductor sees through the definition's products
        return lora_linear_reference(x, weight, bias, a, b, scale, drop)
    return implementation("lora_linear", x, None, (a.shape[0], drop is not None))(x, weight, bias, a, b, scale, drop)


def _draw_linear(g: torch.Generator, rank: int = 5, dropping: bool = False) -> tuple[Tensor | Drop | float | None, ...]:
    return draw(g, 2, 9, 48), draw(g, 40, 48), draw(g, 40), draw(g, rank, 48), draw(g, 40, rank), 1.7, _drop(dropping)


@definition(_draw_linear)
def lora_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float = 1.0, drop: Drop | None = None
) -> Tensor:
    wide = _wide(x)
    rows = x.to(wide).reshape(-1, x.shape[-1])
    y = rows @ weight.to(wide).t() + scale * (dropped(rows, drop) @ a.to(wide).t()) @ b.to(wide).t()
    y = y if bias is None else y + bias.to(wide)
    return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def _like(rows: int) -> int:
    """A few numbers that stand for all, so that not each number of tokens is tested by itself."""
    return 2048 if rows <= 2048 else 4096 if rows <= 4096 else 8192


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _drop(dropping: bool) -> Drop | None:
    """For examples."""
    return Drop(0.25, ints(7).long(), 3) if dropping else None


def _check(op: str, x: Tensor, **others: tuple[Tensor | None, tuple[int | str, ...]]) -> None:
    """That x is a matrix of floats, and each of the others a tensor of floats beside it; a name in its shape is any size."""
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(
            f"{op}: its first argument must be a floating-point matrix, got {x.dtype} {tuple(x.shape)}; reshape it."
        )
    for name, (t, shape) in others.items():
        if t is None:
            continue
        fits = t.dim() == len(shape) and all(
            got > 0 if isinstance(want, str) else got == want for want, got in zip(shape, t.shape)
        )
        if not fits or not t.is_floating_point():
            raise ValueError(
                f"{op}: {name} must be a floating-point tensor ({', '.join(map(str, shape))}), got {t.dtype} {tuple(t.shape)}; "
                f"its sizes follow from the first argument and the rank."
            )
        require_device(op, name, t, x)


def _check_drop(op: str, drop: Drop | None, x: Tensor) -> None:
    if drop is not None:
        require(op, "drop.seed", drop.seed, torch.int64, (1,), x.device, "make it once, and write each step's seed into it")


def _as_in_memory(t: Tensor | None, rows: int, columns: int) -> tuple[Tensor | None, tuple[int, int]]:
    """The matrix and its shape, transposed where its columns are the rows in memory, as those of several b side by side are."""
    turned = t is not None and t.dim() == 2 and t.stride(0) == 1 < t.stride(1)
    return (t.t(), (columns, rows)) if t is not None and turned else (t, (rows, columns))


def _check_outputs(op: str, x: Tensor, **outputs: tuple[Tensor | None, tuple[int, int]]) -> None:
    _check(op, x, **outputs)
    for name, (t, (rows, columns)) in outputs.items():
        if t is None or t.numel() == 0:
            continue
        if (columns > 1 and t.stride(1) != 1) or (rows > 1 and t.stride(0) < columns):
            raise ValueError(
                f"{op}: {name} is written, so its rows must be dense and apart, got strides {t.stride()}; "
                f"pass a contiguous one."
            )
