"""Richards curves as ops: a curve, the gated unit of two, and dynamic tanh in place of a norm.

    richards        y = f(x)
    richards_glu    h = x1 · f_v(x1) · f_g(x2)               of one packed tensor [x1 | x2]
    dynamic_tanh    y = tanh(alpha · x) · weight + bias      Zhu et al. 2025, arXiv 2503.10622

A Richards curve is a logistic function with more freedom, of five parameters, some of them learned:

    f = gain · (1 + e^(−rate · (x − m)))^(−1/nu) + bias        rate = k, with `tail` k · nu

nu bends one end more than the other. Far to the left f falls as e^(k x / nu), with `tail` as e^(k x), for any nu.

Learned parameters are one vector `free`. nu and k must stay positive: `free` has softplus⁻¹(p − LEAST).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.dispatch import TOO_WIDE, WIDEST, implementation, require_device, require_last, require_residual, require_rows
from ....kernels.gated import check_half
from ....kernels.registry import definition, draw, load

NAMES = ("nu", "k", "m", "gain", "bias")
POSITIVE = ("nu", "k")
LEAST = 1e-6  # lower bound of a learned positive parameter: softplus may be 0, and nu is a divisor


@dataclass(frozen=True)
class Curve:
    """A curve: its learned parameters, and the (initial) value of each. With the default values f is the logistic sigmoid."""

    learned: tuple[str, ...] = ()
    tail: bool = False
    nu: float = 1.0
    k: float = 1.0
    m: float = 0.0
    gain: float = 1.0
    bias: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.learned, str):
            raise ValueError(f"Curve: learned must be names in a tuple, got {self.learned!r}.")
        object.__setattr__(self, "learned", tuple(self.learned))
        for name, value in zip(NAMES, self.values):
            if not math.isfinite(value) or (name in POSITIVE and value < 2 * LEAST):
                wanted = f"a number from {2 * LEAST:g} up" if name in POSITIVE else "a finite number"
                raise ValueError(f"Curve: {name} must be {wanted}, got {value}; start from its default.")
        unknown = [name for name in self.learned if name not in NAMES]
        if unknown or len(set(self.learned)) < len(self.learned):
            raise ValueError(f"Curve: learned must name each once, some of {', '.join(NAMES)}, got {', '.join(self.learned)}.")

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(float(getattr(self, name)) for name in NAMES)

    def start(self) -> list[float]:
        """Return the initial `free`."""
        values = ((name, float(getattr(self, name))) for name in self.learned)
        return [_inverse_softplus(value - LEAST) if name in POSITIVE else value for name, value in values]

    @cached_property
    def constants(self) -> tuple:
        """Compile-time constants of a kernel: the index of each parameter in `free`, or -1; its value, if fixed; tail."""
        places = [self.learned.index(name) if name in self.learned else -1 for name in NAMES]
        fixed = [0.0 if place >= 0 else value for place, value in zip(places, self.values)]
        return (*places, *fixed, self.tail)

    def parameters(self, free: Tensor | None, dtype: torch.dtype) -> list[Tensor | float]:
        """Return all parameters in the order of NAMES, the learned ones as scalars of `dtype`."""
        parameters: list[Tensor | float] = list(self.values)
        for i, name in enumerate(self.learned):
            assert free is not None
            value = free[i].to(dtype)
            parameters[NAMES.index(name)] = LEAST - F.logsigmoid(-value) if name in POSITIVE else value
        return parameters

    def apply(self, x: Tensor, free: Tensor | None) -> Tensor:
        """Compute f(x) in x's dtype: the definition."""
        nu, k, m, gain, bias = self.parameters(free, x.dtype)
        t = -(k * nu if self.tail else k) * (x - m)
        sigma = torch.exp(F.logsigmoid(-t) / nu)  # logsigmoid(−t) is −softplus(t), without softplus's threshold
        return gain * sigma + bias


