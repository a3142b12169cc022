"""Forward passes in which no token depends on what it is computed with: `with BatchInvariant(): model(...)`.

A sampler multiplies a few rows at a time and reads keys from a cache, a trainer takes thousands of packed tokens. Where both
run the model's own modules in this context, their results are equal bit for bit: linear products and attention are those of
kernels/invariant.py, and all else in such a model is computed row by row. Gradients are the usual ones.

The context replaces F.linear, products by a matrix, and attention. What it cannot replace raises a ValueError.
"""

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..kernels import invariant_attention, invariant_linear
from ..kernels.dispatch import SIXTEEN_BITS
from ..kernels.latent_attention import WIDEST
from .packed_attention import Segments

PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}
OTHERS = {
    torch.bmm,
    Tensor.bmm,
    torch.baddbmm,
    torch.einsum,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.bilinear,
    F.multi_head_attention_forward,
}
ROWS = "exact: a row's result would depend on the other rows: "
CONTEXT = threading.local()
"""`mode` is this thread's BatchInvariant, or None. Not for code that torch.compile traces."""


class KeyCache(Protocol):
    """Keys and values of a decoder."""

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store k and v (B, G, T, D) of layer `number`, and return the attention of q (B, H, T, D) as (B, T, H, D)."""
        ...


class BatchInvariant(TorchFunctionMode):
    """Context of forward passes whose results have the same bits in any batch. A backward pass belongs after it.

    cache  the keys and values that attention reads and extends, of a decoder; None: those of the batch itself
    """

    def __init__(self, cache: KeyCache | None = None) -> None:
        super().__init__()
        self.cache, self.layers = cache, 0  # attention layers so far, in this forward
        self._bounds: dict[tuple, Tensor] = {}

    def __enter__(self) -> "BatchInvariant":
        self.outer, CONTEXT.mode = getattr(CONTEXT, "mode", None), self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        CONTEXT.mode = self.outer
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return linear(*args, **kwargs)
        if func in PRODUCTS and "out" not in kwargs:
            return _product(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._sdpa(*args, **kwargs)
        if func is F.dropout and _drops(*args, **kwargs):
            raise ValueError(f"{ROWS}the model drops numbers at random; set its dropout to 0, or leave exact out.")
        if func in OTHERS:
            raise ValueError(f"{ROWS}the model calls {func.__name__}, which has no batch-invariant kernel; leave exact out.")
        return func(*args, **kwargs)

    def _sdpa(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return self.attend(q, k, v, attn_mask, scale, dropout_p, is_causal or q.shape[2] == 1, None).transpose(1, 2)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, dropout: float, causal: bool, window: int | None
    ) -> Tensor:
        """Compute `layers.attention.attend`."""
        if why := _unable(mask, dropout, causal, window):
            raise ValueError(f"{ROWS}attention has {why}, and its batch-invariant kernel none; leave exact out.")
        number, self.layers = self.layers, self.layers + 1
        with torch._C.DisableTorchFunction():
            if self.cache is not None:
                return self.cache.attend(number, q, k, v, scale)
            (B, H, T, _), segments = q.shape, mask if isinstance(mask, Segments) else None
            bounds = self._rows(B, T, q.device) if segments is None else segments.bounds()
            q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
            return _Attention.apply(q.contiguous(), k, v, bounds, scale, segments, T).view(B, T, H, -1)

    def _rows(self, rows: int, length: int, device: torch.device) -> Tensor:
        """Return the bounds of rows that are one sequence each."""
        key = rows, length, device
        if key not in self._bounds:
            self._bounds[key] = torch.arange(0, rows * length + 1, length, device=device, dtype=torch.int32)
        return self._bounds[key]


def _unable(mask: Any, dropout: float, causal: bool, window: int | None) -> str | None:
    if isinstance(mask, Tensor):
        return "a mask"
    if isinstance(mask, Segments) and mask.cu_seqlens is None:
        return "packed rows without cu_seqlens"
    if window is not None:
        return f"a window of {window} tokens"
    return "dropout" if dropout else None if causal else "no causal order"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear by `invariant_linear`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    product: Callable[..., Tensor] = _Linear.apply if trains else invariant_linear
    return product(rows, weight.contiguous(), bias).view(*x.shape[:-1], len(weight))


def _product(func: Any, a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b of a matrix b, or of a column and a row, which sums nothing."""
    if b.dim() == 2 and a.dim() > 1:
        return linear(a, b.t())
    if a.dim() > 1 and b.dim() > 1 and a.shape[-1] == 1:
        return a * b
    raise ValueError(f"{ROWS}the model multiplies {tuple(a.shape)} by {tuple(b.shape)} ({func.__name__}); leave exact out.")


def _drops(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return training and p > 0


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return invariant_linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x, weight), (of_x, of_weight, of_bias) = ctx.saved_tensors, ctx.needs_input_grad
        with torch._C.DisableTorchFunction():
            return (
                g @ weight if of_x else None,
                g.t() @ x if of_weight else None,
                g.sum(0) if of_bias else None,
            )


class _Attention(torch.autograd.Function):
    """Backward is that of torch's variable-length flash attention, which takes our result and log-sum-exp; where it cannot,
    that of SDPA, computed again."""

    @staticmethod
    def forward(ctx, q, k, v, bounds, scale, segments, length):
        y, lse = invariant_attention(q, k, v, bounds, scale)
        ctx.save_for_backward(q, k, v, y, lse, bounds)
        ctx.scale, ctx.segments, ctx.length = scale, segments, length
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (q, k, v, y, lse, bounds), length = ctx.saved_tensors, ctx.length
        width = q.shape[-1]
        with torch._C.DisableTorchFunction():
            if q.is_cuda and q.dtype in SIXTEEN_BITS and width <= WIDEST and width % 8 == 0:
                none = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that there is not
                gradients = torch.ops.aten._flash_attention_backward(
                    g.contiguous(), q, k, v, y, lse, bounds, bounds, length, length, 0.0, True, none, none[0], scale=ctx.scale
                )
                return *gradients, None, None, None, None
            leaves = [t.detach().unflatten(0, (-1, length)).transpose(1, 2).requires_grad_() for t in (q, k, v)]
            with torch.enable_grad():
                mask = None if ctx.segments is None else ctx.segments.mask()
                group = q.shape[1] // k.shape[1]
                keys, values = (t.repeat_interleave(group, 1) for t in leaves[1:])
                again = F.scaled_dot_product_attention(
                    leaves[0], keys, values, attn_mask=mask, is_causal=mask is None, scale=ctx.scale
                )
            upstream = g.unflatten(0, (-1, length)).transpose(1, 2)
            gradients = torch.autograd.grad(again, leaves, upstream)
        return *(t.transpose(1, 2).flatten(0, 1) for t in gradients), None, None, None, None
