"""One public script: its verdict, and what its steps take, unmodified and patched."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from gpubound.doctor.finding import Verdict
from gpubound.doctor.report.words import unnamed

from .outcome import Outcome
from .peers import score_peer, spans_in
from .score import Script, score

ALONE = (sys.executable, "-m", "benchmarks.doctor_wild.alone")


@dataclass(frozen=True)
class Measurement:
    """How a script is measured.

    folder     where the scripts lie; copies are made in it
    lock       the file that gives the machine to one process at a time
    keep       a folder for doctor.json and doctor.html of each script, and for the stderr of a run that fails
    rounds     of a proof; 0: the patches are made, and not run
    seconds    after which a program is ended, with its wait for its turn: a verdict, or all runs of a proof
    until      a time of time.monotonic(), after which nothing begins, and what runs is ended
    """

    folder: Path
    lock: Path
    keep: Path | None = None
    rounds: int = 3
    seconds: float = 300.0
    until: float = inf
    dry: bool = False
    eye: str = "doctor"

    def of(self, script: Script) -> Outcome:
        """Measure on a copy of the script's folder, since scripts write next to themselves.

        The copy is next to it, so that "../data" is what it was.
        """
        if self.late:
            return Outcome(script.name, failed="not begun")
        with tempfile.TemporaryDirectory(dir=self.folder) as there:
            shutil.copytree(self.folder / script.place, there, dirs_exist_ok=True)
            run = _Run(self, script, Path(there))
            try:
                return run.peer() if self.eye != "doctor" else run.doctor()
            except subprocess.TimeoutExpired:
                return Outcome(script.name, failed=f"no verdict in {self.seconds:.0f} s")
            except _Failed as failed:
                return Outcome(script.name, failed=str(failed))

    @property
    def late(self) -> bool:
        return time.monotonic() > self.until


def ran_within(seconds: float, command: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Return a program's exit code, stdout and stderr. After `seconds` it is ended with what it has started, such as a run of a
    proof, which would keep its turn."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as program:
        try:
            output, errors = program.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            raise
    return program.returncode, output, errors


class _Failed(Exception):
    """A run without a result, with its exit code and last line."""


@dataclass(frozen=True)
class _Run:
    how: Measurement
    script: Script
    there: Path

    def call(self, command: Sequence[str], allowed: int = 1) -> str:
        """Return what a command prints. Its exit code may be `allowed` at most."""
        left = min(self.how.seconds, max(self.how.until - time.monotonic(), 1.0))
        code, output, errors = ran_within(left, command, self.there)
        if code > allowed or not output.strip():
            if self.how.keep is not None:
                self.how.keep.mkdir(parents=True, exist_ok=True)
                (self.how.keep / f"{self.script.name}-stderr.txt").write_text(errors, encoding="utf-8")
            raise _Failed(f"exit code {code}: {(errors.strip().splitlines() or [''])[-1][:200]}")
        return output

    @property
    def words(self) -> list[str]:
        return shlex.split(f"{self.script.command} {self.script.small if self.how.dry else ''}")

    def alone(self, name: str, *arguments: str, allowed: int = 1) -> str:
        return self.call([*ALONE, str(self.how.lock), "notes.json", name, *arguments], allowed)

    def peer(self) -> Outcome:
        output = self.call([sys.executable, "-m", "benchmarks.doctor_wild.peers", self.how.eye, *self.words])
        found = score_peer(self.script, self.how.eye, spans_in(output))
        return Outcome(self.script.name, *map(list, (map(str, found.found), map(str, found.missed), found.wrong)))

    def doctor(self) -> Outcome:
        dry = ["--dry-run"] if self.how.dry else []
        content = json.loads(self.alone("doctor", "--json", "--out", "verdict", *dry, *self.words))
        ended = time.time()
        notes = json.loads((self.there / "notes.json").read_text(encoding="utf-8"))
        self.save()
        outcome = replace(outcome_of(self.script, content), seconds=round(ended - notes["first"] - notes["waited"], 1))
        outcome = self.fixed(outcome)
        return replace(outcome, plain_ms=outcome.before_ms)

    def save(self) -> None:
        if self.how.keep is not None:
            self.how.keep.mkdir(parents=True, exist_ok=True)
            for name in ("doctor.json", "doctor.html"):
                shutil.copy(self.there / "verdict" / name, self.how.keep / f"{self.script.name}-{name}")

    def fixed(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the patches that need no asking, and their proof."""
        rounds = ["--try", "--rounds", str(self.how.rounds)] if self.how.rounds and not self.how.late else []
        try:
            answer = json.loads(self.alone("fix", "verdict/doctor.json", "--json", *rounds, allowed=3))
        except subprocess.TimeoutExpired:  # the verdict stays
            return outcome
        if self.how.keep is not None:
            (self.how.keep / f"{self.script.name}-fix.json").write_text(json.dumps(answer, indent=1), encoding="utf-8")
        proof = answer["proof"] or {}
        timed = proof if proof.get("speedup") else {}
        return replace(
            outcome,
            patched=[f"{each['patch']}: {each['kind']} {Path(each['file']).name}:{each['line']}" for each in answer["patched"]],
            refused=[
                f"{each['kind']} {Path(each['file']).name}:{each['line']}: {each['reason']}" for each in answer["refused"]
            ],
            expected_ms=answer["expected_ms"],
            before_ms=[round(ms, 4) for ms in timed.get("before_ms", ())],
            after_ms=[round(ms, 4) for ms in timed.get("after_ms", ())],
            holds=proof.get("holds"),
            faster=proof.get("faster") if timed else None,
        )


def is_largest(script: Script, first: dict[str, Any]) -> bool:
    """Return whether the first finding is the largest loss, which is known by its kind, or by its kind and line."""
    return not {first["kind"], f"{first['kind']} {first['line']}"}.isdisjoint(script.largest)


def outcome_of(script: Script, content: dict[str, Any]) -> Outcome:
    """Return the score of a verdict, as in doctor.json."""
    result, verdict = score(script, content), Verdict.from_dict(content)
    first = content["findings"][0] if content["findings"] else None
    return Outcome(
        script.name,
        found=[str(line) for line in result.found],
        missed=[str(line) for line in result.missed],
        wrong=list(result.wrong),
        first="" if first is None else f"{first['kind']} {Path(first['file'] or '').name}:{first['line']}",
        largest=is_largest(script, first) if first is not None and verdict.step_ms is not None else None,
        step_ms=verdict.step_ms,
        unnamed_ms=unnamed(verdict),
        findings=len(content["findings"]),
    )
