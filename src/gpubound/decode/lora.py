"""Low-rank adapters while a model decodes: read in place at each launch, and never merged.

Few rows add them inside the kernels of the products, more rows by a kernel after each product (kernels/decode_adapters.py), and
the many tokens of a prompt by two GEMMs. A row has all adapters that are on, or one by name, or none: `AdapterRouter.ids` holds
the selection on the device, so one graph serves all of them.

Legend: B rows, N tokens of them, a multiple of B; K inputs and O outputs of a weight.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.decode_adapters import (
    EMPTY,
    EVERY_ADAPTER,
    NO_ADAPTER,
    StepAdapter,
    StepAdapters,
    add_adapters,
    emptied,
    shape_of_ranks,
    table_of,
)
from ..kernels.lora import lora_down, lora_up
from ..layers.fused_weights import has_reader
from ..models.decoding import Linear

# The most tokens whose adapters a kernel adds row by row. With products for each adapter, three launches of each, a step of 1b
# took 31 ms (H200, eight adapters of rank 16 in all linear layers, 8 rows).
ROW_BY_ROW = 64


def adapter_names(model: nn.Module) -> dict[int, str]:
    """Return the names of a model's adapters by the id of their a."""
    names: dict[int, str] = {}
    for layer in filter(has_reader, model.modules()):
        halves: Any = layer.lora_A
        names |= {id(half.weight): name for name, half in halves.items()}
    return names


def shape_of_adapters(*layers: Linear) -> tuple:
    """Return the shape of the adapters in a product of these layers, for its kernel's example; () without adapters."""
    lows = [low for layer in layers for low in layer.adapters]
    return shape_of_ranks([sum(len(low.a) for low in layer.adapters) for layer in layers], lows[0].a.dtype) if lows else ()


