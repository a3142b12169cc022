"""Ops of one decoding step, for one token of each of B rows: products, and norms that are part of no product.

All outputs are written in place. The stream `x` is fp32 (B, hidden); weights are read in the model's dtype, or are `Packed`.

With `tiled`, 2 to MOST rows are multiplied together on tensor cores (quantized_product.py, as kernels of packed weights are).
Otherwise each row is multiplied by itself in fp32: bound by memory for one row, and by waiting for a few. In a tiled
product x times its norm's gain is rounded to the dtype of the weights, so a row's bits differ from those that it gets alone. In
fp16 such an x may have no end, where its norm has: bf16 is what they are for. The stream x may be given in the dtype of the
weights: each program reads all of it, and fp32 is twice as many bytes. `add_product` writes such a copy.

Programmatic dependent launch (PDL): with `dependent` a kernel starts while its predecessor in the stream still runs. It is only
for a chain of these ops, each of which reads the result of the one before. An EARLY kernel lets its successor start at once, a
LATE one when its own weights are loaded, a FENCE when all kernels before it have ended. An AHEAD kernel also lets its successor
start at once, and waits only before it writes: all that it reads was written before the last fence. triton/_launch.py has the
rules. A step with ops that also serve training sets the mode once: in `chained`, every kernel that supports PDL uses it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import constant
from .decode_adapters import StepAdapters, adapters_shape, check_adapters, draw_adapters
from .dispatch import implementation, require
from .packed_weights import Packed, check_packed
from .peer_exchange import Mail, check_mail, example_mail
from .registry import definition, draw, zeros

EARLY, LATE, FENCE, AHEAD = 1, 2, 3, 4  # values of `dependent`; 0 is a plain launch
FIRST = (9, 0)  # the first compute capability with PDL

_mode: ContextVar[int] = ContextVar("gpubound_chained", default=0)


@contextmanager
def chained(device: torch.device, mode: int = EARLY) -> Iterator[None]:
    """Launch the kernels in the block with PDL, if `device` supports it."""
    before = _mode.set(mode if can_chain(device) else 0)
    try:
        yield
    finally:
        _mode.reset(before)


@contextmanager
def ahead() -> Iterator[None]:
    """Let kernels of a chain in the block read before they wait: their inputs were written before the last fence."""
    before = _mode.set(AHEAD if _mode.get() else 0)
    try:
        yield
    finally:
        _mode.reset(before)


def chain_mode() -> int:
    """Return the PDL mode of a kernel that is launched now: a value of `dependent`."""
    return 0 if torch.compiler.is_compiling() else _mode.get()


@constant
def can_chain(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST


Weight = TypeVar("Weight", bound="Tensor | Packed")

MOST = 32  # rows of a tiled product
WRITTEN = "it is written in place"
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
ACTIVATED = ACTIVATIONS | {"relu": F.relu, "relu2": lambda x: F.relu(x).square()}  # of products without a gate


class Norm(NamedTuple):
    """An RMSNorm, as the ops of a decoding step take one."""

    weight: Tensor
    eps: float
    offset: float = 0.0  # the gain is offset + weight


def norm_product(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor | Packed,
    k_weight: Tensor | None = None,
    v_weight: Tensor | None = None,
    bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    out: Tensor | None = None,
    best: Tensor | None = None,
    arg: Tensor | None = None,
    dependent: int = 0,
    cap: float = 0.0,
    adapters: StepAdapters | None = None,
    activation: str = "",
    by: Tensor | None = None,
    tiled: bool = False,
) -> Tensor:
    """out (B, rows, fp32) = rms_norm(x) times one weight, or two or three (q, k, v) concatenated. One may be packed.

    With `cap`, cap · tanh(out / cap) of it. With an activation, one of ACTIVATED, activation(out) · by, in any dtype; `by`
    (B, rows, fp32) may be absent.

    `adapters` of the weights add to it, as to the results of the products below: decode_adapters.py.

    `best` (B, P, fp32) and `arg` (B, P, int32) also receive maxima. The weight's rows are split into P ranges of equal
    length, a power of two such as 8 or 16. For each range they hold the largest value (NaN if it contains a NaN) and its row.
    The largest of all is then one of P.
    """
    weights, rows = side_by_side("norm_product", weight, k_weight, v_weight)
    if out is None:
        out = torch.empty(x.shape[0], rows, device=x.device, dtype=torch.float32)
    others = {"adapters": adapters, "activation": activation, "by": by}
    if isinstance(weight, Packed):
        refuse("norm_product", "a packed weight", k_weight=k_weight, **others, tiled=tiled)
    elif tiled:
        refuse("norm_product", "tiled", best=best, cap=cap, **others)
        check_rows("norm_product", x)
    check_stream("norm_product", x, norm, *weights, rounded=tiled)
    check_biases("norm_product", (bias, k_bias, v_bias), weights)
    require("norm_product", "out", out, None if activation else torch.float32, (x.shape[0], rows), x.device, WRITTEN)
    check_best("norm_product", best, arg, rows, x)
    check_activation("norm_product", activation or "silu", ACTIVATED)
    if by is not None:
        require("norm_product", "by", by, torch.float32, tuple(out.shape), out.device, "it has one number for each of out")
    if (best is not None) if activation else by is not None:
        raise ValueError("norm_product: best is of outputs without an activation, and by of those with one; leave one out.")
    if isinstance(weight, Packed):
        kernel = implementation("quantized_norm_product", x if norm is None else norm.weight, None, call_shape(norm, cap))
        kernel(x, norm, weight, bias, out, best, arg, dependent, cap)
        return out
    operands = x, norm, weight, k_weight, v_weight, bias, k_bias, v_bias, out
    if tiled:
        implementation("tiled_norm_product", weight, None, call_shape(norm))(*operands, dependent)
        return out
    check_adapters("norm_product", adapters, x, [len(w) for w in weights])
    shape = call_shape(norm, cap, added=adapters_shape(adapters), unit=(activation, by is not None) if activation else ())
    kernel = implementation("norm_product", weight, None, shape)
    kernel(*operands, best, arg, dependent, cap, adapters, activation, by)
    return out


@definition(
    lambda g, offset=0.0, cap=0.0, rank=0, fp32=True, activation="", by=False: (
        *draw_stream(g, 48, offset), *_draw_qkv_outputs(g, activation, cap), 0, cap,
        _draw_adapters(g, 48, (32, 16, 16), rank, fp32), activation, draw(g, 2, 64).detach() if by else None,
    )
)  # fmt: skip
def norm_product_reference(
    x, norm, weight, k_weight, v_weight, bias, k_bias, v_bias, out, best, arg, dependent=0, cap=0.0, adapters=None,
    activation="", by=None,
):  # fmt: skip
    normed = rms_normed(x, norm)
    parts = [(weight, bias), (k_weight, k_bias), (v_weight, v_bias)]
    products = [_times(normed, w, b) for w, b in parts if w is not None]
    y = capped_(torch.cat([y + _added(adapters, number, normed) for number, y in enumerate(products)], -1), cap)
    y = ACTIVATED[activation](y) if activation else y
    out.copy_(y if by is None else y * by)
    if best is not None and arg is not None:
        size = 1 << (-(-out.shape[1] // best.shape[1]) - 1).bit_length()  # rows of a partial maximum
        padded = F.pad(out, (0, size * best.shape[1] - out.shape[1]), value=float("-inf"))
        largest = padded.view(*best.shape, size).max(-1)
        best.copy_(largest.values)  # NaN if any is
        arg.copy_(largest.indices + torch.arange(best.shape[1], device=x.device) * size)
    return out, best, arg


def norm_gate_up(
    x: Tensor,
    norm: Norm | None,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    out: Tensor | None = None,
    dependent: int = 0,
    activation: str = "silu",
    adapters: StepAdapters | None = None,
    tiled: bool = False,
) -> Tensor:
    """out (B, rows, in gate's dtype) = activation(n gateᵀ) · (n upᵀ), where n is the RMSNorm of x; one of ACTIVATIONS.

    `quantized_norm_gate_up` takes both in one packed weight.
    """
    if out is None:
        out = torch.empty(x.shape[0], gate.shape[0], device=x.device, dtype=gate.dtype)
    check_stream("norm_gate_up", x, norm, gate, up, rounded=tiled)
    require("norm_gate_up", "up", up, gate.dtype, tuple(gate.shape), x.device, "it is multiplied with gate, row by row")
    check_biases("norm_gate_up", (gate_bias, up_bias), [gate, up])
    require("norm_gate_up", "out", out, gate.dtype, (x.shape[0], gate.shape[0]), x.device, WRITTEN)
    check_activation("norm_gate_up", activation)
    operands = x, norm, gate, up, gate_bias, up_bias, out, dependent, activation
    if tiled:
        refuse("norm_gate_up", "tiled", adapters=adapters)
        check_rows("norm_gate_up", x)
        return implementation("tiled_norm_gate_up", gate, None, call_shape(norm, activation))(*operands)
    check_adapters("norm_gate_up", adapters, x, [len(gate), len(up)])
    kernel = implementation("norm_gate_up", gate, None, call_shape(norm, activation, added=adapters_shape(adapters)))
    return kernel(*operands, adapters)


@definition(
    lambda g, offset=0.0, activation="silu", rank=0, fp32=True: (
        *(*draw_stream(g, 48, offset), *draw_gate_up(g), 0, activation), _draw_adapters(g, 48, (40, 40), rank, fp32)
    )
)  # fmt: skip
def norm_gate_up_reference(x, norm, gate, up, gate_bias, up_bias, out, dependent=0, activation="silu", adapters=None):
    normed = rms_normed(x, norm)
    gated = ACTIVATIONS[activation](_times(normed, gate, gate_bias) + _added(adapters, 0, normed))
    return out.copy_(gated * (_times(normed, up, up_bias) + _added(adapters, 1, normed)))


def add_product(
    h: Tensor,
    weight: Tensor | Packed,
    bias: Tensor | None,
    x: Tensor,
    dependent: int = 0,
    adapters: StepAdapters | None = None,
    copy: Tensor | None = None,
    keep: Tensor | None = None,
    tiled: bool = False,
) -> Tensor:
    """x += h weightᵀ, in place: the output and the down product, with the residual.

    keep: rows of x's width, such as columns of a wider tensor, that become the new x, too. So does copy, of a tiled product, in
    the weight's dtype
    """
    check_add("add_product", h, weight, bias, x.device)
    require("add_product", "x", x, torch.float32, (h.shape[0], weight.shape[0]), x.device, WRITTEN)
    check_keep("add_product", "keep", keep, x)
    if isinstance(weight, Packed):
        refuse("add_product", "a packed weight", adapters=adapters, keep=keep, copy=copy, tiled=tiled)
        return implementation("quantized_add_product", h)(h, weight, bias, x, dependent)
    if tiled:
        refuse("add_product", "tiled", adapters=adapters)
        check_rows("add_product", h)
        if copy is not None:
            require("add_product", "copy", copy, weight.dtype, tuple(x.shape), x.device, WRITTEN)
        return implementation("tiled_add_product", weight)(h, weight, bias, x, dependent, copy, keep)
    refuse("add_product", "tiled=False", copy=copy)
    check_adapters("add_product", adapters, h, [len(weight)])
    kernel = implementation("add_product", weight, None, adapters_shape(adapters))
    return kernel(h, weight, bias, x, dependent, adapters, keep)


@definition(
    lambda g, rank=0, fp32=True: (
        draw(g, 2, 40), draw(g, 48, 40), None, draw(g, 2, 48).detach(), 0, _draw_adapters(g, 40, (48,), rank, fp32)
    )
)  # fmt: skip
def add_product_reference(h, weight, bias, x, dependent=0, adapters=None, keep=None):
    h = h.to(x.dtype)
    x.add_(_times(h, weight, bias) + _added(adapters, 0, h))
    return x if keep is None else (x, keep.copy_(x))


def send_product(h: Tensor, weight: Tensor, bias: Tensor | None, mail: Mail, dependent: int = 0) -> tuple[Tensor, ...]:
    """Write h weightᵀ, a device's part of a sum that `take_words` adds to the stream, into the boxes of `mail`."""
    check_add("send_product", h, weight, bias, h.device)
    check_mail("send_product", mail, (len(h), len(weight)), h.device, fills=True)
    return implementation("send_product", weight)(h, weight, bias, mail, dependent)


@definition(lambda g: (draw(g, 2, 40), draw(g, 48, 40), None, example_mail(g, 2, 2, 48)))
def send_product_reference(h, weight, bias, mail, dependent=0):
    mail.post(_times(h.float(), weight, bias))
    return mail.boxes


def check_add(op: str, h: Tensor, weight: Tensor | Packed, bias: Tensor | None, device: torch.device) -> None:
    if isinstance(weight, Tensor):
        require(op, "weight", weight, None, ("outputs", "inputs"), device, "the kernel reads row after row")
    require(op, "h", h, None, (*h.shape[:1], weight.shape[1]), device, "the kernel reads row after row")
    if isinstance(weight, Packed):
        check_packed(op, weight, h)
    check_biases(op, (bias,), [weight])


def refuse(op: str, what: str, **others: Any) -> None:
    """Raise ValueError if one of `others` is passed together with `what`."""
    if refused := [name for name, value in others.items() if isinstance(value, Tensor) or value]:
        raise ValueError(f"{op}: got {refused[0]} with {what}, which no kernel takes together; leave one of them out.")


def check_rows(op: str, x: Tensor) -> None:
    if len(x) > MOST:
        raise ValueError(f"{op}: tiled takes at most {MOST} rows, got {len(x)}; more are worth a matrix product of torch's.")


def check_keep(op: str, name: str, to: Tensor | None, x: Tensor) -> None:
    """Raise ValueError unless `to` can take the rows of x."""
    if to is not None and (to.dtype, to.shape, to.device, to.stride(-1)) != (x.dtype, x.shape, x.device, 1):
        raise ValueError(
            f"{op}: {name} must be {x.dtype} {tuple(x.shape)} on {x.device}, each row in one piece, got {to.dtype} "
            f"{tuple(to.shape)} on {to.device} with strides {to.stride()}; give columns of a wider tensor, or one of x's shape."
        )


def rms_normed(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    gain = norm.weight.to(x.dtype)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * (gain + norm.offset if norm.offset else gain)


def capped_(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap), in place; x unchanged if cap is 0."""
    return x.div_(cap).tanh_().mul_(cap) if cap else x


def _times(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def side_by_side(op: str, *present: Weight | None) -> tuple[list[Weight], int]:
    """The weights that are there, one, two or three, and how many rows they have together."""
    if present[1] is None and present[2] is not None:
        raise ValueError(f"{op}: got v_weight without k_weight; of two weights pass the second as k_weight.")
    weights = [weight for weight in present if weight is not None]
    return weights, sum(weight.shape[0] for weight in weights)


def check_stream(op: str, x: Tensor, norm: Norm | None, *weights: Tensor | Packed, rounded: bool = False) -> None:
    """rounded: x may be in the weights' dtype."""
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    dtypes = dict.fromkeys((torch.float32, *(w.dtype for w in plain[:1] if rounded)))
    if x.dim() != 2 or x.dtype not in dtypes or not x.is_contiguous():
        names = " or ".join(map(str, dtypes))
        raise ValueError(f"{op}: x must be a contiguous {names} (rows, hidden), got {x.dtype} {tuple(x.shape)}.")
    if norm is not None:
        require(op, "norm.weight", norm.weight, None, x.shape[1:], x.device, "it has one weight for each column of x")
    for weight in plain:
        wanted = "outputs", x.shape[1]
        require(op, "a weight", weight, plain[0].dtype, wanted, x.device, "all have x's width and one dtype")
    for packed in (weight for weight in weights if isinstance(weight, Packed)):
        if packed.columns != x.shape[1]:
            raise ValueError(f"{op}: the weight must have {x.shape[1]} columns to match x, got {packed.columns}.")
        check_packed(op, packed, x)


def check_biases(op: str, biases: tuple[Tensor | None, ...], weights: Sequence[Tensor | Packed]) -> None:
    """None at all, or one of the weights' rows for each."""
    present = [bias for bias in biases if bias is not None]
    if present and (len(present) != len(weights) or biases[0] is None):
        raise ValueError(f"{op}: got {len(present)} biases for {len(weights)} weights; pass one for each, or none.")
    why = "it has one number for each row of its weight"
    for bias, weight in zip(present, weights):
        dtype = None if bias is present[0] else present[0].dtype
        require(op, "a bias", bias, dtype, weight.shape[:1], weight.device, why)


def check_best(op: str, best: Tensor | None, arg: Tensor | None, rows: int, x: Tensor) -> None:
    """Check the outputs of the search for the greatest of `rows` outputs."""
    if (best is None) != (arg is None):
        raise ValueError(f"{op}: best and arg must be given together and have one shape; pass both or neither.")
    if best is None or arg is None:
        return
    columns = best.shape[1] if best.dim() == 2 else 0
    if not columns or -(-rows // (1 << (-(-rows // columns) - 1).bit_length())) != columns:
        raise ValueError(
            f"{op}: best has {columns} columns, but {rows} rows do not make that many ranges of a power of two; "
            "give it ceil(rows / 16)."
        )
    require(op, "best", best, torch.float32, (len(x), columns), x.device, WRITTEN)
    require(op, "arg", arg, torch.int32, (len(x), columns), x.device, WRITTEN)


def check_activation(op: str, activation: str, known: Collection[str] = ACTIVATIONS) -> None:
    if activation not in known:
        raise ValueError(f"{op}: activation must be one of {', '.join(known)}, got {activation!r}.")


def call_shape(norm: Norm | None, *rest: Any, added: tuple = (), unit: tuple = ()) -> tuple:
    """Return the shape of a call: the arguments of the op's example, none for the default ones.

    added: `adapters_shape` of its adapters; unit: an activation, and whether its result is multiplied by another
    """
    if unit:
        return None if norm is None else norm.offset, *rest, *(added or (0, True)), *unit
    if added:
        return None if norm is None else norm.offset, *rest, *added
    if norm is None:
        return None, *rest
    return (norm.offset, *rest) if norm.offset or rest not in ((), (0.0,), ("silu",)) else ()


def draw_stream(
    generator: torch.Generator, columns: int, offset: float | None = 0.0, rows: int = 2
) -> tuple[Tensor, Norm | None]:
    """x and its norm; offset None: without one."""
    x, weight = draw(generator, rows, columns).detach(), draw(generator, columns)
    return x, None if offset is None else Norm(weight, 1e-6, offset)


def draw_qkv(generator: torch.Generator, hidden: int = 48, heads: int = 32) -> tuple[Tensor, ...]:
    """Weights and biases."""
    parts = heads, heads // 2, heads // 2
    return *(draw(generator, rows, hidden) for rows in parts), *(draw(generator, rows) for rows in parts)


def below_cap(cap: float, *weights: Tensor) -> tuple[Tensor, ...]:
    """Scale an example's weights, with which outputs are up to 55, by its cap: of outputs far beyond it several would round to
    it, and which of these is the largest would be the rounding's choice."""
    for t in weights if cap else ():
        t.detach().mul_(cap / 32)
    return weights


def _draw_qkv_outputs(generator, activation="", cap=0.0):
    if activation:
        return *draw_qkv(generator), draw(generator, 2, 64), None, None
    return *below_cap(cap, *draw_qkv(generator)), zeros(2, 64), zeros(2, 4), torch.zeros(2, 4, dtype=torch.int32, device="cpu")


def _added(adapters: StepAdapters | None, number: int, x: Tensor) -> Tensor | float:
    return 0.0 if adapters is None else adapters.added(number, x)


def _draw_adapters(g, inputs, outputs, rank, fp32):
    return draw_adapters(g, inputs, outputs, rank, fp32) if rank else None


def draw_gate_up(generator: torch.Generator, rows: int = 2, hidden: int = 48, width: int = 40) -> tuple[Tensor, ...]:
    weights, biases = (draw(generator, width, hidden) for _ in range(2)), (draw(generator, width) for _ in range(2))
    return *weights, *biases, zeros(rows, width)


def norm_rows(x: Tensor, norm: Norm, out: Tensor, dependent: int = 0, parts: Tensor | None = None, groups: int = 1) -> Tensor:
    """out (B, hidden, in any dtype) = rms_norm(x), such as the input of a product on tensor cores.

    With parts (P, B, hidden, fp32), of `split_product`, x += their sum before that, in place. With groups, each of so many
    parts of a row is normed by itself.
    """
    check_stream("norm_rows", x, norm)
    require("norm_rows", "out", out, None, tuple(x.shape), x.device, WRITTEN)
    if parts is not None:
        require("norm_rows", "parts", parts, torch.float32, ("parts", *x.shape), x.device, "each is a part of a sum for x")
    if groups < 1 or x.shape[1] % groups or (groups > 1 and parts is not None):
        raise ValueError(
            f"norm_rows: groups: got {groups} for {x.shape[1]} columns, wanted a divisor of them, and without parts."
        )
    shape = call_shape(norm) if parts is None else (norm.offset, True)
    shape = shape if groups == 1 else (norm.offset, False, groups)
    implementation("norm_rows", norm.weight, None, shape)(x, norm, out, dependent, parts, groups)
    return out


@definition(lambda g, offset=0.0, parts=False, groups=1: (
    *draw_stream(g, 48, offset), zeros(2, 48), 0, draw(g, 3, 2, 48).detach() if parts else None, groups
))  # fmt: skip
def norm_rows_reference(x, norm, out, dependent=0, parts=None, groups=1):
    x = x if parts is None else x.add_(parts.sum(0))
    out.copy_(rms_normed(x, norm) if groups == 1 else group_normed(x, norm, groups))
    return out if parts is None else (out, x)


def group_normed(x: Tensor, norm: Norm, groups: int) -> Tensor:
    """Return the RMSNorm of each of `groups` parts of x (..., width), in the dtype of x."""
    parts = x.unflatten(-1, (groups, -1))
    parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + norm.eps)
    return parts.flatten(-2) * (norm.weight.to(x.dtype) + norm.offset)


def add_norm(y: Tensor, norm: Norm, x: Tensor, dependent: int = 0, factor: Tensor | None = None) -> Tensor:
    """x += rms_norm(y), both fp32 (B, hidden), and y = 0: the next `add_product` into y begins from nothing.

    With a factor (1,), x is multiplied by it after the addition.
    """
    check_stream("add_norm", x, norm)
    require("add_norm", "y", y, torch.float32, tuple(x.shape), x.device, WRITTEN)
    if factor is not None:
        require("add_norm", "factor", factor, None, (1,), x.device, "it is one number for the stream")
    shape = call_shape(norm) if factor is None else (norm.offset, True)
    return implementation("add_norm", norm.weight, None, shape)(y, norm, x, dependent, factor)


@definition(lambda g, offset=0.0, factor=False: (
    *draw_stream(g, 48, offset), draw(g, 2, 48).detach(), 0, draw(g, 1).detach() if factor else None
))  # fmt: skip
def add_norm_reference(y, norm, x, dependent=0, factor=None):
    x.add_(rms_normed(y, norm))
    y.zero_()
    return x if factor is None else x.mul_(factor)
