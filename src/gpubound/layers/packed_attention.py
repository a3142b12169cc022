"""Attention within examples of packed rows. A row holds several examples, and a token attends to those of the same one only.

`Segments` has the bounds of the examples as tensors on the device, and takes the place of a mask. In 16 bits on a GPU, torch's
variable-length flash attention reads cu_seqlens and skips what a mask would hide. Elsewhere, SDPA with a block-diagonal mask
defines the result. Neither reads the device from the host, so a captured step takes other bounds at every replay.

Legend: B batch, T tokens of a row, H query heads, K key and value heads, D width of a head, S examples of a batch, empty ones
included.
"""

from typing import Any

import torch
from torch import Tensor

from ..kernels.dispatch import SIXTEEN_BITS, transformed
from ..kernels.latent_attention import no_flash
from ..trace import fallback


class Segments:
    """Bounds of the examples in a batch of packed rows, as the `mask` of attention.

    segment_ids  (B, T): the number of the token's example in its row; padding may have any other number, such as -1
    cu_seqlens   (S + 1), int32: where each example begins among the B T tokens, then their number. An example may be empty,
                 and padding is one. None: only the masks are used
    """

    def __init__(self, segment_ids: Tensor, cu_seqlens: Tensor | None = None) -> None:
        self.segment_ids, self.cu_seqlens = segment_ids, cu_seqlens
        self._masks: dict[tuple, Tensor] = {}
        self._bounds: Tensor | None = None

    @classmethod
    def of(cls, tokens: Tensor, segment_ids: Tensor | None, cu_seqlens: Tensor | None) -> "Segments | None":
        """Return the segments of a batch of `tokens` (B, T), from either or both fields; None without fields."""
        if cu_seqlens is not None and (cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1):
            raise ValueError(
                f"packed rows: cu_seqlens: got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}, wanted torch.int32 of "
                f"one dimension: where each example begins among the tokens of the batch, and their number."
            )
        if segment_ids is not None and segment_ids.shape != tokens.shape:
            raise ValueError(
                f"packed rows: segment_ids: got shape {tuple(segment_ids.shape)}, wanted that of input_ids, "
                f"{tuple(tokens.shape)}: the number of each token's example in its row."
            )
        if segment_ids is None:
            if cu_seqlens is None:
                return None
            at = torch.arange(tokens.numel(), device=tokens.device, dtype=torch.int32)
            segment_ids = torch.searchsorted(cu_seqlens, at, right=True).view(tokens.shape)
        return cls(segment_ids, cu_seqlens)

    def mask(self, window: int | None = None, causal: bool = True) -> Tensor:
        """Return the mask of SDPA, (B, 1, T, T) bool. window: a token attends to at most that many, itself included"""
        key = window, causal
        if key not in self._masks:
            at = torch.arange(self.segment_ids.shape[1], device=self.segment_ids.device)
            mask = self.segment_ids[:, :, None] == self.segment_ids[:, None, :]
            distance = at[:, None] - at
            if causal:
                mask = mask & (distance >= 0)
            if window is not None:
                mask = mask & ((distance if causal else distance.abs()) < window)
            self._masks[key] = mask[:, None]
        return self._masks[key]

    def bias(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """Return the causal mask to be added to scores: 0, and the dtype's least number where a token may not attend."""
        key = window, dtype
        if key not in self._masks:
            mask = self.mask(window)
            self._masks[key] = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        return self._masks[key]

    def bounds(self) -> Tensor:
        """Return where examples begin, ascending from 0 to the number of tokens, each within one row, whatever cu_seqlens
        holds: other bounds would let the kernel read and write beyond its tensors. Those of a feed stay as they are."""
        assert self.cu_seqlens is not None
        if self._bounds is None:
            (rows, length), device = self.segment_ids.shape, self.segment_ids.device
            begins = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)
            ascending = self.cu_seqlens.clamp(0, rows * length).cummax(0).values
            self._bounds = torch.cat([ascending, begins]).sort().values
        return self._bounds

    def to(self, device: Any, non_blocking: bool = False) -> "Segments":
        """Return the same bounds on a device."""
        if self.segment_ids.device == torch.device(device):
            return self
        ids, bounds = self.segment_ids.to(device, non_blocking=non_blocking), self.cu_seqlens
        return Segments(ids, None if bounds is None else bounds.to(device, non_blocking=non_blocking))


def flash_attend(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, dropout: float, causal: bool, window: int | None
) -> Tensor | None:
    """Compute attention of q (B, H, T, D), k and v (B, K, T, D) within segments -> (B, T, H, D), or return None if torch's
    variable-length kernel cannot. On a GPU that is a counted fallback.

    Heads that follow the tokens in memory are read in place. The kernel's grid has a program for each of S examples and each
    block of T tokens, most of which end at once; so S should not be much larger than the number of examples.
    """
    if not q.is_cuda:
        return None
    dtype = q.dtype
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
    if why := _unable(q, k, v, segments, dtype, dropout):
        if not torch.compiler.is_compiling():
            fallback("attention of packed rows by a variable-length kernel", why)
        return None
    (B, H, T, D), bounds = q.shape, segments.bounds()
    rows = (t.to(dtype).transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    left = -1 if window is None else window - 1  # keys before the token; -1: all
    right = 0 if causal else left
    y, *_ = torch.ops.aten._flash_attention_forward(
        *rows, bounds, bounds, T, T, 0.0, causal, False, scale=scale, window_size_left=left, window_size_right=right
    )
    return y.view(B, T, H, D)


def _unable(q: Tensor, k: Tensor, v: Tensor, segments: Segments, dtype: torch.dtype, dropout: float) -> str | None:
    """Return why the kernel cannot compute this call; None if it can."""
    width = q.shape[-1]
    if segments.cu_seqlens is None:
        return "the batch has no cu_seqlens"
    if dtype not in SIXTEEN_BITS:
        return f"it computes in 16 bits, not in {dtype}"
    if v.shape[-1] != width:
        return f"its heads are as wide as those of the values, not {width} and {v.shape[-1]}"
    if dropout:
        return f"it has no dropout, and attention drops {dropout:g} of its weights"
    if q.shape[2] != k.shape[2]:
        return "keys of a cache"
    if transformed():
        return "torch.func and forward-mode transforms (vmap, grad, jvp) have no rule for it"
    return no_flash(q.device, width)
