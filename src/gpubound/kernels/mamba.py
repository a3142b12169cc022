"""Mamba-2: a recurrence of a matrix for each head, which forgets, and writes a token's input times B, a row of the group.

    S = exp(-exp(A) dt) S + dt x Bᵀ,  y = S C + D x,   dt = softplus(its product + its bias), at least a limit

`mamba_step` is a decoding step of a layer: the causal convolution of x, B and C with SiLU, the recurrence, and y times silu(z).
Falcon-H1 multiplies z, the product of dt, and the result by factors.
`grouped_norm_rows` is the RMSNorm over each group of heads that follows.

Legend: B rows, H heads, P width of a head, G groups, which share B and C, N width of a state, C channels of the convolution
(x, B and C: H P + 2 G N), K its taps.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunk_scan import in_chunks, scan_chunks
from .decode_product import WRITTEN, Norm
from .dispatch import implementation, require
from .registry import definition, draw, ints, zeros
from .short_conv import check_recurrence, draw_product, ring_convolution


class MambaShape(NamedTuple):
    """Sizes of a layer's heads. A row of its product has z, x, B, C and dt, in this order."""

    heads: int
    width: int
    groups: int
    state: int
    least: float = 0.0  # dt is no smaller
    gate: float = 1.0  # factor of z
    rate: float = 1.0  # factor of dt's product
    scale: float = 1.0  # factor of the gated output

    @property
    def matrix(self) -> tuple[int, ...]:
        """The sizes of a row's state."""
        return self.heads, self.width, self.state

    @property
    def inner(self) -> int:
        return self.heads * self.width

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state

    @property
    def columns(self) -> int:
        return self.inner + self.channels + self.heads

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return z (..., H P), the inputs of the convolution (..., C), and dt (..., H)."""
        return x.split([self.inner, self.channels, self.heads], -1)

    def gated(self, y: Tensor, z: Tensor) -> Tensor:
        """Return y (..., H P) times the gate z, in the dtype of y."""
        z = z.to(y.dtype)
        y = y * F.silu(z if self.gate == 1 else z * self.gate)
        return y if self.scale == 1 else y * self.scale


class MambaParameters(NamedTuple):
    """Weights of a layer besides its projections."""

    conv: Tensor  # (C, K)
    conv_bias: Tensor | None  # (C,)
    a_log: Tensor  # (H,)
    dt: Tensor  # (H,)
    skip: Tensor  # (H,): D


def mamba_step(
    x: Tensor, position: Tensor, ring: Tensor, state: Tensor, parameters: MambaParameters, shape: MambaShape, out: Tensor,
    dependent: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One token of each row: (out, ring, state). The ring gets the inputs of the convolution, and the state goes on.

    x         (B, columns) fp32, as norm_product writes it, or 16 bits: z, x, B, C and dt
    position  (B,) int32. At 0 a row begins with zeros; below it out is NaN, and nothing is written
    ring      (B, places, C), of at least K places: the inputs at position p are at place p % places
    state     (B, H, P, N) fp32
    out       (B, H P) in any dtype
    """
    op, rows, (H, P, G, *_) = "mamba_step", len(ring), shape
    conv, bias, *vectors = parameters
    if H % G:
        raise ValueError(f"{op}: shape: {H} heads must divide evenly among {G} groups.")
    check_recurrence(op, x, position, ring, state, conv, shape)
    if bias is not None:
        require(op, "parameters.conv_bias", bias, None, (shape.channels,), x.device, "it has one number for each channel")
    for name, t in zip(("a_log", "dt", "skip"), vectors):
        require(op, f"parameters.{name}", t, None, (H,), x.device, "it has one number for each head")
    require(op, "out", out, None, (rows, H * P), x.device, WRITTEN)
    kernel = implementation(op, conv, None, (*shape[:4], conv.shape[1], bias is not None, x.dtype != torch.float32))
    return kernel(x, position, ring, state, parameters, shape, out, dependent)


def _example(
    g: torch.Generator, H: int = 4, P: int = 8, G: int = 2, N: int = 16, taps: int = 4, bias: bool = True,
    rounded: bool = False,
) -> tuple:  # fmt: skip
    """Two rows, one at its first position."""
    shape = MambaShape(H, P, G, N, 0.5, 0.7, 1.3, 1.1)
    vectors = (draw(g, H).detach() for _ in range(3))
    parameters = MambaParameters(draw(g, shape.channels, taps), draw(g, shape.channels) if bias else None, *vectors)
    return (
        draw_product(g, 2, shape.columns, rounded), ints(0, 7), draw(g, 2, taps, shape.channels).detach(),
        draw(g, 2, H, P, N).detach(), parameters, shape, zeros(2, H * P),
    )  # fmt: skip


