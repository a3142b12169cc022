"""Placing a model: look, move, swap what can be swapped, verify each swap, then the whole.

The order matters. The whole model runs forward and backward on its device before anything is changed: that is what the end
is compared with. Leaves (norms, attention, MLPs) are swapped one at a time, each verified tightly against itself in a wider
dtype; then the decoder loop and the loss, each by a run of what it wraps. A swap that fails is taken back, with its reason.
"""

import time
from collections import Counter
from typing import Any

import torch
from torch import nn

from .. import device as facts
from ..errors import PlaceError
from ..kernels.dispatch import hasten, runs
from ..layers.fused_weights import Projecting
from ..lora import layers as lora_layers  # noqa: F401  from now on, projections that PEFT has adapted are read
from ..trace import fallback
from . import candidates
from .candidates import Candidate
from .exercise import Exercise, check_example
from .fused import MARK, Fused, release
from .placement import Note, Placement
from .verify import Agreement, coarsest, judged, made_inside, verify


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
    there = facts.resolve(device)
    # A weight moved inside inference_mode could not be trained, and autocast would round what is compared.
    with facts.plainly(there):
        return _placed(model, there, fuse, strict, example, begin)


def _placed(model: nn.Module, there: torch.device, fuse: bool, strict: bool, example: Any, begin: float) -> Placement:
    candidates.move(model, there)
    plain, leaves = candidates.plain(model), list(candidates.leaves(model)) if fuse else []
    if fuse:
        hasten(candidates.calls_of(model, leaves), there, coarsest(model))
    whole, placer = Exercise(model, example), _Placer(model, strict)
    verdict = Agreement(why=whole.trouble)
    try:
        if fuse:
            placer.leaves(leaves)
            placer.wholes()
        if not whole.trouble:
            verdict = placer.last(whole)
        placer.report()
    except BaseException:  # strict, or Ctrl-C: nothing stays half swapped
        placer.release_all()
        raise
    notes = placer.notes()
    for note in notes:
        for counter in note.counters():  # the exercises' own
            counter.clear()
    unsupported = candidates.unsupported(model) if fuse else None
    if fuse:
        vars(model)[MARK] = True  # refused until undo(), even where nothing could be swapped
    return Placement(model, there, notes, verdict, time.perf_counter() - begin, unsupported, fuse and plain)


def as_it_is(model: nn.Module, device: str | torch.device, why: str) -> Placement:
    """The table of a model that stays what and where it is. `why` it was not run there."""
    return Placement(model, facts.resolve(device), _Placer(model, strict=False).notes(), Agreement(why=why), 0.0)


def _trials_refusal(c: Candidate) -> str:
    trial = c.swap.trial
    return "" if trial is None else judged("its trial", lambda: Agreement(why=trial() or "")).why


