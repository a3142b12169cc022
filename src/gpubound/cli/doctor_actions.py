"""Actions of `gpubound doctor`: patches and their proof, and the gate for CI."""

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..distributed import launched
from ..distributed.rendezvous import rank_and_world
from ..doctor.finding import Verdict
from ..doctor.fix.prove import Proof, prove, timed_steps
from ..doctor.fix.repair import PATCHES, Repair, expected_ms, patched
from ..doctor.gate import FAILED, NOT_MEASURED, OK, Budgets, gate, read_allowances, read_baseline
from ..errors import DataError
from ..formatting import hint

if TYPE_CHECKING:
    from .doctor import Command, Doctor


NOT_WRITTEN = 2
Result = tuple[list[str], int]
"""Lines to print, exit code."""


def progress() -> Callable[[str], None]:
    """Return a function that prints lines of progress to the present stderr, which the script may replace."""
    stderr = sys.stderr
    return lambda line: print(f"gpubound doctor: {line}", file=stderr, flush=True)


def read_gate(options: "Doctor") -> Callable[[Verdict], Result]:
    """Read the limits before the script runs, as an invalid file should cost no run. Return a function that applies them."""
    budgets = Budgets(**{each.name: getattr(options, each.name) for each in fields(Budgets)})
    if budgets.max_regress_pct is not None and options.baseline is None:
        raise ValueError("--max-regress-pct: got no --baseline to compare with; give the doctor.json of a good run.")
    baseline = None if options.baseline is None else read_baseline(Path(options.baseline))
    allowances = [] if options.allow is None else read_allowances(Path(options.allow))

    def apply(verdict: Verdict) -> Result:
        if budgets == Budgets() and options.baseline is None and options.allow is None:
            return [], OK
        result = gate(verdict, budgets, baseline, allowances)
        return result.lines(), result.code

    return apply


@dataclass(frozen=True)
class FixResult:
    """A verdict with its patches, all of them in one repair, and their proof."""

    verdict: Verdict
    repair: Repair | None = None
    proof: Proof | None = None

    @property
    def diff(self) -> str:
        return "" if self.repair is None else self.repair.diff()

    @property
    def expected_ms(self) -> float | None:
        """Milliseconds of a patched step, by the prices; None without patches or prices."""
        return expected_ms(self.verdict, self.repair) if self.repair is not None and self.repair.patches else None


def check_fix(options: "Doctor") -> None:
    """Raise ValueError for options of --fix that make no sense."""
    for option, present in (("fix-also", options.fix_also), ("apply", options.apply), ("prove", options.prove is not None)):
        if present and not options.fix:
            raise ValueError(f"--{option}: got no --fix; there is no patch without it.")
    for name in options.other_patches:
        if name not in PATCHES:
            raise ValueError(f"--fix-also: {name!r} is no patch; {hint(name, list(PATCHES), 'wanted one of')}")
    if options.prove is None:
        return
    if options.prove < 3:
        raise ValueError(f"--prove: got {options.prove}, wanted at least 3 rounds: an interval needs them.")
    _, world = rank_and_world()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if local != world:
        raise ValueError(
            f"--prove: got {world} ranks, {local} of them on this machine, wanted all on one, where a proof can start them "
            f"again and again; run it on one machine, or leave out --prove."
        )


def patch(options: "Doctor", command: "Command", verdict: Verdict) -> FixResult:
    """Return the verdict with its patches, and their proof if --prove was given."""
    if not options.fix:
        return FixResult(verdict)
    verdict, repair = patched(verdict, options.other_patches)
    if not repair.changes or options.prove is None:
        return FixResult(verdict, repair)
    changes = {path: after for path, (_, after) in repair.changes.items()}
    gc.collect()  # the script's memory: the runs of the proof need the same amount on the same GPU
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    proof = prove(
        command.target, command.rest, changes=changes, equal=repair.equal, rounds=options.prove, module=command.module,
        marker=options.step_marker, dry=options.dry_run, ranks=rank_and_world()[1] if launched() else 0, report=progress(),
        **timed_steps(verdict),
    )  # fmt: skip
    return FixResult(verdict, repair, proof)


def finish_fix(options: "Doctor", result: FixResult) -> Result:
    """Write the files if --apply was given and the proof holds."""
    if result.repair is None:
        return [], OK
    lines = [str(result.repair) or "--fix: no finding has a line that could be patched.", result.diff]
    if result.expected_ms is not None:
        step = result.verdict.step_ms or 0.0
        lines.append(f"expected by the prices: {step:.2f} ms before, {result.expected_ms:.2f} ms a step after")
    code = OK
    if options.prove is not None:
        code = NOT_MEASURED if result.proof is None else OK if result.proof.holds else FAILED
        lines.append("--prove: there is no patch to prove." if result.proof is None else str(result.proof))
    if options.apply and code == FAILED:
        lines.append("--apply: nothing was written: the losses are not the same.")
    elif options.apply:
        try:
            lines += [f"patched: {path.name}" for path in result.repair.apply()]
        except (DataError, OSError) as error:  # reported after the diff, which took a run
            lines.append(f"--apply: nothing was written: {error}")
            code = NOT_WRITTEN
    return [text for text in lines if text], code
