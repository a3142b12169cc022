"""Quantised folders, written anew: random codes in each published format, and the numbers that they are, in fp64.

A writer draws the codes of a layer (O, K) and returns the tensors of its file by the last part of their names, and the layer's
numbers by the format's published formula, one element or block at a time.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpubound.models import Decoder, DecoderConfig
from gpubound.models.llama.checkpoint import save_hf

Drawn = tuple[dict[str, Tensor], Tensor]
CONFIG = DecoderConfig(hidden=256, intermediate=512, layers=2, heads=4, kv_heads=2, vocabulary=96)
GROUP = 128


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def half(values: Any) -> Any:
    return np.asarray(values).astype(np.float16)[()]


def scales(g: np.random.Generator, *shape: int) -> Any:
    return half(0.002 + 0.006 * g.random(shape))


def pack(levels: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack along the last dimension: field i of a word is its element order[i]."""
    count = 32 // bits
    order = order or tuple(range(count))
    words = np.zeros((*levels.shape[:-1], levels.shape[-1] // count), dtype=np.uint32)
    for i, column in enumerate(order):
        words |= levels[..., column::count].astype(np.uint32) << np.uint32(bits * i)
    return torch.from_numpy(words.view(np.int32).copy())


def act_order(seed: int, index: np.ndarray) -> np.ndarray:
    """Return the groups of columns in an order that layers of one input share, as GPTQ's do. Seeds from 100 on share none."""
    return generator(seed if seed >= 100 else len(index)).permutation(index)


def gptq(seed: int, rows: int, columns: int, bits: int = 4, symmetric: bool = True, sort: bool = False) -> Drawn:
    g, groups, top = generator(seed), columns // GROUP, 1 << bits
    levels, scale = g.integers(0, top, (columns, rows)), scales(g, groups, rows)
    zeros = np.full((groups, rows), top // 2) if symmetric else g.integers(1, top + 1, (groups, rows))
    index = np.arange(columns) // GROUP
    if sort:
        index = act_order(seed, index)
    numbers = (levels - zeros[index]) * scale.astype(np.float64)[index] / (16 if bits == 8 else 1)
    if bits == 8:
        scale = half(scale / 16)
        numbers = (levels - zeros[index]) * scale.astype(np.float64)[index]
    tensors = {
        "qweight": pack(levels.T, bits).t().contiguous(),
        "qzeros": pack(zeros - 1, bits),
        "scales": torch.from_numpy(scale),
        "g_idx": torch.from_numpy(index.astype(np.int32)),
    }
    return tensors, torch.from_numpy(numbers.T.copy())


def awq(seed: int, rows: int, columns: int) -> Drawn:
    g, groups = generator(seed), columns // GROUP
    levels, zeros, scale = g.integers(0, 16, (columns, rows)), g.integers(0, 16, (groups, rows)), scales(g, groups, rows)
    index, order = np.arange(columns) // GROUP, (0, 2, 4, 6, 1, 3, 5, 7)
    numbers = (levels - zeros[index]) * scale.astype(np.float64)[index]
    tensors = {"qweight": pack(levels, 4, order), "qzeros": pack(zeros, 4, order), "scales": torch.from_numpy(scale)}
    return tensors, torch.from_numpy(numbers.T.copy())


def packed_integers(
    seed: int, rows: int, columns: int, size: int = 32, symmetric: bool = True, sort: bool = False, older: bool = False
) -> Drawn:
    """older: zero points that are not packed, and an order that was never made"""
    g, groups = generator(seed), columns // size
    values, scale = g.integers(-8, 8, (rows, columns)), scales(g, rows, groups)
    zeros = np.zeros((rows, groups), dtype=np.int64) if symmetric else g.integers(-8, 8, (rows, groups))
    index = act_order(seed, np.arange(columns) // size) if sort else np.arange(columns) // size
    numbers = (values - zeros[:, index]) * scale.astype(np.float64)[:, index]
    tensors = {
        "weight_packed": pack(values + 8, 4),
        "weight_scale": torch.from_numpy(scale),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack((zeros + 8).T, 4).t().contiguous()
    if older:
        tensors |= {"weight_zero_point": torch.from_numpy(zeros).to(torch.int8), "weight_g_idx": torch.full((columns,), -1)}
    elif sort:
        tensors["weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
    return tensors, torch.from_numpy(numbers)


def int8_rows(seed: int, rows: int, columns: int) -> Drawn:
    g = generator(seed)
    values, scale = g.integers(-128, 128, (rows, columns)), torch.from_numpy(scales(g, rows, 1) / 16).bfloat16()
    return {"weight": torch.from_numpy(values).to(torch.int8), "weight_scale": scale}, torch.from_numpy(values) * scale.double()


def _fp8(g: np.random.Generator, rows: int, columns: int) -> Tensor:
    return torch.from_numpy(g.standard_normal((rows, columns)) * 60).float().clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_tensor(seed: int, rows: int, columns: int) -> Drawn:
    codes, scale = _fp8(g := generator(seed), rows, columns), torch.tensor([5e-4 + 1e-4 * g.random()], dtype=torch.float32)
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}
    return tensors, codes.double() * scale.double()


def fp8_rows(seed: int, rows: int, columns: int) -> Drawn:
    codes, scale = _fp8(g := generator(seed), rows, columns), torch.from_numpy(scales(g, rows, 1) / 8).bfloat16()
    return {"weight": codes, "weight_scale": scale}, codes.double() * scale.double()


def fp8_blocks(seed: int, rows: int, columns: int) -> Drawn:
    codes, shape = _fp8(g := generator(seed), rows, columns), (-(-rows // 128), -(-columns // 128))
    scale = torch.from_numpy(1e-4 + 5e-4 * g.random(shape)).float()
    numbers = codes.double().clone()
    for i in range(shape[0]):
        for j in range(shape[1]):
            numbers[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= scale[i, j].double()
    return {"weight": codes, "weight_scale_inv": scale}, numbers


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = (0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)


def nf4(
    seed: int, rows: int, columns: int, nested: bool = True, kind: str = "nf4", storage: torch.dtype = torch.uint8
) -> Drawn:
    from gpubound.kernels.quantize import dynamic_code

    g, blocks = generator(seed), rows * columns // 64
    code = torch.tensor(NF4 if kind == "nf4" else [*FP4, *(-x for x in FP4)])
    levels = g.integers(0, 16, rows * columns)
    packed = torch.from_numpy((levels[0::2] << 4 | levels[1::2]).astype(np.uint8)).view(storage)[:, None]
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": [rows, columns]}
    tensors = {"weight": packed, "weight.quant_map": code}
    if nested:
        table = dynamic_code(torch.device("cpu"))  # tests/kernels/test_nf4.py has its definition
        places, offset = g.integers(0, 256, blocks), 0.05
        groups = torch.from_numpy((0.02 * g.random(-(-blocks // 256)) + 0.01).astype(np.float32))
        each = table.double()[places] * groups.double().repeat_interleave(256)[:blocks]
        largest = (each.float() + torch.tensor(offset)).double()
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors["weight.absmax"] = torch.from_numpy(places.astype(np.uint8))
        tensors |= {"weight.nested_absmax": groups, "weight.nested_quant_map": table.clone()}
    else:
        tensors["weight.absmax"] = torch.from_numpy((0.02 + 0.05 * g.random(blocks)).astype(np.float32))
        largest = tensors["weight.absmax"].double()
    name = f"weight.quant_state.bitsandbytes__{kind}"
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    numbers = code.double()[torch.from_numpy(levels)] * largest.repeat_interleave(64)
    return tensors, numbers.view(rows, columns)


def bnb_int8(seed: int, rows: int, columns: int) -> Drawn:
    g = generator(seed)
    values, largest = g.integers(-127, 128, (rows, columns)), torch.from_numpy(0.05 + 0.1 * g.random(rows)).float()
    tensors = {
        "weight": torch.from_numpy(values).to(torch.int8),
        "SCB": largest,
        "weight_format": torch.tensor(0).to(torch.uint8),
    }
    return tensors, torch.from_numpy(values) * (largest / 127).double()[:, None]


def compressed(form: str, bits: int, kind: str, strategy: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FORMATS: dict[str, tuple[Callable[..., Drawn], dict[str, Any], str]] = {
    # name: (writer, quantization_config, format of ours)
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}, "int4"),
    "gptq-asymmetric": (
        lambda *a: gptq(*a, symmetric=False), {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}, "uint4",
    ),
    "gptq-8": (lambda *a: gptq(*a, bits=8), {"quant_method": "gptq", "bits": 8, "group_size": GROUP}, "int8"),
    "gptq-act-order": (
        lambda *a: gptq(*a, sort=True), {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}, "int4",
    ),
    "gptq-act-order-asymmetric": (
        lambda *a: gptq(*a, symmetric=False, sort=True), {"quant_method": "gptq", "bits": 4, "desc_act": True}, "uint4",
    ),
    "gptq-8-act-orders": (  # of each layer another
        lambda seed, *a: gptq(100 + seed, *a, bits=8, sort=True), {"quant_method": "gptq", "bits": 8, "desc_act": True}, "int8",
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, "uint4"),
    "packed": (packed_integers, compressed("pack-quantized", 4, "int", "group"), "int4_32"),
    "packed-asymmetric": (
        lambda *a: packed_integers(*a, symmetric=False), compressed("pack-quantized", 4, "int", "group"), "uint4_32",
    ),
    "packed-older": (
        lambda *a: packed_integers(*a, symmetric=False, older=True), compressed("pack-quantized", 4, "int", "group"),
        "uint4_32",
    ),
    "packed-act-order": (
        lambda *a: packed_integers(*a, symmetric=False, sort=True), compressed("pack-quantized", 4, "int", "group"), "uint4_32",
    ),
    "int8-rows": (int8_rows, compressed("int-quantized", 8, "int", "channel"), "int8"),
    "fp8-tensor": (fp8_tensor, compressed("float-quantized", 8, "float", "tensor"), "fp8"),
    "fp8-rows": (fp8_rows, compressed("float-quantized", 8, "float", "channel"), "fp8"),
    "fp8-blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_blocks"),
    "nf4": (nf4, BNB4, "nf4"),
    "nf4-plain": (lambda *a: nf4(*a, nested=False), BNB4, "nf4"),
    "nf4-storage": (lambda *a: nf4(*a, storage=torch.bfloat16), BNB4 | {"bnb_4bit_quant_storage": "bfloat16"}, "nf4"),
    "fp4": (lambda *a: nf4(*a, kind="fp4"), BNB4 | {"bnb_4bit_quant_type": "fp4"}, "nf4"),
    "bnb-int8": (bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
}  # fmt: skip


def write(folder: Path, name: str, config: DecoderConfig = CONFIG) -> dict[str, Tensor]:
    """Write a folder in this format. Return the numbers of all of its weights, fp64 those of quantised ones."""
    writer, options, _ = FORMATS[name]
    torch.manual_seed(0)
    model = Decoder(config)
    save_hf(model, folder)
    state = load_file(folder / "model.safetensors")
    numbers: dict[str, Tensor] = dict(state)
    for seed, (key, tensor) in enumerate(list(state.items())):
        if key.endswith("_proj.weight"):
            layer = key.removesuffix(".weight")
            parts, numbers[key] = writer(seed, *tensor.shape)
            del state[key]
            state |= {f"{layer}.{part}": t.contiguous() for part, t in parts.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"quantization_config": options}))
    return numbers


# GGUF


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(item: Any) -> bytes:
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    if isinstance(item, list):
        of = 8 if isinstance(item[0], str) else 5
        return struct.pack("<IIQ", 9, of, len(item)) + b"".join(string(i) if of == 8 else struct.pack("<i", i) for i in item)
    return struct.pack("<If", 6, item) if isinstance(item, float) else struct.pack("<II", 4, item)


def write_gguf(file: Path, metadata: dict[str, Any], tensors: dict[str, tuple[int, tuple[int, ...], bytes]]) -> None:
    """tensors: (type, shape, bytes) by name."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(string(key) + value(item) for key, item in metadata.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        head += string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    file.write_bytes(head + b"\0" * (-len(head) % 32) + data)


def block_q8_0(g: np.random.Generator) -> tuple[bytes, list[float]]:
    d, q = scales(g)[()] / np.float16(16), g.integers(-128, 128, 32)
    return np.float16(d).tobytes() + q.astype(np.int8).tobytes(), [float(d) * x for x in q]


def block_q4_0(g: np.random.Generator) -> tuple[bytes, list[float]]:
    d, qs = scales(g)[()], g.integers(0, 256, 16)
    low, high = [float(d) * ((x & 15) - 8) for x in qs], [float(d) * ((x >> 4) - 8) for x in qs]
    return d.tobytes() + qs.astype(np.uint8).tobytes(), low + high


def block_q4_1(g: np.random.Generator) -> tuple[bytes, list[float]]:
    d, m, qs = scales(g)[()], np.float16(-0.03), g.integers(0, 256, 16)
    low, high = [float(d) * (x & 15) + float(m) for x in qs], [float(d) * (x >> 4) + float(m) for x in qs]
    return d.tobytes() + m.tobytes() + qs.astype(np.uint8).tobytes(), low + high


def block_q5(g: np.random.Generator, least: bool) -> tuple[bytes, list[float]]:
    d, m, qs, high = scales(g)[()], np.float16(-0.03), g.integers(0, 256, 16), int(g.integers(0, 1 << 32))
    levels = [(int(qs[i % 16]) >> (4 * (i // 16)) & 15) | (high >> i & 1) << 4 for i in range(32)]
    head = d.tobytes() + (m.tobytes() if least else b"") + struct.pack("<I", high)
    return head + qs.astype(np.uint8).tobytes(), [float(d) * x + float(m) if least else float(d) * (x - 16) for x in levels]


def block_k(g: np.random.Generator, fifth: bool) -> tuple[bytes, list[float]]:
    d, e = half(1e-4 + 1e-4 * g.random()), half(1e-3 + 1e-3 * g.random())
    s, m, qs = g.integers(0, 64, 8), g.integers(0, 64, 8), g.integers(0, 256, 128)
    packed = np.zeros(12, dtype=np.uint8)
    for j in range(4):
        packed[j], packed[j + 4] = s[j] | (s[j + 4] >> 4) << 6, m[j] | (m[j + 4] >> 4) << 6
        packed[j + 8] = (s[j + 4] & 15) | (m[j + 4] & 15) << 4
    high = g.integers(0, 256, 32) if fifth else np.zeros(32, dtype=np.int64)
    values = []
    for i in range(256):
        group, chunk = i // 32, i // 64
        level = int(qs[32 * chunk + i % 32]) >> (4 * (group % 2)) & 15 | (int(high[i % 32]) >> group & 1) << 4
        values.append(float(np.float32(float(d) * int(s[group]) * level) - np.float32(float(e) * int(m[group]))))
    raw = d.tobytes() + e.tobytes() + packed.tobytes() + (high.astype(np.uint8).tobytes() if fifth else b"")
    return raw + qs.astype(np.uint8).tobytes(), values


def block_q6_k(g: np.random.Generator) -> tuple[bytes, list[float]]:
    levels, s, d = g.integers(0, 64, 256), g.integers(-128, 128, 16), half(1e-5 + 1e-5 * g.random())
    low, high = np.zeros(128, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    for i, level in enumerate(levels):
        part, group, at = i // 128, i % 128 // 32, i % 32
        low[64 * part + 32 * (group % 2) + at] |= (level & 15) << (4 * (group // 2))
        high[32 * part + at] |= (level >> 4) << (2 * group)
    raw = low.tobytes() + high.tobytes() + s.astype(np.int8).tobytes() + d.tobytes()
    return raw, [float(d) * int(s[i // 16]) * (int(level) - 32) for i, level in enumerate(levels)]


BLOCKS: dict[str, tuple[int, int, Callable[[np.random.Generator], tuple[bytes, list[float]]], str]] = {
    # name: (type, columns, writer, format of ours)
    "Q4_0": (2, 32, block_q4_0, "int4_32"),
    "Q4_1": (3, 32, block_q4_1, "uint4_32"),
    "Q5_0": (6, 32, lambda g: block_q5(g, False), "int8_32"),
    "Q5_1": (7, 32, lambda g: block_q5(g, True), "uint8_32"),
    "Q8_0": (8, 32, block_q8_0, "int8_32"),
    "Q4_K": (12, 256, lambda g: block_k(g, False), "uint4_32"),
    "Q5_K": (13, 256, lambda g: block_k(g, True), "uint8_32"),
    "Q6_K": (14, 256, block_q6_k, "int8_16"),
}


def gguf_tensor(
    name: str, g: np.random.Generator, rows: int, columns: int
) -> tuple[tuple[int, tuple[int, ...], bytes], Tensor]:
    """Draw a tensor of 40 different blocks in random order."""
    kind, size, writer, _ = BLOCKS[name]
    parts = [writer(g) for _ in range(40)]
    order = g.integers(0, len(parts), rows * columns // size)
    raw = np.array([np.frombuffer(raw, np.uint8) for raw, _ in parts])[order]
    numbers = torch.tensor([values for _, values in parts], dtype=torch.float64)[torch.from_numpy(order)]
    return (kind, (rows, columns), raw.tobytes()), numbers.view(rows, columns)
