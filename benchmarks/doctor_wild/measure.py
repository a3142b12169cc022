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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from gpubound.doctor.finding import Verdict
from gpubound.doctor.report.words import unnamed

from .alone import RUNS
from .outcome import Outcome
from .peers import score_peer, spans_in
from .score import Script, score

ALONE = (sys.executable, "-m", "benchmarks.doctor_wild.alone")


Tell = Callable[[Outcome], None]
TICK_S = 2.0  # after which the runs of a proof are looked at again


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

    def all(self, scripts: Sequence[Script], processes: int, tell: Tell) -> None:
        """Measure scripts, `processes` at the same time: all verdicts, then all proofs, since runs of a proof that start would
        hold up what is measured. `tell` receives the outcome of a script whenever more of it is known."""
        with ThreadPoolExecutor(processes) as pool:
            named = list(pool.map(lambda script: self.named(script, tell), scripts))
            list(pool.map(lambda pair: self.proven(*pair, tell), zip(scripts, named)))

    def named(self, script: Script, tell: Tell) -> Outcome:
        """Return what the doctor, or another tool, names."""
        with self._copied(script) as run:
            try:
                outcome = run.doctor() if self.eye == "doctor" else run.peer()
            except subprocess.TimeoutExpired:
                outcome = Outcome(script.name, failed=f"no verdict in {self.seconds:.0f} s")
            except _Failed as failed:
                outcome = Outcome(script.name, failed=str(failed))
            except (OSError, ValueError, KeyError) as broken:  # one script's files, which cost the others nothing
                outcome = Outcome(script.name, failed=f"{type(broken).__name__}: {broken}")
        tell(outcome)
        return outcome

    def proven(self, script: Script, outcome: Outcome, tell: Tell) -> None:
        """Run the script unmodified and patched, if there are patches."""
        if self.rounds and outcome.patched and self.eye == "doctor" and time.monotonic() < self.until:
            with self._copied(script) as run:
                run.prove(outcome, tell)

    @contextmanager
    def _copied(self, script: Script) -> Iterator[_Run]:
        """A copy of the script's folder, since scripts write next to themselves. "../data" is the same from it."""
        with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as there:
            shutil.copytree(self.folder / script.place, there, dirs_exist_ok=True)
            yield _Run(self, script, Path(there))


def ran_within(seconds: float, command: Sequence[str], folder: Path, tick: Callable[[], Any] = bool) -> tuple[int, str, str]:
    """Return a program's exit code, stdout and stderr, calling `tick` every TICK_S.

    After `seconds` it is ended with what it has started, such as a run of a proof, which would keep its turn.
    """
    pipe, end = subprocess.PIPE, time.monotonic() + seconds
    with subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as program:
        while True:
            try:
                output, errors = program.communicate(timeout=min(TICK_S, max(end - time.monotonic(), 0.01)))
                return program.returncode, output, errors
            except subprocess.TimeoutExpired:
                tick()
                if time.monotonic() >= end:
                    os.killpg(program.pid, signal.SIGKILL)
                    raise


class _Failed(Exception):
    """A run without a result, with its exit code and last line."""


@dataclass(frozen=True)
class _Run:
    how: Measurement
    script: Script
    there: Path

    def call(self, command: Sequence[str], allowed: int = 1, tick: Callable[[], Any] = bool) -> str:
        """Return what a command prints. Its exit code may be `allowed` at most."""
        left = min(self.how.seconds, self.how.until - time.monotonic())
        if left <= 0:
            raise _Failed("not begun")
        code, output, errors = ran_within(left, command, self.there, tick)
        if code > allowed or not output.strip():
            self.keep("stderr.txt", errors)
            raise _Failed(f"exit code {code}: {(errors.strip().splitlines() or [''])[-1][:200]}")
        return output

    def keep(self, name: str, text: str) -> None:
        if self.how.keep is not None:
            self.how.keep.mkdir(parents=True, exist_ok=True)
            (self.how.keep / f"{self.script.name}-{name}").write_text(text, encoding="utf-8")

    def read(self, name: str) -> str:
        return (self.there / name).read_text(encoding="utf-8")

    @property
    def verdict(self) -> Path:
        """The doctor.json, from the verdict to the proof."""
        return self.how.lock.with_name(f"{self.script.name}-doctor.json")

    @property
    def words(self) -> list[str]:
        return shlex.split(f"{self.script.command} {self.script.small if self.how.dry else ''}")

    def alone(self, name: str, *arguments: str, allowed: int = 1, tick: Callable[[], Any] = bool) -> str:
        return self.call([*ALONE, str(self.how.lock), "notes.json", name, *arguments], allowed, tick)

    def peer(self) -> Outcome:
        output = self.call([sys.executable, "-m", "benchmarks.doctor_wild.peers", self.how.eye, *self.words])
        found = score_peer(self.script, self.how.eye, spans_in(output))
        return Outcome(self.script.name, *map(list, (map(str, found.found), map(str, found.missed), found.wrong)))

    def doctor(self) -> Outcome:
        """Return the score of the verdict, with the patches that need no asking."""
        dry = ["--dry-run"] if self.how.dry else []
        content = json.loads(self.alone("doctor", "--json", "--out", "verdict", *dry, *self.words))
        for name in ("doctor.json", "doctor.html"):
            self.keep(name, self.read(f"verdict/{name}"))
        shutil.copy(self.there / "verdict" / "doctor.json", self.verdict)
        notes, answer = json.loads(self.read("notes.json")), json.loads(self.read("patches.json"))
        return replace(
            outcome_of(self.script, content),
            start_s=round(notes["start"], 1),
            seconds=round(notes["ended"] - notes["first"] - notes["waited"], 1),
            patched=[f"{each['patch']}: {_of(each)}" for each in answer["patched"]],
            refused=[f"{_of(each)}: {each['reason']}" for each in answer["refused"]],
            expected_ms=answer["expected_ms"],
        )

    def prove(self, outcome: Outcome, tell: Tell) -> None:
        """Tell the outcome with the times of the unmodified runs, as soon as there are any, and with the proof. A proof that is
        ended leaves the verdict."""
        shutil.copy(self.verdict, self.there / "doctor.json")
        began, told = time.monotonic(), outcome

        def timed() -> Outcome:
            nonlocal told
            file = self.there / RUNS
            lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
            plain = [run for run in map(json.loads, lines) if run["side"] == "before"]
            if len(plain) > len(told.plain_ms):
                told = replace(
                    told,
                    plain_ms=[round(run["step_ms"], 4) for run in plain],
                    plain_s=round(median(run["seconds"] for run in plain), 1),
                )
                tell(told)
            return told

        rounds = str(self.how.rounds)
        try:
            answer = json.loads(self.alone("fix", "doctor.json", "--json", "--try", "--rounds", rounds, allowed=3, tick=timed))
        except (subprocess.TimeoutExpired, _Failed, ValueError) as why:
            tell(replace(timed(), unproven="ended" if isinstance(why, subprocess.TimeoutExpired) else str(why)))
            return
        self.keep("fix.json", json.dumps(answer, indent=1))
        proof = answer["proof"]
        tell(
            replace(
                timed(),
                before_ms=[round(ms, 4) for ms in proof["before_ms"]],
                after_ms=[round(ms, 4) for ms in proof["after_ms"]],
                holds=proof["holds"],
                faster=proof["faster"] if proof["speedup"] else None,
                proof_s=round(time.monotonic() - began, 1),
            )
        )


def _of(finding: dict[str, Any]) -> str:
    return f"{finding['kind']} {Path(finding['file']).name}:{finding['line']}"


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
