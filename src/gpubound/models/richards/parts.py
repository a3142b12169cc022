"""The parts that a config of this family names, a line each in a table: what makes one, and what it costs and calls.

A new part is a new line. A mixer has `mix(x, rope, mask)`, an MLP `mix(x)`, a norm `forward(x)` and `add(x, pending)`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ...kernels.dispatch import Call
from ...layers.attention import Attention, turn_calls
from ...layers.mlp import MLP, gated_calls
from ...layers.moe import MoE
from ...layers.norm import RMSNorm
from .kernels.dynamic_tanh import NORM
from .layers.dynamic_tanh import DynamicTanh, RichardsNorm
from .layers.poly_attention import PolyAttention, poly_calls
from .layers.rg_lru import RGLRU, rg_lru_calls
from .layers.richards import RichardsGLU, richards_glu_calls

if TYPE_CHECKING:
    from .config import RichardsConfig

POLY = ("degree", "soft_clip", "window", "max_pos", "gates")


@dataclass(frozen=True)
class NamedPart:
    """One choice of a table."""

    make: Callable[..., nn.Module]  # (config, device=, dtype=)
    products: Callable[["RichardsConfig"], int] = lambda c: 0  # parameters that a token is multiplied by
    calls: Callable[["RichardsConfig"], Iterable[Call]] = lambda c: ()  # ops of a training step, in which shapes
    options: tuple[str, ...] = ()  # fields of the config that not every part reads
    lifts: bool = False  # whether embeddings are multiplied by √hidden, where a norm does not bring them to size 1
    backwards: bool = True  # whether it can let a token see what comes behind it


def _softmax(c: "RichardsConfig", **where: Any) -> nn.Module:
    qk_norm = c.eps if c.qk_norm else None
    return Attention(c.hidden, c.heads, c.kv_heads, c.head_dim, c.qkv_bias, qk_norm, c.causal, **where)


def _projections(c: "RichardsConfig") -> int:
    return 2 * c.hidden * c.head_dim * (c.heads + c.kv_heads)


def _softmax_calls(c: "RichardsConfig") -> Iterable[Call]:
    return turn_calls(c.heads, c.kv_heads, c.head_dim, c.head_dim // 2, c.qk_norm)


def _poly(c: "RichardsConfig", **where: Any) -> nn.Module:
    qk_norm = c.eps if c.qk_norm else None
    own = {option: getattr(c, option) for option in POLY}
    return PolyAttention(
        c.hidden, c.heads, c.kv_heads, c.head_dim, c.qkv_bias, qk_norm, c.causal, **own, positions=c.positions, **where
    )


def _poly_products(c: "RichardsConfig") -> int:
    return _projections(c) + c.gates * c.hidden * c.heads


def _poly_calls(c: "RichardsConfig") -> Iterable[Call]:
    own = {option: getattr(c, option) for option in POLY}
    return *_softmax_calls(c), *poly_calls(c.heads, c.kv_heads, c.head_dim, **own, causal=c.causal)


def _gated(c: "RichardsConfig") -> int:
    return 3 * c.hidden * c.intermediate


def _moe(c: "RichardsConfig", **where: Any) -> nn.Module:
    return MoE(c.hidden, c.intermediate, c.experts, c.slots, c.balance > 0, **where)


def _chosen(c: "RichardsConfig") -> int:
    return c.experts * c.hidden + c.slots * _gated(c)


def _gated_calls(c: "RichardsConfig") -> Iterable[Call]:
    return gated_calls("silu", c.intermediate)


MIXERS = {
    "softmax": NamedPart(_softmax, _projections, _softmax_calls, ("qkv_bias", "qk_norm")),
    "poly": NamedPart(_poly, _poly_products, _poly_calls, ("qkv_bias", "qk_norm", *POLY)),
    "rg_lru": NamedPart(
        lambda c, **where: RGLRU(c.hidden, **where), lambda c: 4 * c.hidden**2, lambda c: rg_lru_calls(), backwards=False
    ),
}
MLPS = {
    "swiglu": NamedPart(lambda c, **where: MLP(c.hidden, c.intermediate, **where), _gated, _gated_calls),
    "richards_glu": NamedPart(
        lambda c, **where: RichardsGLU(c.hidden, c.intermediate, **where), _gated, lambda c: richards_glu_calls(c.intermediate)
    ),
    "moe": NamedPart(_moe, _chosen, _gated_calls, ("experts", "slots", "balance")),
}
NORMS = {
    "rms": NamedPart(
        lambda c, **where: RMSNorm(c.hidden, c.eps, **where),
        calls=lambda c: (("rms_norm", (c.hidden,)), ("add_rms_norm", (c.hidden,))),
    ),
    "dyt": NamedPart(
        lambda c, **where: DynamicTanh(c.hidden, c.alpha, **where),
        calls=lambda c: (("dynamic_tanh", (c.hidden,)), ("add_dynamic_tanh", (c.hidden,))),
        options=("alpha",),
        lifts=True,
    ),
    "richards": NamedPart(
        lambda c, **where: RichardsNorm(c.hidden, **where),
        calls=lambda c: (("richards_norm", (c.hidden, NORM)), ("add_richards_norm", (c.hidden, NORM))),
        lifts=True,
    ),
}
TABLES = {"attention": MIXERS, "mlp": MLPS, "norm": NORMS}
"""By the config's field that names one of them."""
