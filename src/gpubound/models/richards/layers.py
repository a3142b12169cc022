"""Layers of Richards models: curves, the gated MLP of two curves, a tanh in place of a norm, polynomial attention and a
recurrent mixer.

RichardsGLU computes down(x1 · f_v(x1) · f_g(x2)), where x1 is the gate's product and x2 that of up. With a fixed logistic f_v,
x1 · f_v(x1) is the silu(gate) of a SwiGLU, so only the curve on x2 differs.

Legend: B batch, T tokens, H query heads, K key and value heads, D width of a head, L length of a cache.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...kernels.dispatch import Call
from ...layers.attention import Attention, Rope
from ...layers.block import Unit, gated_down, trained_weight
from ...layers.fused_weights import Kernels, Projecting, Stacked, run_linear
from ...layers.linear_product import DENSE, LEAST_BYTES, attach_recipe, format_of, multiply
from .kernels import (
    Curve,
    add_dynamic_tanh,
    dynamic_tanh,
    poly_attention,
    poly_attention_step,
    rg_lru,
    richards,
    richards_glu,
    richards_glu_backward,
)
from .kernels.poly_attention import EVEN
from .kernels.rg_lru import POWER
from .kernels.richards import GATE, NAMES, VALUE

REMEMBERED = (0.9, 0.999)  # range of a channel's initial factor of the state, for a token whose gate is open
SHUT = -1e4  # a gate's logit: its sigmoid is 0 in any dtype


class CurveNumbers(nn.Module):
    """Learned parameters of a curve: one small vector `free` in at least fp32, or None without any.

    A layer whose kernel includes a curve has this as a child.
    """

    in_parents_row = True  # in a placement's table

    def __init__(self, curve: Curve, device=None, dtype=None) -> None:
        super().__init__()
        self.curve = curve
        self.register_parameter("free", nn.Parameter(_scalars(curve.start(), device, dtype)) if curve.learned else None)

    def values(self) -> dict[str, float]:
        """Return the current values of the five parameters. Synchronises with the device, so not for use in a step."""
        free: Any = self._parameters["free"]
        values = self.curve.parameters(None if free is None else free.detach().double().cpu(), torch.float64)
        return {name: float(value) for name, value in zip(NAMES, values)}

    def extra_repr(self) -> str:
        return f"learns {', '.join(self.curve.learned) or 'nothing'}"


class RichardsCurve(CurveNumbers):
    """f of each element."""

    def forward(self, x: Tensor) -> Tensor:
        return richards(x, self._parameters["free"], self.curve)

    def fused_kernels(self) -> Kernels:
        return "{}", ("richards",)


class RichardsGLU(Projecting):
    """Gate and up as one GEMM, both curves and the multiplication as one kernel, then down. No bias."""

    PROJECTIONS: tuple[str, ...] = ("gate_proj", "up_proj")  # together [x1 | x2]

    recompute_bytes = LEAST_BYTES

    def __init__(self, hidden: int, intermediate: int, device=None, dtype=None) -> None:
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, **where)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, **where)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, **where)
        self.value, self.gate = CurveNumbers(VALUE, **where), CurveNumbers(GATE, **where)
        self.unit = RichardsUnit()
        self.stacked = Stacked()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)

    def mix(self, x: Tensor) -> Tensor:
        gates = self.stacked.joined(self.projections())
        packed = torch.cat(self.one_by_one(x), -1) if gates is None else multiply(x, gates)
        children: dict[str, Any] = self._modules
        down, free = children["down_proj"], [children[name]._parameters["free"] for name in ("value", "gate")]
        weight = trained_weight(down) if torch.is_grad_enabled() and not torch.compiler.is_compiling() else None
        if weight is not None and packed.nbytes // 2 >= self.recompute_bytes and format_of(weight) is DENSE:
            return gated_down(packed, weight, self.unit, free)
        h = self.unit.forward(packed, *free)
        return run_linear(down, attach_recipe(h, self.recompute_bytes, self.unit.forward, packed, *free))

    def fused_kernels(self) -> Kernels:
        return f"{self.product_words('gate and up')}; {{}}", ("richards_glu",)


class RichardsUnit(Unit):
    """x1 · f_v(x1) · f_g(x2). `small` are the learned parameters of both curves."""

    def forward(self, packed: Tensor, *small: Tensor | None) -> Tensor:
        value, gate = small
        return richards_glu(packed, value, gate, VALUE, GATE)

    def backward(
        self, dh: Tensor, packed: Tensor, *small: Tensor | None, overwrite: bool = False
    ) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        value, gate = small
        gradient, h, *small_gradients = richards_glu_backward(dh, packed, value, gate, VALUE, GATE)
        return gradient, h, small_gradients


def richards_glu_calls(inner: int) -> tuple[Call, ...]:
    """Return the ops that a RichardsGLU of width `inner` calls, so that the first step can compile in parallel."""
    return ("richards_glu", (inner, VALUE, GATE)), ("richards_glu_backward", (inner, VALUE, GATE))


class DynamicTanh(nn.Module):
    """y = tanh(alpha · x) · weight + bias in place of a norm, without statistics.

    It has RMSNorm's methods. `add` also adds the last sub-layer's output to the residual stream, in the same pass.

    alpha: initial value of the one learned factor
    """

    OPS = ("dynamic_tanh", "add_dynamic_tanh")
    recompute_bytes = LEAST_BYTES

    def __init__(self, hidden: int, alpha: float = 0.5, device=None, dtype=None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(hidden, device=device, dtype=dtype))
        self.alpha = nn.Parameter(torch.full((1,), alpha, device=device, dtype=_at_least_fp32(dtype)))

    def _small(self) -> list[Any]:
        return [self._parameters[name] for name in ("alpha", "weight", "bias")]

    def forward(self, x: Tensor) -> Tensor:
        small = self._small()
        return attach_recipe(dynamic_tanh(x, *small), self.recompute_bytes, dynamic_tanh, x, *small)

    def add(self, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output for the new residual stream x + pending, and the new stream. With pending None, the stream is x."""
        if pending is None:
            return self.forward(x), x
        small = self._small()
        # Under autocast GEMMs return 16 bits, and the stream stays fp32.
        y, stream = add_dynamic_tanh(x, pending.to(x.dtype), *small)
        return attach_recipe(y, self.recompute_bytes, dynamic_tanh, stream, *small), stream

    def fused_kernels(self) -> Kernels:
        return "{}", self.OPS

    def extra_repr(self) -> str:
        return str(len(self.weight))


