"""Polynomial attention: the weight of a key is a power of its score, without softmax or normalisation.

    s_ij = q_i · k_j / √D
    s̃    = c tanh(s / c)                        with a soft clip c, else s
    φ_ij = scale · (a s̃^p + b)                  p odd and fixed; a, b and scale are learned
    y_i  = g_i Σ_j φ_ij v_j                     g with gates, one a head and token; j runs over the keys that i attends to

A token attends to itself and earlier tokens, or to all if not causal; with a window, to those less than `window` away.

No weight depends on another, so sums over parts of the keys add. A key whose v is zero adds nothing and gets no gradient, so
zeroed values mask padding.

Legend: B batch, T tokens, H query heads, K key and value heads, D width of a head, L length of the cache.
"""

import torch
from torch import Tensor

from ....kernels.dispatch import implementation, require
from ....kernels.registry import definition, draw, ints

DEGREES = (1, 3, 5, 7)
WIDEST_HEAD = 128
EVEN, ODD = 256, 200  # tokens of a self-test: divisibility by 16 is a compile-time constant


def poly_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coefficients: Tensor,
    gates: Tensor | None = None,
    degree: int = 3,
    soft_clip: float = 0.0,
    window: int = 0,
    causal: bool = True,
) -> Tensor:
    """Return y (B, T, H, D) of q (B, T, H, D), k and v (B, T, K, D), in q's dtype, of any strides; y is contiguous.

    coefficients  (3,): a, b and scale
    gates         (B, T, H)
    soft_clip     0: none
    window        0: none
    """
    op = "poly_attention"
    _check(op, q, k, v, coefficients, gates, degree, soft_clip, window, 4)
    tokens = q.shape[1]
    window = 0 if window >= tokens else window  # it masks nothing
    has = gates is not None, window > 0
    shape = *q.shape[2:], k.shape[2], degree, soft_clip, *has, causal, EVEN if tokens % 16 == 0 else ODD
    kernel = implementation(op, q, _unable(q), shape)
    return kernel(q, k, v, coefficients, gates, degree, soft_clip, window, causal)


def _example(generator, heads=2, size=16, kv=1, degree=3, soft_clip=2.0, gated=True, windowed=True, causal=True, tokens=24):
    q, k, v = (draw(generator, 1, tokens, count, size) for count in (heads, kv, kv))
    gates = draw(generator, 1, tokens, heads) if gated else None
    return q, k, v, draw(generator, 3), gates, degree, soft_clip, 9 if windowed else 0, causal


