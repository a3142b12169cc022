"""Attention with sinks by torch's own attention kernels, which know none.

With the result o and the log-sum-exp l of attention without the sink s, that with it has l' = log(exp(l) + exp(s)) and
o' = o · exp(l − l') = o · sigmoid(l − s). The kernels' backward computes the weights exp(scores − l) from the log-sum-exp that
it is given, and dS = weights · (do · v − do · o) from the result: with l' and o' it returns the gradients of attention with
sinks. That of a sink is −exp(s − l') · (do' · o'), summed over tokens.

16 bits on a GPU take flash attention over the tokens of all rows; fp32 the memory-efficient kernel; the CPU its own flash
attention.
"""

from typing import Any

import torch
from torch import Tensor

from ..dispatch import SIXTEEN_BITS
from ..sink_attention import hidden


def sink_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float, window: int | None = None, bounds: Tensor | None = None
) -> Tensor:
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))  # the CPU's kernel reads others wrongly
    y: Tensor = _SinkAttention.apply(q, k, v, sinks, scale, window, bounds)
    return y


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, scale, window, bounds):
        kernel = (_Flash if q.dtype in SIXTEEN_BITS else _Efficient) if q.is_cuda else _OnCPU
        call = kernel(q, k, scale, window, bounds)
        y, lse = call.forward(q, k, v)
        sink = sinks.to(lse.dtype)[:, None]
        y.mul_(call.by_token((lse - sink).sigmoid())[..., None])
        lse = torch.logaddexp(lse, sink)
        ctx.save_for_backward(q, k, v, y, lse, sinks)
        ctx.call = call
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (q, k, v, y, lse, sinks), call = ctx.saved_tensors, ctx.call
        g, of_sinks = g.contiguous(), None
        if ctx.needs_input_grad[3]:
            shares = call.by_token((sinks.to(lse.dtype)[:, None] - lse).exp())
            of_sinks = -(shares * (g.to(lse.dtype) * y).sum(-1)).sum((0, 1)).to(sinks.dtype)
        return *call.backward(g, q, k, v, y, lse), of_sinks, None, None, None


class _Flash:
    """torch's variable-length flash attention. lse (H, B T)"""

    def __init__(self, q: Tensor, k: Tensor, scale: float, window: int | None, bounds: Tensor | None) -> None:
        (B, T), L = q.shape[:2], k.shape[1]
        if bounds is None:
            begins = [torch.arange(0, B * n + 1, n, dtype=torch.int32, device=q.device) for n in (T, L)]
        else:  # descending ones, or ones beyond the tokens, would let the kernel read beyond its tensors
            begins = [bounds.clamp(0, B * T).cummax(0).values] * 2
        self.rows, self.limits = (B, T), (*begins, T, L, 0.0, True)
        left = -1 if window is None else min(window, L) - 1  # keys before the token; -1: all
        self.options: dict[str, Any] = {"scale": scale, "window_size_left": left, "window_size_right": 0}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rows = map(_aligned_rows, (q, k, v))
        y, lse, *_ = torch.ops.aten._flash_attention_forward(*rows, *self.limits, False, **self.options)
        return y.unflatten(0, self.rows), lse

    def backward(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        rows = map(_aligned_rows, (g, q, k, v, y))
        none = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that there is not
        gradients = torch.ops.aten._flash_attention_backward(*rows, lse, *self.limits, none, none[0], **self.options)
        return tuple(d.unflatten(0, (len(t), -1)) for d, t in zip(gradients, (q, k, v)))

    def by_token(self, t: Tensor) -> Tensor:
        """Return a tensor like lse as (B, T, H)."""
        return t.t().unflatten(0, self.rows)


def _aligned_rows(t: Tensor) -> Tensor:
    """Return t (B, T, H, D) as (B T, H, D), in place where the kernel's loads of 16 bytes can read it."""
    rows = t.flatten(0, 1)
    odd = rows.stride(0) % 8 or rows.stride(1) % 8 or rows.storage_offset() % 8
    return rows.clone(memory_format=torch.contiguous_format) if odd else rows


class _Efficient:
    """torch's memory-efficient attention, for equal head counts and rows that are one sequence. lse (B, H, T or more)"""

    def __init__(self, q: Tensor, k: Tensor, scale: float, window: int | None, bounds: Tensor | None) -> None:
        assert bounds is None
        self.tokens, self.group = q.shape[1], q.shape[2] // k.shape[2]
        self.causal = 2  # as of a mask whose diagonal ends in the lower right corner
        self.options: dict[str, Any] = {"scale": scale, "window_size": None if window is None else min(window, k.shape[1])}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        none = (None,) * 5
        y, lse, *_ = torch.ops.aten._efficient_attention_forward(
            *self.repeated(q, k, v), *none, 0.0, self.causal, True, **self.options
        )
        return y, lse

    def backward(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        none = torch.empty((), dtype=torch.int64, device=q.device)  # the state of a dropout that there is not
        dq, *others, _ = torch.ops.aten._efficient_attention_backward(
            g, *self.repeated(q, k, v), None, y, None, None, self.tokens, k.shape[1], lse, 0.0, none, none, self.causal, False,
            **self.options,
        )  # fmt: skip
        return dq, *(d.unflatten(2, (-1, self.group)).sum(3) for d in others)

    def repeated(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return q.contiguous(), *(t.repeat_interleave(self.group, 2) for t in (k, v))

    def by_token(self, t: Tensor) -> Tensor:
        return t[..., : self.tokens].transpose(1, 2)


class _OnCPU:
    """The CPU's flash attention. lse (B, H, T)"""

    def __init__(self, q: Tensor, k: Tensor, scale: float, window: int | None, bounds: Tensor | None) -> None:
        mask = hidden(q, k, window, bounds)
        self.options = {"attn_mask": q.new_zeros(mask.shape).masked_fill_(mask, float("-inf")), "scale": scale}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        heads = (t.transpose(1, 2) for t in (q, k, v))
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, False, **self.options)
        return y.transpose(1, 2), lse

    def backward(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        heads = (t.transpose(1, 2) for t in (g, q, k, v, y))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*heads, lse, 0.0, False, **self.options)
        return tuple(d.transpose(1, 2) for d in gradients)

    def by_token(self, t: Tensor) -> Tensor:
        return t.transpose(1, 2)