class AdapterRouter:
    """The adapters selected by each row, and the products that add them, in the order of a step."""

    def __init__(self, rows: int, tokens: int, device: torch.device) -> None:
        """tokens: of a row that a step may take."""
        self.ids = torch.full((rows,), EVERY_ADAPTER, device=device, dtype=torch.int32)
        self.each = self.ids.repeat_interleave(tokens)  # the same for every token of a step
        self.tokens, self.most, self.device = tokens, rows * tokens, device
        self.targets: Tensor | None = None  # (B, C): rows whose prompts are computed; None: the first B
        self._chosen: list[int] = []
        self.begin({})

    def begin(self, names: dict[int, str]) -> None:
        """Begin to collect products, in the order of a step. `close` ends this."""
        self.names, self.owners, self.products = names, dict[str, int](), list["LoraDelta"]()
        self.marked, self.between = self.each, self.ids[:0]  # between: every product's h
        # By the owners of columns of h: the tokens that have another adapter, and the columns that no token has.
        self.masks: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def close(self) -> None:
        if not self.products:
            return
        sizes = [self.most * product.columns for product in self.products]
        aligned = [-(-size // 32) * 32 for size in sizes]
        self.between = emptied(1, sum(aligned), self.device)[0]
        for product, size, block in zip(self.products, sizes, self.between.split(aligned)):
            product.h = block[:size].view(self.most, product.columns)
        for product, before in zip(self.products, [*self.products[-1:], *self.products]):
            product.before = before.h

    def added(self, *layers: Linear) -> "LoraDelta | None":
        """Return the delta of a product of these layers; None without adapters."""
        return LoraDelta(self, layers) if any(layer.adapters for layer in layers) else None

    def number(self, a: Tensor) -> int:
        return self.owners.setdefault(self.names[id(a)], len(self.owners))

    def choose(self, names: Sequence[str | None] | None) -> None:
        """Select the adapter of each of the first rows, None for no adapter. No list: all rows have all that are on.

        It is called before each request, and clears the values that a request interrupted between two products has left.
        """
        self.between.fill_(EMPTY)
        chosen = [] if names is None else [NO_ADAPTER if name is None else self.owners[name] for name in names]
        spare = EVERY_ADAPTER if names is None else NO_ADAPTER  # for unused rows
        if chosen == self._chosen:
            return
        self._chosen = chosen
        ids = torch.tensor(chosen + [spare] * (len(self.ids) - len(chosen)), dtype=torch.int32, device="cpu")
        self.ids.copy_(ids.pin_memory() if self.device.type == "cuda" else ids, non_blocking=True)
        self.each.view(-1, self.tokens).copy_(self.ids[:, None])

    def report(self) -> list[tuple[str, str, str]]:
        if not self.products:
            return []
        return [("adapters", ", ".join(self.owners), f"added to {len(self.products)} products, read in place")]

    def mark(self, rows: int, tokens: int) -> None:
        """Set the adapter of each of the `tokens` tokens of the first rows, for the `LoraDelta.add` calls that follow."""
        ids = self.ids[:rows] if self.targets is None else self.ids[self.targets[:, 0]]
        self.marked, self.masks = ids.repeat_interleave(tokens), {}


class LoraDelta:
    """The adapters of layers that are computed as one product."""

    h: Tensor
    before: Tensor

    def __init__(self, adapting: AdapterRouter, layers: Sequence[Linear]) -> None:
        self.adapting = adapting
        self.parts = tuple(tuple(sorted(map(self._adapter, layer.adapters), key=lambda one: one.owner)) for layer in layers)
        self.table = table_of(self.parts)
        self.columns = self.table.shape[1]  # of h
        counts = [sum(len(one.a) for one in part) for part in self.parts]
        self.owners, self.scales = self.table[3].split(counts), self.table[4].int().view(torch.float32).split(counts)
        self._alone = emptied(1, 1, adapting.device)
        adapting.products.append(self)

    def _adapter(self, low: Any) -> StepAdapter:
        return StepAdapter(low.a.detach(), low.b.detach(), low.scale, self.adapting.number(low.a))

    def step_adapters(self, ids: Tensor) -> StepAdapters:
        """Return the operands of a kernel that adds the adapters `ids` of each row."""
        before = self.before
        if before is self.h:  # no other product empties it
            self.h.fill_(EMPTY)
            before = self._alone
        return StepAdapters(self.parts, ids, self.h, before, self.table)

    def add(self, x: Tensor, *results: Tensor) -> None:
        """Add the adapters to the products of x (..., K) with each of the layers, (..., O), in place."""
        x, flat = x.reshape(-1, x.shape[-1]), [y if y.dim() == 2 else y.view(-1, y.shape[-1]) for y in results]
        if len(x) <= min(len(self.h), ROW_BY_ROW):
            add_adapters(x.contiguous(), self.step_adapters(self.adapting.marked), *flat)
            return
        for part, owners, scales, y in zip(self.parts, self.owners, self.scales, flat):
            if part:
                self._add_as_one(x, part, owners, scales, y)

    def _add_as_one(self, x: Tensor, part: Sequence[StepAdapter], owners: Tensor, scales: Tensor, y: Tensor) -> None:
        """Add the adapters of a layer as one that has the ranks of all: six launches, where three each would be 24 for eight.

        Adapters that no token has are zeros in b, too: zeros in h times a diverged adapter would be NaN in every row.
        """
        a, b = (halves[0] if len(part) == 1 else torch.cat(halves, dim) for dim, halves in enumerate(list(zip(*part))[:2]))
        key, marked = tuple(one.owner for one in part for _ in one.a), self.adapting.marked[:, None]
        if key not in self.adapting.masks:
            masked = (marked != owners) & (marked != EVERY_ADAPTER)
            self.adapting.masks[key] = masked, masked.all(0)
        masked, unused = self.adapting.masks[key]
        alike = all(one.scale == part[0].scale for one in part)
        h = lora_down(x, a, part[0].scale) if alike else lora_down(x, a).mul_(scales)
        lora_up(y, h.masked_fill_(masked, 0.0), b.masked_fill(unused, 0.0))

    def tensors(self) -> list[Tensor]:
        return [t for part in self.parts for one in part for t in (one.a, one.b)]


def adapters_for(added: LoraDelta | None, rows: int) -> StepAdapters | None:
    """Return the adapters of a step's product of `rows` rows."""
    return None if added is None else added.step_adapters(added.adapting.each[:rows])
