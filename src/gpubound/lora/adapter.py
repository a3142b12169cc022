"""Low-rank adapters of linear products: y += scale · drop(x) aᵀ bᵀ (layers/linear_product.py).

Adapters of one weight, or of weights that are multiplied as one, are computed as a group: x is read once for all of their aᵀ,
and once more for all of their gradients. Saved for backward are x and the low-rank product h.

Legend: N tokens, K inputs, O outputs, R ranks; x (N, K), a (R, K), b (O, R), h (N, R), g (N, O) the output's gradient.

With several adapters in one batch, each of its rows has one of them, or none: the adapters of a weight become one
(`RoutedLowRank`), and each row keeps the columns of h that belong to its
adapter (kernels/lora.py). So x is read once for all adapters, forward and backward. The adapter of a row is read on
the device: a captured step takes other ids at each replay.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..kernels.accumulate import join, join_rows, one_matrix
from ..kernels.lora import Drop, Owners, OwnRanks, adapter_gradients, blocks_of, drawn, lora_down, lora_up, own_columns
from ..layers.fused_weights import Projecting, has_reader, site_of
from ..layers.linear_product import AdapterOutputs, Factors, is_sharded, rows_of, shape_of
from ..trace import fallback


class LowRank:
    """One adapter. `dropout` drops only if it is an nn.Dropout in training mode."""

    routing: Any = None  # which rows of a batch have which columns of h; None: all rows have all columns

    def __init__(self, a: Tensor, b: Tensor, scale: float = 1.0, dropout: nn.Module | None = None):
        self.a, self.b = a, b
        self.parameters: Sequence[Tensor] = (a, b)
        self.all_a: tuple[Tensor, ...] = (a,)
        self.all_b: tuple[Tensor, ...] = (b,)
        self.scale, self.dropout = scale, dropout

    @property
    def identity(self) -> tuple:
        """Return a key that is equal for adapters that add the same, whatever values their parameters have."""
        return (*map(id, self.parameters), self.scale)

    @property
    def rate(self) -> float:
        """The dropout probability, 0 in eval mode."""
        dropout = self.dropout
        return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0

    @classmethod
    def group(cls, outputs: Sequence[AdapterOutputs]) -> "Sequence[LowRankGroup]":
        """Return a `LowRankGroup` for each scale, dropout rate and routing."""
        if len(outputs) == 1:
            return (LowRankGroup(outputs),)
        groups: dict[tuple, list[AdapterOutputs]] = {}
        for one in outputs:
            groups.setdefault((one.adapter.scale, one.adapter.rate, one.adapter.routing), []).append(one)
        return [LowRankGroup(group) for group in groups.values()]

    def plain(self, x: Tensor) -> Tensor:
        """Compute the term of y in differentiable torch, for torch.compile and torch.func."""
        x = F.dropout(x, self.rate) if self.rate else x
        return F.linear(F.linear(x, self.a.to(x.dtype)) * self.scale, self.b.to(x.dtype))

    def gradients(self, x: Tensor, gh: Tensor, g: Tensor, h: Tensor, drop: Drop | None) -> list[Tensor | None]:
        """Compute the gradients of `parameters`."""
        return adapter_gradients([self.a], [self.b], x, gh, g, h, drop, [p.requires_grad for p in self.parameters])


class RoutedLowRank(LowRank):
    """Several adapters of one weight, of which each row of a batch has one or none.

    indices: the index of each adapter in the routing's names
    """

    def __init__(self, adapters: Sequence[LowRank], indices: Sequence[int], routing: Any):
        self.routing, self.dropout, self.scale = routing, adapters[0].dropout, 1.0
        self.all_a, self.all_b = tuple(low.a for low in adapters), tuple(low.b for low in adapters)
        self.parameters = [p for low in adapters for p in low.parameters]
        self.columns = tuple((index, low.a.shape[0], low.scale) for index, low in zip(indices, adapters))

    @property
    def identity(self) -> tuple:
        return (*super().identity, self.columns, id(self.routing))

    @property
    def a(self) -> Tensor:  # type: ignore[override]
        return one_matrix(self.all_a)

    @property
    def b(self) -> Tensor:  # type: ignore[override]
        return one_matrix(self.all_b, by_columns=True)

    def plain(self, x: Tensor) -> Tensor:
        x = F.dropout(x, self.rate) if self.rate else x
        h = F.linear(x, torch.cat(self.all_a).to(x.dtype))
        own = self.routing.owners(self.routing.ids_of(x), [self])
        return F.linear(own_columns(h.flatten(0, -2), own).view(h.shape), torch.cat(self.all_b, COLUMNS).to(x.dtype))

    def gradients(self, x: Tensor, gh: Tensor, g: Tensor, h: Tensor, drop: Drop | None) -> list[Tensor | None]:
        requires_grad = [p.requires_grad for p in self.parameters]
        return adapter_gradients(self.all_a, self.all_b, x, gh, g, h, drop, requires_grad, same_outputs=True)


class LowRankGroup:
    """Adapters over column ranges of y[..., start:stop], in order, with one scale and one dropout mask.

    If the ranges are adjacent, b is block-diagonal (kernels/lora.py), and the group is computed as one adapter. Methods run
    where autograd is off; x (N, K) and g (N, O) are 16-bit or fp32, as the product has them.
    """

    routed_ids: Any = None  # identifies the ids of forward in backward

    def __init__(self, outputs: Sequence[AdapterOutputs]):
        first = outputs[0].adapter
        self.start, self.stop = outputs[0].start, outputs[-1].stop
        self.scale, self.rate, self.routing = first.scale, first.rate, first.routing
        self.blocks: list[int] | None = None
        if len(outputs) == 1:
            self.adapters, self.ranges, self.parameters = [first], [(0, self.stop - self.start)], first.parameters
        else:
            self.adapters = [one.adapter for one in outputs]
            self.ranges = [(start - self.start, stop - self.start) for _, start, stop in outputs]
            self.parameters = [p for low in self.adapters for p in low.parameters]
            if all(one.start == before.stop for before, one in pairwise(outputs)):
                self.blocks = blocks_of([low.b for low in self.adapters])
        self.as_one = self.blocks is not None or len(outputs) == 1

    def forward(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Add to y in place. Return the tensors to save for backward."""
        h, saved = self._down(x)
        y = y.view(-1, y.shape[-1])
        if self.as_one:
            lora_up(y, h, self._matrix("b"), blocks=self.blocks)
        else:
            for low, columns, part in self._parts(y, h):
                lora_up(columns, part, low.b.detach())
        return saved

    def factors(self, x: Tensor) -> tuple[Factors, Sequence[Tensor]] | None:
        """Return the term that the product adds as it writes y, and the tensors to save. None: `forward` must add it."""
        if not self.as_one:
            return None
        h, saved = self._down(x)
        own_ranks = None if self.routing is None else self._own_ranks(saved[1])
        return Factors(h, self._matrix("b"), None, self.blocks, own_ranks), saved

    def _down(self, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return h, and the tensors to save: h, then with routing the ids, then with dropout the seed."""
        drop = drawn(self.rate, x.device) if self.rate else None
        if self.routing is None:
            h = lora_down(rows_of(x), self._matrix("a"), self.scale, drop)
            return h, (h,) if drop is None else (h, drop.seed)
        ids = self.routing.begin(self, x)
        h = lora_down(rows_of(x), self._matrix("a"), self.scale, drop, None, self.routing.owners(ids, self.adapters))
        return h, (h, ids) if drop is None else (h, ids, drop.seed)

    def input_factors(self, g: Tensor, saved: Sequence[Tensor]) -> Factors:
        """Return the group's term of dx."""
        h, *rest = saved
        ids = None if self.routing is None else self.routing.again(self, rest.pop(0))
        gh = h.new_empty(h.shape)
        if self.as_one:
            own = None if ids is None else self.routing.owners(ids, self.adapters)
            lora_down(g, self._matrix("b").t(), self.scale, None, gh, own, self.blocks)
        else:
            for low, columns, part in self._parts(g, gh):
                own = None if ids is None else self.routing.owners(ids, [low])
                lora_down(columns, low.b.detach().t(), self.scale, None, part, own)
        own_ranks = None if ids is None else self._own_ranks(ids)
        return Factors(gh, self._matrix("a").t(), Drop(self.rate, rest[0]) if rest else None, None, own_ranks)

    def _own_ranks(self, ids: Tensor) -> OwnRanks | None:
        layout = self.routing.equal_layout(self.adapters)
        return None if layout is None else OwnRanks(ids, *layout)

    def backward(
        self, g: Tensor, x: Tensor, saved: Sequence[Tensor], dx: Tensor | None, factors: Factors | None = None
    ) -> Sequence[Tensor | None]:
        """Return the gradients of `parameters`, None where one is not wanted or was delivered (kernels/accumulate.py).

        The group's part of dx is added in place, unless `factors`, from `input_factors`, are in dx already.
        """
        if factors is None:
            factors = self.input_factors(g, saved)
            if dx is not None:
                lora_up(dx, factors.h, factors.b, factors.drop)
        h, gh, drop = saved[0], factors.h, factors.drop
        if len(self.adapters) == 1:
            return self.adapters[0].gradients(x, gh, g, h, drop)
        if self.blocks and self.routing is None:
            a, b = [low.a for low in self.adapters], [low.b for low in self.adapters]
            return adapter_gradients(a, b, x, gh, g, h, drop, [p.requires_grad for p in self.parameters])
        gradients: list[Tensor | None] = []
        for (low, columns, part), (_, _, part_gh) in zip(self._parts(g, h), self._parts(g, gh)):
            gradients += low.gradients(x, part_gh, columns, part, drop)
        return gradients

    def _parts(self, y: Tensor, h: Tensor) -> Iterator[tuple[LowRank, Tensor, Tensor]]:
        """Yield each adapter with its columns of y and of h."""
        parts = h.split([low.a.shape[0] for low in self.adapters], 1)
        for low, (start, stop), part in zip(self.adapters, self.ranges, parts):
            yield low, y[..., start:stop], part

    def _matrix(self, half: str) -> Tensor:
        """Return the a, or the b, of all adapters as one matrix."""
        if len(self.adapters) == 1:
            return getattr(self.adapters[0], half).detach().contiguous()
        parameters = [getattr(low, half) for low in self.adapters]
        joined = join_rows([p.detach() for p in parameters])
        if joined is None and self._packable():
            if (why := pack(parameters)) is not None:
                fallback("lora: the adapters of layers that are multiplied as one, as one matrix", f"{why}: they are copied")
            joined = join_rows([p.detach() for p in parameters])
        return torch.cat([p.detach() for p in parameters]) if joined is None else joined

    def pack(self) -> None:
        """Store a and b as one matrix each, wherever they are now."""
        if self._packable() or self.routing is not None:
            pack([a for low in self.adapters for a in low.all_a], force=True)
        if self._packable() and self.blocks:
            pack([low.b for low in self.adapters], force=True)
        for low in self.adapters:
            pack(low.all_b, COLUMNS, force=True)

    def _packable(self) -> bool:
        """Return whether no two adapters are of one weight."""
        stops = [0, *(stop for _, stop in self.ranges)]
        return self.routing is None and all(start >= stop for (start, _), stop in zip(self.ranges, stops))


ROWS, COLUMNS = 0, 1


def pack(parameters: Sequence[Tensor], dim: int = ROWS, force: bool = False) -> str | None:
    """Make the parameters slices of one matrix, along `dim`. Return None if they are, else the reason against moving them.

    force: move slices of a larger buffer, too, as before a TrainStep, which moves every parameter
    """
    if len(parameters) == 1 or join([p.detach() for p in parameters], by_columns=dim == COLUMNS) is not None:
        return None
    if (why := _immovable(parameters, force)) is not None:
        return why
    with torch.inference_mode(False), torch.no_grad():
        parts = [p.detach().t() if dim == COLUMNS else p.detach() for p in parameters]
        for p, rows in zip(parameters, torch.cat(parts).split([t.shape[0] for t in parts])):
            p.data = rows.t() if dim == COLUMNS else rows
    return None


def _immovable(parameters: Sequence[Tensor], force: bool) -> str | None:
    if any(type(p) is not nn.Parameter or p.is_inference() for p in parameters):
        return "some of them are no plain parameters"
    if len({(p.dtype, p.device) for p in parameters}) > 1:
        return "they differ in dtype or device"
    if len({id(p) for p in parameters}) < len(parameters):
        return "two of them share one parameter"
    if any(hasattr(p, "main_grad") for p in parameters):
        return "a TrainStep holds them in its buffers; make a new TrainStep"
    if any(hasattr(p, "ds_id") or hasattr(p, "_fsdp_flattened") for p in parameters):
        return "DeepSpeed or FSDP manages their memory"
    if any(p.device.type == "cpu" and p.is_shared() for p in parameters):
        return "they are in memory shared between processes"
    if any(p.is_cuda for p in parameters) and torch.cuda.is_current_stream_capturing():
        return "their memory was moved, and a graph is being captured; run the model once before the capture"
    if not force and any(p.untyped_storage().nbytes() != p.nbytes for p in parameters):
        return "they are slices of a larger buffer"
    return None


def pack_adapters(model: nn.Module) -> None:
    """Store the adapters of layers that are multiplied as one as one matrix, and those that rows of a batch choose from.

    A TrainStep calls it before it lays out its flat buffers, which keep neighbours next to each other.
    """
    projections = [module.projections() for module in model.modules() if isinstance(module, Projecting)]
    grouped = {id(layer) for layers in projections for layer in layers}
    others = [m for m in model.modules() if id(m) not in grouped and (isinstance(m, nn.Linear) or has_reader(m))]
    for layers in [*projections, *([layer] for layer in others)]:
        sites = [site_of(layer) for layer in layers]
        if any(site.why is not None or is_sharded(site.weight) for site in sites):
            continue
        outputs, stop = list[AdapterOutputs](), 0
        for site in sites:
            start, stop = stop, stop + shape_of(site.weight)[0]
            outputs += [AdapterOutputs(low, start, stop) for low in site.adapters]
        for group in LowRank.group(outputs) if outputs else ():
            group.pack()


KEY = "adapter_ids"  # the keyword of the model's calls, and the key in a batch of TrainStep


class _Call:
    """The ids of a call. In slots, which graphs do not check for changes: each call has its own."""

    __slots__ = ("ids",)

    def __init__(self, ids: Tensor | None):
        self.ids = ids


class Routing:
    """The adapter of each row of the model's call. All adapted layers share one.

    ids   the adapter ids of calls that pass none
    word  the argument's name in errors
    """

    def __init__(self, names: Sequence[str], ids: Tensor | None = None, word: str = KEY):
        self.names, self.ids, self.word = tuple(names), ids, word
        self._call = _Call(ids)  # running, or the last one: backward may recompute it
        self._inside: nn.Module | None = None
        self._tables: dict[tuple, tuple[Tensor, Tensor]] = {}

    def watch(self, entry: nn.Module) -> Iterator[Any]:
        yield entry.register_forward_pre_hook(self._enter, with_kwargs=True)
        yield entry.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        ids = kwargs.pop(KEY, None)
        outermost = self._inside in (None, module)  # a call that was interrupted by Ctrl-C never left
        if outermost:
            self._inside = module
        if outermost or ids is not None:
            self._call.ids = self.ids if ids is None else ids
            if self._call.ids is None:
                raise ValueError(
                    f"lora.rows: the call has no {KEY}; pass one number a row, an index of {list(self.names)} or -1, or set "
                    f"`ids` of what gb.lora.rows returned."
                )
            self.check(self._call.ids)
        return args, kwargs

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._inside is module:
            self._inside = None

    def check(self, ids: Any) -> None:
        """Raise for ids that are no integers (rows,), or, on the CPU and not while tracing, no indices of `names`.

        Elsewhere a value that is no index counts as -1.
        """
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
            got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
            raise ValueError(
                f"lora.rows: {KEY} must be an int32 or int64 tensor (rows,), got {got}; give one number for each row of the "
                f"batch, -1 for the model without adapters."
            )
        if ids.device.type == "cpu" and not torch.compiler.is_compiling() and _get_current_dispatch_mode() is None:
            for value in ids.tolist():
                if not -1 <= value < len(self.names):
                    raise ValueError(
                        f"lora.rows: {KEY} must be from -1 to {len(self.names) - 1}, indices of {list(self.names)} or -1 for "
                        f"none of them, got {value}."
                    )

    def begin(self, group: Any, x: Tensor) -> Tensor:
        """Return the ids of x's rows, for a product whose backward calls `again`."""
        ids = self.ids_of(x)
        group.routed_ids = _identity(ids)
        return ids

    def again(self, group: Any, ids: Tensor) -> Tensor:
        """Return the saved `ids`. After recomputation by a checkpoint they are those of the last call."""
        if _identity(ids) != group.routed_ids:
            raise RuntimeError(
                f"lora.rows: {KEY} of a call were replaced or overwritten before its backward, which reads them; run backward "
                f"before the model's next call."
            )
        return ids

    def ids_of(self, x: Tensor) -> Tensor:
        recomputed = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        ids = self._call.ids if self._inside is not None or recomputed else self.ids
        if ids is None:
            raise ValueError(
                f"lora.rows: an adapted layer was called outside of the model; call the model with {KEY}, or set `ids` of what "
                f"gb.lora.rows returned."
            )
        if x.dim() < 2 or x.shape[0] != len(ids):
            raise ValueError(
                f"lora.rows: {self.word} are {len(ids)}, and an adapted layer has an x of {tuple(x.shape)}, whose first "
                f"dimension must be the batch's rows; give one for each, and adapt no layers that see rows merged or gathered."
            )
        return ids

    @staticmethod
    def equal_layout(adapters: Iterable[RoutedLowRank]) -> tuple[int, int] | None:
        """Return (ranks of each, number), if all weights have the same adapters, in order and of equal ranks."""
        first, *others = {tuple((index, rank) for index, rank, _ in adapter.columns) for adapter in adapters}
        ranks = first[0][1]
        return (ranks, len(first)) if not others and first == tuple((i, ranks) for i in range(len(first))) else None

    def owners(self, ids: Tensor, adapters: Iterable[RoutedLowRank]) -> Owners:
        """Return the owner of each column of these adapters' h: a table that is computed once, and stays on the device."""
        columns = tuple(adapter.columns for adapter in adapters)
        if torch.compiler.is_compiling():  # a constant of the compiled code
            return Owners(ids, *_table(columns, ids.device))
        key = ids.device, columns
        if key not in self._tables:
            self._tables[key] = _table(columns, ids.device)
        return Owners(ids, *self._tables[key])


def is_routed(model: nn.Module) -> bool:
    """Return whether the model's calls take adapter ids."""
    return any(isinstance(getattr(hook, "__self__", None), Routing) for hook in model._forward_pre_hooks.values())


def _table(columns: Sequence[Sequence[tuple[int, int, float]]], device: torch.device) -> tuple[Tensor, Tensor]:
    each = [(index, scale) for of_weight in columns for index, rank, scale in of_weight for _ in range(rank)]
    owner = torch.tensor([index for index, _ in each], dtype=torch.int32, device=device)
    return owner, torch.tensor([scale for _, scale in each], dtype=torch.float32, device=device)


def _identity(ids: Tensor) -> tuple[int, int]:
    return ids.data_ptr(), 0 if ids.is_inference() else ids._version
