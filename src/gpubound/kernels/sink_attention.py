"""Causal attention with a sink in each head: a further score of the softmax, without a key or a value.

The weights of a token's keys sum to less than 1 by the sink's share, exp(sink) / (exp(sink) + sum of exp(scores)). gpt-oss
learns one sink for each head.

Legend: B batch, T queries of a row, L keys of a row, H query heads, K key and value heads, D width of a head.
"""

import torch
from torch import Tensor

from .dispatch import SIXTEEN_BITS, implementation, require, transformed
from .registry import definition, draw, ints, load

WIDEST, SMALL = 256, 192  # heads of torch's flash attention, in multiples of 8, on data centre and on other GPUs


def sink_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float, window: int | None = None, bounds: Tensor | None = None
) -> Tensor:
    """Attention of q (B, T, H, D), a row's last tokens, to k and v (B, L, K, D) -> (B, T, H, D); under autocast, in its dtype.

    sinks   (H,): a score of each head's softmax, not multiplied by `scale`
    window  a token attends to at most that many, itself included; None: to all before it
    bounds  (S + 1), int32, if T = L: where sequences begin among the B T tokens, ascending from 0 to B T, each in one row. A
            token attends to those of its sequence. None: a row is one
    """
    op, (H, D) = "sink_attention", q.shape[-2:] if q.dim() == 4 else (0, 0)
    if (
        not q.dim() == k.dim() == v.dim() == 4
        or k.shape != v.shape
        or (q.shape[0], D) != (k.shape[0], k.shape[3])
        or k.shape[1] < q.shape[1]
        or k.shape[2] == 0
        or H % k.shape[2]
        or not (q.is_floating_point() and q.dtype == k.dtype == v.dtype and q.device == k.device == v.device)
    ):
        got = ", ".join(f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in (q, k, v))
        raise ValueError(
            f"{op}: got q, k and v of {got}; wanted (B, T, H, D) and twice (B, L, K, D) of one floating dtype and device, with "
            f"L from T on and an H that K divides."
        )
    if sinks.shape != (H,) or not sinks.is_floating_point() or sinks.device != q.device:
        raise ValueError(
            f"{op}: sinks: got {sinks.dtype} {tuple(sinks.shape)} on {sinks.device}, wanted a floating-point tensor ({H},) on "
            f"{q.device}: one score for each head."
        )
    if window is not None and window < 1:
        raise ValueError(f"{op}: window: got {window}, wanted at least 1, the token itself, or None for all tokens.")
    if bounds is not None:
        require(op, "bounds", bounds, torch.int32, ("bounds",), q.device, "it is where sequences begin")
        if k.shape[1] != q.shape[1]:
            raise ValueError(f"{op}: bounds: got {k.shape[1]} keys for {q.shape[1]} tokens of a row, wanted as many.")
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        q, k, v = (t.to(torch.get_autocast_dtype(kind)) for t in (q, k, v))
    shape = H, k.shape[2], D, window is not None, bounds is not None
    with torch.autocast(kind, enabled=False):  # it would round the definition's fp32
        # The CPU's flash attention: 0.32 s forward and backward, the definition 0.84, transformers 0.70 (1,024 tokens, 16 heads
        # of 64, fp32, one core).
        torchs = kind == "cpu" and q.numel() > 0 and not transformed() and not torch.compiler.is_compiling()
        function = load("triton", op) if torchs else implementation(op, q, unable(q, bounds), shape)
        return function(q, k, v, sinks, scale, window, bounds)


def unable(q: Tensor, bounds: Tensor | None = None) -> str | None:
    """Return why torch's kernels cannot take q, so that the definition would hold all scores; None if they can."""
    if not q.is_cuda:
        return None
    if q.dtype in SIXTEEN_BITS:
        return no_flash(q.device, q.shape[-1])
    if bounds is not None:
        return f"packed rows are computed in 16 bits, not in {q.dtype}"
    return f"its heads are a multiple of 8 wide, not {q.shape[-1]}" if q.shape[-1] % 8 else None


def no_flash(device: torch.device, width: int) -> str | None:
    """Return why torch's flash attention has no forward and backward of heads of this width on a GPU; None if it has."""
    if width > WIDEST or width % 8:
        return f"its heads are up to {WIDEST} wide, a multiple of 8, not {width}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return "it needs a GPU of compute capability 8.0"
    if width > SMALL and capability not in ((8, 0), (9, 0), (10, 0)):
        return f"its backward for heads wider than {SMALL} needs more shared memory than this GPU has"
    return None


def hidden(q: Tensor, k: Tensor, window: int | None, bounds: Tensor | None) -> Tensor:
    """Return which keys each token does not attend to: (B or 1, 1, T, L) bool."""
    (B, T), L = q.shape[:2], k.shape[1]
    key = torch.arange(L, device=q.device)
    age = key[L - T :, None] - key
    far = (age < 0) if window is None else (age < 0) | (age >= window)
    if bounds is None:
        return far[None, None]
    sequence = torch.searchsorted(bounds, torch.arange(B * T, device=q.device, dtype=torch.int32), right=True).view(B, 1, T)
    return far | (sequence[..., None] != sequence[..., None, :])


def _example(
    g: torch.Generator, heads: int = 4, kv_heads: int = 2, width: int = 16, windowed: bool = True, packed: bool = False
) -> tuple:
    q, k, v = (draw(g, 2, 40, count, width) for count in (heads, kv_heads, kv_heads))
    bounds = ints(0, 11, 40, 40, 70, 80) if packed else None
    return q, k, v, draw(g, heads), width**-0.5, 7 if windowed else None, bounds


@definition(_example)
def sink_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float, window: int | None = None, bounds: Tensor | None = None
) -> Tensor:
    (B, T, H, D), (L, K), compute = q.shape, k.shape[1:3], torch.promote_types(q.dtype, torch.float32)
    queries, keys, values = (t.to(compute).transpose(1, 2) for t in (q, k, v))
    queries = queries.reshape(B, K, H // K * T, D)  # a group's heads as queries of its one key head
    scores = (queries * scale @ keys.mT).view(B, H, T, L).masked_fill(hidden(q, k, window, bounds), float("-inf"))
    sink = sinks.to(compute)[:, None, None]
    most = torch.maximum(scores.detach().amax(-1, keepdim=True), sink.detach())  # the result is the same for any number
    weights = (scores - most).exp()
    total = weights.sum(-1, keepdim=True) + (sink - most).exp()
    y = (weights.view(B, K, -1, L) @ values).view(B, H, T, D) / total
    return y.transpose(1, 2).to(q.dtype)
