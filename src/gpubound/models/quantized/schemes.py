"""Schemes of quantised folders, chosen by config.json or by a GGUF file.

bitsandbytes, as transformers saves it.

4 bits  weight (O · K / 2, 1) uint8, the first of two codes in the upper half; weight.quant_map the sixteen numbers;
        weight.absmax fp32 a block of 64 or more, or uint8, indices into weight.nested_quant_map, times weight.nested_absmax
        a group of 256, plus nested_offset; weight.quant_state.bitsandbytes__nf4 (or __fp4) a JSON object in bytes
int8    weight (O, K) int8, SCB (O) fp32: code · SCB / 127

FP8: e4m3 weights with a scale for all of a weight, for each row, or for each block.

compressed-tensors (float-quantized): weight, weight_scale of (1), (O, 1) or (blocks of rows, blocks of columns)
fine-grained FP8 (DeepSeek-V3, Qwen3-FP8): weight, weight_scale_inv of blocks of weight_block_size, 128 x 128

    value = code · scale, also of weight_scale_inv; an e8m0 scale is a power of two

GPTQ, AWQ, and the integers of compressed-tensors.

GPTQ  qweight (K · bits / 32, O) int32, qzeros (G, O · bits / 32) of zero - 1 (of zero in gptq_v2), scales (G, O), g_idx (K) the
      group of each column. With act-order groups are not adjacent columns: they are sorted by group, and their order is kept
AWQ   qweight (K, O / 8) int32, qzeros (G, O / 8), scales (G, O); a word's eight columns are in the order 0 2 4 6 1 3 5 7
compressed-tensors
      pack-quantized: weight_packed (O, K · bits / 32) of level + 2^(bits - 1), weight_scale (O, G), weight_zero_point
      (O · bits / 32, G); int-quantized: weight (O, K) int8, weight_scale (O, G), weight_zero_point (O, G) int8

MXFP4 of gpt-oss: experts in e2m1, with a power of two for every 32 columns; all else is in 16 bits.

experts.gate_up_proj_blocks  (E, 2 I, H / 32, 16) uint8, the first of two codes in the lower half; rows of gate and up alternate
experts.gate_up_proj_scales  (E, 2 I, H / 32) e8m0; down_proj the same, (E, H, I / 32)

Legend: E experts in all, H hidden, I width of an expert.
"""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...data.gguf_file import gguf_in
from ...errors import DataError
from ...kernels.experts import clamped_unit
from ...kernels.quantize import BLOCK, CODE, GROUP, dynamic_code
from ...layers.quantized_base import KINDS, InFp8, InNf4
from ..folder import CURE, Beyond, Stored, stored_tensors
from .experts import PARTS, Fp4Experts, built_with, keep_fp4
from .gguf import Gguf
from .scheme import Coded, Scheme, Take, Values, Weight, by_group, fields, hold_levels

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
        size, codes = int(state["blocksize"]), codes.view(torch.uint8)  # bnb_4bit_quant_storage names the dtype of a file
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
        """Return whether the tables are those of kernels/quantize.py."""
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


SCALES = ("weight_scale_inv", "weight_scale")


