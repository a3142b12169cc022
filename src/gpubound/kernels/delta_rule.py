"""Gated delta rule: a recurrence of a matrix for each head, which forgets, and writes what a key did not predict.

    S = exp(g) S,  S = S + beta k (v - Sᵀ k)ᵀ,  o = Sᵀ q

with g = -exp(A) softplus(a + dt) and beta = sigmoid(b). `delta_step` is a decoding step of a layer of Qwen3-Next and Qwen3.5:
the causal convolution of q, k and v with SiLU, q and k divided by their lengths, the recurrence, and the norm of o with a gate.

Legend: B rows, N key heads, H value heads, of which H / N share a key head, D width of a key, E of a value, C channels of the
convolution (q, k and v: 2 N D + H E), K its taps, P places of its ring.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunk_scan import in_chunks, scan_chunks
from .decode_product import WRITTEN, Norm, rms_normed
from .dispatch import implementation, require
from .registry import definition, draw, ints, zeros
from .short_conv import check_recurrence, draw_product, ring_convolution

TINY = 1e-6  # added to the square of a key's length


class DeltaShape(NamedTuple):
    """Sizes of a layer's heads, and the order of the products that it reads.

    A row of them has q, k, v and z, and then b and a. grouped: the columns of each key head together, q, k, v and z, and b and
    a (Qwen3-Next). Otherwise q of all heads comes first, then k, v and z, and b before a.
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    grouped: bool = False

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width

    @property
    def matrix(self) -> tuple[int, ...]:
        """The sizes of a row's state."""
        return self.value_heads, self.key_width, self.value_width

    @property
    def inner(self) -> int:
        return self.value_heads * self.value_width

    @property
    def columns(self) -> int:
        return self.channels + self.inner + 2 * self.value_heads

    def parts(self, x: Tensor) -> list[Tensor]:
        """Return q, k (..., N D), v and z (..., H E), b and a (..., H) of products (..., columns)."""
        N, H, D, E, grouped = self
        x, gates = x.split([self.columns - 2 * H, 2 * H], -1)
        widths, heads = [D, D, H // N * E, H // N * E], [H // N] * 2
        if not grouped:
            return [*x.split([N * width for width in widths], -1), *gates.chunk(2, -1)]
        x, gates = x.unflatten(-1, (N, -1)), gates.unflatten(-1, (N, -1))
        return [part.flatten(-2) for part in (*x.split(widths, -1), *gates.split(heads, -1))]


class DeltaParameters(NamedTuple):
    """Weights of a layer besides its projections."""

    conv: Tensor  # (C, K)
    a_log: Tensor  # (H,)
    dt: Tensor  # (H,)
    norm: Norm  # of E


def delta_step(
    x: Tensor, position: Tensor, ring: Tensor, state: Tensor, parameters: DeltaParameters, shape: DeltaShape, out: Tensor,
    dependent: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One token of each row: (out, ring, state). The ring gets the inputs of the convolution, and the state goes on.

    x         (B, columns) fp32, as norm_product writes it, or 16 bits: q, k, v and z, b and a
    position  (B,) int32. At 0 a row begins with zeros; below it out is NaN, and nothing is written
    ring      (B, P, C), of P >= K places: the inputs at position p are at place p % P
    state     (B, H, D, E) fp32
    out       (B, H E)
    """
    op, rows, (N, H, _, E, _) = "delta_step", len(ring), shape
    conv, a_log, dt, norm = parameters
    if H % N:
        raise ValueError(f"{op}: shape: {H} value heads must divide evenly among {N} key heads.")
    check_recurrence(op, x, position, ring, state, conv, shape)
    for name, t, size in (("a_log", a_log, H), ("dt", dt, H), ("norm.weight", norm.weight, E)):
        require(op, f"parameters.{name}", t, None, (size,), x.device, "it has one number a head, or a column")
    require(op, "out", out, None, (rows, H * E), x.device, WRITTEN)
    kernel = implementation(op, conv, None, (*shape, conv.shape[1], x.dtype != torch.float32))
    return kernel(x, position, ring, state, parameters, shape, out, dependent)


def _example(
    g: torch.Generator, N: int = 2, H: int = 4, D: int = 16, E: int = 8, grouped: bool = False, taps: int = 4,
    rounded: bool = False,
) -> tuple:  # fmt: skip
    """Two rows, one at its first position."""
    shape = DeltaShape(N, H, D, E, grouped)
    parameters = DeltaParameters(
        draw(g, shape.channels, taps), draw(g, H).detach(), draw(g, H).detach(), Norm(draw(g, E), 1e-6)
    )
    return (
        draw_product(g, 2, shape.columns, rounded), ints(0, 7), draw(g, 2, taps, shape.channels).detach(),
        draw(g, 2, H, D, E).detach(), parameters, shape, zeros(2, H * E),
    )  # fmt: skip


@definition(_example)
@torch.no_grad()
def delta_step_reference(
    x: Tensor, position: Tensor, ring: Tensor, state: Tensor, parameters: DeltaParameters, shape: DeltaShape, out: Tensor,
    dependent: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, z, b, a = shape.parts(x.to(torch.promote_types(x.dtype, torch.float32)))
    mixed = ring_convolution(torch.cat([q, k, v], -1)[:, None], position, ring, parameters.conv, None)
    q, k, v, g, beta = (t[:, 0] for t in delta_inputs(F.silu(mixed), b[:, None], a[:, None], parameters, shape))
    known = (position >= 0).view(-1, 1, 1, 1)
    S = torch.where(position.view(-1, 1, 1, 1) > 0, state, 0.0) * g.exp()[..., None, None]
    change = beta[..., None] * (v - torch.einsum("bhde,bhd->bhe", S, k))
    S = S + k[..., None] * change[..., None, :]
    o = torch.einsum("bhde,bhd->bhe", S, q)
    state.copy_(torch.where(known, S, state))
    out.copy_(torch.where(known[..., 0, 0], gated_norm(o, z, parameters.norm).flatten(1), torch.nan))
    return out, ring, state


def delta_inputs(mixed: Tensor, b: Tensor, a: Tensor, parameters: DeltaParameters, shape: DeltaShape) -> list[Tensor]:
    """Return q, k (B, T, H, D), v (B, T, H, E), g and beta (B, T, H) of the recurrence, in at least fp32.

    mixed: the convolved q, k and v (B, T, C); b, a: (B, T, H)
    """
    N, H, D, E, _ = shape
    compute_dtype = torch.promote_types(mixed.dtype, torch.float32)
    q, k, v = mixed.to(compute_dtype).split([N * D, N * D, H * E], -1)
    q, k = (t.unflatten(-1, (N, D)) for t in (q, k))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + TINY) for t in (q, k))
    q, k = ((t if H == N else t.repeat_interleave(H // N, 2)) for t in (q * D**-0.5, k))
    g = -parameters.a_log.to(compute_dtype).exp() * F.softplus(a.to(compute_dtype) + parameters.dt.to(compute_dtype))
    return [q, k, v.unflatten(-1, (H, E)), g, b.to(compute_dtype).sigmoid()]


def gated_norm(o: Tensor, z: Tensor, norm: Norm) -> Tensor:
    """Return the normed o (..., H, E) times silu(z), of z (..., H E), in the dtype of o."""
    return rms_normed(o, norm) * F.silu(z.to(o.dtype).unflatten(-1, o.shape[-2:]))


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, precise: bool = True
) -> tuple[Tensor, Tensor]:
    """Return o (B, T, H, E) and the states (B, H, D, E) after the last token, chunk by chunk.

    Within a chunk, what its tokens write depends on each other and on the state before it, linearly: one triangular system for
    each chunk, of all chunks at once. Only the states then go from chunk to chunk.

    q, k, v, g, beta: as of `delta_inputs`. precise: as of `chunk_scan`
    """
    tokens = q.shape[1]
    q, k, v, beta, total, left = in_chunks(g, q, k, v, beta)
    written = beta[..., None] * k
    system = (written @ k.transpose(-1, -2) * left).tril(-1)  # its diagonal of ones is implied
    right = torch.cat([beta[..., None] * v, written * total.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    o, S = scan_chunks(values, read, q, k, total, left, state, precise)
    return o[:, :tokens], S
