"""A GGUF file: its header, its block formats, and the config of its model.

A file begins with metadata (key, type, value) and the tensors' names, shapes (columns first), types and offsets; the data
follow. A row of a tensor is blocks of 32 or 256 columns. Numbers are as llama.cpp computes them in fp32:

    Q4_0 (q - 8) d                Q4_1 q d + m        Q5_0 (q - 16) d        Q5_1 q d + m        Q8_0 q d      32 columns
    Q4_K, Q5_K q (d s) - (e m)    d, e fp16; s, m 6 bits for every 32 of 256 columns
    Q6_K (q - 32) (d s)           d fp16; s int8 for every 16 of 256 columns

llama.cpp stores q and k of a Llama with the rows of each head in another order, which is undone.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import DataError
from ..folder import CURE, Stored
from .scheme import Held, Scheme, Take, Values, Weight, hold_levels

MAGIC, ALIGNMENT = b"GGUF", 32
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
PLAIN = {0: ("F32", torch.float32), 1: ("F16", torch.float16), 30: ("BF16", torch.bfloat16)}
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
MODELS = ("llama", "qwen2", "qwen3")  # values of general.architecture


class Blocks(NamedTuple):
    """A type of blocks: its name, columns and bytes of a block, and what reads them."""

    name: str
    columns: int
    nbytes: int
    read: Callable[[Tensor, int], Weight]


@dataclass(frozen=True)
class Entry:
    """A tensor of the file: its rows and columns, type, first byte."""

    shape: tuple[int, ...]
    type: int
    start: int


class GgufFile:
    """Header of a GGUF file; `rows` reads a tensor's bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._data = mmap(file.fileno(), 0, access=ACCESS_READ)
        self._at = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, IndexError, ValueError) as error:
            raise DataError(f"{path} is no whole GGUF file: {error}; {CURE}.") from error

    def _read_header(self) -> None:
        if self._data[:4] != MAGIC:
            raise ValueError(f"it begins with {bytes(self._data[:4])!r}, not {MAGIC!r}")
        self._at = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, wanted 2 or 3")
        tensors, pairs = self._scalar("<Q"), self._scalar("<Q")
        self.metadata: dict[str, Any] = {self._string(): self._value(self._scalar("<I")) for _ in range(pairs)}
        found = []
        for _ in range(tensors):
            name, sizes = self._string(), [self._scalar("<Q") for _ in range(self._scalar("<I"))]
            found.append((name, tuple(reversed(sizes)), self._scalar("<I"), self._scalar("<Q")))
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: Entry(shape, kind, start + offset) for name, shape, kind, offset in found}

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        size = self._scalar("<Q")
        self._at += size
        if self._at > len(self._data):
            raise ValueError("a string ends after the file")
        return self._data[self._at - size : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            of, count = self._scalar("<I"), self._scalar("<Q")
            return [self._value(of) for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"a value of type {kind}")
        return self._scalar(SCALARS[kind])

    def numbers(self, name: str) -> Tensor:
        """Return the tensor's bytes as rows, or its numbers where it is not quantised."""
        entry = self.tensors[name]
        if entry.type in PLAIN:
            dtype = PLAIN[entry.type][1]
            nbytes = dtype.itemsize * int(np.prod(entry.shape))
            return self._bytes(name, entry.start, nbytes).view(dtype).view(entry.shape)
        blocks = TYPES[entry.type]
        columns = entry.shape[-1]
        rows = int(np.prod(entry.shape[:-1]))
        nbytes = rows * columns // blocks.columns * blocks.nbytes
        return self._bytes(name, entry.start, nbytes).view(rows, -1, blocks.nbytes)

    def _bytes(self, name: str, start: int, nbytes: int) -> Tensor:
        if start + nbytes > len(self._data):
            raise DataError(f"{self.path} ends within {name}; {CURE}.")
        return torch.from_numpy(np.frombuffer(self._data, np.uint8, nbytes, start).copy())


def half(blocks: Tensor, at: int) -> Tensor:
    """Return the fp16 number at this byte of each block (O, blocks) in fp32."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(qs: Tensor) -> Tensor:
    """Return (..., 2 · bytes) levels: the lower halves of all bytes, and then the upper ones."""
    return torch.cat((qs & 15, qs >> 4), -1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Return 16 where the bit of a column in the 4 bytes at `at` is set, (O, blocks, 32)."""
    bits = blocks[..., at : at + 4, None] >> torch.arange(8, device=blocks.device, dtype=torch.uint8)
    return (bits & 1).flatten(-2) << 4


def _q4_0(blocks: Tensor, columns: int) -> Weight:
    return hold_levels(_nibbles(blocks[..., 2:]).view(-1, columns), half(blocks, 0).half(), 4, 8)


def _q4_1(blocks: Tensor, columns: int) -> Weight:
    levels = _nibbles(blocks[..., 4:]).view(-1, columns)
    return hold_levels(levels, half(blocks, 0).half(), 4, 0, -half(blocks, 2))


def _q5_0(blocks: Tensor, columns: int) -> Weight:
    levels = (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)).view(-1, columns)
    return hold_levels(levels, half(blocks, 0).half(), 8, 16)


