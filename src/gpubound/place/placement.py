"""The result of placing: a table of each module's device, dtype, kernel, verification and calls on a slower path."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from .. import device as facts
from ..layers.fused_weights import Projecting
from ..models.registry import fused_types
from .candidates import MARK, Fused, release
from .verify import Agreement


@dataclass(frozen=True)
class PlacedModule:
    module: str
    kind: str
    device: str
    dtype: str
    kernel: str
    why: str
    error: float | None  # the largest relative error of its verification
    limit: float | None
    fallbacks: int
    reasons: dict[str, int]


@dataclass(frozen=True)
class Note:
    """The decision about one module."""

    name: str
    module: nn.Module
    kernel: str
    why: str
    refused: bool = False
    result: Agreement | None = None

    def counters(self) -> list[Counter[str]]:
        """Return the module's counts of calls on a slower path, by reason."""
        own = self.module.__dict__
        return [*([own["delegated"]] if "delegated" in own else []), *([own["stacked"].fallbacks] if "stacked" in own else [])]

    def row(self) -> PlacedModule:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        where = _joined(str(t.device) for t in tensors)
        dtypes = _joined(str(p.dtype).removeprefix("torch.") for p in self.module.parameters())
        reasons: Counter[str] = sum(self.counters(), Counter())
        why = self.why
        for reason, often in reasons.most_common(1):
            why += f"; {often} calls: {reason}"
        kind = ("Fused" if isinstance(self.module, Fused) else "") + self.module._get_name()
        error, limit = (self.result.error, self.result.limit) if self.result else (None, None)
        name, often = self.name or "(the model)", reasons.total()
        return PlacedModule(name, kind, where, dtypes, self.kernel, why, error, limit, often, dict(reasons))


@dataclass(eq=False, repr=False)
class Placement:
    """The result of `place`. `str()` is the table. `undo()` restores the model's classes."""

    model: nn.Module
    device: torch.device
    _notes: list[Note]
    _result: Agreement  # of the whole model
    seconds: float
    unsupported: str | None = None  # model_type of a transformers model without fused attention and MLP
    plain: bool = False  # no module is transformers' or gpubound's

    @property
    def verified(self) -> bool:
        return self._result.ok

    @property
    def rows(self) -> list[PlacedModule]:
        """Return a row for each module that has own parameters or was swapped, in its present state."""
        return [note.row() for note in self._notes]

    @property
    def swapped(self) -> int:
        return sum(isinstance(note.module, Fused) for note in self._notes)

    @property
    def refused(self) -> int:
        return sum(note.refused for note in self._notes)

    @property
    def fallbacks(self) -> int:
        return sum(row.fallbacks for row in self.rows)

    @property
    def summary(self) -> str:
        """Return the table's last line: the model's device, and whether it was verified there."""
        swaps = f"{self.swapped} swapped, {self.refused} refused, {self.seconds:.1f} s"
        if self.unsupported:
            swaps += (
                f". Attention and MLP stay transformers' own: {self.unsupported!r} is not among the families that have fused "
                f"ones ({', '.join(fused_types())})"
            )
        if self.plain:
            done = "Only norms were swapped" if self.swapped else "Nothing was swapped"
            swaps += (
                f". {done}: {type(self.model).__name__} is a plain module, whose attention, MLP and loss run as written; "
                f"docs/your-own-model.md has three changes that fuse them"
            )
        where = facts.label(self.device)
        if not self.verified:
            return f"On {where}, not verified as a whole: {self._result}. {swaps}."
        if self.device.type == "cuda":
            return f"GPU ready: {where}. Whole model, forward and backward: {self._result}. {swaps}."
        kernels = "reference kernels, plain PyTorch (a CPU gains nothing)"
        if facts.interpreted():
            kernels = "Triton's interpreter (slow, for tests)"
        ours = self.swapped or any(hasattr(type(note.module), "fused_kernels") for note in self._notes)
        return f"{where}: {kernels if ours else 'torch'}. Whole model, forward and backward: {self._result}. {swaps}."

    def as_dict(self) -> dict[str, Any]:
        own = ("verified", "summary", "swapped", "refused", "fallbacks", "seconds", "unsupported")
        rows = [asdict(row) for row in self.rows]
        return {"device": str(self.device), **{name: getattr(self, name) for name in own}, "rows": rows}

    def undo(self) -> None:
        """Restore every swapped module's class. The weights stay on their device; stacked ones get separate memory again."""
        for note in self._notes:
            if isinstance(note.module, Fused) and isinstance(note.module, Projecting):
                note.module.separate()
            release(note.module)
        vars(self.model).pop(MARK, None)

    def __str__(self) -> str:
        columns = ("module", "device", "dtype", "kernel", "fallbacks", "why")
        lines = [columns, *((g.module, g.device, g.dtype, g.kernel, str(g.fallbacks), g.why) for g in _grouped(self.rows))]
        widths = [max(len(line[i]) for line in lines) for i in range(len(columns) - 1)]
        text = ["  ".join([*(cell.ljust(w) for cell, w in zip(line, widths)), line[-1]]).rstrip() for line in lines]
        return "\n".join([*text, self.summary])


def _joined(values: Iterable[str]) -> str:
    return "+".join(sorted(set(values)))


def _grouped(rows: list[PlacedModule]) -> list[PlacedModule]:
    """Merge rows that differ only in the layer's number, in order: layers.*.mlp (24). The worst of them is shown."""
    groups: dict[tuple, list[PlacedModule]] = {}
    for row in rows:
        why = "" if row.error is not None else row.why
        key = (re.sub(r"\.\d+(?=\.|$)", ".*", row.module), row.device, row.dtype, row.kernel, why)
        groups.setdefault(key, []).append(row)
    return [_merged(key[0], group) for key, group in groups.items()]


def _merged(name: str, group: list[PlacedModule]) -> PlacedModule:
    if len(group) == 1:
        return group[0]
    worst = max(group, key=lambda r: (r.fallbacks, (r.error or 0.0) / (r.limit or 1.0)))
    reasons = sum((Counter(r.reasons) for r in group), Counter())
    return replace(worst, module=f"{name} ({len(group)})", fallbacks=reasons.total(), reasons=dict(reasons))
