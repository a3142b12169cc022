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

from ....kernels.decode_product import WRITTEN
from ....kernels.dispatch import implementation, require, require_device
from ....kernels.peer_exchange import Mail, check_mail, example_mail
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


def check_rounds(op: str, iterations: int) -> None:
    if iterations < 1:
        raise ValueError(f"{op}: iterations must be at least 1, got {iterations}; DeepSeek-V4 takes 20.")


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
def hc_pre_reference(x, weight, scale, base, eps=1e-6, norm_eps=1e-6, iterations=20):
    u, post, comb = mixed(x, weight, scale, base, eps, norm_eps, lambda z: sinkhorn(z, iterations, eps))
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
def hc_post_reference(x, y, post, comb):
    dtype32 = torch.promote_types(x.dtype, torch.float32)
    residual = comb.to(dtype32).transpose(-1, -2) @ x.to(dtype32)
    return (post.to(dtype32)[..., None] * y.to(dtype32)[..., None, :] + residual).to(x.dtype)


def hc_head(x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, eps: float = 1e-6, norm_eps: float = 1e-6) -> Tensor:
    """Return only u, for weight (S, S D), scale (1,) and base (S,)."""
    _check_streams("hc_head", x)
    streams = x.shape[-2]
    _check("hc_head", x, weight, scale, base, streams, 1)
    kernel = implementation("hc_head", x, _unable(x), (streams, _many(x)))
    return kernel(x, weight, scale, base, eps, norm_eps)


@definition(lambda g, streams=4, many=False: _example(g, streams, many, streams, 1))
def hc_head_reference(x, weight, scale, base, eps=1e-6, norm_eps=1e-6):
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
    require_device(op, x, **{name: t})


def _example(generator, streams, many, outputs, scales):
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
    _check_step("hc_sums", x)
    require("hc_sums", "weight", weight, None, ("products", x.shape[1] * x.shape[2]), x.device, "a row is a product")
    sums = _room("hc_sums", "sums", sums, x, sums_shape(len(x), x.shape[2], len(weight)))
    return implementation("hc_sums", x, _unable(x), (x.shape[1],))(x, weight, sums)


@definition(lambda g, streams=4: _step_example(g, streams)[:3])
def hc_sums_reference(x, weight, sums):
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
    _check_sums("hc_read", x, sums, scale, base)
    u = _room("hc_read", "u", u, x, (len(x), x.shape[2]))
    return implementation("hc_read", x, _unable(x), (x.shape[1],))(x, sums, scale, base, eps, norm_eps, u)


@definition(lambda g, streams=4: _read(g, streams))
def hc_read_reference(x, sums, scale, base, eps, norm_eps, u):
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
    _check_sums("hc_write", x, sums, scale, base)
    if isinstance(y, Mail):
        check_mail("hc_write", y, (len(x), x.shape[2]), x.device, takes=True)
        if more is not None:
            raise ValueError("hc_write: got y by peer exchange and more; pass more to send_words, which adds it to the sum.")
    else:
        require("hc_write", "y", y, torch.float32, (len(x), x.shape[2]), x.device, "a part gives as much as it reads")
    if more is not None:
        require("hc_write", "more", more, torch.float32, (len(x), "some", x.shape[2]), x.device, "it is added to y")
    check_rounds("hc_write", rounds)
    out = _room("hc_write", "out", out, x, tuple(x.shape))
    if weight is not None:
        require("hc_write", "weight", weight, None, ("products", x.shape[1] * x.shape[2]), x.device, "a row is a product")
        following = _room("hc_write", "following", following, x, sums_shape(len(x), x.shape[2], len(weight)))
    form = x.shape[1], weight is not None, 0 if more is None else more.shape[1], isinstance(y, Mail)
    kernel = implementation("hc_write", x, _unable(x), form)
    return kernel(x, y, sums, scale, base, eps, norm_eps, rounds, more, weight, out, following)


@definition(lambda g, streams=4, followed=True, some=0, mailed=False: _write(g, streams, followed, some, mailed))
def hc_write_reference(x, y, sums, scale, base, eps, norm_eps, rounds, more, weight, out, following):
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


def _room(op: str, name: str, buffer: Tensor | None, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    if buffer is None:
        return torch.empty(shape, device=x.device, dtype=torch.float32)
    require(op, name, buffer, torch.float32, shape, x.device, WRITTEN)
    return buffer


def _check_step(op: str, x: Tensor) -> None:
    require(op, "x", x, torch.float32, ("tokens", "streams", "width"), x.device, "a step's streams are fp32")


def _check_sums(op: str, x: Tensor, sums: Tensor, scale: Tensor, base: Tensor) -> None:
    _check_step(op, x)
    products = (2 + x.shape[1]) * x.shape[1]
    require(
        op, "sums", sums, torch.float32, sums_shape(len(x), x.shape[2], products), x.device, "hc_sums or hc_write makes them"
    )
    require(op, "scale", scale, None, (3,), x.device, "of pre, post and comb")
    require(op, "base", base, None, (products,), x.device, "one for each product")


def _step_example(g, streams):
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
