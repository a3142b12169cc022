"""Manifold-constrained hyper-connections of DeepSeek-V4: a residual of S streams, mixed by weights computed per token.

Before a layer, `hc_pre` computes the layer's input u from the streams, and the weights by which `hc_post` adds its output y:

    z     = n(vec X) weightᵀ                            n divides by the root of mean square + norm_eps
    pre   = sigmoid(z₁ scale₁ + base₁) + eps            u = Σ_s pre_s X_s
    post  = 2 sigmoid(z₂ scale₂ + base₂)
    comb  = sinkhorn(z₃ scale₃ + base₃)                 X'_t = post_t y + Σ_s comb_st X_s

`hc_head` collapses the streams after the last layer, with only pre.

Legend: X (..., S, D) streams; z₁, z₂ and z₃ are S, S and S·S of the (2 + S) S products, in that order.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.checks import require_device
from ....kernels.dispatch import implementation
from ....kernels.registry import definition, draw
from .sinkhorn import check_rounds, sinkhorn_reference

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
    _check_streams("hc_pre", x)
    streams = x.shape[-2]
    _check("hc_pre", x, weight, scale, base, (2 + streams) * streams, 3)
    check_rounds("hc_pre", iterations)
    kernel = implementation("hc_pre", x, _unable(x), (streams, _many(x)))
    return kernel(x, weight, scale, base, eps, norm_eps, iterations)


@definition(lambda g, streams=4, many=False: _example(g, streams, many, (2 + streams) * streams, 3))
def hc_pre_reference(
    x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, eps: float = 1e-6, norm_eps: float = 1e-6, iterations: int = 20
) -> tuple[Tensor, Tensor, Tensor]:
    u, post, comb = mixed(x, weight, scale, base, eps, norm_eps, lambda z: sinkhorn_reference(z, iterations, eps))
    return u, post, comb


def hc_post(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return the streams after a layer: post_t y + Σ_s comb_st X_s for each t, summed in fp32 and rounded once to x's dtype."""
    _check_streams("hc_post", x)
    *leading, streams, width = x.shape
    wanted = {"y": (*leading, width), "post": (*leading, streams), "comb": (*leading, streams, streams)}
    for (name, shape), t in zip(wanted.items(), (y, post, comb)):
        _check_shape("hc_post", name, t, shape, x)
    return implementation("hc_post", x, _unable(x), (streams,))(x, y, post, comb)


@definition(lambda g, streams=4: (draw(g, 3, streams, 40), draw(g, 3, 40), draw(g, 3, streams), draw(g, 3, streams, streams)))
def hc_post_reference(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    kept = comb.to(wide).transpose(-1, -2) @ x.to(wide)
    return (post.to(wide)[..., None] * y.to(wide)[..., None, :] + kept).to(x.dtype)


def hc_head(x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, eps: float = 1e-6, norm_eps: float = 1e-6) -> Tensor:
    """Return only u, for weight (S, S D), scale (1,) and base (S,)."""
    _check_streams("hc_head", x)
    streams = x.shape[-2]
    _check("hc_head", x, weight, scale, base, streams, 1)
    kernel = implementation("hc_head", x, _unable(x), (streams, _many(x)))
    return kernel(x, weight, scale, base, eps, norm_eps)


@definition(lambda g, streams=4, many=False: _example(g, streams, many, streams, 1))
def hc_head_reference(
    x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, eps: float = 1e-6, norm_eps: float = 1e-6
) -> Tensor:
    return mixed(x, weight, scale, base, eps, norm_eps)[0]


def mixed(
    x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float,
    balance: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute (u,), or (u, post, comb) with `balance`, which maps logits to comb, by torch ops."""
    streams, wide = x.shape[-2], torch.promote_types(x.dtype, torch.float32)
    flat, scale, base = x.to(wide).flatten(-2), scale.to(wide), base.to(wide)
    z = F.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps), weight.to(wide))
    pre = torch.sigmoid(z[..., :streams] * scale[0] + base[:streams]) + eps
    u = (pre[..., None] * x.to(wide)).sum(-2).to(x.dtype)
    if balance is None:
        return (u,)
    of_post, of_comb = slice(streams, 2 * streams), slice(2 * streams, None)
    post = 2 * torch.sigmoid(z[..., of_post] * scale[1] + base[of_post])
    return u, post, balance((z[..., of_comb] * scale[2] + base[of_comb]).unflatten(-1, (streams, streams)))


def _many(x: Tensor) -> bool:
    return x.numel() > FEW * x.shape[-1] * x.shape[-2]


def _unable(x: Tensor) -> str | None:
    return None if x.shape[-2] in STREAMS else f"its kernel mixes 1, 2, 4 or 8 streams, not {x.shape[-2]}"


def _check_streams(op: str, x: Tensor) -> None:
    if x.dim() < 2 or not x.is_floating_point():
        raise ValueError(
            f"{op}: x must be a floating-point tensor of streams (..., S, D), got {x.dtype} {tuple(x.shape)}; "
            "give each token its streams one below the other."
        )


def _check(op: str, x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, outputs: int, scales: int) -> None:
    for name, t, shape in (
        ("weight", weight, (outputs, x.shape[-2] * x.shape[-1])),
        ("scale", scale, (scales,)),
        ("base", base, (outputs,)),
    ):
        _check_shape(op, name, t, shape, x)


def _check_shape(op: str, name: str, t: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    if t.shape != shape or not t.is_floating_point():
        raise ValueError(
            f"{op}: {name} must be a floating-point tensor {tuple(shape)} for streams {tuple(x.shape)}, "
            f"got {t.dtype} {tuple(t.shape)}; reshape or cast it before the call."
        )
    require_device(op, name, t, x)


def _example(generator: torch.Generator, streams: int, many: bool, outputs: int, scales: int) -> tuple:
    x = draw(generator, 20 if many else 3, streams, 40)
    return x, draw(generator, outputs, 40 * streams), draw(generator, scales), draw(generator, outputs), 1e-6, 1e-6
