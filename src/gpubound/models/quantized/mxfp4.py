"""MXFP4 of gpt-oss: experts in e2m1, with a power of two for every 32 columns; all else is in 16 bits.

experts.gate_up_proj_blocks  (E, 2 I, H / 32, 16) uint8, the first of two codes in the lower half; rows of gate and up alternate
experts.gate_up_proj_scales  (E, 2 I, H / 32) e8m0; down_proj the same, (E, H, I / 32)

Legend: N tokens, S experts a token, E experts in all, H hidden, I width of an expert.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import DataError
from ...kernels.packed_weights import MX, TABLE, Packed, pack_fp4
from ...kernels.quantized_product import dequantize
from ...layers.quantized_base import OnlyCodes
from ..folder import CURE, Stored
from .scheme import Scheme, Take

PARTS = ("gate_up", "down")


class Mxfp4(Scheme):
    name = "MXFP4"

    def __init__(self, folder: Path, stored: dict[str, Stored], options: dict[str, Any]) -> None:
        super().__init__(folder, stored, options)
        ends = tuple(f".{part}_proj_{kind}" for part in PARTS for kind in ("blocks", "scales"))
        self.coded = {name for name in stored if name.endswith(ends)}

    def plain_names(self) -> set[str]:
        return self.stored.keys() - self.coded

    def read_modules(self, model: nn.Module, take: Take) -> int:
        read = 0
        for stem, experts in model.named_modules():
            if isinstance(experts, MxExperts):
                for part in PARTS:
                    names = [f"{stem}.{part}_proj_{kind}" for kind in ("blocks", "scales")]
                    if not self.coded >= set(names):
                        raise DataError(f"{self.folder} lacks {names[0]}, the experts in MXFP4; {CURE}.")
                    blocks, scales = map(take, names)
                    read += experts.keep(part, blocks, scales, f"{self.folder}: {names[0]}")
        return read


class MxExperts(OnlyCodes):
    """The experts of gpt-oss over their codes. Those of a few tokens are dequantised by themselves, without the host; of many
    tokens, one expert at a time, also in the backward pass."""

    _is_hf_initialized = True  # so transformers draws no weights for it

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts, self.alpha, self.limit = config.num_local_experts, config.swiglu_alpha, config.swiglu_limit
        hidden, inner = config.hidden_size, config.intermediate_size
        self.shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        kind, device = TABLE["fp4"], torch.get_default_device()  # those that transformers builds a model with
        for part, (rows, columns) in self.shapes.items():
            bias = torch.empty(self.num_experts, rows, device=device, dtype=torch.get_default_dtype())
            self.register_parameter(f"{part}_proj_bias", nn.Parameter(bias, requires_grad=False))
            for name, each, dtype in (
                ("words", kind.words(columns), torch.int32), ("scale", kind.scales(columns), torch.uint8),
            ):  # fmt: skip
                codes = torch.zeros(self.num_experts * rows, each, device=device, dtype=dtype)
                self.register_buffer(f"{part}_{name}", codes, persistent=False)

    @property
    def size(self) -> int:
        return self.num_experts * sum(rows * columns for rows, columns in self.shapes.values())

    def packed(self, part: str) -> Packed:
        """Return the rows of all experts, one below the other."""
        words, scale = self._buffers[f"{part}_words"], self._buffers[f"{part}_scale"]
        assert words is not None and scale is not None
        return Packed(words, scale, self.shapes[part][1], "fp4")

    def keep(self, part: str, blocks: Tensor, scales: Tensor, name: str) -> int:
        """Store published codes. Return their number of bytes."""
        rows, columns = self.shapes[part]
        if blocks.shape != (self.num_experts, rows, columns // MX, MX // 2) or scales.shape != blocks.shape[:-1]:
            raise DataError(
                f"{name}: got {tuple(blocks.shape)} and scales {tuple(scales.shape)}, wanted {self.num_experts} experts of "
                f"{rows} rows and {columns} columns in blocks of {MX}; {CURE}."
            )
        packed = pack_fp4(blocks.flatten(0, 1).flatten(1), scales.flatten(0, 1))
        for buffer, new in zip(self.packed(part)[:2], packed[:2]):
            buffer.copy_(new)
        return packed.nbytes

    def numbers(self, part: str, experts: Tensor | int, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weights (n, rows, columns) of some experts, or (rows, columns) of one."""
        rows, columns = self.shapes[part]
        words, scale = (t.view(self.num_experts, rows, -1) for t in self.packed(part)[:2])
        if isinstance(experts, Tensor):
            words, scale = words.index_select(0, experts), scale.index_select(0, experts)
        else:
            words, scale = words[experts : experts + 1], scale[experts : experts + 1]
        chosen = self.packed(part)._replace(words=words.flatten(0, 1), scale=scale.flatten(0, 1))
        out = torch.empty(chosen.rows, columns, device=words.device, dtype=dtype)
        weights = dequantize(chosen, out).view(-1, rows, columns)
        return weights if isinstance(experts, Tensor) else weights[0]

    def gated(self, both: Tensor) -> Tensor:
        gate, up = both[..., ::2].clamp(max=self.limit), both[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)

    def forward(self, hidden_states: Tensor, router_indices: Any = None, routing_weights: Any = None) -> Tensor:
        x, biases = hidden_states, [self.get_parameter(f"{part}_proj_bias") for part in PARTS]
        if router_indices.numel() <= self.num_experts and not torch.is_grad_enabled():
            ids = router_indices.flatten()
            rows = x.repeat_interleave(router_indices.shape[1], 0)[..., None]
            both = torch.bmm(self.numbers("gate_up", ids, x.dtype), rows)[..., 0] + biases[0][ids]
            y = torch.bmm(self.numbers("down", ids, x.dtype), self.gated(both)[..., None])[..., 0] + biases[1][ids]
            return (y * routing_weights.flatten()[:, None]).view(len(x), -1, x.shape[1]).sum(1).to(x.dtype)
        out = torch.zeros_like(x)
        for expert in router_indices.unique().tolist():
            token, slot = torch.where(router_indices == expert)
            both = _Product.apply(x[token], self, "gate_up", expert) + biases[0][expert]
            y = _Product.apply(self.gated(both), self, "down", expert) + biases[1][expert]
            out = out.index_add(0, token, (y * routing_weights[token, slot, None]).to(x.dtype))
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


@contextmanager
def experts_in_codes() -> Iterator[None]:
    """Make transformers build gpt-oss with MxExperts within the context."""
    from transformers.models.gpt_oss import modeling_gpt_oss

    module: Any = modeling_gpt_oss
    own = module.GptOssExperts
    module.GptOssExperts = MxExperts
    try:
        yield
    finally:
        module.GptOssExperts = own
