"""bitsandbytes, as transformers saves it.

4 bits  weight (O · K / 2, 1) uint8, the first of two codes in the upper half; weight.quant_map the sixteen numbers;
        weight.absmax fp32 a block of 64 or more, or uint8, indices into weight.nested_quant_map, times weight.nested_absmax
        a group of 256, plus nested_offset; weight.quant_state.bitsandbytes__nf4 (or __fp4) a JSON object in bytes
int8    weight (O, K) int8, SCB (O) fp32: code · SCB / 127
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import DataError
from ...kernels.nf4 import BLOCK, CODE, GROUP, dynamic_code
from ...layers.quantized_base import KINDS, InNf4
from ..folder import CURE, Stored
from .scheme import Coded, Scheme, Take, Values, Weight, hold_levels

STATE = ".weight.quant_state.bitsandbytes__"


class FourBits(Scheme):
    name = "bitsandbytes, 4 bits"

    def __init__(self, folder: Path, stored: dict[str, Stored], options: dict[str, Any]) -> None:
        super().__init__(folder, stored, options)
        self.states: dict[str, dict[str, Any]] = {}
        for name, state in self.small(STATE).items():
            layer, about = name.partition(STATE)[0], json.loads(bytes(state.tolist()))
            self.states[layer], (rows, columns) = about, about["shape"]
            self.layers[layer] = rows, columns

    def tensors(self, layer: str) -> list[str]:
        return [name for name in self.stored if name == f"{layer}.weight" or name.startswith(f"{layer}.weight.")]

    def read(self, layer: str, take: Take) -> Weight:
        state, (rows, columns) = self.states[layer], self.layers[layer]
        codes, code, absmax = (take(f"{layer}.weight{part}") for part in ("", ".quant_map", ".absmax"))
        size = int(state["blocksize"])
        if codes.numel() * 2 != rows * columns:
            raise DataError(f"{self.folder}: {layer}: got {codes.numel()} bytes for {rows} x {columns} weights; {CURE}.")
        nested = None
        if absmax.dtype == torch.uint8:
            nested = [take(f"{layer}.weight.nested_{part}").float() for part in ("absmax", "quant_map")]
        offset = torch.tensor([state.get("nested_offset", 0.0)], dtype=torch.float32, device=codes.device)
        full_rows = columns % BLOCK == 0
        if full_rows and size == BLOCK and nested is not None and self._is_nf4(code, nested[1], state):
            scales = {"absmax": absmax, "scale": nested[0], "offset": offset}
            return Coded(InNf4, codes.view(rows, columns // 2), scales)
        if nested is not None:
            group = int(state.get("nested_blocksize", GROUP))
            absmax = nested[1][absmax.int()] * nested[0].repeat_interleave(group)[: len(absmax)] + offset
        if full_rows and size % BLOCK == 0 and columns % size == 0:
            scale = absmax.float().repeat_interleave(size // BLOCK).view(rows, columns // BLOCK)
            words = codes.contiguous().view(rows, columns // 2).view(torch.int32)
            return Coded(KINDS["nf4"], words, {"scale": scale.contiguous(), "extra": code.float()})
        codes = codes.flatten()
        values = code.float()[torch.stack((codes >> 4, codes & 15), 1).flatten().int()]
        each = absmax.float().repeat_interleave(size)[: len(values)]
        return Values((values * each).view(rows, columns), f"its rows of {columns} are no whole blocks of {size}")

    def _is_nf4(self, code: Tensor, dynamic: Tensor, state: dict[str, Any]) -> bool:
        """Return whether the tables are those of kernels/nf4.py."""
        ours = torch.tensor(CODE, dtype=torch.float32, device=code.device)
        same = torch.equal(code.float(), ours) and torch.equal(dynamic, dynamic_code(code.device))
        return same and state.get("nested_blocksize", GROUP) == GROUP


class Int8(Scheme):
    name = "bitsandbytes, int8"
    PARTS = ("weight", "SCB", "weight_format")

    def __init__(self, folder: Path, stored: dict[str, Stored], options: dict[str, Any]) -> None:
        super().__init__(folder, stored, options)
        for name in stored:
            if name.endswith(".SCB"):
                layer = name.removesuffix(".SCB")
                rows, columns = self.shape(f"{layer}.weight")
                self.layers[layer] = rows, columns

    def read(self, layer: str, take: Take) -> Weight:
        levels = (take(f"{layer}.weight").to(torch.int16) + 128).to(torch.uint8)
        return hold_levels(levels, (take(f"{layer}.SCB").float() / 127)[:, None], 8, 128)
