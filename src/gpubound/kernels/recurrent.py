"""Layers that keep a state: the gated delta rule, Mamba-2 and LFM2's short convolution, and the scan of the first two.

Both hold a matrix S for each head, which forgets. The gated delta rule writes what a key did not predict, and Mamba-2 a token's
input times B, a row of the group:

    S = exp(g) S,  S = S + beta k (v - Sᵀ k)ᵀ,  o = Sᵀ q          g = -exp(A) softplus(a + dt), beta = sigmoid(b)
    S = exp(-exp(A) dt) S + dt x Bᵀ,  y = S C + D x               dt = softplus(its product + its bias), at least a limit

`chunk_scan` is what is left to do token after token once each chunk has been solved by itself, of Mamba-2 without w:

    new = u - w S,   o = q S + p new,   S = decay S + kᵀ new      for each chunk of L tokens

`delta_step` is a decoding step of a layer of Qwen3-Next and Qwen3.5: the causal convolution of q, k and v with SiLU, q and k
divided by their lengths, the recurrence, and the norm of o with a gate. `mamba_step` is one of Mamba-2: the causal convolution
of x, B and C with SiLU, the recurrence, and y times silu(z); Falcon-H1 multiplies z, the product of dt, and the result by
factors. `norm_rows` may norm each group of heads after it. `short_conv` is LFM2's gated convolution, for
one or a few tokens of each row.

A row's inputs of a convolution are in a ring: that of position p is at place p % P. So a step shifts nothing, and the same step
may be repeated. Inputs before a row's first position are zeros, whatever its ring holds.

Legend: B rows of T tokens, H (value) heads, N key heads, of which each has H / N value heads, D width of a key, E of a value; n
chunks of L tokens, R = B H rows of the scan; of Mamba-2, P width of a head, G groups, which share B and C, N width of a state;
C channels of the convolution (q, k and v: 2 N D + H E; x, B and C: H P + 2 G N), K its taps, P places of its ring, at least
K - 1 + T.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .decode_product import WRITTEN, Norm, rms_normed
from .dispatch import SIXTEEN_BITS, implementation, require
from .registry import definition, draw, ints, zeros

CHUNK = 64  # tokens of a chunk


def chunk_scan(
    u: Tensor, w: Tensor | None, q: Tensor, p: Tensor, k: Tensor, decay: Tensor, state: Tensor, precise: bool = True
) -> tuple[Tensor, Tensor]:
    """Outputs o (R, n, L, E), and the states (R, D, E) after the last chunk.

    u      (R, n, L, E)
    w      (R, n, L, D), or None: what is written does not depend on the state
    q, k   (R, n, L, D)
    p      (R, n, L, L): zeros above the diagonal
    decay  (R, n): the share of a state that is left after a chunk
    state  (R, D, E)
    precise  False: the kernel multiplies in tf32, enough for what comes from 16 bits
    """
    R, n, L, E = u.shape
    D = q.shape[-1]
    sizes = {"q": (q, (R, n, L, D)), "p": (p, (R, n, L, L)), "k": (k, (R, n, L, D)), "decay": (decay, (R, n))}
    sizes |= {"state": (state, (R, D, E))} | ({} if w is None else {"w": (w, (R, n, L, D))})
    for name, (t, size) in sizes.items():
        if t.shape != size or t.dtype != u.dtype or t.device != u.device:
            raise ValueError(
                f"chunk_scan: {name} must be {size} {u.dtype} on {u.device} to match u, got {tuple(t.shape)} {t.dtype} on "
                f"{t.device}; reshape or cast it before the call."
            )
    unable = None if L in (16, 32, 64) else f"its kernel takes chunks of 16, 32 or 64 tokens, not {L}"
    return implementation("chunk_scan", u, unable, (w is not None, D, E, L, precise))(u, w, q, p, k, decay, state, precise)


def _scan_example(g, reads=True, D=16, E=24, L=16, precise=True):
    """Two rows of three chunks."""
    u, q, k = draw(g, 2, 3, L, E), draw(g, 2, 3, L, D), draw(g, 2, 3, L, D)
    w = draw(g, 2, 3, L, D).detach().mul(D**-1.0).requires_grad_() if reads else None
    p = draw(g, 2, 3, L, L).detach().tril().requires_grad_()
    return u, w, q, p, k, draw(g, 2, 3).detach().sigmoid().requires_grad_(), draw(g, 2, D, E), precise


@definition(_scan_example, tf32=lambda *shape: shape[-1:] == (False,), gradient=True)
def chunk_scan_reference(u, w, q, p, k, decay, state, precise=True):
    compute_dtype = torch.promote_types(u.dtype, torch.float32)
    u, q, p, k, decay, S = (t.to(compute_dtype) for t in (u, q, p, k, decay, state))
    w, outputs = None if w is None else w.to(compute_dtype), []
    for chunk in range(u.shape[1]):
        new = u[:, chunk] if w is None else u[:, chunk] - w[:, chunk] @ S
        outputs.append(q[:, chunk] @ S + p[:, chunk] @ new)
        S = S * decay[:, chunk, None, None] + k[:, chunk].transpose(-1, -2) @ new
    return torch.stack(outputs, 1).to(state.dtype), S.to(state.dtype)


def in_chunks(g: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return tensors (B, T, H, ...) in chunks (B, H, n, L, ...), padded by zeros, which neither forget nor write; and of logs
    of decays g (B, T, H) the log of what each token leaves of a state, and what it leaves (..., L, L) of each token's write."""
    pad = -g.shape[1] % CHUNK
    padded = (F.pad(t, (*[0, 0] * (t.dim() - 2), 0, pad)) if pad else t for t in (g, *tensors))
    g, *split = (t.transpose(1, 2).unflatten(2, (-1, CHUNK)) for t in padded)
    total = g.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, device=g.device, dtype=torch.bool).tril()
    return [*split, total, (total[..., None] - total[..., None, :]).masked_fill(~causal, float("-inf")).exp()]