def _inverse_softplus(p: float) -> float:
    return p + math.log(-math.expm1(-p))


VALUE = Curve(("nu", "k", "m", "bias"), tail=True)
"""Default curve of a value. gain is not learned, since the following GEMM scales h too; bias sets the part of x1 that bypasses
the curve."""
GATE = Curve(("nu", "k", "m"), tail=True)
"""Default curve of a gate, from 0 to 1."""


def richards(x: Tensor, free: Tensor | None, curve: Curve) -> Tensor:
    """Compute f(x) elementwise. `free` has the learned parameters in the order of `curve.learned`, or is None without any."""
    require_last("richards", "x", x, "with a last dimension")
    require_free("richards", "free", free, curve, x)
    return chosen("richards", x, (curve,))(x, free, curve)


@definition(lambda g, curve=VALUE: (draw(g, 3, 40), draw_free(g, curve), curve), gradient=True)
def richards_reference(x, free, curve):
    return curve.apply(_fp32(x), free).to(x.dtype)


def richards_glu(
    packed: Tensor, value_free: Tensor | None, gate_free: Tensor | None, value_curve: Curve, gate_curve: Curve
) -> Tensor:
    """Compute x1 · f_v(x1) · f_g(x2), (..., H), of packed [x1 | x2] (..., 2 H).

    With both curves at their defaults it is silu(x1) · sigmoid(x2).
    """
    _check_glu("richards_glu", packed, value_free, gate_free, value_curve, gate_curve)
    shape = packed.shape[-1] // 2, value_curve, gate_curve
    return chosen("richards_glu", packed, shape)(packed, value_free, gate_free, value_curve, gate_curve)


def _glu_example(g, cols=40, value=VALUE, gate=GATE):
    return draw(g, 16, 2 * cols), draw_free(g, value), draw_free(g, gate), value, gate


@definition(_glu_example, gradient=True)
def richards_glu_reference(packed, value_free, gate_free, value_curve, gate_curve):
    x1, x2 = _fp32(packed).chunk(2, -1)
    return (x1 * value_curve.apply(x1, value_free) * gate_curve.apply(x2, gate_free)).to(packed.dtype)