@definition(_example)
@torch.no_grad()
def mamba_step_reference(
    x: Tensor, position: Tensor, ring: Tensor, state: Tensor, parameters: MambaParameters, shape: MambaShape, out: Tensor,
    dependent: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    z, mixed, dt = shape.parts(x.to(torch.promote_types(x.dtype, torch.float32)))
    mixed = ring_convolution(mixed[:, None], position, ring, parameters.conv, parameters.conv_bias)
    v, b, c, g, skipped = (t[:, 0] for t in mamba_inputs(F.silu(mixed), dt[:, None], parameters, shape))
    known = (position >= 0).view(-1, 1, 1, 1)
    S = torch.where(position.view(-1, 1, 1, 1) > 0, state, 0.0) * g.exp()[..., None, None] + v[..., None] * b[..., None, :]
    y = torch.einsum("bhpn,bhn->bhp", S, c) + skipped
    state.copy_(torch.where(known, S, state))
    out.copy_(torch.where(known[..., 0, 0], shape.gated(y.flatten(1), z), torch.nan))
    return out, ring, state


def mamba_inputs(mixed: Tensor, dt: Tensor, parameters: MambaParameters, shape: MambaShape) -> list[Tensor]:
    """Return dt x (B, T, H, P), B and C (B, T, H, N), the logs of decays (B, T, H) and D x (B, T, H, P), in at least fp32.

    mixed: the convolved x, B and C (B, T, C); dt: (B, T, H)
    """
    H, P, G, N, least, _, rate, _ = shape
    compute_dtype = torch.promote_types(mixed.dtype, torch.float32)
    x, b, c = mixed.to(compute_dtype).split([H * P, G * N, G * N], -1)
    x = x.unflatten(-1, (H, P))
    b, c = (t.unflatten(-1, (G, N)).repeat_interleave(H // G, -2) for t in (b, c))
    dt = dt.to(compute_dtype) if rate == 1 else dt.to(compute_dtype) * rate
    dt = F.softplus(dt + parameters.dt.to(compute_dtype)).clamp(min=least)
    skipped = parameters.skip.to(compute_dtype)[:, None] * x
    return [dt[..., None] * x, b, c, -parameters.a_log.to(compute_dtype).exp() * dt, skipped]


def chunked_mamba(
    v: Tensor, b: Tensor, c: Tensor, g: Tensor, state: Tensor | None = None, precise: bool = True
) -> tuple[Tensor, Tensor]:
    """Return S C (B, T, H, P) of every token, and the states (B, H, P, N) after the last one, chunk by chunk.

    v, b, c, g: as of `mamba_inputs`. precise: as of `chunk_scan`
    """
    tokens = v.shape[1]
    v, b, c, total, left = in_chunks(g, v, b, c)
    y, S = scan_chunks(v, None, c, b, total, left, None if state is None else state.transpose(-1, -2), precise)
    return y[:, :tokens], S.transpose(-1, -2)


def grouped_norm_rows(x: Tensor, norm: Norm, groups: int, out: Tensor, dependent: int = 0) -> Tensor:
    """out (B, width, in any dtype) = the RMSNorm of each of `groups` parts of fp32 x (B, width), times the norm's gain."""
    require("grouped_norm_rows", "x", x, torch.float32, ("rows", len(norm.weight)), x.device, "mamba_step writes it")
    require("grouped_norm_rows", "norm.weight", norm.weight, None, x.shape[1:], x.device, "it has one number for each column")
    require("grouped_norm_rows", "out", out, None, tuple(x.shape), x.device, WRITTEN)
    if groups < 1 or x.shape[1] % groups:
        raise ValueError(f"grouped_norm_rows: groups: {x.shape[1]} columns must divide evenly among them, got {groups}.")
    return implementation("grouped_norm_rows", norm.weight)(x, norm, groups, out, dependent)


@definition(lambda g: (draw(g, 2, 48).detach(), Norm(draw(g, 48), 1e-5), 3, zeros(2, 48)))
@torch.no_grad()
def grouped_norm_rows_reference(x: Tensor, norm: Norm, groups: int, out: Tensor, dependent: int = 0) -> Tensor:
    return out.copy_(group_normed(x, norm, groups))


def group_normed(x: Tensor, norm: Norm, groups: int) -> Tensor:
    """Return the RMSNorm of each of `groups` parts of x (..., width), in the dtype of x."""
    parts = x.unflatten(-1, (groups, -1))
    parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + norm.eps)
    return parts.flatten(-2) * (norm.weight.to(x.dtype) + norm.offset)
