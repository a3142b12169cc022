"""Low-rank adapters in a decoding step: y += h bᵀ, with h = scale · x aᵀ.

For few rows they are fused into the step's products (decode_product.py), whose x is normed; for more, whose products cuBLAS
computes, they are a separate launch (`add_adapters`).

The kernel's first programs compute one column of h for one row of x each. The others multiply by the weight at the same time,
and add h bᵀ to their sums at the end. They exchange `h`: an element holds the bits of EMPTY, which no arithmetic yields, until
its value is written. The next such product resets it, so that the next step finds EMPTY again.

A row has all adapters, none, or one of several: the columns of other adapters are zero in its h.

Legend: B rows, K inputs, O outputs of a weight, R ranks; x (B, K), a (R, K), b (O, R).
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import implementation, require
from .plans import power_of_two
from .registry import definition, draw, ints

EMPTY = 0x7FA00000  # a signalling NaN: what is computed holds quiet ones alone
NO_ADAPTER, EVERY_ADAPTER = -1, -2  # in place of a row's adapter


class StepAdapter(NamedTuple):
    """One adapter of one weight."""

    a: Tensor
    b: Tensor
    scale: float = 1.0
    owner: int = 0  # the number by which rows ask for it


class StepAdapters(NamedTuple):
    """All adapters of one product, in the order of its weights."""

    parts: tuple[tuple[StepAdapter, ...], ...]  # those of each weight; of some there may be none
    ids: Tensor  # int32 (B,): the adapter of each row, or NO_ADAPTER, or EVERY_ADAPTER
    h: Tensor  # int32 (at least B, all ranks), EMPTY; not that of any other product in flight
    before: Tensor  # int32: the `h` of the product before this one, which has ended when this one reads x; emptied here
    table: Tensor | None = None  # `table_of(parts)`: addresses, good as long as no parameter moves

    @property
    def columns(self) -> tuple[int, ...]:
        """Columns of h for each weight."""
        return tuple(sum(one.a.shape[0] for one in part) for part in self.parts)

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.parts)

    def added(self, number: int, x: Tensor) -> Tensor | float:
        """Compute the adapters' part of the product of weight `number` with x (B, K), in x's dtype: the definition."""
        total: Tensor | float = 0.0
        for a, b, scale, owner in self.parts[number]:
            wanted = ((self.ids == owner) | (self.ids == EVERY_ADAPTER))[:, None]
            total = total + torch.where(wanted, scale * (x @ a.to(x.dtype).t()) @ b.to(x.dtype).t(), 0.0)
        return total


def adapters_shape(adapters: StepAdapters | None) -> tuple:
    """Return the example arguments for a product's adapters."""
    return () if adapters is None else shape_of_ranks(adapters.columns, adapters.dtype)


def shape_of_ranks(ranks: Sequence[int], dtype: torch.dtype) -> tuple[int, bool]:
    """The ranks of a weight in all, and whether the adapters are fp32 under 16 bits, as most are."""
    return power_of_two(max(ranks)), dtype == torch.float32


def dtype_of(parts: Sequence[Sequence[StepAdapter]]) -> torch.dtype:
    return next(one.a.dtype for part in parts for one in part)


def table_of(parts: Sequence[Sequence[StepAdapter]]) -> Tensor:
    """int64 (5, columns of h): for each column, the addresses of its row of a and its column of b, the bytes between b's rows,
    its owner, and the bits of its scale."""
    columns, every = [], [one for part in parts for one in part]
    for a, b, scale, owner in every:
        size, bits = a.element_size(), torch.tensor(scale, dtype=torch.float32, device="cpu").view(torch.int32).item()
        for rank in range(a.shape[0]):
            starts = a.data_ptr() + rank * a.stride(0) * size, b.data_ptr() + rank * b.stride(1) * size
            columns.append((*starts, b.stride(0) * size, owner, bits))
    return torch.tensor(columns, dtype=torch.int64, device="cpu").t().contiguous().to(every[0].a.device)


def emptied(rows: int, columns: int, device: torch.device) -> Tensor:
    """A new `h`."""
    return torch.full((rows, columns), EMPTY, device=device, dtype=torch.int32)


