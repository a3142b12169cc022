"""The doors of one decoding step, a token for each of B rows: check, choose, call. Everything is written in place.

The stream `x` is fp32 (B, hidden); weights are read where they lie, in the model's dtype. `dependent` lets a kernel start while
the one before it in the stream still runs (programmatic dependent launch): only for a chain of these doors, where each reads
what the one before wrote. EARLY kernels let their successor in at once, LATE ones when their own weights are there.
"""

import torch
from torch import Tensor

from .cached import LARGEST
from .choose import implementation

EARLY, LATE = 1, 2  # values of `dependent`; 0 is a plain launch


def norm_rows(x: Tensor, norm: Tensor, eps: float, out: Tensor) -> Tensor:
    """out (B, hidden, in the model's dtype) = rms_norm(x): what a product on tensor cores reads."""
    _check("norm_rows", x, norm)
    _check_out("norm_rows", "out", out, tuple(x.shape), out.dtype)
    return implementation("decode_product.norm_rows", norm)(x, norm, eps, out)


def norm_product(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    k_weight: Tensor | None = None,
    v_weight: Tensor | None = None,
    bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    out: Tensor | None = None,
    best: Tensor | None = None,
    arg: Tensor | None = None,
    dependent: int = 0,
) -> Tensor:
    """out (B, rows, fp32) = rms_norm(x) times one weight, or q, k and v side by side.

    With `best` (B, P, fp32) and `arg` (B, P, int32), rows are also searched: each stretch of 8 or 16 or so of them, a power of
    two, P in all, gives its greatest value (NaN if any is) and where it lies, so that the greatest of all is found among P.
    """
    weights = [w for w in (weight, k_weight, v_weight) if w is not None]
    rows = sum(w.shape[0] for w in weights)
    if out is None:
        out = torch.empty(x.shape[0], rows, device=x.device, dtype=torch.float32)
    _check("norm_product", x, norm, *weights)
    _check_out("norm_product", "out", out, (x.shape[0], rows), torch.float32)
    if (best is None) != (arg is None) or (best is not None and arg is not None and best.shape != arg.shape):
        raise ValueError("norm_product: best and arg must be given together and have one shape; pass both or neither.")
    if best is not None and -(-rows // (1 << (-(-rows // best.shape[1]) - 1).bit_length())) != best.shape[1]:
        raise ValueError(
            f"norm_product: best has {best.shape[1]} columns, which {rows} rows cannot be cut into in stretches of a power of "
            "two; give it ceil(rows / 16)."
        )
    implementation("decode_product.norm_product", weight)(
        x, norm, eps, weight, k_weight, v_weight, bias, k_bias, v_bias, out, best, arg, dependent
    )
    return out


def norm_gate_up(
    x: Tensor,
    norm: Tensor,
    eps: float,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    out: Tensor | None = None,
    dependent: int = 0,
) -> Tensor:
    """out (B, rows, in gate's dtype) = silu(n gateᵀ) · (n upᵀ), n the RMSNorm of x."""
    if out is None:
        out = torch.empty(x.shape[0], gate.shape[0], device=x.device, dtype=gate.dtype)
    _check("norm_gate_up", x, norm, gate, up)
    _check_out("norm_gate_up", "out", out, (x.shape[0], gate.shape[0]), gate.dtype)
    return implementation("decode_product.norm_gate_up", gate)(x, norm, eps, gate, up, gate_bias, up_bias, out, dependent)


def add_product(h: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, dependent: int = 0) -> Tensor:
    """x += h weightᵀ, in place: the output and the down product, with the residual."""
    if h.dim() != 2 or h.shape[1] != weight.shape[1]:
        raise ValueError(f"add_product: h must have shape (rows, {weight.shape[1]}) to match weight, got {tuple(h.shape)}.")
    _check_out("add_product", "x", x, (h.shape[0], weight.shape[0]), torch.float32)
    return implementation("decode_product.add_product", weight)(h, weight, bias, x, dependent)


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
              gap (tokens beyond the cache may share its last place; what comes of them is nobody's)
    caches    (B, K, L, D); places beyond `position` are never read
    cos, sin  (L, D/2) fp32 of every position
    q_norm    weights (D,) for models that norm their heads; None for others
    window    the nearest keys that a token sees, itself among them; 0: all
    partial   scratch (B, K, splits, H/K, D + 2) fp32; splits is over how many programs a row's kv head may spread
    count     scratch (B · K,) int32, zeros; each launch leaves zeros
    out       (B, H D) in the cache's dtype or any other
    pages     (B, M) int32, for caches (P, K, S, D) of P pages that hold S places each, a power of two: row b's places from m S
              on lie in page pages[b, m]. The bits are those of the same rows side by side
    """
    _check_attention("decode_attention", qkv, position, k_cache, v_cache, cos, sin, out, pages)
    return implementation("decode_attention", k_cache)(
        qkv, position, k_cache, v_cache, cos, sin, q_norm, k_norm, eps, scale, window, partial, count, out, dependent, pages
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
    _check_attention("quantized_decode_attention", qkv, position, k_cache, v_cache, cos, sin, out, pages)
    if k_cache.dtype not in LARGEST or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"quantized_decode_attention: caches must both be one of {', '.join(map(str, LARGEST))}, got {k_cache.dtype} and "
            f"{v_cache.dtype}; decode_attention takes the others."
        )
    for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        _check_out(
            "quantized_decode_attention", name, scales, tuple(k_cache.shape[:3]), torch.float32, "it has one for each place"
        )
    unable = None
    if k_cache.dtype == torch.float8_e4m3fn and k_cache.is_cuda and torch.cuda.get_device_capability(k_cache.device) < (8, 9):
        unable = "e4m3 needs compute capability 8.9"
    return implementation("decode_attention.quantized_decode_attention", out, unable)(
        qkv, position, k_cache, v_cache, k_scale, v_scale, cos, sin, q_norm, k_norm, eps, scale, window, partial, count, out,
        dependent, pages,
    )  # fmt: skip


def _check_attention(
    op: str, qkv: Tensor, position: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor, sin: Tensor, out: Tensor,
    pages: Tensor | None,
) -> None:  # fmt: skip
    B, K, places, D = k_cache.shape
    heads, tokens = out.shape[1] // D, position.shape[1:]
    if pages is not None:
        if pages.dim() != 2 or pages.dtype != torch.int32 or not pages.is_contiguous() or places & (places - 1):
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
    _check_out(op, "position", position, (B, *tokens), torch.int32, "it says where each row stands")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (places, D // 2) or table.dtype != torch.float32:
            raise ValueError(
                f"{op}: {name} must be torch.float32 ({places}, {D // 2}), got {table.dtype} {tuple(table.shape)}; give one "
                "angle for each place of the cache and pair."
            )


def _check(op: str, x: Tensor, norm: Tensor, *weights: Tensor) -> None:
    if x.dim() != 2 or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"{op}: x must be a contiguous torch.float32 (rows, hidden), got {x.dtype} {tuple(x.shape)}.")
    if norm.shape != x.shape[1:]:
        raise ValueError(f"{op}: norm must have shape {tuple(x.shape[1:])} to match x, got {tuple(norm.shape)}.")
    for weight in weights:
        if weight.dim() != 2 or weight.shape[1] != x.shape[1] or not weight.is_contiguous():
            raise ValueError(
                f"{op}: a weight must be contiguous (outputs, {x.shape[1]}) to match x, got {tuple(weight.shape)}."
            )


def _check_out(
    op: str, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, why: str = "it is written in place"
) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"{op}: {name} must be a contiguous {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}; {why}.")
