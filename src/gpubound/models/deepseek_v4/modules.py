"""Modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from ...kernels.packed_weights import BIAS, BITS, GROUP, MX, Packed, unpack
from ...layers.quantized_base import OnlyCodes
from .kernels.products import Fp8Blocks, numbers, scales_shape


class Fp8Linear(OnlyCodes):
    """Replacement of a linear layer without a bias. The buffers are uint8, since `.to(torch.bfloat16)` would round
    floating-point buffers. transformers cannot load the saved buffers."""

    linear = True
    codes: Tensor
    scale: Tensor

    def __init__(self, layer: Any, block: tuple[int, int]) -> None:
        super().__init__()
        self.n_groups = getattr(layer, "n_groups", 0)  # of a grouped layer: each group of rows has a separate input
        self.block, self.dtype = block, layer.weight.dtype
        rows, columns = layer.weight.shape
        like = {"device": layer.weight.device, "dtype": torch.uint8}
        self.register_buffer("codes", torch.zeros(rows, columns, **like))
        across, down = scales_shape((rows, columns), block)
        self.register_buffer("scale", torch.zeros(across, 4 * down, **like))

    @property
    def blocks(self) -> Fp8Blocks:
        return Fp8Blocks(self.codes.view(torch.float8_e4m3fn), self.scale.view(torch.float32), self.block, self.dtype)

    @property
    def size(self) -> int:
        return self.codes.numel()

    def _apply(self, fn: Any, recurse: bool = True) -> "Fp8Linear":
        """Apply fn to the buffers, and to the dtype of the dequantised weight."""
        module = super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, device=self.codes.device, dtype=self.dtype)).dtype
        return module

    def forward(self, x: Tensor) -> Tensor:
        weight = numbers(self.blocks, x.dtype)
        if not self.n_groups:
            return F.linear(x, weight)
        return torch.einsum("...gk,grk->...gr", x, weight.unflatten(0, (self.n_groups, -1)))


PARTS = ("gate_up", "down")


class Fp4Experts(OnlyCodes):
    """Experts with buffers of quantised weights and scales (see `packed`). transformers cannot load the saved buffers."""

    original = theirs.DeepseekV4Experts  # the replaced class, for models/registry.py
    _is_hf_initialized = True  # so transformers draws no weights for it

    def __init__(self, config: Any) -> None:
        super().__init__()
        with torch.device("meta"):
            like = self.original(config)
        self.num_experts, self.act_fn, self.limit = like.num_experts, like.act_fn, like.limit
        shapes = {part: like.get_parameter(f"{part}_proj").shape for part in PARTS}
        self.columns = {part: shape[2] for part, shape in shapes.items()}
        for part, (count, rows, columns) in shapes.items():
            padded = -(-columns // GROUP) * GROUP
            words = torch.zeros(count * rows, padded * BITS["fp4"] // 32, dtype=torch.int32)
            self.register_buffer(f"{part}_words", words)
            self.register_buffer(f"{part}_scale", torch.full((count * rows, padded // MX), BIAS, dtype=torch.uint8))

    def packed(self, part: str) -> Packed:
        """Return the concatenated rows of all experts."""
        words, scale = self._buffers[f"{part}_words"], self._buffers[f"{part}_scale"]
        assert words is not None and scale is not None
        return Packed(words, scale, self.columns[part], "fp4")

    @property
    def size(self) -> int:
        return sum(self.packed(part).rows * self.columns[part] for part in PARTS)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, slot = torch.where(top_k_index == expert)
            gate_up, down = (self._numbers(part, expert, hidden_states.dtype) for part in PARTS)
            gate, up = F.linear(hidden_states[token], gate_up).chunk(2, -1)
            own = F.linear(self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit), down)
            y.index_add_(0, token, (own * top_k_weights[token, slot, None]).to(y.dtype))
        return y

    def _numbers(self, part: str, expert: int, dtype: torch.dtype) -> Tensor:
        packed = self.packed(part)
        each = packed.rows // self.num_experts
        return unpack(packed.part(slice(expert * each, (expert + 1) * each))).to(dtype)


@contextmanager
def in_fp4(wanted: bool) -> Iterator[None]:
    """Make transformers build models with Fp4Experts within the context, if `wanted`."""
    module: Any = theirs
    own = module.DeepseekV4Experts
    if wanted:
        module.DeepseekV4Experts = Fp4Experts
    try:
        yield
    finally:
        module.DeepseekV4Experts = own


def keep_in_fp32(model: Any) -> None:
    """Convert parameters to fp32 as transformers' loading does, and make the norms `rounded` permanently."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in model._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.float()
    rounded(model)


def rounded(model: nn.Module) -> list[RemovableHandle]:
    """Register hooks that round the norms' outputs, and return their handles; empty if norms already round."""
    norms: list[Any] = [m for m in model.modules() if type(m).__name__ == "DeepseekV4RMSNorm"]
    if not norms or norms[0](norms[0].weight.detach().bfloat16()).dtype == torch.bfloat16:
        return []
    return [norm.register_forward_hook(_round) for norm in norms]


def _round(norm: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return y.to(inputs[0].dtype)
