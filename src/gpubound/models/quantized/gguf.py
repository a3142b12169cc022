"""The block formats of a GGUF file (data/gguf_file.py).

A row of a tensor is blocks of 32 or 256 columns. Numbers are as llama.cpp computes them in fp32:

    Q4_0 (q - 8) d                Q4_1 q d + m        Q5_0 (q - 16) d        Q5_1 q d + m        Q8_0 q d      32 columns
    Q4_K, Q5_K q (d s) - (e m)    d, e fp16; s, m 6 bits for every 32 of 256 columns
    Q6_K (q - 32) (d s)           d fp16; s int8 for every 16 of 256 columns

llama.cpp stores q and k of a Llama and its kin with the rows of each head in another order, which is undone. It changes weights
of other architectures, too: it adds 1 to the gains of Gemma's and Nemotron's norms.
"""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...data.gguf_file import PLAIN, GgufFile, hf_name
from ...errors import DataError
from ..folder import Stored
from .scheme import Coded, Scheme, Take, Values, Weight, hold_levels


class Blocks(NamedTuple):
    """A type of blocks: its name, columns and bytes of a block, and what reads them."""

    name: str
    columns: int
    nbytes: int
    read: Callable[[Tensor, int], Weight]


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


# general.architecture of the models whose numbers are Hugging Face's: whether the rows of q and k are in llama.cpp's order.
REORDERED = {
    "llama": True, "arcee": True, "granite": True, "smollm3": True, "qwen2": False, "qwen3": False, "cohere2": False,
    "command-r": False, "ernie4_5": False, "stablelm": False,
}  # fmt: skip


class Gguf(Scheme):
    """The tensors of a GGUF file under the names of Hugging Face's models."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        if self.file.architecture not in REORDERED:
            raise DataError(
                f"{path}: general.architecture: got {self.file.architecture!r}, wanted one of {', '.join(sorted(REORDERED))}: "
                "of others llama.cpp may have changed the weights; take another quantisation of the model."
            )
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
        types = {about.dtype for about in stored.values() if about.dtype not in ("F32", "F16", "BF16")}
        self.name = f"GGUF, {', '.join(sorted(types))}"
        self.heads: dict[str, int] = {}
        if REORDERED[self.file.architecture]:
            self.heads["q_proj"] = self.file.value("attention.head_count")
            self.heads["k_proj"] = self.file.value("attention.head_count_kv", self.heads["q_proj"])
        for name, one in stored.items():
            layer, _, part = name.rpartition(".")
            if part == "weight" and len(one.shape) == 2 and one.dtype in types:
                self.layers[layer] = one.shape[0], one.shape[1]

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
        return Coded(weight.kind, weight.codes[at], {key: t[at] for key, t in weight.scales.items()})

    def dense(self, name: str, take: Take) -> Tensor:
        order, numbers = self._order(name.rpartition(".")[0], self.stored[name].shape[0]), take(name)
        return numbers if order is None else numbers[order.to(numbers.device)]

    def raw(self, name: str) -> Tensor:
        """Read a tensor's numbers, or its blocks (rows, blocks of a row, bytes)."""
        name = self._theirs[name]
        entry = self.file.tensors[name]
        if entry.type in PLAIN:
            dtype = PLAIN[entry.type][1]
            return self.file.bytes(name, dtype.itemsize * prod(entry.shape)).view(dtype).view(entry.shape)
        blocks, rows = TYPES[entry.type], prod(entry.shape[:-1])
        nbytes = rows * entry.shape[-1] // blocks.columns * blocks.nbytes
        return self.file.bytes(name, nbytes).view(rows, -1, blocks.nbytes)

    def _order(self, layer: str, rows: int) -> Tensor | None:
        """Return the order of the rows of q or k: llama.cpp alternates those of a head's first and second half."""
        heads = self.heads.get(layer.rpartition(".")[2])
        return None if heads is None else torch.arange(rows, device="cpu").view(heads, -1, 2).transpose(1, 2).flatten()
