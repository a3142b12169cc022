"""Manifold-constrained hyper-connections of DeepSeek-V4: a residual of S streams, mixed by weights computed per token. Like all
ops of decoding they give no gradients.

Before a layer, `hc_pre` computes the layer's input u from the streams, and the weights by which `hc_post` adds its output y:

    z     = n(vec X) weightᵀ                            n divides by the root of mean square + norm_eps
    pre   = sigmoid(z₁ scale₁ + base₁) + eps            u = Σ_s pre_s X_s
    post  = 2 sigmoid(z₂ scale₂ + base₂)
    comb  = sinkhorn(z₃ scale₃ + base₃)                 X'_t = post_t y + Σ_s comb_st X_s

comb is doubly stochastic, so the streams neither explode nor vanish. `hc_head` collapses the streams after the last layer, with
only pre.

A decoding step of few tokens has three other ops. `hc_sums` computes partial sums over slices of the streams: products with the
weight of a part (attention or MLP), and squares. `hc_read` computes u from the sums. `hc_write` computes post and comb from the
sums, adds the part's output to the streams, and computes the next part's sums, in one launch.

Only `hc_write` needs comb, so its Sinkhorn iterations do not delay the part. With PDL (dependent_launch.py), `hc_write`
computes comb while the part still runs, if the GPU has free multiprocessors, and loads the sums before its wait: a fence
(triton/_launch.py) is required between the launch that wrote the sums and `hc_write`.

Legend: X (..., S, D) streams; z₁, z₂ and z₃ are S, S and S·S of the P = (2 + S) S products, in that order; N tokens, Z slices
of D.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.dispatch import implementation
from ....kernels.peer_exchange import Mail, example_mail
from ....kernels.plans.types import power_of_two
from ....kernels.registry import definition, draw


def sinkhorn(logits: Tensor, iterations: int = 20, eps: float = 1e-6) -> Tensor:
    """Compute (..., S, S): softmax of each row plus eps, columns divided by their sums, then `iterations` - 1 times rows and
    columns divided by their sums.

    Each sum has eps added.
    """
    m = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


FEW = 4  # tokens up to which a program multiplies without tensor cores, which take 16 or 64 tokens at a time
STREAMS = (1, 2, 4, 8)


def hc_pre(
    x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, eps: float = 1e-6, norm_eps: float = 1e-6, iterations: int = 20
) -> tuple[Tensor, Tensor, Tensor]:
    """Return u (..., D) in x's dtype, post (..., S) fp32 and comb (..., S, S) fp32 of the streams x (..., S, D).

    weight  ((2 + S) S, S D)
    scale   (3,): of pre, post and comb
    base    ((2 + S) S,)
    """
    kernel = implementation("hc_pre", x, _unable(x), (x.shape[-2], _many(x)))
    return kernel(x, weight, scale, base, eps, norm_eps, iterations)


@definition(lambda g, streams=4, many=False: _example(g, streams, many, (2 + streams) * streams, 3))
@torch.no_grad()
def hc_pre_reference(
    x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, eps: float = 1e-6, norm_eps: float = 1e-6, iterations: int = 20
) -> tuple[Tensor, Tensor, Tensor]:
    u, post, comb = mixed(x, weight, scale, base, eps, norm_eps, lambda z: sinkhorn(z, iterations, eps))
    return u, post, comb


def hc_post(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return the streams after a layer: post_t y + Σ_s comb_st X_s for each t, summed in fp32 and rounded once to x's dtype."""
    return implementation("hc_post", x, _unable(x), (x.shape[-2],))(x, y, post, comb)


