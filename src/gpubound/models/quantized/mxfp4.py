"""MXFP4 of gpt-oss: experts in e2m1, with a power of two for every 32 columns; all else is in 16 bits.

experts.gate_up_proj_blocks  (E, 2 I, H / 32, 16) uint8, the first of two codes in the lower half; rows of gate and up alternate
experts.gate_up_proj_scales  (E, 2 I, H / 32) e8m0; down_proj the same, (E, H, I / 32)

Legend: E experts in all, H hidden, I width of an expert.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import DataError
from ...kernels.column_experts import clamped_unit
from ..folder import CURE, Stored
from .experts import PARTS, Fp4Experts, built_with, keep_fp4
from .scheme import Scheme, Take


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
                    (blocks, scales), place = map(take, names), experts.packed(part)
                    keep_fp4(place, blocks.flatten(-2), scales, f"{self.folder}: {names[0]}")
                    read += place.nbytes
        return read


class MxExperts(Fp4Experts):
    """The experts of gpt-oss, with biases, over their codes."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.num_local_experts, config.hidden_size, config.intermediate_size, persistent=False)
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        for part, (rows, _) in self.shapes.items():
            bias = torch.empty(self.num_experts, rows, dtype=torch.get_default_dtype())
            self.register_parameter(f"{part}_proj_bias", nn.Parameter(bias, requires_grad=False))

    def gated(self, both: Tensor) -> Tensor:
        return clamped_unit(both, self.alpha, self.limit)

    def bias(self, part: str, experts: Tensor | int) -> Tensor:
        return self.get_parameter(f"{part}_proj_bias")[experts]


def experts_in_codes() -> AbstractContextManager[None]:
    """Make transformers build gpt-oss with MxExperts within the context."""
    from transformers.models.gpt_oss import modeling_gpt_oss

    return built_with(modeling_gpt_oss, "GptOssExperts", MxExperts)
