"""Placing a model: check it, move it, swap the modules that can be swapped, verify each swap, then the whole model.

The order matters. The whole model runs forward and backward on its device before anything is changed: the end is compared with
that. Leaves (norms, attention, MLPs) are swapped individually, each compared tightly with itself in a wider dtype; then the
decoder stack and the loss, each by a run of the module before and after. A swap that fails is undone, with its reason.
"""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from .. import device as facts
from ..errors import PlaceError
from ..kernels.dispatch import hasten, runs
from ..layers.fused_weights import Projecting
from ..lora import layers as lora_layers  # noqa: F401  registers the reader of projections that PEFT has adapted
from ..trace import fallback
from . import candidates
from .candidates import MARK, Candidate, Fused, release
from .placement import Note, Placement
from .verify import Agreement, Exercise, attempt, check_example, coarsest, inference_weight, verify


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
    with facts.plainly(target):
        candidates.move(model, target)
        is_plain, notes = candidates.is_plain(model), dict[str, Note]()
        leaves = list(candidates.leaves(model)) if fuse else []
        if fuse:
            hasten((call for c in chain(leaves, candidates.wholes(model)) for call in c.swap.calls), target, coarsest(model))
        whole = Exercise(model, example)
        result = Agreement(why=whole.trouble)
        try:
            shared = candidates.shared_memory(model) if fuse else {}
            for c in leaves:
                notes[c.name] = _swap(c, strict, _leaf_refusal(c, shared), partial(verify, c.module, c.swap.cases, c.adopt))
            for c in candidates.wholes(model) if fuse else ():
                notes[c.name] = _swap(c, strict, _trial_refusal(c), partial(_exercised, c))
            refusals = Counter((type(note.module).__name__, note.why) for note in notes.values() if note.refused)
            if not whole.trouble and not (result := attempt("", whole.again)).ok:
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


def _exercised(c: Candidate) -> Agreement:
    """Swap a decoder stack or language model, whose leaves are swapped already, and compare runs before and after."""
    exercise = Exercise(c.module)
    if exercise.trouble:
        return Agreement(why=exercise.trouble)
    c.adopt()
    return exercise.again()


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
    p = next(module.parameters(), torch.empty(1, device="cpu", dtype=torch.float32))
    by_source: dict[str, list[str]] = {}
    for op in ops:
        by_source.setdefault(runs(op, p.device, p.dtype), []).append(op)
    return text.format("; ".join(f"{source} {', '.join(ops)}" for source, ops in by_source.items()) or "no positions")