class Fp8Scheme(Scheme):
    name = "FP8"
    PARTS = ("weight", *SCALES, "input_scale", "activation_scale", "weight_zero_point")

    def __init__(self, folder: Path, stored: dict[str, Stored], options: dict[str, Any]) -> None:
        super().__init__(folder, stored, options)
        for name, about in stored.items():
            layer, _, part = name.rpartition(".")
            if part == "weight" and about.dtype == "F8_E4M3":
                if self._scale(layer) is None:
                    raise DataError(f"{about.file}: {name}: got fp8 codes without {' or '.join(SCALES)}; {CURE}.")
                self.layers[layer] = about.shape[0], about.shape[1]

    def _scale(self, layer: str) -> str | None:
        return next((name for part in SCALES if (name := f"{layer}.{part}") in self.stored), None)

    def read(self, layer: str, take: Take) -> Weight:
        codes, scale = take(f"{layer}.weight"), wide(take(str(self._scale(layer))))
        rows, columns = codes.shape
        if scale.numel() == 1:
            scale = scale.view(1, 1)
        elif scale.dim() == 1:
            scale = scale[:, None]
        down, across = (-(-size // n) for size, n in zip((rows, columns), scale.shape))
        block = self.options.get("weight_block_size")
        if block is not None and min(scale.shape) > 0 and scale.numel() > 1:
            down, across = block
        if scale.shape != (-(-rows // down), -(-columns // across)):
            raise DataError(
                f"{self.stored[f'{layer}.weight'].file}: {layer}: got scales {tuple(scale.shape)} for {rows} x {columns} "
                f"weights, wanted one for each block of {down} x {across}; {CURE}."
            )
        scale = scale.repeat_interleave(down, 0)[:rows]
        if columns % 16 or rows % 16 or (scale.shape[1] > 1 and across % 128):
            values = codes.float() * scale.repeat_interleave(across, 1)[:, :columns]
            return Values(
                values, f"its {rows} x {columns} weights in blocks of {down} x {across} are no multiples of 16 and 128"
            )
        words = codes.contiguous().view(torch.int32)
        if scale.shape[1] == 1:
            return Coded(InFp8, words, {"scale": scale[:, 0].contiguous()})
        each = scale.repeat_interleave(across // 128, 1)[:, : -(-columns // 128)]
        return Coded(KINDS["fp8_blocks"], words, {"scale": each.contiguous()})


def wide(scale: Tensor) -> Tensor:
    """Return scales in fp32. uint8 scales are e8m0."""
    return (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _hold(levels: Tensor, scale: Tensor, zeros: Tensor | None, bits: int, index: Tensor | None = None) -> Weight:
    """Return the weight of levels (O, K), with scales and levels of zero (O, G). index: the group (K,) of each column, by which
    columns are sorted"""
    middle, columns = 1 << (bits - 1), levels.shape[1]
    offset = None if zeros is None or (zeros == middle).all() else zeros.float() * scale.float()
    in_order = torch.arange(columns, device=levels.device) // -(-columns // scale.shape[1])
    if index is None or (index < 0).any() or torch.equal(index.long(), in_order):  # -1: an order that was never made
        return hold_levels(levels, scale, bits, middle, offset)
    order, why = index.argsort(stable=True), "its groups are not adjacent columns (act-order), and of different sizes"
    if torch.equal(index[order].long(), in_order):
        weight = hold_levels(levels[:, order], scale, bits, middle, offset)
        if isinstance(weight, Coded):
            return weight._replace(scales=weight.scales | {"order": order.int()})
        why = weight.why
    return Values(by_group(levels, scale, middle, offset, index.long()), why)


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
        index = take(f"{layer}.g_idx") if f"{layer}.g_idx" in self.stored else None
        size, columns = self.options.get("group_size") or 0, levels.shape[1]
        if index is None and size > 0 and -(-columns // size) == scale.shape[1]:  # the last group may have fewer columns
            index = torch.arange(columns, device=levels.device) // size
        return _hold(levels, scale, zeros, self.bits, index)


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
        words, zeros, scale = (take(f"{layer}.{part}") for part in self.PARTS)
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
        if packed := f"{layer}.weight_packed" in self.stored:
            (_, columns), words = self.layers[layer], take(f"{layer}.weight_packed")
            bits = 32 * words.shape[1] // columns
            levels = fields(words, bits)[:, :columns]
        else:
            bits, levels = 8, (take(f"{layer}.weight").to(torch.int16) + 128).to(torch.uint8)
        if packed and zeros is not None and zeros.dtype == torch.int32:  # fields of zero + middle; int8 are not packed
            zeros = fields(zeros.t(), bits).t()[: len(levels)].to(torch.int32)
        elif zeros is not None:
            zeros = zeros.to(torch.int32).view(scale.shape) + (1 << (bits - 1))
        index_name = f"{layer}.weight_g_idx"
        return _hold(levels, scale, zeros, bits, take(index_name) if index_name in self.stored else None)


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
        # constants of the model's code before transformers 5.18
        self.alpha, self.limit = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
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


READ = "GPTQ, AWQ, FP8, MXFP4, compressed-tensors of 4 and 8 bits, bitsandbytes and GGUF"


def scheme_of(folder: Path, config: dict[str, Any]) -> Scheme | None:
    """Return the scheme of the folder's weights; None if they are not quantised. Raise Beyond for an unknown one."""
    if (file := gguf_in(folder)) is not None:
        scheme: Scheme = Gguf(file)
        scheme.check()
        return scheme
    options = config.get("quantization_config", config.get("compression_config"))
    if options is None:
        return None
    if not isinstance(options, dict):
        raise DataError(f"{folder / 'config.json'}: quantization_config: got {options!r}, wanted an object.")
    kind = _kind(options)
    if kind is None:
        what = " ".join(str(options[key]) for key in ("quant_method", "format") if key in options) or sorted(options)
        raise Beyond(
            f"{folder / 'config.json'}: quantization_config: got {what!r}, wanted one of {READ}; take another quantisation of "
            "the model, or its 16-bit weights."
        )
    if options.get("transform_config"):  # rotations of what layers read and return
        raise Beyond(
            f"{folder / 'config.json'}: quantization_config: got a transform_config, wanted weights alone; take another "
            "quantisation of the model, or its 16-bit weights."
        )
    scheme = kind(folder, stored_tensors(folder), options)
    if expert := next((layer for layer in scheme.layers if ".experts." in layer), None):
        raise Beyond(
            f"{folder / 'config.json'}: quantization_config: got {scheme.name} of experts, first {expert}, wanted dense "
            "layers, or gpt-oss in MXFP4; take another quantisation of the model, or its 16-bit weights."
        )
    scheme.check()
    return scheme


def _kind(options: dict[str, Any]) -> type[Scheme] | None:
    method, form = options.get("quant_method"), str(options.get("format", ""))
    if method == "bitsandbytes" or "load_in_4bit" in options:
        return FourBits if options.get("load_in_4bit", options.get("_load_in_4bit")) else Int8
    if method in ("compressed-tensors", "compressed_tensors"):
        types = {str(group.get("weights", {}).get("type")) for group in options.get("config_groups", {}).values()}
        if form in ("float-quantized", "naive-quantized") and types == {"float"}:
            return Fp8Scheme
        return Integers if form in ("int-quantized", "pack-quantized", "naive-quantized") and types == {"int"} else None
    return {"gptq": Gptq, "awq": Awq, "fp8": Fp8Scheme, "mxfp4": Mxfp4}.get(str(method))


def numbers_stored(scheme: Scheme) -> dict[str, Stored]:
    """Return the metadata of the folder's weights as if none was quantised."""
    stored = {name: scheme.stored[name] for name in scheme.plain_names()}
    for layer, shape in scheme.layers.items():
        first = scheme.stored[scheme.tensors(layer)[0]]
        stored[f"{layer}.weight"] = Stored(first.file, shape, "F16")
    return stored
