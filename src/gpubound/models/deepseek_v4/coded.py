"""transformers' experts with weights in fp4, their published format: 4.25 bits per weight.

A decoding step reads the quantised weights in place (decode/experts.py). The module's forward, which transformers'
generate and the decoder's reference check call, dequantises one expert at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from ...kernels.packed_weights import BIAS, BITS, GROUP, MX, Packed, unpack
from ...layers.quantized_base import OnlyCodes

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
            wide = -(-columns // GROUP) * GROUP
            words = torch.zeros(count * rows, wide * BITS["fp4"] // 32, dtype=torch.int32)
            self.register_buffer(f"{part}_words", words)
            self.register_buffer(f"{part}_scale", torch.full((count * rows, wide // MX), BIAS, dtype=torch.uint8))

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