class PolyAttention(Attention):
    """Attention with weights φ = scale · (a s̃^p + b) instead of softmax: degree p, scores s̃, learned a, b and scale.

    A row's weights are not normalised, so a token with more keys has a larger output. `scale` is initially 1 / √positions: a
    sum over all positions then has about the size of one value. A degree above 1 needs small scores: a soft clip bounds them,
    and `qk_norm` normalises q and k.

    soft_clip  s̃ is clipped softly to ±soft_clip; 0: not clipped
    window     number of last tokens that a token attends to; 0: all
    gates      each head of each token is multiplied by a Richards curve, from 0 to 1, of a linear function of x
    positions  the longest text to expect, for the initial scale
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        qk_norm: float | None = None,
        causal: bool = True,
        degree: int = 3,
        soft_clip: float = 8.0,
        window: int = 0,
        gates: bool = False,
        positions: int = 1024,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(hidden, heads, kv_heads, head_dim, bias, qk_norm, causal, device, dtype)
        if positions < 1:
            raise ValueError(f"PolyAttention: positions must be at least 1, got {positions}; give the longest text to expect.")
        self.degree, self.soft_clip, self.window = degree, soft_clip, window
        self.coefficients = nn.Parameter(_scalars([1.0, 0.0, positions**-0.5], device, dtype))  # a, b and scale
        if gates:
            self.head_gate = nn.Linear(hidden, heads, device=device, dtype=dtype)
            self.gate_curve = RichardsCurve(GATE, device, dtype)

    def mix(self, x: Tensor, rope: Rope | None, mask: Any = None) -> Tensor:
        """Return (B, T, hidden) of x (B, T, hidden).

        mask  keys that all tokens ignore, in addition to `causal` and `window`: bool, (B, T) or (B, 1, 1, T), True for a key
        """
        q, k, v = self.project(x, rope)
        return self.weighted(q, k, v if mask is None else self._without(v, mask), self.gates(x))

    def weighted(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None) -> Tensor:
        """Return (B, T, hidden) of heads (B, T, H, D), (B, T, K, D) and gates (B, T, H)."""
        coefficients = cast(Tensor, self._parameters["coefficients"])
        y = poly_attention(q, k, v, coefficients, gates, self.degree, self.soft_clip, self.window, self.causal)
        return self.output(y.flatten(-2))

    def step(self, x: Tensor, rope: Rope | None, position: Tensor, cache_k: Tensor, cache_v: Tensor) -> Tensor:
        """Return (B, 1, hidden) of x (B, 1, hidden), a token of each row at `position` (B,) int32.

        Its key and value are written to the caches (B, L, K, D).
        """
        if not self.causal:
            raise ValueError("PolyAttention: step: a token of this layer attends to later tokens; take one with causal=True.")
        q, k, v = (heads[:, 0] for heads in self.project(x, rope))
        gates, coefficients = self.gates(x), cast(Tensor, self._parameters["coefficients"])
        y, *_ = poly_attention_step(
            q, k, v, cache_k, cache_v, position, coefficients, None if gates is None else gates[:, 0], self.degree,
            self.soft_clip, self.window,
        )  # fmt: skip
        return self.output(y.flatten(-2)[:, None])

    def gates(self, x: Tensor) -> Tensor | None:
        """Return the gates (B, T, H), or None without gates."""
        children: dict[str, Any] = self._modules
        return children["gate_curve"](run_linear(children["head_gate"], x)) if "head_gate" in children else None

    def attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError("PolyAttention has no softmax: `weighted` and `step` are what it computes.")

    def fused_kernels(self) -> Kernels:
        words, ops = super().fused_kernels()
        gates = ("richards",) if "head_gate" in self._modules else ()
        return words.removesuffix("; SDPA"), (*ops, "poly_attention", *gates)

    def extra_repr(self) -> str:
        shape = f"degree={self.degree}, soft_clip={self.soft_clip}, window={self.window}"
        return shape if self.causal else f"{shape}, causal=False"

    def _without(self, v: Tensor, mask: Tensor) -> Tensor:
        """Set masked keys' values to zero: they then add nothing, and all their gradients are zero."""
        shape = tuple(mask.shape)
        keys = mask[:, 0, 0] if mask.dim() == 4 and shape[1:3] == (1, 1) else mask
        if keys.dim() != 2 or keys.dtype != torch.bool or keys.shape[1] != v.shape[1] or len(keys) not in (1, len(v)):
            raise ValueError(
                f"PolyAttention: mask must be bool (batch, tokens) or (batch, 1, 1, tokens), True where there is a key, for a "
                f"batch {tuple(v.shape[:2])}, got {mask.dtype} {shape}; causal and window set what each token sees."
            )
        return torch.where(keys[..., None, None], v, 0.0)