class _Placer:
    """Swaps candidates one by one and remembers what came of each."""

    def __init__(self, model: nn.Module, strict: bool) -> None:
        self.model, self.strict = model, strict
        self.decided: dict[str, Note] = {}
        self.refusals: Counter[tuple[str, str]] = Counter()

    def leaves(self, leaves: list[Candidate]) -> None:
        shared = candidates.shared_memory(self.model)
        for found in leaves:
            why = found.swap.refusal or candidates.leave_alone(found.module)
            why = why or made_inside(found.module) or _torn(found, shared)
            if why:
                self.refuse(found, why)
                continue
            self.settle(found, self._verified(found))

    def wholes(self) -> None:
        for found in candidates.wholes(self.model):
            refusal = Agreement(why=found.swap.refusal or _trials_refusal(found))
            self.settle(found, self._exercised(found) if refusal.ok else refusal)

    def _verified(self, c: Candidate) -> Agreement:
        return judged("its verification", lambda: verify(c.module, c.swap.cases, c.adopt))

    def _exercised(self, c: Candidate) -> Agreement:
        """A decoder or language model, before and after. Its leaves are swapped already: this judges the loop or the loss."""
        inside = Exercise(c.module)
        if inside.trouble:
            return Agreement(why=inside.trouble)
        c.adopt()
        return judged("", inside.again)

    def settle(self, c: Candidate, verdict: Agreement) -> None:
        if verdict.ok:
            stacked = getattr(c.module, "stacked", None)
            why = "; ".join([f"verified: {verdict}", *(stacked.fallbacks if stacked else ())])
            self.decided[c.name] = Note(c.name, c.module, _kernel(c.module), why, verdict=verdict)
            return
        release(c.module)
        self.refuse(c, str(verdict))

    def refuse(self, c: Candidate, why: str) -> None:
        if self.strict:
            raise PlaceError(f"place: {c.name or 'the model'} ({type(c.module).__name__}) was not swapped: {why}.")
        self.decided[c.name] = Note(c.name, c.module, "torch", f"not swapped: {why}", refused=True)
        self.refusals[type(c.module).__name__, why] += 1

    def last(self, whole: Exercise) -> Agreement:
        """The whole model as it is now, against what it was. Taken back whole when it differs."""
        verdict = judged("", whole.again)
        if verdict.ok:
            return verdict
        why = f"the whole model with every swap in it: {verdict}"
        if self.strict:
            raise PlaceError(f"place: {why}; every swap was taken back.")
        self.release_all()
        for name, note in self.decided.items():
            if not note.refused:
                self.decided[name] = Note(name, note.module, "torch", f"taken back: {why}", refused=True)
        self.refusals["the model", why] += 1
        return Agreement(why=why)

    def release_all(self) -> None:
        for module in self.model.modules():
            release(module)

    def report(self) -> None:
        """One fallback for each kind of module and reason, however many layers there are."""
        for (kind, why), often in self.refusals.items():
            fallback(f"place: {kind} x{often}" if often > 1 else f"place: {kind}", why)

    def notes(self) -> list[Note]:
        """Every module that was decided on, and every other that holds parameters of its own, in the model's order."""
        notes = []
        for name, module in self.model.named_modules():
            if name in self.decided:
                notes.append(self.decided[name])
            elif hasattr(type(module), "fused_kernels") and not isinstance(module, Fused):
                notes.append(Note(name, module, _kernel(module), "gpubound's own, tested against the reference"))
            elif module._parameters and not _within_ours(self.model, name):
                notes.append(Note(name, module, "torch", "as it was"))
        return notes


def _torn(c: Candidate, shared: dict[str, str]) -> str:
    """Why a module whose weights are to lie side by side may not have them moved; empty when it may, or moves none."""
    if "stacked" not in c.swap.attributes:
        return ""
    for name, _ in c.module.named_parameters(c.name):
        if name in shared:
            return (
                f"{name} and {shared[name]} are two tensors over the same memory, and to be stacked one would move away; "
                f"tie them by giving both modules the one Parameter object"
            )
    return ""


def _within_ours(model: nn.Module, name: str) -> bool:
    """Inside an attention, an MLP or another part of ours that projects: its row speaks for its projections.

    And the numbers of a curve, for which the layer speaks that computes with them.
    """
    parents = [name[:i] for i, c in enumerate(name) if c == "."]
    return getattr(type(model.get_submodule(name)), "in_parents_row", False) or any(
        isinstance(model.get_submodule(p), Projecting) for p in parents
    )


def _kernel(module: Any) -> str:
    """A module's kernels in words, each op under the implementation that its door chooses for this module's tensors."""
    words, ops = module.fused_kernels()  # as its calls so far have run it, not as it was expected to
    p = next(module.parameters(), torch.empty(1, device="cpu", dtype=torch.float32))
    chosen: dict[str, list[str]] = {}
    for op in ops:
        chosen.setdefault(runs(op, p.device, p.dtype), []).append(op)
    return words.format("; ".join(f"{source} {', '.join(ops)}" for source, ops in chosen.items()) or "no positions")
