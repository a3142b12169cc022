"""Patch what the doctor has found, from its doctor.json, without running the script again.

gpubound fix                         shows the patches of .doctor/doctor.json as one diff
gpubound fix --try                   runs the script unmodified and patched: step times and losses
gpubound fix --try --apply           writes the patches if the losses are the same

With --json one object is printed:

version      1
patched      `kind`, `file`, `line` and the name of the `patch` of each
refused      `kind`, `file`, `line` and the `reason` of each
diff         all patches as one diff
expected_ms  a patched step by the prices of the findings; null without prices
proof        with --try: `holds` (the losses are the same), `faster` (the whole interval is above 1), `speedup`, `before_ms`,
             `after_ms` and `difference` (in a dry run no times, `speedup` is null); else null
applied      whether the files were written
"""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import DataError
from . import arguments
from .doctor import Command, Doctor, split

HIDDEN = "..."  # what doctor.json has in place of a secret


@dataclass(frozen=True)
class Fix:
    """Patch what `gpubound doctor` has found, from its doctor.json, without running the script again.

    It is run in the folder in which the doctor was. A line that was changed since then is refused. Exit code 0: done. 1: the
    losses of the patched script are not the same. 2: bad input, or the files could not be written. 3: nothing to try.

    Examples: gpubound fix
              gpubound fix --try --apply
              gpubound fix runs/doctor.json --also tf32 --json
    """

    verdict: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")] = ".doctor/doctor.json"
    """The doctor.json of a run."""
    try_: Annotated[bool, tyro.conf.arg(name="try")] = False
    """Run the script unmodified and patched, alternately, and compare step times and losses."""
    rounds: int = 5
    """With --try: how often each is run."""
    apply: bool = False
    """Write the patches into the files."""
    also: str = ""
    """Patches that change the results or the output, too: tf32, bf16, rarely, unfiltered, persistent."""
    json: bool = False
    """Print the answer as JSON."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Fix, argv, "fix")
    path = Path(options.verdict)
    if not path.exists():
        raise DataError(f"there is no file {path}; run gpubound doctor on the script first, or give its doctor.json.")
    from ..doctor.gate import read_baseline  # torch takes two seconds: options are read first
    from .doctor_actions import check_fix, finish_fix, patch

    verdict = read_baseline(path)
    command, doctor = Command([], "", [], False), Doctor(fix=True, fix_also=options.also, apply=options.apply)
    if options.try_:
        command = command_of(verdict.command, path)
        own = arguments(Doctor, command.own, "doctor")
        doctor = replace(doctor, prove=options.rounds, dry_run=own.dry_run, step_marker=own.step_marker)
    check_fix(doctor)
    result = patch(doctor, command, verdict)
    assert result.repair is not None
    lines, code = finish_fix(doctor, result)
    if options.json:
        patched, refused = result.repair.patches, result.repair.refused
        answer = {
            "version": 1,
            "patched": [{"kind": t.kind, "file": t.file, "line": t.line, "patch": p.name} for t, p in patched.items()],
            "refused": [{"kind": t.kind, "file": t.file, "line": t.line, "reason": why} for t, why in refused.items()],
            "diff": result.diff,
            "expected_ms": result.expected_ms,
            "proof": None if result.proof is None else result.proof.as_dict(),
            "applied": options.apply and code == 0,
        }
        print(json.dumps(answer, indent=1))
    for text in lines:
        print(text, file=sys.stderr if options.json else sys.stdout)
    return code


def command_of(line: str, path: Path) -> Command:
    """Return the doctor's command line that a verdict was measured with."""
    command = split(shlex.split(line)[2:])
    if not command.target or command.target.endswith((".json", ".json.gz")):
        raise DataError(f"--try: {path} has no script to run again: its command is {line!r}; measure a script.")
    if any(HIDDEN in word for word in command.rest):
        raise DataError(
            f"--try: {path} leaves out a secret of the command {line!r}; run gpubound doctor --fix --prove 5 with it instead."
        )
    return command
