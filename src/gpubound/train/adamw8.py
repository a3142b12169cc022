"""AdamW with 8-bit moments: quantised in blocks of 256 elements of a rank's flat buffer, with one scale a block.

The elements of a block depend on the layout of the parameters, so a state records the layout. Under another layout, as with
another number of ranks, the moments are dequantised with their old scales and quantised in the new blocks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels.adamw import BLOCK, adamw8, decode, encode, number
from ..kernels.tensor_state import made_record
from ..layers.linear_product import full_tensor
from .adamw import AdamW, FlatAdamW
from .flat_layout import FlatLayout, Group

PART = BLOCK << 13  # elements that are dequantised at a time: 8 MiB of fp32, and ten times as many of intermediates
PLACES = "places"  # name of the recorded layout in a state


@dataclass(frozen=True)
class AdamW8bit(AdamW):
    """AdamW that keeps its moments in 8 bits: 2 bytes per parameter instead of 8. Gradient and master weights stay in fp32."""

    def moment_bytes(self, layout: FlatLayout) -> int:
        return sum(2 * quantised_bytes(group.stop - group.start) for group in layout.groups)

    def flat(self, *rest: Any) -> "FlatAdamW":
        return FlatAdamW8bit(self, *rest)


class QuantisedMoment:
    """A moment in 8 bits: the quantised elements, followed in the same memory by the scale of each block of 256."""

    def __init__(self, raw: Tensor, size: int, dtype: torch.dtype):
        """Take the memory `raw`, zeros of quantised_bytes(size)."""
        self.codes, self.scales = _codes_and_scales(raw, size, dtype)
        # The certificate of a captured step compares the dequantised numbers, not the bytes.
        made_record(self.codes).numbers = partial(_numbers, size=size, dtype=dtype)


def quantised_bytes(size: int) -> int:
    return size + 4 * -(-size // BLOCK)


def _codes_and_scales(raw: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return raw[:size].view(dtype), raw[size:].view(torch.float32)


def _numbers(raw: Tensor, device: torch.device, size: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the numbers in parts, dequantised on `device`: a host would take seconds for a billion."""
    codes, scales = _codes_and_scales(raw, size, dtype)
    for part, scale in zip(codes.split(PART), scales.split(PART // BLOCK)):
        yield decode(part.to(device), scale.to(device))


def _blocks(shape: torch.Size, first: int, place: list[int]) -> Tensor:
    """Return the old block, counted over all ranks, of each element of rows from `first` on, from a parameter's old place."""
    blocks, start, rows, *strides = place
    row = torch.arange(first, first + shape[0], device="cpu")
    position, rank = start + row % rows * strides[0], row // rows
    for size, stride in zip(shape[1:], strides[1:]):
        position, rank = position[..., None] + torch.arange(size, device="cpu") * stride, rank[..., None]
    return rank * blocks + position // BLOCK


class FlatAdamW8bit(FlatAdamW):
    """FlatAdamW with quantised moments, a pair for each group: its blocks begin with the group."""

    loads = "scale.", PLACES
    kernel = staticmethod(adamw8)

    def hasten(self) -> None:
        """Do nothing: `DeviceStep.compile_update` begins the self-tests of what an update calls."""

    def _begin_moments(self, layout: FlatLayout) -> None:
        self.m8, self.v8 = (
            {group: self._quantised(group.stop - group.start, dtype) for group in layout.groups}
            for dtype in (torch.int8, torch.uint8)
        )

    def _quantised(self, size: int, dtype: torch.dtype) -> QuantisedMoment:
        return QuantisedMoment(self.memory.zeros(quantised_bytes(size), torch.uint8), size, dtype)

    @property
    def moments(self) -> list[Tensor]:
        return [coded.codes for coded in (*self.m8.values(), *self.v8.values())]

    def named_moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield quantised moments by parameter and scales by group: a block may extend over two parameters."""
        yield PLACES, self._layout_rows()
        for kind, moments in self._by_name():
            for index, (group, coded) in enumerate(moments.items()):
                yield f"scale.{kind}.{index}", coded.scales
                for slot in self.weights.layout.slots_of(group):
                    yield f"{kind}.{slot.name}", slot.view(coded.codes, group.start)

    def _by_name(self) -> tuple[tuple[str, dict[Group, QuantisedMoment]], ...]:
        return ("m", self.m8), ("v", self.v8)

    def _layout_rows(self) -> Tensor:
        """Return a row of integers for every parameter, in the order of names: its group, the group's blocks on a rank, its
        offset in the group, its rows on a rank, and its strides."""
        layout = self.weights.layout
        width = max(1, *(slot.parameter.dim() for slot in layout.slots))
        rows_of = {}
        for index, (group, coded) in enumerate(self.m8.items()):
            for slot in layout.slots_of(group):
                codes = slot.view(coded.codes, group.start)
                strides = codes.stride() + (0,) * (width - codes.dim())
                rows_of[slot.name] = [index, len(coded.scales), slot.start - group.start, *(codes.shape or (1,))[:1], *strides]
        return torch.tensor([rows_of[name] for name in sorted(rows_of)], device="cpu")

    def load(self, state: Mapping[str, Tensor]) -> None:
        groups = state[PLACES][:, 0].unique().tolist() if PLACES in state else ()
        for name in (PLACES, *(f"scale.{kind}.{index}" for kind, _ in self._by_name() for index in groups)):
            if name not in state:
                raise ValueError(
                    f"load_state_dict: {name}: got nothing, wanted it beside moments in 8 bits; the state is another "
                    f"optimizer's, or an earlier version's; give all of what state_dict() gave."
                )

    @torch.no_grad()
    def loaded(self, state: Mapping[str, Tensor]) -> None:
        """Load the scales after the quantised elements; requantise if the state has another layout."""
        rows_of, part = state[PLACES].cpu(), self.weights.part
        same = rows_of.equal(self._layout_rows())
        for kind, moments in self._by_name():
            scales = {index: full_tensor(state[f"scale.{kind}.{index}"]) for index in rows_of[:, 0].unique().tolist()}
            for index, (group, coded) in enumerate(moments.items()):
                begin = part * len(coded.scales)
                if same and begin < len(scales[index]):
                    coded.scales.copy_(scales[index][begin : begin + len(coded.scales)])
                else:
                    self._requantise(group, coded, rows_of, {i: s.to(coded.scales.device) for i, s in scales.items()})

    def _requantise(self, group: Group, coded: QuantisedMoment, rows_of: Tensor, scales: dict[int, Tensor]) -> None:
        """Dequantise with the `scales` of the old layout, and quantise in the blocks of this one."""
        layout = self.weights.layout
        row_of = dict(zip(sorted(slot.name for slot in layout.slots), rows_of.tolist()))
        numbers = torch.zeros(len(coded.codes), device=layout.device, dtype=torch.float32)  # zeros between parameters
        for slot in layout.slots_of(group):
            codes, dequantised = (slot.view(t, group.start) for t in (coded.codes, numbers))
            if not codes.dim():
                codes, dequantised = codes.view(1), dequantised.view(1)
            index, *place = row_of[slot.name]
            first, at_once = self.weights.part * len(codes), max(1, PART // codes[0].numel())
            for begin in range(0, len(codes), at_once):
                these = codes[begin : begin + at_once]
                blocks = _blocks(these.shape, first + begin, place).to(layout.device).clamp_(max=len(scales[index]) - 1)
                dequantised[begin : begin + at_once] = number(these) * scales[index][blocks]
        for begin in range(0, len(numbers), PART):
            elements, its_scales = slice(begin, begin + PART), slice(begin // BLOCK, (begin + PART) // BLOCK)
            coded.codes[elements], coded.scales[its_scales] = encode(numbers[elements], coded.codes.dtype)

    def _moments_of(self, group: Group, inside: slice) -> list[Tensor]:
        m, v, blocks = self.m8[group], self.v8[group], slice(inside.start // BLOCK, -(-inside.stop // BLOCK))
        return [m.codes[inside], v.codes[inside], m.scales[blocks], v.scales[blocks]]
