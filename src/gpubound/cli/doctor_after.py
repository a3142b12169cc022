"""Actions of `gpubound doctor` after a verdict: patches and their proof, and the gate for CI."""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from ..distributed import launched
from ..distributed.store_messages import numbers
from ..doctor.finding import Verdict
from ..doctor.fix.prove import Proof, prove
from ..doctor.fix.repair import PATCHES, Repair, patched
from ..doctor.gate import FAILED, NOT_MEASURED, OK, Allowance, Budgets, gate, read_allowances, read_baseline
from ..errors import DataError
from ..formatting import hint

UNWRITTEN = 2


def progress() -> Callable[[str], None]:
    """Return a function that prints lines of progress to the present stderr, which the script may replace."""
    stderr = sys.stderr
    return lambda line: print(f"gpubound doctor: {line}", file=stderr, flush=True)


@dataclass(frozen=True)
class Gate:
    """The limits of a verdict, read before the script runs, so that a wrong file costs no run."""

    budgets: Budgets
    baseline: Verdict | None
    allowances: Sequence[Allowance]
    asked: bool

    @classmethod
    def of(cls, options: object, baseline: str | None, allow: str | None) -> "Gate":
        budgets = Budgets(**{each.name: getattr(options, each.name) for each in fields(Budgets)})
        if budgets.max_regress_pct is not None and baseline is None:
            raise ValueError("--max-regress-pct: got no --baseline to compare with; give the doctor.json of a good run.")
        before = None if baseline is None else read_baseline(Path(baseline))
        allowances = [] if allow is None else read_allowances(Path(allow))
        return cls(budgets, before, allowances, budgets != Budgets() or baseline is not None or allow is not None)

    def hold(self, verdict: Verdict) -> tuple[list[str], int]:
        """(what it says, its exit code); nothing and 0 where no budget was given."""
        if not self.asked:
            return [], OK
        passage = gate(verdict, self.budgets, self.baseline, self.allowances)
        return passage.lines(), passage.code


@dataclass(frozen=True)
class FixOptions:
    """Options of --fix: which patches are shown, and what is done with them."""

    fix: bool = False
    also: tuple[str, ...] = ()
    apply: bool = False
    rounds: int | None = None
    marker: str = ""
    dry: bool = False

    def __post_init__(self) -> None:
        for option, present in (("--fix-also", self.also), ("--apply", self.apply), ("--prove", self.rounds is not None)):
            if present and not self.fix:
                raise ValueError(f"{option}: got no --fix; there is no patch without it.")
        for name in self.also:
            if name not in PATCHES:
                raise ValueError(f"--fix-also: {name!r} is no patch; {hint(name, list(PATCHES), 'wanted one of')}")
        if self.rounds is not None and self.rounds < 3:
            raise ValueError(f"--prove: got {self.rounds}, wanted at least 3 rounds: an interval needs them.")
        _, world = numbers()
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if self.rounds is not None and here != world:
            raise ValueError(
                f"--prove: got {world} ranks, {here} of them on this machine, wanted all on one, where a proof can start them "
                f"again and again; run it on one machine, or leave out --prove."
            )

    def of(self, verdict: Verdict, script: str, arguments: Sequence[str], module: bool) -> "FixResult":
        if not self.fix:
            return FixResult(verdict)
        verdict, repair = patched(verdict, self.also)
        if not repair.changes or self.rounds is None:
            return FixResult(verdict, repair)
        changes = {path: after for path, (_, after) in repair.changes.items()}
        _put_away()
        proof = prove(
            script, arguments, changes=changes, equal=repair.equal, rounds=self.rounds, module=module, marker=self.marker,
            dry=self.dry, ranks=numbers()[1] if launched() else 0, report=progress(),
        )  # fmt: skip
        return FixResult(verdict, repair, proof)

    def finish(self, mended: "FixResult") -> tuple[list[str], int]:
        """Write the files if --apply was given and the proof holds; return (lines, exit code)."""
        if mended.repair is None:
            return [], OK
        lines = [str(mended.repair) or "--fix: no finding has a line that could be patched.", mended.diff]
        code = OK
        if self.rounds is not None:
            code = NOT_MEASURED if mended.proof is None else OK if mended.proof.holds else FAILED
            lines.append("--prove: there is no patch to prove." if mended.proof is None else str(mended.proof))
        if self.apply and code == FAILED:
            lines.append("--apply: nothing was written: the losses are not the same.")
        elif self.apply:
            try:
                lines += [f"patched: {path.name}" for path in mended.repair.apply()]
            except (DataError, OSError) as error:  # reported after the diff, which took a run
                lines.append(f"--apply: nothing was written: {error}")
                code = UNWRITTEN
        return [text for text in lines if text], code


def _put_away() -> None:
    """The script that was looked at has left its memory to this process; the next runs need as much on the same GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class FixResult:
    """A verdict with its patches, all of them in one repair, and their proof."""

    verdict: Verdict
    repair: Repair | None = None
    proof: Proof | None = None

    @property
    def diff(self) -> str:
        return "" if self.repair is None else self.repair.diff()