def poly_calls(
    heads: int, kv_heads: int, head_dim: int, degree: int, soft_clip: float, window: int, gates: bool, causal: bool
) -> tuple[Call, ...]:
    """Return the ops that `weighted` calls, so that the first step can compile their kernels in parallel."""
    shape = heads, head_dim, kv_heads, degree, soft_clip, gates, window > 0, causal, EVEN
    return ("poly_attention", shape), *((("richards", (GATE,)),) if gates else ())


class RGLRU(Projecting):
    """Recurrent mixer in place of attention, with a state of one value per channel:

    h_t = a_t · h_{t-1} + √(1 − a_t²) · σ(i_t) · x_t with a_t = σ(λ)^(8 σ(r_t)); x, r and i are projections of the input.
    """

    PROJECTIONS: tuple[str, ...] = ("x_proj", "r_proj", "i_proj")  # together [x | r | i]

    def __init__(self, hidden: int, width: int | None = None, bias: bool = True, device=None, dtype=None) -> None:
        super().__init__()
        width, where = width or hidden, {"device": device, "dtype": dtype}
        self.x_proj = nn.Linear(hidden, width, bias=bias, **where)
        self.r_proj = nn.Linear(hidden, width, bias=bias, **where)
        self.i_proj = nn.Linear(hidden, width, bias=bias, **where)
        self.o_proj = nn.Linear(width, hidden, bias=False, **where)
        remembered = torch.empty(width, device=device, dtype=torch.float32).uniform_(*REMEMBERED)
        self.decay = nn.Parameter(remembered.pow_(1 / POWER).logit_().to(self.x_proj.weight.dtype))
        self.stacked = Stacked()

    def forward(self, x: Tensor, rope: Rope | None = None, mask: Tensor | None = None) -> Tensor:
        return self.mix(x, rope, mask)

    def mix(self, x: Tensor, rope: Rope | None = None, mask: Tensor | None = None) -> Tensor:
        """Return (B, T, hidden) of x (B, T, hidden). rope is not used: positions follow from the order of the tokens."""
        if mask is not None:
            raise ValueError("RGLRU: mask: got one, but a recurrence reads all tokens before its own; leave the mask out.")
        return self.step(x, None)[0]

    def step(self, x: Tensor, state: Tensor | None, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the output for the next tokens x, and the state (B, width) after them, beginning with `state`.

        With `lengths` (B,), a row's state is that after `lengths` of its tokens; later ones are padding.
        """
        packed = self.stacked.product(x, self.projections())
        if packed is None:
            packed = torch.cat(self.one_by_one(x), -1)
        if lengths is not None:
            packed = _keep_state(packed, torch.arange(x.shape[1], device=x.device) >= lengths[:, None])
        decay: Any = self._parameters["decay"]
        y, state = rg_lru(packed, decay, state)
        return run_linear(self._modules["o_proj"], y), state

    def fused_kernels(self) -> Kernels:
        return f"{self.product_words('x, r, i')}; {{}}", ("rg_lru",)


def _keep_state(packed: Tensor, padding: Tensor) -> Tensor:
    """Return [x | r | i] with no input and a shut gate where `padding` (B, T), so that the state does not change there."""
    x, r, i = packed.chunk(3, -1)
    padding = padding[..., None]
    return torch.cat([x.masked_fill(padding, 0.0), r.masked_fill(padding, SHUT), i], -1)


def rg_lru_calls() -> tuple[Call, ...]:
    """Return the ops that a training step calls, so that the first step can compile their kernels in parallel."""
    return (("rg_lru", (False,)),)


def _at_least_fp32(dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a layer's few global parameters: 16 bits would round away their updates and save no memory."""
    return torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)


def _scalars(values: Sequence[float], device: Any, dtype: torch.dtype | None) -> Tensor:
    """Return a small tensor on the device, or on the default device.

    It is created on the CPU and moved: a dispatch mode does not see torch.tensor on the meta device, and sharded models are
    initialised by what such a mode has seen (distributed/deferred_init.py).
    """
    target = torch.get_default_device() if device is None else device
    return torch.tensor(values, device="cpu", dtype=_at_least_fp32(dtype)).to(target)