def richards_glu_backward(
    dh: Tensor,
    packed: Tensor,
    value_free: Tensor | None,
    gate_free: Tensor | None,
    value_curve: Curve,
    gate_curve: Curve,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradient of packed (..., 2 H), h, and the fp32 gradients of value_free and gate_free, from dh (..., H).

    It is for an autograd.Function that multiplies by h and does not save it: h is recomputed.
    """
    _check_glu("richards_glu_backward", packed, value_free, gate_free, value_curve, gate_curve)
    check_half("richards_glu_backward", dh, packed, "packed", "richards_glu")
    arguments = dh, packed, value_free, gate_free, value_curve, gate_curve
    return chosen("richards_glu_backward", packed, (dh.shape[-1], value_curve, gate_curve))(*arguments)


@definition(lambda g, cols=40, value=VALUE, gate=GATE: (draw(g, 16, cols), *_glu_example(g, cols, value, gate)))
def richards_glu_backward_reference(dh, packed, value_free, gate_free, value_curve, gate_curve):
    inputs = [None if t is None else _fp32(t.detach()).requires_grad_() for t in (packed, value_free, gate_free)]
    assert inputs[0] is not None
    with torch.enable_grad():
        h = richards_glu_reference(inputs[0], inputs[1], inputs[2], value_curve, gate_curve)
        gradients = iter(torch.autograd.grad(h, [t for t in inputs if t is not None], dh.to(h.dtype)))
    gradient, value, gate = (None if t is None else next(gradients) for t in inputs)
    assert gradient is not None
    return gradient.to(packed.dtype), h.detach().to(packed.dtype), value, gate


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute tanh(alpha · x) · weight + bias, in place of a norm, without statistics. `alpha` is a tensor of one element."""
    _check_tanh("dynamic_tanh", x, alpha, weight, bias)
    unable = TOO_WIDE if x.shape[-1] > WIDEST else None
    return implementation("dynamic_tanh", x, unable, x.shape[-1:])(x, alpha, weight, bias)


@definition(lambda g, cols=40: (draw(g, 3, cols), draw(g, 1), draw(g, cols), draw(g, cols)), gradient=True)
def dynamic_tanh_reference(x, alpha, weight, bias=None):
    x32 = _fp32(x)
    return _scaled(torch.tanh(alpha.to(x32.dtype).reshape(()) * x32), weight, bias).to(x.dtype)


def add_dynamic_tanh(
    x: Tensor, residual: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (dynamic_tanh(s), s) with s = x + residual, in one pass."""
    _check_tanh("add_dynamic_tanh", x, alpha, weight, bias)
    require_residual("add_dynamic_tanh", residual, x)
    unable = TOO_WIDE if x.shape[-1] > WIDEST else None
    return implementation("add_dynamic_tanh", x, unable, x.shape[-1:])(x, residual, alpha, weight, bias)


@definition(lambda g, cols=40: (draw(g, 3, cols), draw(g, 3, cols), draw(g, 1), draw(g, cols), draw(g, cols)), gradient=True)
def add_dynamic_tanh_reference(x, residual, alpha, weight, bias=None):
    s = x + residual  # rounded once to x.dtype
    return dynamic_tanh_reference(s, alpha, weight, bias), s


def chosen(op: str, x: Tensor, shape: tuple, unable: str | None = None) -> Callable:
    """Return the op's implementation. torch.compile gets the definition, since it fuses pointwise functions itself."""
    return load("reference", op) if torch.compiler.is_compiling() else implementation(op, x, unable, shape)


def require_free(op: str, name: str, free: Tensor | None, curve: Curve, x: Tensor) -> None:
    """Raise ValueError unless `free` has the learned parameters of `curve`, on x's device."""
    if (free is None) if curve.learned else (free is not None):
        wanted = f"hold its learned {', '.join(curve.learned)}" if curve.learned else "be None"
        got = "None" if free is None else f"shape {tuple(free.shape)}"
        raise ValueError(f"{op}: {name} must {wanted} to match its curve, got {got}; RichardsCurve keeps both together.")
    if free is None:
        return
    if free.shape != (len(curve.learned),) or not free.is_floating_point():
        raise ValueError(
            f"{op}: {name} must be floating point of shape ({len(curve.learned)},), for {', '.join(curve.learned)}, "
            f"got {free.dtype} {tuple(free.shape)}; begin with its curve's start()."
        )
    require_device(op, x, **{name: free})


def draw_free(generator: torch.Generator, curve: Curve) -> Tensor | None:
    """Draw `free` for a self-test, near the initial values, all different."""
    if not curve.learned:
        return None
    start = torch.tensor(curve.start(), device="cpu", dtype=torch.float32)
    return (start + 0.2 * draw(generator, len(curve.learned)).detach()).requires_grad_()


def _check_glu(op: str, packed: Tensor, value_free: Tensor | None, gate_free: Tensor | None, value: Curve, gate: Curve) -> None:
    require_last(op, "packed", packed, "with a last dimension")
    if packed.shape[-1] % 2:
        raise ValueError(
            f"{op}: packed [x1 | x2] needs an even last dimension, got {tuple(packed.shape)}; join two halves of one width."
        )
    require_free(op, "value_free", value_free, value, packed)
    require_free(op, "gate_free", gate_free, gate, packed)


def _check_tanh(op: str, x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    require_rows(op, x, weight=weight, bias=bias)
    if alpha.numel() != 1:
        raise ValueError(f"{op}: alpha must hold one element, got shape {tuple(alpha.shape)}; reduce it before the call.")
    require_device(op, x, alpha=alpha)


def _scaled(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = y * weight.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def _fp32(x: Tensor) -> Tensor:
    """Convert to at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