def check_adapters(op: str, adapters: StepAdapters | None, x: Tensor, outputs: Sequence[int]) -> None:
    """outputs: of each weight."""
    if adapters is None:
        return
    if len(adapters.parts) != len(outputs):
        raise ValueError(
            f"{op}: adapters.parts must name those of each of {len(outputs)} weights, got {len(adapters.parts)}; "
            "give an empty tuple for a weight without any."
        )
    for rows, part in zip(outputs, adapters.parts):
        for a, b, _, _ in part:
            wanted = (a.shape[0], x.shape[1]), (rows, a.shape[0])
            if (a.shape, b.shape) != wanted or a.dtype != adapters.dtype or b.dtype != adapters.dtype or a.stride(1) != 1:
                raise ValueError(
                    f"{op}: an adapter must have a {wanted[0]} with dense rows and b {wanted[1]}, all of one dtype, got "
                    f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}."
                )
    require(op, "adapters.ids", adapters.ids, torch.int32, (len(x),), x.device, "each row of x has one of them, all, or none")
    require(op, "adapters.h", adapters.h, torch.int32, ("rows", sum(adapters.columns)), x.device, "`emptied` makes it")
    if len(adapters.h) < len(x) or adapters.h.data_ptr() == adapters.before.data_ptr():
        raise ValueError(
            f"{op}: adapters.h must have {len(x)} rows or more and not be adapters.before, got {len(adapters.h)}; two products "
            "in flight may not share it."
        )


def draw_adapters(g: torch.Generator, inputs: int, outputs: Sequence[int], rank: int, fp32: bool) -> StepAdapters:
    """For examples of two rows: the first has one adapter of two, the second both; the last weight has one alone."""
    per_weight = []
    for number, rows in enumerate(outputs):
        ranks = [rank] if number == len(outputs) - 1 else [max(1, rank // 2), max(1, rank - rank // 2)]
        pairs = [(draw(g, r, inputs), draw(g, rows, r)) for r in ranks]
        pairs = [(a.detach(), b.detach()) if fp32 else (a, b) for a, b in pairs]
        per_weight.append(tuple(StepAdapter(a, b, 0.5, owner) for owner, (a, b) in enumerate(pairs)))
    device = torch.device("cpu")
    columns = sum(one.a.shape[0] for part in per_weight for one in part)
    return StepAdapters(tuple(per_weight), ints(1, EVERY_ADAPTER), emptied(2, columns, device), emptied(1, 1, device))


def add_adapters(
    x: Tensor, adapters: StepAdapters, y: Tensor, k: Tensor | None = None, v: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Add to y (B, outputs), the product of x and a weight, what the adapters of each row add to it; in place, as to two or
    three products of the same x. Their rows may lie apart.
    """
    args = [one for one in (y, k, v) if one is not None]
    for part in adapters.parts:
        owners = [owner for owner, _ in groupby(part, key=lambda one: one.owner)]
        if len(set(owners)) < len(owners):
            raise ValueError(
                f"add_adapters: adapters of one number must stand side by side in their weight's part, got {owners}."
            )
    require("add_adapters", "x", x, None, ("rows", "inputs"), x.device, "the kernel reads row after row")
    check_adapters("add_adapters", adapters, x, [one.shape[-1] for one in args])
    for one in args:
        wanted = len(x), one.shape[-1]
        if one.shape != wanted or one.dtype != y.dtype or one.device != x.device or one.stride(1) != 1:
            raise ValueError(
                f"add_adapters: a product of x must be {y.dtype} {wanted} with dense rows on {x.device}, got {one.dtype} "
                f"{tuple(one.shape)} on {one.device}; it is changed in place."
            )
    return implementation("add_adapters", x, None, adapters_shape(adapters))(x, adapters, y, k, v)


def _draw_call(g, rank=16, fp32=True):
    outputs = 32, 16, 16
    x, adapters = draw(g, 2, 40), draw_adapters(g, 40, outputs, rank, fp32)
    return x, adapters, *(draw(g, 2, count).detach() for count in outputs)


@definition(_draw_call)
def add_adapters_reference(x, adapters, y, k=None, v=None):
    args, fp32 = tuple(one for one in (y, k, v) if one is not None), torch.promote_types(x.dtype, torch.float32)
    for number, one in enumerate(args):
        one += adapters.added(number, x.to(fp32))
    return args
