"""A step that trains low-rank adapters over a frozen model: what a plan must know of it beside what it knows of every step.

lora_memory.py and lora_pace.py say what such a step keeps and computes. They register it where memory.py, kept.py, pace.py and
wire.py ask, so those know no adapters.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from torch import Tensor, nn

from ..layers.linear_formats import shape_of
from ..lora.base import FORMATS, suited
from ..lora.pairs import adapted_layers
from ..models.llama.decoder import Decoder
from ..train.adapters import Lora
from ..train.flat_buffers import FlatLayout, counted
from ..words import quantity
from .setting import Setting

PRODUCTS = {
    "q, k, v": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",), "gate, up": ("gate_proj", "up_proj"), "down": ("down_proj",),
}  # fmt: skip
"""The products of a block -> the layers that are multiplied as one."""
ADAPTED_HOST_S = 1.3e-3  # of a product with adapters, forward and backward, that is not captured: five launches (LOG.md)


@dataclass(frozen=True)
class Projection:
    """One linear layer of a block."""

    inputs: int
    outputs: int
    stored: int
    """Bytes of its weight: numbers or codes."""
    beside: int
    """Bytes of what codes are read by, which ranks that share weights hold whole."""
    rank: int
    """Of its adapter; 0: it has none."""


@dataclass(frozen=True)
class Product:
    """Layers that are multiplied as one, summed up."""

    inputs: int
    outputs: int
    ranks: int
    """Columns of x aᵀ, of all its adapters; 0: it has none."""
    adapted: int
    """Numbers of its adapters."""


@dataclass(frozen=True, kw_only=True)
class LoraSetting(Setting):
    """Adapters train, and every weight below them is frozen."""

    rank: int
    base: str | None
    """The format of the layers' frozen weights; None: the numbers of the step."""
    projections: Mapping[str, Projection]
    small: int
    """Bytes of a block's norms and biases."""
    around: int
    """Bytes of the embedding, the head and the last norm."""
    cast_from: int | None = None
    """Bytes of a number before weights were cast on the GPU; None: they were read as they are kept."""

    @cached_property
    def products(self) -> dict[str, Product]:
        return {name: _together(self.projections[key] for key in keys) for name, keys in PRODUCTS.items()}

    @property
    def multiplied(self) -> list[Product]:
        """What a block multiplies by. Sharded weights are multiplied one by one."""
        return [_together([p]) for p in self.projections.values()] if self.sharded else list(self.products.values())

    @property
    def in_8_bits(self) -> bool:
        """Whether frozen layers are multiplied in fp8: a GPU does so for bf16 alone."""
        return self.base == "fp8" and self.precision.startswith("bf16")

    @property
    def in_block(self) -> int:
        """Bytes of a block's weights, but for what codes are read by."""
        return self.small + sum(p.stored for p in self.projections.values())

    @property
    def beside(self) -> int:
        """Bytes of what the codes of all blocks are read by."""
        return self.config.layers * sum(p.beside for p in self.projections.values())

    @property
    def trained(self) -> int:
        return self.config.layers * sum(p.rank * (p.inputs + p.outputs) for p in self.projections.values())

    @property
    def layout(self) -> FlatLayout:
        """Every rank holds all adapters."""
        return counted(self.numbers.dtype, self.trained)

    @property
    def flops_per_token(self) -> int:
        """No gradient is made of a frozen weight."""
        return super().flops_per_token - 2 * self.config.product_parameters + 6 * self.trained

    @property
    def assumed(self) -> list[str]:
        ms = f"{1e3 * ADAPTED_HOST_S:.1f} ms"
        return [
            f"assumed: what is not captured costs the host {ms} for each product with adapters, as one layer alone on an H200",
            "counted: what frozen weights leave free between each other, by the rules of torch's allocator",
        ]

    def __str__(self) -> str:
        frozen = f"{quantity(self.outline.parameters)} parameters frozen in {self.base or self.precision}"
        return f"{frozen}, {quantity(self.trained)} in adapters of rank {self.rank}, {self.precision}"


def adapted(setting: Setting, lora: Lora, model: Decoder) -> LoraSetting:
    """`setting` with these adapters. `model` is its outline on the meta device, which gets them, too."""
    if lora.dora:
        raise ValueError("plan: lora: got dora, wanted plain adapters, whose kept bytes are counted; leave dora out to plan.")
    if lora.dropout:
        raise ValueError("plan: lora: got dropout, wanted none: its cost is not counted; leave dropout out to plan.")
    whole = dict(model.named_parameters())
    codes = [] if lora.base is None else suited(model, FORMATS[lora.base])
    lora.check_model(model)
    blocks = [_projections(block, f"model.layers.{i}", setting, lora, codes) for i, block in enumerate(model.model.layers)]
    if any(block != blocks[0] for block in blocks) or set(_adapted_names(model)) != _in_blocks(blocks):
        raise ValueError(
            "plan: lora: targets: wanted linear layers of blocks, the same in each, because one block is counted and "
            "multiplied; name them by the ends of their names, such as q_proj."
        )
    size = setting.numbers.dtype.itemsize
    layers = [f"model.layers.0.{home}.{key}.weight" for home, keys in HOMES.items() for key in keys]
    of_block = sum(p.numel() for name, p in whole.items() if name.startswith("model.layers.0."))
    small = of_block - sum(whole[name].numel() for name in layers)
    given = {field.name: getattr(setting, field.name) for field in fields(Setting)}
    return LoraSetting(
        **given, rank=lora.rank, base=lora.base, projections=blocks[0], small=size * small,
        around=size * setting.outline.outside,
    )  # fmt: skip


HOMES = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}


def _projections(block: nn.Module, name: str, setting: Setting, lora: Lora, codes: list[str]) -> dict[str, Projection]:
    found = {}
    for home, keys in HOMES.items():
        for key in keys:
            layer = block.get_submodule(f"{home}.{key}")
            ranks = [own.rank for _, adapters in adapted_layers(layer) for _, own in adapters.pairs()]
            stored, beside = _bytes(layer.weight, lora.base if f"{name}.{home}.{key}" in codes else None, setting)  # type: ignore[arg-type]
            outputs, inputs = shape_of(layer.weight)  # type: ignore[arg-type]
            found[key] = Projection(inputs, outputs, stored, beside, sum(ranks))
    return found


def _bytes(weight: Tensor, format: str | None, setting: Setting) -> tuple[int, int]:
    """Of a weight in numbers or codes, and of what codes are read by: those that encoding makes, on the meta device."""
    weight = weight.detach().to(setting.numbers.dtype)
    if format is None:
        return weight.nbytes, 0
    codes, others = FORMATS[format].encode(weight)
    return codes.nbytes, sum(t.nbytes for t in others.values() if t is not codes)


def _adapted_names(model: nn.Module) -> list[str]:
    return [name for name, _ in adapted_layers(model)]


def _in_blocks(blocks: list[dict[str, Projection]]) -> set[str]:
    homes = {key: home for home, keys in HOMES.items() for key in keys}
    return {f"model.layers.{i}.{homes[key]}.{key}" for i, block in enumerate(blocks) for key, p in block.items() if p.rank}


def _together(layers: Iterable[Projection]) -> Product:
    layers = list(layers)
    ranks, adapted = sum(p.rank for p in layers), sum(p.rank * (p.inputs + p.outputs) for p in layers)
    return Product(layers[0].inputs, sum(p.outputs for p in layers), ranks, adapted)
