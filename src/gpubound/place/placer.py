"""Placing a model: check it, move it, swap the modules that can be swapped, verify each swap, then the whole model.

The order matters. The whole model runs forward and backward on its device before anything is changed: the end is compared with
that. Leaves (norms, attention, MLPs) are swapped individually, each compared tightly with itself in a wider dtype; then the
decoder stack and the loss, each by a run of the module before and after. A swap that fails is undone, with its reason.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from .. import device as facts
from ..errors import PlaceError
from ..kernels.dispatch import runs, start_self_tests
from ..layers.fused_weights import Projecting
from ..lora import layers as lora_layers  # noqa: F401  registers the reader of projections that PEFT has adapted
from ..trace import fallback, timed
from . import candidates
from .candidates import MARK, Candidate, Fused, release
from .verify import CACHED, KEPT, Agreement, Exercise, attempt, check_example, coarsest, inference_weight, verify


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
                "ones, which docs/models.md lists"
            )
        if self.plain:
            done = "Only norms were swapped" if self.swapped else "Nothing was swapped"
            swaps += (
                f". {done}: {type(self.model).__name__} is a plain module, whose attention, MLP and loss run as written; "
                f"docs/models.md#your-own-model has three changes that fuse them"
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


@timed("place")
def place(
    model: nn.Module, device: str | torch.device = "auto", fuse: bool = True, strict: bool = False, example: Any = None
) -> Placement:
    """Move `model` to `device`, and swap its supported modules, in this instance, for fused ones that compute the same.

    device   auto, require, cpu, cuda or cuda:<index> (device.py)
    fuse     False: only move the model and run it once
    strict   True: PlaceError when a module cannot be swapped or fails its verification. Otherwise such a module stays
             unchanged, and the table says why
    example  a batch to run the model with, where its input cannot be guessed: a dict of keywords, a tuple of arguments, or
             one argument

    Parameters keep their names and identity. state_dict, save_pretrained and an optimizer built before keep working.
    """
    begin = time.perf_counter()
    candidates.check_placeable(model)
    check_example(example)
    target = facts.resolve(device)
    # A weight moved inside inference_mode could not be trained, and autocast would round the values that are compared.
    with facts.plainly(target), facts.growing_segments(target), facts.collecting_new_objects(target):
        candidates.move(model, target)
        is_plain, notes = candidates.is_plain(model), dict[str, Note]()
        leaves = list(candidates.leaves(model)) if fuse else []
        if fuse:
            calls = (call for c in chain(leaves, candidates.wholes(model)) for call in c.swap.calls)
            start_self_tests(calls, target, coarsest(model), compile_first=True)
        complete = Exercise(model, example)
        result = Agreement(why=complete.trouble)
        try:
            shared = candidates.shared_memory(model) if fuse else {}
            cache_limit = max(CACHED, sum(p.nbytes for p in model.parameters()) // KEPT)
            with timed(f"comparison of {len(leaves)} modules with their replacements"):
                for c in leaves:
                    check = partial(verify, c.module, c.swap.cases, c.adopt, cache_limit)
                    notes[c.name] = _swap(c, strict, _leaf_refusal(c, shared), check)
                    # Stacked weights have left their memory, in pieces too small for others.
                    facts.release_cached(target, cache_limit)
            for c in candidates.wholes(model) if fuse else ():
                notes[c.name] = _swap(c, strict, _trial_refusal(c), partial(_exercised, c, complete))
            refusals = Counter((type(note.module).__name__, note.why) for note in notes.values() if note.refused)
            if not complete.trouble and not (result := complete.agreement or attempt("", complete.again)).ok:
                result = Agreement(why=f"the whole model with every swap in it: {result}")
                if strict:
                    raise PlaceError(f"place: {result}; every swap was undone.")
                _release_all(model)
                for name, note in notes.items():
                    if not note.refused:
                        notes[name] = Note(name, note.module, "torch", f"undone: {result}", refused=True)
                refusals["the model", str(result)] += 1
            for (kind, why), count in refusals.items():  # one fallback for each class and reason
                fallback(f"place: {kind} x{count}" if count > 1 else f"place: {kind}", why.removeprefix(NOT_SWAPPED))
        except BaseException:  # strict, or Ctrl-C: no swap is kept
            _release_all(model)
            raise
        table = _all_notes(model, notes)
        for note in table:
            for counter in note.counters():  # the counts of these runs
                counter.clear()
        unsupported = candidates.unsupported(model) if fuse else None
        if fuse:
            vars(model)[MARK] = True  # placing it again is refused until undo(), even where nothing could be swapped
    return Placement(model, target, table, result, time.perf_counter() - begin, unsupported, fuse and is_plain)


def unplaced(model: nn.Module, device: str | torch.device, why: str) -> Placement:
    """Return the table of a model that is neither changed nor moved. `why`: the reason that it was not run there"""
    return Placement(model, facts.resolve(device), _all_notes(model, {}), Agreement(why=why), 0.0)


NOT_SWAPPED = "not swapped: "


def _swap(c: Candidate, strict: bool, refusal: str | None, check: Callable[[], Agreement]) -> Note:
    """Swap a module unless there is a `refusal`. `check` swaps and compares; a swap that fails is undone."""
    what = "its verification" if c.swap.cases else ""
    result = Agreement(why=refusal) if refusal else attempt(what, check)
    if result.ok:
        stacked = getattr(c.module, "stacked", None)
        why = "; ".join([f"verified: {result}", *(stacked.fallbacks if stacked else ())])
        return Note(c.name, c.module, _kernel(c.module), why, result=result)
    release(c.module)
    if strict:
        raise PlaceError(f"place: {c.name or 'the model'} ({type(c.module).__name__}) was not swapped: {result}.")
    return Note(c.name, c.module, "torch", f"{NOT_SWAPPED}{result}", refused=True)


def _leaf_refusal(c: Candidate, shared: dict[str, str]) -> str | None:
    """Return why a leaf is left alone, such as weights that would be moved away from another tensor over their memory."""
    why = c.swap.refusal or candidates.leave_alone(c.module) or inference_weight(c.module)
    if why or "stacked" not in c.swap.attributes:
        return why
    for name, _ in c.module.named_parameters(c.name):
        if name in shared:
            return (
                f"{name} and {shared[name]} are two tensors over the same memory, and to be stacked one would move away; "
                f"tie them by giving both modules the one Parameter object"
            )
    return None


def _trial_refusal(c: Candidate) -> str | None:
    trial = c.swap.trial
    return c.swap.refusal or (None if trial is None else attempt("its trial", lambda: Agreement(why=trial() or "")).why)


def _exercised(c: Candidate, complete: Exercise) -> Agreement:
    """Swap a decoder stack or language model, whose leaves are swapped already, and compare runs before and after.

    The model of `complete` itself is compared with its run before any swap, as at the end, and once for both: 0.8 s at 8b.
    """
    is_complete = c.module is complete.model and bool(complete.seeds)
    exercise, complete.agreement = complete if is_complete else Exercise(c.module), None
    if exercise.trouble:
        return Agreement(why=exercise.trouble)
    c.adopt()
    result = exercise.again()
    if result.ok and is_complete:
        complete.agreement = result
    return result


def _release_all(model: nn.Module) -> None:
    for module in model.modules():
        release(module)


def _all_notes(model: nn.Module, notes: dict[str, Note]) -> list[Note]:
    """Return `notes`, and one for every other module with own parameters, in the model's order."""
    table = []
    for name, module in model.named_modules():
        if name in notes:
            table.append(notes[name])
        elif hasattr(type(module), "fused_kernels") and not isinstance(module, Fused):
            table.append(Note(name, module, _kernel(module), "gpubound's own, tested against the reference"))
        elif module._parameters and not _in_parents_row(model, name):
            table.append(Note(name, module, "torch", "unchanged"))
    return table


def _in_parents_row(model: nn.Module, name: str) -> bool:
    """Return whether a parent's row covers the module: a projection of an attention or MLP, or a curve of a layer."""
    parents = [name[:i] for i, c in enumerate(name) if c == "."]
    return getattr(type(model.get_submodule(name)), "in_parents_row", False) or any(
        isinstance(model.get_submodule(p), Projecting) for p in parents
    )


def _kernel(module: Any) -> str:
    """Describe a module's kernels, each op with the implementation that is chosen for this module's tensors."""
    text, ops = module.fused_kernels()  # by its calls so far
    tensors = (t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point())  # codes are no numbers
    p = next(tensors, torch.empty(1, device="cpu", dtype=torch.float32))
    by_source: dict[str, list[str]] = {}
    for op in ops:
        by_source.setdefault(runs(op, p.device, p.dtype), []).append(op)
    return text.format("; ".join(f"{source} {', '.join(ops)}" for source, ops in by_source.items()) or "no positions")
