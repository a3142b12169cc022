"""Several adapters in one batch: each of its rows has one of them, or none.

The adapters of a weight become one (PerRow of adapter.py), and a row keeps of its narrow product h the columns of its own
adapter (kernels/adapter_routing.py). So x is read once for all adapters, forward and backward. The adapter of a row is read on
the device: a captured step takes other ids at each replay.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..kernels.adapter_routing import Owners
from .adapter import PerRow

KEY = "adapter_ids"  # what a call of the model has, and a batch of TrainStep


class _Call:
    """What a call was given. In slots, where a graph does not look for what must stand still: each call has its own."""

    __slots__ = ("ids",)

    def __init__(self, ids: Tensor | None):
        self.ids = ids


class Routing:
    """Which adapter each row of the model's call has. The records of all adapted weights share one."""

    def __init__(self, names: Sequence[str], ids: Tensor | None = None, word: str = KEY):
        self.names, self.ids, self.word = tuple(names), ids, word
        self._call = _Call(ids)  # under way, or the last one: backward may compute it again
        self._inside: nn.Module | None = None
        self._tables: dict[tuple, tuple[Tensor, Tensor]] = {}

    def watch(self, entry: nn.Module) -> Iterator[Any]:
        yield entry.register_forward_pre_hook(self._enter, with_kwargs=True)
        yield entry.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = kwargs.pop(KEY, None)
        outermost = self._inside in (None, module)  # a call that Ctrl-C has ended never left
        if outermost:
            self._inside = module
        if outermost or given is not None:
            self._call.ids = self.ids if given is None else given
            if self._call.ids is None:
                raise ValueError(
                    f"lora.rows: the call has no {KEY}; give one number a row, places in {list(self.names)} or -1, or set "
                    f"`ids` of what gb.lora.rows returned."
                )
            self.check(self._call.ids)
        return args, kwargs

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._inside is module:
            self._inside = None

    def check(self, ids: Any) -> None:
        """Its values only where the host has them, and nothing records the call for later ones. Elsewhere, numbers that are no
        place in `names` are as -1."""
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
            got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
            raise ValueError(
                f"lora.rows: {KEY} must be an int32 or int64 tensor (rows,), got {got}; give one number for each row of the "
                f"batch, -1 for the model without adapters."
            )
        if ids.device.type == "cpu" and not torch.compiler.is_compiling() and _get_current_dispatch_mode() is None:
            for found in ids.tolist():
                if not -1 <= found < len(self.names):
                    raise ValueError(
                        f"lora.rows: {KEY} must be from -1 to {len(self.names) - 1}, places in {list(self.names)} or -1 for "
                        f"none of them, got {found}."
                    )

    def begin(self, adapter: Any, x: Tensor) -> Tensor:
        """The adapters of x's rows, for a product that `again` finds in backward."""
        ids = self.ids_of(x)
        adapter.seen = _mark(ids)
        return ids

    def again(self, adapter: Any, ids: Tensor) -> Tensor:
        """`ids` as they were kept. Where a checkpoint has computed the product again, they are those of the last call."""
        if _mark(ids) != adapter.seen:
            raise RuntimeError(
                f"lora.rows: {KEY} of a call were replaced or overwritten before its backward, which reads them; run backward "
                f"before the model's next call."
            )
        return ids

    def ids_of(self, x: Tensor) -> Tensor:
        computed_again = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        ids = self._call.ids if self._inside is not None or computed_again else self.ids
        if ids is None:
            raise ValueError(
                f"lora.rows: an adapted layer was called beside the model; call the model with {KEY}, or set `ids` of what "
                f"gb.lora.rows returned."
            )
        if x.dim() < 2 or x.shape[0] != len(ids):
            raise ValueError(
                f"lora.rows: {self.word} are {len(ids)}, and an adapted layer has an x of {tuple(x.shape)}, whose first "
                f"dimension must be the batch's rows; give one for each, and adapt no layers that see rows merged or gathered."
            )
        return ids

    @staticmethod
    def alike(adapters: Iterable[PerRow]) -> tuple[int, int] | None:
        """(ranks of each, how many), if on all these weights the same adapters lie in their order with as many ranks each."""
        found = {tuple((place, rank) for place, rank, _ in adapter.columns) for adapter in adapters}
        first, *others = found
        ranks = first[0][1]
        return (ranks, len(first)) if not others and first == tuple((i, ranks) for i in range(len(first))) else None

    def owners(self, ids: Tensor, adapters: Iterable[PerRow]) -> Owners:
        """Whose the columns of these adapters' h are: a table that is made at the first call, and stays on the device."""
        columns = tuple(adapter.columns for adapter in adapters)
        if torch.compiler.is_compiling():  # a constant of what is compiled
            return Owners(ids, *_table(columns, ids.device))
        key = ids.device, columns
        if key not in self._tables:
            self._tables[key] = _table(columns, ids.device)
        return Owners(ids, *self._tables[key])


def _table(columns: Sequence[Sequence[tuple[int, int, float]]], device: torch.device) -> tuple[Tensor, Tensor]:
    each = [(place, scale) for some in columns for place, rank, scale in some for _ in range(rank)]
    owner = torch.tensor([place for place, _ in each], dtype=torch.int32, device=device)
    return owner, torch.tensor([scale for _, scale in each], dtype=torch.float32, device=device)


def _mark(ids: Tensor) -> tuple[int, int]:
    return ids.data_ptr(), 0 if ids.is_inference() else ids._version
