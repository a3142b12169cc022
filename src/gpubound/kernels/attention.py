"""Attention in one decoding step, a token or a few for each of B rows. Everything is written in place."""

import torch
from torch import Tensor

from .cached import LARGEST
from .checks import require
from .choose import implementation
from .decoding import WRITTEN

MOST_PLACES = 2**31 - 1  # a larger window hides no more, and kernels take it as an int32


def decode_attention(
    qkv: Tensor,
    position: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scale: float,
    window: int,
    partial: Tensor,
    count: Tensor,
    out: Tensor,
    dependent: int = 0,
    pages: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of one new token a row over the cache, which gets the token's k and v: (out, k_cache, v_cache).

    With T new tokens a row, row after row in qkv, out and the scratch (B·T for B): each sees the cache and those before it, and
    gets the same bits as if it had come alone.

    qkv       (B, (H + 2K) D), as norm_product writes it: neither normed nor turned yet
    position  (B,) int32: where the token stands, and how many keys its row has already; or (B, T), places in order without a
              gap (tokens beyond the cache may share its last place; what comes of them is nobody's). At a place that the
              cache does not have, nothing is written and out is NaN, as it is for a row whose first token stands there
    caches    (B, K, L, D); places beyond `position` are never read
    cos, sin  (L, D/2) fp32 of every position
    q_norm    weights (D,) for models that norm their heads; None for others
    window    the nearest keys that a token sees, itself among them; 0: all
    partial   scratch (B, K, splits, H/K, D + 2) fp32; splits is over how many programs a row's kv head may spread
    count     scratch (B · K,) int32, zeros; each launch leaves zeros
    out       (B, H D) in the cache's dtype or any other
    pages     (B, M) int32, for caches (P, K, S, D) of P pages that hold S places each, a power of two: row b's places from m S
              on lie in page pages[b, m]. The bits are those of the same rows side by side. A page that there is not is
              neither read nor written, and makes NaN of what would have seen it
    """
    _check(
        "decode_attention", qkv, position, k_cache, v_cache, cos, sin, q_norm, k_norm, window, partial, count, out, pages
    )  # fmt: skip
    return implementation("decode_attention", k_cache)(
        qkv,
        position,
        k_cache,
        v_cache,
        cos,
        sin,
        q_norm,
        k_norm,
        eps,
        scale,
        min(window, MOST_PLACES),
        partial,
        count,
        out,
        dependent,
        pages,
    )


def quantized_decode_attention(
    qkv: Tensor,
    position: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scale: float,
    window: int,
    partial: Tensor,
    count: Tensor,
    out: Tensor,
    dependent: int = 0,
    pages: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`decode_attention` over a cache of 8-bit codes (cached.py): (out, k_cache, v_cache, k_scale, v_scale).

    The token's k and v are rounded when they are written, and the token itself sees them rounded: what it attends to is what
    later ones will. Caches are torch.int8 or torch.float8_e4m3fn; the scales are their shape without the last dimension, fp32.
    """
    _check(
        "quantized_decode_attention", qkv, position, k_cache, v_cache, cos, sin, q_norm, k_norm, window, partial, count, out,
        pages,
    )  # fmt: skip
    if k_cache.dtype not in LARGEST or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"quantized_decode_attention: caches must both be one of {', '.join(map(str, LARGEST))}, got {k_cache.dtype} and "
            f"{v_cache.dtype}; decode_attention takes the others."
        )
    for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        shape = tuple(k_cache.shape[:3])
        require("quantized_decode_attention", name, scales, torch.float32, shape, k_cache.device, "it has one for each place")
    unable = None
    if k_cache.dtype == torch.float8_e4m3fn and k_cache.is_cuda and torch.cuda.get_device_capability(k_cache.device) < (8, 9):
        unable = "e4m3 needs compute capability 8.9"
    return implementation("decode_attention.quantized_decode_attention", out, unable)(
        qkv, position, k_cache, v_cache, k_scale, v_scale, cos, sin, q_norm, k_norm, eps, scale, min(window, MOST_PLACES),
        partial, count, out, dependent, pages,
    )  # fmt: skip


def _check(
    op: str, qkv: Tensor, position: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None,
    k_norm: Tensor | None, window: int, partial: Tensor, count: Tensor, out: Tensor, pages: Tensor | None,
) -> None:  # fmt: skip
    device = k_cache.device
    if k_cache.dim() != 4 or k_cache.shape[3] % 2 or out.dim() != 2 or out.shape[1] % max(1, k_cache.shape[3]):
        raise ValueError(
            f"{op}: caches must be (rows, kv heads, places, an even head size) and out (rows, heads x head size), got "
            f"{tuple(k_cache.shape)} and {tuple(out.shape)}."
        )
    B, K, places, D = k_cache.shape
    heads, tokens = out.shape[1] // D, position.shape[1:]
    if pages is not None:
        if (
            pages.dim() != 2 or pages.dtype != torch.int32 or not pages.is_contiguous() or places & (places - 1)
            or pages.device != device
        ):  # fmt: skip
            raise ValueError(
                f"{op}: pages must be a contiguous torch.int32 (rows, pages a row) of pages of a power of two places, got "
                f"{pages.dtype} {tuple(pages.shape)} of {places}."
            )
        B, places = len(pages), min(len(cos), places * pages.shape[1])
    rows = B * tokens.numel()
    if k_cache.shape != v_cache.shape or heads % K or qkv.shape != (rows, (heads + 2 * K) * D) or len(out) != rows:
        raise ValueError(
            f"{op}: qkv must be ({rows}, {(heads + 2 * K) * D}) for {heads} heads and caches {tuple(k_cache.shape)}, got "
            f"{tuple(qkv.shape)} and a v cache {tuple(v_cache.shape)}; all three come from one model."
        )
    require(op, "position", position, torch.int32, (B, *tokens), device, "it says where each row stands")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (places, D // 2) or table.dtype != torch.float32:
            raise ValueError(
                f"{op}: {name} must be torch.float32 ({places}, {D // 2}), got {table.dtype} {tuple(table.shape)}; give one "
                "angle for each place of the cache and pair."
            )
        require(op, name, table, torch.float32, (places, D // 2), device, "the kernel reads row after row")
    _check_rest(op, qkv, k_cache, v_cache, q_norm, k_norm, window, partial, count, out)


def _check_rest(
    op: str, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, window: int,
    partial: Tensor, count: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """What has the right shape or none to fit: layout, devices, norms, scratch."""
    device, (_, K, _, D) = k_cache.device, k_cache.shape
    rows, heads = len(out), out.shape[1] // D
    require(op, "qkv", qkv, None, tuple(qkv.shape), device, "pass the product as norm_product writes it")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require(op, name, cache, k_cache.dtype, tuple(k_cache.shape), device, "it is written in place")
    require(op, "out", out, None, tuple(out.shape), device, WRITTEN)
    if (q_norm is None) != (k_norm is None):
        raise ValueError(f"{op}: q_norm and k_norm go together, got one of them; pass both or neither.")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            require(op, name, norm, None, (D,), device, "it has one weight for each dimension of a head")
    if window < 0:
        raise ValueError(f"{op}: window must be at least 0, got {window}; 0 lets a token see all keys.")
    splits = partial.shape[2] if partial.dim() == 5 else 1
    wanted = (max(rows, len(partial)), K, max(1, splits), heads // K, D + 2)
    require(op, "partial", partial, torch.float32, wanted, device, "it is scratch for (rows, kv heads, splits, group, D + 2)")
    counts = (max(rows * K, count.numel()),)
    require(op, "count", count, torch.int32, counts, device, "it is scratch: a zero for each row and kv head")
