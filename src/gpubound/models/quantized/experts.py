"""Experts over fp4 codes: e2m1, with a power of two for every 32 columns, as gpt-oss and DeepSeek-V4 are published.

Legend: N tokens, S experts a token, E experts in all, I width of an expert.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import DataError
from ...kernels.packed_weights import BIAS, MX, TABLE, Packed, pack_fp4
from ...kernels.quantized_product import dequantize
from ...layers.quantized_base import OnlyCodes
from ..folder import CURE

PARTS = ("gate_up", "down")
AT_ONCE = 1 << 32  # bytes of gate and up that are dequantised together: 128 experts of gpt-oss-120b, 4.2 GB


class Fp4Experts(OnlyCodes):
    """Base class of experts with buffers of codes and scales. Those of a few tokens are dequantised by themselves, without the
    host; of many tokens, one expert at a time, also in the backward pass. transformers cannot load the saved buffers."""

    _is_hf_initialized = True  # so transformers draws no weights for it

    def __init__(self, experts: int, hidden: int, inner: int, persistent: bool) -> None:
        """persistent: whether the buffers are in the state dict"""
        super().__init__()
        self.num_experts, kind = experts, TABLE["fp4"]
        self.shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        for part, (rows, columns) in self.shapes.items():
            words = torch.zeros(experts * rows, kind.words(columns), dtype=torch.int32)
            scale = torch.full((experts * rows, kind.scales(columns)), BIAS, dtype=torch.uint8)
            self.register_buffer(f"{part}_words", words, persistent)
            self.register_buffer(f"{part}_scale", scale, persistent)

    @property
    def size(self) -> int:
        return self.num_experts * sum(rows * columns for rows, columns in self.shapes.values())

    def packed(self, part: str) -> Packed:
        """Return the rows of all experts, one below the other."""
        words, scale = self._buffers[f"{part}_words"], self._buffers[f"{part}_scale"]
        assert words is not None and scale is not None
        return Packed(words, scale, self.shapes[part][1], "fp4")

    def numbers(self, part: str, experts: Tensor | int, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weights (n, rows, columns) of some experts, or (rows, columns) of one."""
        rows, columns = self.shapes[part]
        packed = self.packed(part)
        if isinstance(experts, Tensor):
            chosen = packed.experts(experts, rows)
        else:
            chosen = packed.part(slice(experts * rows, (experts + 1) * rows))
        out = torch.empty(chosen.rows, columns, device=packed.words.device, dtype=dtype)
        weights = dequantize(chosen, out).view(-1, rows, columns)
        return weights if isinstance(experts, Tensor) else weights[0]

    def gated(self, both: Tensor) -> Tensor:
        """Return the unit (..., I) of the product with gate and up (..., 2 I)."""
        raise NotImplementedError

    def bias(self, part: str, experts: Tensor | int) -> Tensor | float:
        """Return what is added to a product."""
        return 0.0

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x = hidden_states
        rows, columns = self.shapes["gate_up"]
        most = min(self.num_experts, AT_ONCE // (rows * columns * x.itemsize))
        if top_k_index.numel() <= most and not torch.is_grad_enabled():
            ids = top_k_index.flatten()
            each = x.repeat_interleave(top_k_index.shape[1], 0)[..., None]
            both = torch.bmm(self.numbers("gate_up", ids, x.dtype), each)[..., 0] + self.bias("gate_up", ids)
            y = torch.bmm(self.numbers("down", ids, x.dtype), self.gated(both)[..., None])[..., 0] + self.bias("down", ids)
            return (y * top_k_weights.flatten()[:, None]).view(len(x), -1, x.shape[1]).sum(1).to(x.dtype)
        out = torch.zeros_like(x)
        for expert in top_k_index.unique().tolist():
            token, slot = torch.where(top_k_index == expert)
            both = _Product.apply(x[token], self, "gate_up", expert) + self.bias("gate_up", expert)
            y = _Product.apply(self.gated(both), self, "down", expert) + self.bias("down", expert)
            out.index_add_(0, token, (y * top_k_weights[token, slot, None]).to(x.dtype))  # in place: autograd keeps no copy
        return out


class _Product(torch.autograd.Function):
    """x times an expert's weights, which are dequantised again for the gradient."""

    @staticmethod
    def forward(ctx, x, experts, part, expert):
        ctx.weights = experts, part, expert
        return F.linear(x, experts.numbers(part, expert, x.dtype))

    @staticmethod
    def backward(ctx, g):
        experts, part, expert = ctx.weights
        return g @ experts.numbers(part, expert, g.dtype), None, None, None


def keep_fp4(place: Packed, codes: Tensor, scales: Tensor | None, name: str) -> None:
    """Copy published codes (..., columns / 2) and scales (..., columns / 32) to `place`, in the kernels' layout."""
    got = codes.shape[:-1].numel(), 2 * codes.shape[-1]
    if got != (place.rows, place.columns):
        raise DataError(f"{name}: got {got}, wanted {(place.rows, place.columns)}, by config.json; {CURE}.")
    wanted = (*codes.shape[:-1], place.columns // MX)
    if scales is None or scales.shape != wanted:
        shape = None if scales is None else tuple(scales.shape)
        raise DataError(f"{name}: got scales {shape}, wanted {wanted}: one for each {MX} numbers; {CURE}.")
    packed = pack_fp4(codes.flatten(0, -2), scales.flatten(0, -2))
    place.words.copy_(packed.words)
    place.scale.copy_(packed.scale)


@contextmanager
def built_with(module: Any, name: str, kind: type | None) -> Iterator[None]:
    """Make a module of transformers build models with `kind` instead of its class `name` within the context. None: unchanged"""
    own = getattr(module, name)
    setattr(module, name, kind or own)
    try:
        yield
    finally:
        setattr(module, name, own)