def _q5_1(blocks: Tensor, columns: int) -> Weight:
    levels = (_nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)).view(-1, columns)
    return hold_levels(levels, half(blocks, 0).half(), 8, 0, -half(blocks, 2))


def _q8_0(blocks: Tensor, columns: int) -> Weight:
    levels = (blocks[..., 2:].view(torch.int8).to(torch.int16) + 128).to(torch.uint8).reshape(-1, columns)
    return hold_levels(levels, half(blocks, 0).half(), 8, 128)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (d s) and (e m) of a Q4_K's or Q5_K's groups of 32 columns (O, groups)."""
    low, middle, high = blocks[..., 4:16].to(torch.int32).chunk(3, -1)
    scales = torch.cat((low & 63, (high & 15) | (low >> 6) << 4), -1)
    least = torch.cat((middle & 63, (high >> 4) | (middle >> 6) << 4), -1)
    return (half(blocks, 0)[..., None] * scales).flatten(1), (half(blocks, 2)[..., None] * least).flatten(1)


def _q4_k(blocks: Tensor, columns: int) -> Weight:
    levels = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).reshape(-1, columns)
    return hold_levels(levels, (scales := _k_scales(blocks))[0], 4, 0, scales[1])


def _q5_k(blocks: Tensor, columns: int) -> Weight:
    fifth = (blocks[..., None, 16:48] >> torch.arange(8, device=blocks.device, dtype=torch.uint8)[:, None]) & 1
    levels = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2) | fifth.flatten(-2) << 4
    return hold_levels(levels.reshape(-1, columns), (scales := _k_scales(blocks))[0], 8, 0, scales[1])


def _q6_k(blocks: Tensor, columns: int) -> Weight:
    low = blocks[..., :128].unflatten(-1, (2, 2, 32))  # halves of 128 columns; 32 bytes each of two groups
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.tensor(
        [[0], [2], [4], [6]], device=blocks.device, dtype=torch.uint8
    )
    levels = torch.cat((low & 15, low >> 4), -2) | (high & 3) << 4  # (O, blocks, 2, 4, 32)
    scales = blocks[..., 192:208].view(torch.int8).float() * half(blocks, 208)[..., None]
    return hold_levels(levels.reshape(-1, columns), scales.flatten(1), 8, 32)


TYPES = {
    2: Blocks("Q4_0", 32, 18, _q4_0), 3: Blocks("Q4_1", 32, 20, _q4_1), 6: Blocks("Q5_0", 32, 22, _q5_0),
    7: Blocks("Q5_1", 32, 24, _q5_1), 8: Blocks("Q8_0", 32, 34, _q8_0), 12: Blocks("Q4_K", 256, 144, _q4_k),
    13: Blocks("Q5_K", 256, 176, _q5_k), 14: Blocks("Q6_K", 256, 210, _q6_k),
}  # fmt: skip


class Gguf(Scheme):
    """The tensors of a GGUF file under the names of Hugging Face's models."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        self._theirs = {hf_name(name): name for name in self.file.tensors if name != "rope_freqs.weight"}
        stored = {}
        for ours, theirs in self._theirs.items():
            entry = self.file.tensors[theirs]
            if entry.type not in PLAIN and entry.type not in TYPES:
                known = ", ".join(kind.name for kind in TYPES.values())
                raise DataError(
                    f"{path}: {theirs}: got blocks of type {entry.type}, wanted one of {known}; take another quantisation."
                )
            stored[ours] = Stored(path, entry.shape, PLAIN[entry.type][0] if entry.type in PLAIN else TYPES[entry.type].name)
        super().__init__(path.parent, stored, {})
        kinds = {about.dtype for about in stored.values() if about.dtype not in ("F32", "F16", "BF16")}
        self.name = f"GGUF, {', '.join(sorted(kinds))}"
        about = self.file.metadata
        self.heads = {"q_proj": about[self.key("attention.head_count")]} if self.permuted else {}
        if self.permuted:
            self.heads["k_proj"] = about.get(self.key("attention.head_count_kv"), self.heads["q_proj"])
        for name, one in stored.items():
            layer, _, part = name.rpartition(".")
            if part == "weight" and len(one.shape) == 2 and one.dtype in kinds:
                self.layers[layer] = one.shape[0], one.shape[1]

    @property
    def permuted(self) -> bool:
        return self.file.metadata.get("general.architecture") == "llama"

    def key(self, name: str) -> str:
        return f"{self.file.metadata.get('general.architecture')}.{name}"

    def tensors(self, layer: str) -> list[str]:
        return [f"{layer}.weight"]

    def read(self, layer: str, take: Take) -> Weight:
        name = self._theirs[f"{layer}.weight"]
        weight = TYPES[self.file.tensors[name].type].read(take(f"{layer}.weight"), self.layers[layer][1])
        order = self._order(layer, self.layers[layer][0])
        if order is None:
            return weight
        if isinstance(weight, Values):
            return weight._replace(values=weight.values[order])
        at = order.to(weight.codes.device)
        return Held(weight.kind, weight.codes[at], {key: t[at] for key, t in weight.scales.items()})

    def dense(self, name: str, take: Take) -> Tensor:
        order, numbers = self._order(name.rpartition(".")[0], self.stored[name].shape[0]), take(name)
        return numbers if order is None else numbers[order.to(numbers.device)]

    def raw(self, name: str) -> Tensor:
        return self.file.numbers(self._theirs[name])

    def _order(self, layer: str, rows: int) -> Tensor | None:
        """Return the order of the rows of q or k: llama.cpp alternates those of a head's first and second half."""
        heads = self.heads.get(layer.rpartition(".")[2])
        return None if heads is None else torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()

    def config(self) -> dict[str, Any]:
        """Return the config.json of the model that the file describes."""
        about, model = self.file.metadata, self.file.metadata.get("general.architecture")
        if model not in MODELS:
            raise DataError(f"{self.file.path}: general.architecture: got {model!r}, wanted one of {', '.join(MODELS)}.")
        need = {
            "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
            "num_attention_heads": "attention.head_count", "max_position_embeddings": "context_length",
            "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        }  # fmt: skip
        if missing := [key for key in map(self.key, need.values()) if key not in about]:
            raise DataError(f"{self.file.path} has no {missing[0]}; {CURE}.")
        config = {ours: about[self.key(theirs)] for ours, theirs in need.items()}
        scaled = about.get(self.key("rope.scaling.type"), "none") != "none" or "rope_freqs.weight" in self.file.tensors
        if scaled:
            raise DataError(
                f"{self.file.path}: its rotary angles are scaled, which its metadata describe in part; put the model's own "
                "config.json into the folder."
            )
        heads = config["num_attention_heads"]
        return config | {
            "model_type": model,
            "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[model] + "ForCausalLM"],
            "num_key_value_heads": about.get(self.key("attention.head_count_kv"), heads),
            "head_dim": about.get(self.key("attention.key_length"), config["hidden_size"] // heads),
            "rope_theta": about.get(self.key("rope.freq_base"), 10000.0),
            "vocab_size": self.stored["model.embed_tokens.weight"].shape[0],
            "tie_word_embeddings": "lm_head.weight" not in self.stored,
            "hidden_act": "silu",
            "dtype": "float16",
            "bos_token_id": about.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": about.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": about.get("tokenizer.ggml.padding_token_id"),
        }


def hf_name(name: str) -> str:
    """Return Hugging Face's name of a tensor: blk.0.attn_q.weight is model.layers.0.self_attn.q_proj.weight."""
    stem, _, part = name.rpartition(".")
    block, _, rest = stem.removeprefix("blk.").partition(".")
    if stem.startswith("blk."):
        return f"model.layers.{block}.{NAMES.get(rest, rest)}.{part}"
    return f"{NAMES.get(stem, stem)}.{part}"