@definition(lambda g, streams=4: (draw(g, 3, streams, 40), draw(g, 3, 40), draw(g, 3, streams), draw(g, 3, streams, streams)))
@torch.no_grad()
def hc_post_reference(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    dtype32 = torch.promote_types(x.dtype, torch.float32)
    residual = comb.to(dtype32).transpose(-1, -2) @ x.to(dtype32)
    return (post.to(dtype32)[..., None] * y.to(dtype32)[..., None, :] + residual).to(x.dtype)


def hc_head(x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, eps: float = 1e-6, norm_eps: float = 1e-6) -> Tensor:
    """Return only u, for weight (S, S D), scale (1,) and base (S,)."""
    kernel = implementation("hc_head", x, _unable(x), (x.shape[-2], _many(x)))
    return kernel(x, weight, scale, base, eps, norm_eps)


@definition(lambda g, streams=4, many=False: _example(g, streams, many, streams, 1))
@torch.no_grad()
def hc_head_reference(
    x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, eps: float = 1e-6, norm_eps: float = 1e-6
) -> Tensor:
    return mixed(x, weight, scale, base, eps, norm_eps)[0]


def mixed(
    x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float,
    balance: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute (u,), or (u, post, comb) with `balance`, which maps logits to comb, by torch ops."""
    streams, dtype32 = x.shape[-2], torch.promote_types(x.dtype, torch.float32)
    flat, scale, base = x.to(dtype32).flatten(-2), scale.to(dtype32), base.to(dtype32)
    z = F.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps), weight.to(dtype32))
    pre = torch.sigmoid(z[..., :streams] * scale[0] + base[:streams]) + eps
    u = (pre[..., None] * x.to(dtype32)).sum(-2).to(x.dtype)
    if balance is None:
        return (u,)
    of_post, of_comb = slice(streams, 2 * streams), slice(2 * streams, None)
    post = 2 * torch.sigmoid(z[..., of_post] * scale[1] + base[of_post])
    return u, post, balance((z[..., of_comb] * scale[2] + base[of_comb]).unflatten(-1, (streams, streams)))


def _many(x: Tensor) -> bool:
    return x.numel() > FEW * x.shape[-1] * x.shape[-2]


def _unable(x: Tensor) -> str | None:
    return None if x.shape[-2] in STREAMS else f"its kernel mixes 1, 2, 4 or 8 streams, not {x.shape[-2]}"


def _example(generator: torch.Generator, streams: int, many: bool, outputs: int, scales: int) -> tuple:
    x = draw(generator, 20 if many else 3, streams, 40)
    return x, draw(generator, outputs, 40 * streams), draw(generator, scales), draw(generator, outputs), 1e-6, 1e-6


PIECES = 64  # approximate programs per token. Each computes comb redundantly


def stretch(width: int) -> int:
    """Return the columns of each stream in a slice."""
    return max(16, power_of_two(-(-width // PIECES)))


def sums_shape(tokens: int, width: int, products: int) -> tuple[int, int, int]:
    """Return (Z, N, P + 1 rounded up to a power of two): the squares follow the products."""
    return -(-width // stretch(width)), tokens, power_of_two(products + 1)


def hc_sums(x: Tensor, weight: Tensor, sums: Tensor | None = None) -> Tensor:
    """Compute sums (Z, N, ·) fp32 of the streams x (N, S, D) fp32, for a part with weight (P, S D)."""
    sums = x.new_empty(sums_shape(len(x), x.shape[2], len(weight))) if sums is None else sums
    return implementation("hc_sums", x, _unable(x), (x.shape[1],))(x, weight, sums)


@definition(lambda g, streams=4: _step_example(g, streams)[:3])
@torch.no_grad()
def hc_sums_reference(x: Tensor, weight: Tensor, sums: Tensor) -> Tensor:
    rows = weight.to(x.dtype).unflatten(1, x.shape[1:])
    sums.zero_()
    for piece, (of_x, of_w) in enumerate(zip(x.split(stretch(x.shape[2]), 2), rows.split(stretch(x.shape[2]), 2))):
        sums[piece, :, : len(weight)] = torch.einsum("nsd,psd->np", of_x, of_w)
        sums[piece, :, len(weight)] = of_x.square().sum((1, 2))
    return sums


def hc_read(
    x: Tensor, sums: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float, u: Tensor | None = None
) -> Tensor:
    """Compute u (N, D) fp32, as `hc_pre` does. scale (3,), base (P,)."""
    u = x.new_empty(len(x), x.shape[2]) if u is None else u
    return implementation("hc_read", x, _unable(x), (x.shape[1],))(x, sums, scale, base, eps, norm_eps, u)


@definition(lambda g, streams=4: _read(g, streams))
@torch.no_grad()
def hc_read_reference(x: Tensor, sums: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float, u: Tensor) -> Tensor:
    z, S = _products(x, sums, len(base), norm_eps), x.shape[1]
    pre = torch.sigmoid(z[:, :S] * scale[0] + base[:S]) + eps
    return u.copy_((pre[..., None] * x).sum(1))


def hc_write(
    x: Tensor, y: Tensor | Mail, sums: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float, rounds: int,
    more: Tensor | None = None, weight: Tensor | None = None, out: Tensor | None = None,
    following: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute X' (N, S, D) fp32, as `hc_post` does for the part's output y, and the next part's sums of X'.

    y       (N, D) fp32; or a peer exchange (peer_exchange.py) whose sum is y. Its values may still be in flight
    more    (N, some, D) fp32: terms that are added to y in order. None with a peer exchange, whose senders add them
    weight  the next part's; None: no sums
    """
    out = torch.empty_like(x) if out is None else out
    if weight is not None and following is None:
        following = x.new_empty(sums_shape(len(x), x.shape[2], len(weight)))
    form = x.shape[1], weight is not None, 0 if more is None else more.shape[1], isinstance(y, Mail)
    kernel = implementation("hc_write", x, _unable(x), form)
    return kernel(x, y, sums, scale, base, eps, norm_eps, rounds, more, weight, out, following)


@definition(lambda g, streams=4, followed=True, some=0, mailed=False: _write(g, streams, followed, some, mailed))
@torch.no_grad()
def hc_write_reference(
    x: Tensor, y: Tensor | Mail, sums: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float, rounds: int,
    more: Tensor | None, weight: Tensor | None, out: Tensor, following: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    y = y.summed(len(x)) if isinstance(y, Mail) else y
    if more is not None:
        y = y + more.sum(1)
    z, S = _products(x, sums, len(base), norm_eps), x.shape[1]
    post = 2 * torch.sigmoid(z[:, S : 2 * S] * scale[1] + base[S : 2 * S])
    comb = sinkhorn((z[:, 2 * S :] * scale[2] + base[2 * S :]).unflatten(1, (S, S)), rounds, eps)
    out.copy_(post[..., None] * y[:, None] + comb.transpose(1, 2) @ x)
    if weight is not None and following is not None:
        hc_sums_reference(out, weight, following)
    return out, following


def _products(x: Tensor, sums: Tensor, count: int, norm_eps: float) -> Tensor:
    total = sums.sum(0)
    return total[:, :count] * torch.rsqrt(total[:, count : count + 1] / (x.shape[1] * x.shape[2]) + norm_eps)


def _step_example(g: torch.Generator, streams: int) -> tuple:
    x, products = draw(g, 3, streams, 40).detach(), (2 + streams) * streams
    weight = draw(g, products, 40 * streams).detach()
    sums = torch.zeros(sums_shape(3, 40, products), device="cpu", dtype=torch.float32)
    return x, weight, sums, draw(g, 3).detach(), draw(g, products).detach()


def _read(g: torch.Generator, streams: int) -> tuple:
    x, weight, sums, scale, base = _step_example(g, streams)
    u = torch.zeros(3, 40, device="cpu", dtype=torch.float32)
    return x, hc_sums_reference(x, weight, sums), scale, base, 1e-6, 1e-6, u


def _write(g: torch.Generator, streams: int, followed: bool, some: int, mailed: bool) -> tuple:
    x, sums, scale, base, eps, norm_eps, u = _read(g, streams)
    following = torch.zeros_like(sums) if followed else None
    weight = draw(g, len(base), 40 * streams).detach() if followed else None
    more = draw(g, 3, some, 40).detach() if some else None
    y = example_mail(g, 1, 3, 40, own=-1, rows=3) if mailed else u + 1
    return x, y, sums, scale, base, eps, norm_eps, 20, more, weight, torch.zeros_like(x), following