@definition(_example, gradient=True)
def poly_attention_reference(q, k, v, coefficients, gates=None, degree=3, soft_clip=0.0, window=0, causal=True):
    dtype32 = torch.promote_types(q.dtype, torch.float32)
    groups, tokens = q.shape[2] // k.shape[2], torch.arange(q.shape[1], device=q.device)
    keys, values = (t.to(dtype32).repeat_interleave(groups, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.to(dtype32), keys) * q.shape[3] ** -0.5
    distance = tokens[:, None] - tokens
    weights = _weights(scores, coefficients.to(dtype32), degree, soft_clip)
    visible = distance.abs() < window if window else torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible = visible & (distance >= 0)
    y = torch.einsum("bhij,bjhd->bihd", torch.where(visible, weights, 0.0), values)
    return (y if gates is None else y * gates.to(dtype32)[..., None]).to(q.dtype)


def poly_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    position: Tensor,
    coefficients: Tensor,
    gates: Tensor | None = None,
    degree: int = 3,
    soft_clip: float = 0.0,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write k and v of one token per row to the cache, and return y (B, H, D), cache_k and cache_v.

    q (B, H, D), k and v (B, K, D) are the token's; cache_k and cache_v are (B, L, K, D), in the same dtype. position (B,) int32
    is the token's index in the cache. At a position outside the cache nothing is written, and y is NaN. Later positions are not
    read. gates are (B, H); the other arguments are those of `poly_attention`, which computes the same y for a whole sequence.
    """
    op = "poly_attention_step"
    _check(op, q, k, v, coefficients, gates, degree, soft_clip, window, 3)
    if cache_k.dim() != 4 or cache_k.shape[1] < 1:
        raise ValueError(
            f"{op}: cache_k must be (rows, places, kv heads, head size), got {tuple(cache_k.shape)}; make it once, with a "
            f"place for each token to come."
        )
    sizes = len(q), cache_k.shape[1], *k.shape[1:]
    for name, cache in (("cache_k", cache_k), ("cache_v", cache_v)):
        require(op, name, cache, q.dtype, sizes, q.device)
    require(op, "position", position, torch.int32, (len(q),), q.device, "it says where each row stands")
    shape = *q.shape[1:], k.shape[1], degree, soft_clip, gates is not None, window > 0
    kernel = implementation(op, q, _unable(q), shape)
    window = min(window, 2**31 - 1)  # a larger one masks no more
    return kernel(q, k, v, cache_k, cache_v, position, coefficients, gates, degree, soft_clip, window)


def _step_example(generator, heads=4, size=16, kv=2, degree=3, soft_clip=2.0, gated=True, windowed=True):
    """Draw two rows of ten positions."""
    shapes = (2, heads, size), (2, kv, size), (2, kv, size), (2, 10, kv, size), (2, 10, kv, size)
    tensors = [draw(generator, *shape) for shape in shapes]
    rest = draw(generator, 3), draw(generator, 2, heads) if gated else None
    return *tensors, ints(9, 3), *rest, degree, soft_clip, 6 if windowed else 0


@definition(_step_example)
def poly_attention_step_reference(
    q, k, v, cache_k, cache_v, position, coefficients, gates=None, degree=3, soft_clip=0.0, window=0
):
    dtype32 = torch.promote_types(q.dtype, torch.float32)
    length, groups = cache_k.shape[1], q.shape[1] // k.shape[1]
    known = (position >= 0) & (position < length)
    at, rows = torch.where(known, position, 0).long(), torch.arange(len(q), device=q.device)
    for cache, new in ((cache_k, k), (cache_v, v)):
        cache[rows, at] = torch.where(known[:, None, None], new, cache[rows, at])
    distance = at[:, None] - torch.arange(length, device=q.device)  # (B, L)
    visible = distance >= 0
    if window:
        visible &= distance < window
    keys, values = (
        torch.where(visible[..., None, None], cache, 0).to(dtype32).repeat_interleave(groups, 2) for cache in (cache_k, cache_v)
    )
    scores = torch.einsum("bhd,blhd->bhl", q.to(dtype32), keys) * q.shape[2] ** -0.5
    weights = torch.where(visible[:, None], _weights(scores, coefficients.to(dtype32), degree, soft_clip), 0.0)
    y = torch.einsum("bhl,blhd->bhd", weights, values)
    y = y if gates is None else y * gates.to(dtype32)[..., None]
    return torch.where(known[:, None, None], y, torch.nan).to(q.dtype), cache_k, cache_v


def _weights(scores: Tensor, coefficients: Tensor, degree: int, soft_clip: float) -> Tensor:
    a, b, scale = coefficients
    clipped = soft_clip * torch.tanh(scores / soft_clip) if soft_clip else scores
    return scale * (a * clipped**degree + b)


def _unable(q: Tensor) -> str | None:
    return f"its kernel holds heads of up to {WIDEST_HEAD} numbers" if q.shape[-1] > WIDEST_HEAD else None


def _check(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coefficients: Tensor,
    gates: Tensor | None,
    degree: int,
    soft_clip: float,
    window: int,
    dims: int,
) -> None:
    tokens = "" if dims == 3 else "tokens, "
    if q.dim() != dims or not q.is_floating_point() or 0 in q.shape[-2:]:
        raise ValueError(
            f"{op}: q must be a floating-point tensor (rows, {tokens}heads, head size), got {q.dtype} {tuple(q.shape)}; "
            f"bring it into that shape before the call."
        )
    for name, t in (("k", k), ("v", v)):
        heads = k.shape[-2] if k.dim() == dims else 0
        fits = t.dim() == dims and t.shape == (*q.shape[:-2], heads, q.shape[-1]) and heads and q.shape[-2] % heads == 0
        if not fits or t.dtype != q.dtype or t.device != q.device:
            wanted = ", ".join(map(str, (*q.shape[:-2], "kv heads", q.shape[-1])))
            raise ValueError(
                f"{op}: {name} must be ({wanted}) in {q.dtype} on {q.device}, with as many kv heads as the other, a divisor of "
                f"q's {q.shape[-2]}, got {tuple(t.shape)} {t.dtype} on {t.device}; cast, move or reshape it before the call."
            )
    require(op, "coefficients", coefficients, None, (3,), q.device, "they are a, b and scale")
    if gates is not None and (gates.shape != q.shape[:-1] or not gates.is_floating_point() or gates.device != q.device):
        raise ValueError(
            f"{op}: gates must be a floating-point tensor {tuple(q.shape[:-1])} on {q.device}, got {gates.dtype} "
            f"{tuple(gates.shape)} on {gates.device}; give one for each head of each token."
        )
    if degree not in DEGREES:
        raise ValueError(f"{op}: degree must be one of 1, 3, 5 and 7, got {degree}; an odd power keeps the sign of a score.")
    if not 0.0 <= soft_clip < float("inf"):
        raise ValueError(f"{op}: soft_clip must be at least 0 and finite, got {soft_clip}; 0 clips nothing.")
    if window < 0:
        raise ValueError(f"{op}: window must be at least 0, got {window}; 0 lets a token see all.")
