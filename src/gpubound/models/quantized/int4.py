"""GPTQ, AWQ, and the integers of compressed-tensors.

GPTQ  qweight (K · bits / 32, O) int32, qzeros (G, O · bits / 32) of zero - 1 (of zero in gptq_v2), scales (G, O), g_idx (K) the
      group of each column. With act-order groups are not adjacent columns: such a weight is dequantised
AWQ   qweight (K, O / 8) int32, qzeros (G, O / 8), scales (G, O); a word's eight columns are in the order 0 2 4 6 1 3 5 7
compressed-tensors
      pack-quantized: weight_packed (O, K · bits / 32) of level + 2^(bits - 1), weight_scale (O, G), weight_zero_point
      (O · bits / 32, G); int-quantized: weight (O, K) int8, weight_scale (O, G), weight_zero_point (O, G) int8
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..folder import Stored
from .scheme import Scheme, Take, Values, Weight, by_group, fields, hold_levels

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
ACT_ORDER = "its groups are not adjacent columns (act-order)"


def _hold(levels: Tensor, scale: Tensor, zeros: Tensor | None, bits: int, index: Tensor | None = None) -> Weight:
    """Return the weight of levels (O, K), with scales and levels of zero (O, G). index: the group (K,) of each column"""
    middle, columns = 1 << (bits - 1), levels.shape[1]
    offset = None if zeros is None or (zeros == middle).all() else zeros.float() * scale.float()
    in_order = torch.arange(columns, device=levels.device) // -(-columns // scale.shape[1])
    if index is not None and not torch.equal(index.long(), in_order):
        return Values(by_group(levels, scale, middle, offset, index.long()), ACT_ORDER)
    return hold_levels(levels, scale, bits, middle, offset)


class Gptq(Scheme):
    PARTS = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, folder: Path, stored: dict[str, Stored], options: dict[str, Any]) -> None:
        super().__init__(folder, stored, options)
        self.bits: Any = options.get("bits")
        if self.bits not in (4, 8):
            raise self.wrong("bits of gptq", self.bits, "4 or 8; take another quantisation of the model")
        self.name = f"GPTQ, {self.bits} bits"
        self.less_one = options.get("checkpoint_format", "gptq") != "gptq_v2"
        for name in stored:
            if name.endswith(".qweight"):
                words, outputs = self.shape(name)
                self.layers[name.removesuffix(".qweight")] = outputs, words * 32 // self.bits

    def read(self, layer: str, take: Take) -> Weight:
        levels = fields(take(f"{layer}.qweight").t(), self.bits)
        scale = take(f"{layer}.scales").t()  # (O, G)
        zeros = fields(take(f"{layer}.qzeros"), self.bits).t()[: len(scale)].to(torch.int32) + self.less_one
        return _hold(levels, scale, zeros, self.bits, take(f"{layer}.g_idx") if f"{layer}.g_idx" in self.stored else None)


class Awq(Scheme):
    name = "AWQ, 4 bits"
    PARTS = ("qweight", "qzeros", "scales")

    def __init__(self, folder: Path, stored: dict[str, Stored], options: dict[str, Any]) -> None:
        super().__init__(folder, stored, options)
        bits, version = options.get("bits", options.get("w_bit")), str(options.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise self.wrong("bits and version of awq", (bits, version), "4 and 'gemm'; take another quantisation of the model")
        for name in stored:
            if name.endswith(".qweight"):
                inputs, words = self.shape(name)
                self.layers[name.removesuffix(".qweight")] = 8 * words, inputs

    def read(self, layer: str, take: Take) -> Weight:
        words, zeros, scale = (take(name) for name in self.tensors(layer))
        levels, zeros = (_in_order(fields(t, 4)) for t in (words, zeros))
        return _hold(levels.t().contiguous(), scale.t(), zeros.t(), 4)


def _in_order(levels: Tensor) -> Tensor:
    out = torch.empty_like(levels).unflatten(1, (-1, 8))
    out[..., list(AWQ_ORDER)] = levels.unflatten(1, (-1, 8))
    return out.flatten(1)


class Integers(Scheme):
    """compressed-tensors: pack-quantized and int-quantized."""

    PARTS = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def __init__(self, folder: Path, stored: dict[str, Stored], options: dict[str, Any]) -> None:
        super().__init__(folder, stored, options)
        bits = {group["weights"]["num_bits"] for group in options["config_groups"].values()}
        if not bits <= {4, 8}:
            raise self.wrong("num_bits", sorted(bits), "4 or 8; take another quantisation of the model")
        self.name = f"compressed-tensors, {' and '.join(map(str, sorted(bits)))} bits"
        for name, shape in self.small(".weight_shape").items():
            rows, columns = shape.tolist()
            self.layers[name.removesuffix(".weight_shape")] = rows, columns
        for name, about in stored.items():
            if name.endswith(".weight") and about.dtype == "I8":
                self.layers[name.removesuffix(".weight")] = about.shape[0], about.shape[1]

    def read(self, layer: str, take: Take) -> Weight:
        scale, zero_name = take(f"{layer}.weight_scale"), f"{layer}.weight_zero_point"
        zeros = take(zero_name) if zero_name in self.stored else None
        scale = scale.view(1, 1) if scale.numel() == 1 else scale.view(len(scale), -1)
        if f"{layer}.weight_packed" in self.stored:
            (rows, columns), words = self.layers[layer], take(f"{layer}.weight_packed")
            bits = 32 * words.shape[1] // columns
            levels = fields(words, bits)[:, :columns]
            zeros = None if zeros is None else fields(zeros.t(), bits).t()[:rows].to(torch.int32)  # of zero + middle
        else:
            bits, levels = 8, (take(f"{layer}.weight").to(torch.int16) + 128).to(torch.uint8)
            zeros = None if zeros is None else zeros.to(torch.int32).view(scale.shape) + 128
        index_name = f"{layer}.weight_g_idx"
        return _hold(levels, scale, zeros, bits, take(index_name) if index_name in self.stored else None)