def scan_chunks(
    u: Tensor, w: Tensor | None, q: Tensor, k: Tensor, total: Tensor, left: Tensor, state: Tensor | None, precise: bool
) -> tuple[Tensor, Tensor]:
    """Return o (B, n L, H, E) and the last states (B, H, D, E) of chunks by `in_chunks`. state: None begins with zeros"""
    (B, H, *_, E), D = u.shape, q.shape[-1]
    scores, q = q @ k.transpose(-1, -2) * left, q * total.exp()[..., None]
    k, decay = k * (total[..., -1:] - total).exp()[..., None], total[..., -1].exp()
    S = u.new_zeros(B, H, D, E) if state is None else state.to(u.dtype)
    u, q, scores, k, decay, S = (t.flatten(0, 1) for t in (u, q, scores, k, decay, S))
    o, S = chunk_scan(u, None if w is None else w.flatten(0, 1), q, scores, k, decay, S, precise)
    return o.view(B, H, -1, E).transpose(1, 2), S.view(B, H, D, E)


def short_conv(
    x: Tensor, position: Tensor, ring: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, dependent: int = 0
) -> tuple[Tensor, Tensor]:
    """out = c · conv(b · v), for the three parts b, c, v of a product's rows: (out, ring). The ring gets the products b · v.

    x         (B T, 3 C) fp32, as norm_product writes it, or 16 bits; all tokens of a row before those of the next
    position  (B,) or (B, T) int32: positions in order without a gap. For one below 0, out is NaN and nothing is written
    ring      (B, P, C)
    weight    (C, K): the last tap is that of the token itself
    out       (B T, C)
    """
    require("short_conv", "ring", ring, None, ("rows", "places", "channels"), x.device, "it is written in place")
    (rows, slots, channels), count = ring.shape, position.numel()
    require("short_conv", "position", position, torch.int32, (rows, *position.shape[1:]), x.device, "one for each token")
    require("short_conv", "x", x, product_dtype(x), (count, 3 * channels), x.device, "a product writes it")
    require("short_conv", "weight", weight, None, (channels, "taps"), x.device, "it has the taps of each channel")
    if bias is not None:
        require("short_conv", "bias", bias, None, (channels,), x.device, "it has one number for each channel")
    require("short_conv", "out", out, None, (count, channels), x.device, WRITTEN)
    if slots < (least := weight.shape[1] - 1 + count // rows):
        raise ValueError(f"short_conv: ring: got {slots} places, wanted {least} or more: a place for each input that is read.")
    kernel = implementation("short_conv", weight, None, _shape(weight, bias, count // rows, x.dtype != torch.float32))
    return kernel(x, position, ring, weight, bias, out, dependent)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a product x must have: fp32, or 16 bits, as cuBLAS writes it."""
    return x.dtype if x.dtype in SIXTEEN_BITS else torch.float32


def _shape(weight: Tensor, bias: Tensor | None, tokens: int, rounded: bool) -> tuple:
    """Return the example arguments; none for one token and three taps."""
    shape = weight.shape[1], bias is not None, tokens, rounded
    return () if shape == (3, False, 1, False) else shape


def draw_product(g: torch.Generator, rows: int, columns: int, rounded: bool) -> Tensor:
    """Return the product of an example. rounded: in the weights' dtype, which a self-test gives what asks for a gradient"""
    x = draw(g, rows, columns)
    return x if rounded else x.detach()


def _conv_example(g, taps=3, bias=False, tokens=1, rounded=False):
    """Two rows of 40 channels, one at its first position."""
    position, slots = ints(0, 7)[:, None] + ints(*range(tokens)), taps - 1 + tokens
    return (
        draw_product(g, 2 * tokens, 120, rounded), position.contiguous(), draw(g, 2, slots, 40).detach(), draw(g, 40, taps),
        draw(g, 40) if bias else None, zeros(2 * tokens, 40),
    )  # fmt: skip


@definition(_conv_example)
def short_conv_reference(x, position, ring, weight, bias, out, dependent=0):
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    gate, output_gate, value = x.view(len(ring), -1, 3, ring.shape[2]).unbind(2)  # (B, T, C)
    convolved = ring_convolution(gate * value, position, ring, weight, bias)
    known = (position >= 0).view(len(ring), -1, 1)
    out.copy_(torch.where(known, output_gate * convolved, torch.nan).flatten(0, 1))
    return out, ring


def check_recurrence(op: str, x: Tensor, position: Tensor, ring: Tensor, state: Tensor, conv: Tensor, shape: Any) -> None:
    """Check what a step reads and writes besides a layer's own parameters. shape: has its `columns`, `channels` and `matrix`"""
    rows = len(ring)
    require(op, "x", x, product_dtype(x), (rows, shape.columns), x.device, "a product writes it")
    require(op, "position", position, torch.int32, (rows,), x.device, "a step takes one token of each row")
    require(op, "ring", ring, None, (rows, "places", shape.channels), x.device, "it is written in place")
    require(op, "state", state, torch.float32, (rows, *shape.matrix), x.device, "it is written in place")
    require(op, "parameters.conv", conv, None, (shape.channels, "taps"), x.device, "it has the taps of each channel")
    if ring.shape[1] < conv.shape[1]:
        raise ValueError(f"{op}: ring: got {ring.shape[1]} places, wanted {conv.shape[1]} or more, one for each tap.")


def ring_convolution(x: Tensor, position: Tensor, ring: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the causal convolution (B, T, C) of new inputs x (B, T, C) after those of a ring, which gets them."""
    B, T, _ = x.shape
    taps, slots = weight.shape[1], ring.shape[1]
    at, rows = position.view(B, -1).long(), torch.arange(B, device=x.device)
    x = x.to(ring.dtype).to(x.dtype)  # as the ring holds them
    total = torch.zeros_like(x) if bias is None else bias.to(x.dtype).expand_as(x).clone()
    for t in range(T):
        for j in range(taps):
            if j <= t:
                earlier = x[:, t - j]
            else:
                place = at[:, t] - j
                earlier = torch.where((place >= 0)[:, None], ring[rows, place % slots].to(x.dtype), 0.0)
            total[:, t] += weight[:, taps - 1 - j].to(x.dtype) * earlier
    for t in range(T):
        here = at[:, t] % slots
        ring[rows, here] = torch.where((at[:, t] >= 0)[:, None], x[:, t].to(ring.dtype), ring[rows, here])
    return total


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


def _delta_example(g, N=2, H=4, D=16, E=8, grouped=False, taps=4, rounded=False):
    """Two rows, one at its first position."""
    shape = DeltaShape(N, H, D, E, grouped)
    parameters = DeltaParameters(
        draw(g, shape.channels, taps), draw(g, H).detach(), draw(g, H).detach(), Norm(draw(g, E), 1e-6)
    )
    return (
        draw_product(g, 2, shape.columns, rounded), ints(0, 7), draw(g, 2, taps, shape.channels).detach(),
        draw(g, 2, H, D, E).detach(), parameters, shape, zeros(2, H * E),
    )  # fmt: skip


@definition(_delta_example)
def delta_step_reference(x, position, ring, state, parameters, shape, out, dependent=0):
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


def _mamba_example(g, H=4, P=8, G=2, N=16, taps=4, bias=True, rounded=False):
    """Two rows, one at its first position."""
    shape = MambaShape(H, P, G, N, 0.5, 0.7, 1.3, 1.1)
    vectors = (draw(g, H).detach() for _ in range(3))
    parameters = MambaParameters(draw(g, shape.channels, taps), draw(g, shape.channels) if bias else None, *vectors)
    return (
        draw_product(g, 2, shape.columns, rounded), ints(0, 7), draw(g, 2, taps, shape.channels).detach(),
        draw(g, 2, H, P, N).detach(), parameters, shape, zeros(2, H * P),
    )  # fmt: skip


@definition(_mamba_example)
def mamba_step_reference(x, position, ring, state, parameters, shape, out, dependent=0):
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
