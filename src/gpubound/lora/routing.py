"""Several adapters in one batch: each of its rows has one of them, or none.

The adapters of a weight become one (`RoutedLowRank` of adapter.py), and each row keeps the columns of h that belong to its
adapter (kernels/lora_arguments.py). So x is read once for all adapters, forward and backward. The adapter of a row is read on
the device: a captured step takes other ids at each replay.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..kernels.lora_arguments import Owners
from .adapter import RoutedLowRank

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
