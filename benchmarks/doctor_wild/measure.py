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
from statistics import mean
from typing import Any

from gpubound.doctor.finding import Verdict
from gpubound.doctor.fix.prove import timed_windows
from gpubound.doctor.report.words import unnamed

from .alone import RUNS
from .outcome import Outcome
from .peers import score_peer, spans_in
from .score import Script, score

ALONE = (sys.executable, "-m", "benchmarks.doctor_wild.alone")


Tell = Callable[[Outcome], None]
NUMBERS = 100  # of processes of a script


@dataclass(frozen=True)
class Measurement:
    """How a script is measured.

    folder     where the scripts lie; copies are made in it
    lock       the file that gives the machine to one process at a time
    keep       a folder for doctor.json and doctor.html of each script, its steps, and the stderr of a run that fails
    rounds     runs of the doctor, of the script alone, and of each side of a proof. 0: one of the doctor, and no other
    seconds    after which a program is ended, with its wait for its turn: a verdict, or all runs of a proof
    until      a time of time.monotonic(), after which nothing begins, and what runs is ended
    steps_only nothing is proven, and the doctor's runs are not alone once they have timed their steps
    """

    folder: Path
    lock: Path
    keep: Path | None = None
    rounds: int = 3
    seconds: float = 300.0
    until: float = inf
    dry: bool = False
    eye: str = "doctor"
    steps_only: bool = False

    def all(self, scripts: Sequence[Script], processes: int, tell: Tell) -> None:
        """Measure scripts, `processes` at the same time: their verdicts, then their proofs, since runs of a proof that start
        would hold up what is measured. `tell` receives the outcome of a script whenever more of it is known."""
        with ThreadPoolExecutor(processes) as pool:
            for first in range(0, len(scripts), processes):
                some = scripts[first : first + processes]
                numbers = range(first * NUMBERS, (first + processes) * NUMBERS, NUMBERS)
                named = list(pool.map(lambda script, number: self.named(script, number, tell), some, numbers))
                list(pool.map(lambda *each: self.proven(*each, tell), some, numbers, named))

    def named(self, script: Script, number: int, tell: Tell) -> Outcome:
        """Return what the doctor, or another tool, names. Its processes have numbers from `number` on."""
        with self._copied(script, number) as run:
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

    def proven(self, script: Script, number: int, outcome: Outcome, tell: Tell) -> None:
        """Run the script unmodified and patched, if there are patches."""
        wanted = self.rounds and not self.steps_only and self.eye == "doctor"
        if wanted and outcome.patched and time.monotonic() < self.until:
            with self._copied(script, number + NUMBERS // 2) as run:
                tell(run.prove(outcome))

    @contextmanager
    def _copied(self, script: Script, number: int) -> Iterator[_Run]:
        """A copy of the script's folder, since scripts write next to themselves. "../data" is the same from it."""
        with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as there:
            shutil.copytree(self.folder / script.place, there, dirs_exist_ok=True)
            yield _Run(self, script, Path(there), number)


def ran_within(seconds: float, command: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Return a program's exit code, stdout and stderr.

    After `seconds` it is ended with what it has started, such as a run of a proof, which would keep its turn.
    """
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
    number: int

    def call(self, command: Sequence[str], allowed: int = 1) -> str:
        """Return what a command prints. Its exit code may be `allowed` at most."""
        left = min(self.how.seconds, self.how.until - time.monotonic())
        if left <= 0:
            raise _Failed("not begun")
        code, output, errors = ran_within(left, command, self.there)
        if code > allowed:
            self.keep("stderr.txt", errors)
            raise _Failed(f"exit code {code}: {(errors.strip().splitlines() or [''])[-1][:200]}")
        return output

    def keep(self, name: str, text: str) -> None:
        if self.how.keep is not None:
            self.how.keep.mkdir(parents=True, exist_ok=True)
            (self.how.keep / f"{self.script.name}-{name}").write_text(text, encoding="utf-8")

    @property
    def verdict(self) -> Path:
        """The doctor.json, from the verdict to the proof."""
        return self.how.lock.with_name(f"{self.script.name}-doctor.json")

    @property
    def words(self) -> list[str]:
        return shlex.split(f"{self.script.command} {self.script.small if self.how.dry else ''}")

    def alone(self, folder: str, number: int, name: str, *arguments: str, allowed: int = 1) -> str:
        return self.call([*ALONE, str(self.how.lock), folder, str(self.number + number), name, *arguments], allowed)

    def peer(self) -> Outcome:
        output = self.call([sys.executable, "-m", "benchmarks.doctor_wild.peers", self.how.eye, *self.words])
        found = score_peer(self.script, self.how.eye, spans_in(output))
        return Outcome(self.script.name, *map(list, (map(str, found.found), map(str, found.missed), found.wrong)))

    def doctor(self) -> Outcome:
        """Return the score of the first verdict, with the patches that need no asking, and the steps of all runs.

        Runs of the doctor and of the script alone start together and are measured in turns, and of both the same steps count.
        """
        dry = ["--dry-run"] if self.how.dry else []
        alone = not self.how.dry and self.how.rounds > 0
        name = "steps" if self.how.steps_only else "doctor"
        turns = range(1, self.how.rounds + 1 if alone else 2)
        with ThreadPoolExecutor(2 * len(turns)) as pool:
            doctors, plain = [], []
            for turn in turns:  # the later one of two comes first in the next turn
                own, other = (2 * turn - 1, 2 * turn) if turn % 2 else (2 * turn, 2 * turn - 1)
                doctors.append(pool.submit(self.alone, f"doctor-{turn}", own, name, *dry, *self.words))
                if alone:
                    plain.append(pool.submit(self.alone, f"plain-{turn}", other, "plain", "doctor-1", *self.words))
        doctors[0].result()  # raises what failed; later runs may fail, and are left out
        shutil.copy(self.there / "doctor-1" / "doctor.json", self.verdict)
        self.keep("doctor.html", (self.there / "doctor-1" / "doctor.html").read_text(encoding="utf-8"))
        first, times = self.read("doctor-1", "patches.json"), []
        outcome = replace(
            outcome_of(self.script, self.read("doctor-1", "doctor.json")),
            patched=[f"{each['patch']}: {_of(each)}" for each in first["patched"]],
            refused=[f"{_of(each)}: {each['reason']}" for each in first["refused"]],
        )
        for turn in (turn for turn, doctor in zip(turns, doctors) if doctor.exception() is None):
            content, patches = (self.read(f"doctor-{turn}", name) for name in ("doctor.json", "patches.json"))
            notes = self.read(f"doctor-{turn}", "notes.json")
            self.keep(f"doctor-{turn}.json", json.dumps(content))
            if turn == 1:
                outcome = replace(outcome, start_s=round(notes["start"], 1))
            seconds = round(notes["ended"] - notes["first"] - notes["waited"], 1)
            outcome = replace(outcome, seconds=max(seconds, outcome.seconds or 0.0))
            if content["step_ms"] is None:
                continue
            outcome.steps_ms.append(round(content["step_ms"], 4))
            if patches["expected_ms"] is not None and patches["patched"] == first["patched"]:
                outcome.expected.append(round(1 - patches["expected_ms"] / content["step_ms"], 4))
            if plain and plain[turn - 1].exception() is None:
                windows = self.read(f"doctor-{turn}", "windows.json")
                times.append({"plain": self.read(f"plain-{turn}", "steps.json"), "doctor": windows})
                if (ms := mean_of(times[-1]["plain"], content)) is not None:
                    outcome.plain_ms.append(round(ms, 4))
        self.keep("steps.json", json.dumps(times))
        # Others run while such a verdict records, so that it may have no prices: the largest loss is not known.
        return replace(outcome, largest=None) if self.how.steps_only else outcome

    def read(self, folder: str, name: str) -> Any:
        return json.loads((self.there / folder / name).read_text(encoding="utf-8"))

    def prove(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the proof. A proof that is ended has the times of the runs until then."""
        shutil.copy(self.verdict, self.there / "doctor.json")
        began, rounds = time.monotonic(), str(self.how.rounds)
        try:
            answer = json.loads(self.alone("fix", 0, "fix", "doctor.json", "--json", "--try", "--rounds", rounds, allowed=3))
        except (subprocess.TimeoutExpired, _Failed, ValueError) as why:
            file = self.there / RUNS
            runs = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
            before, after = ([round(run["step_ms"], 4) for run in runs if run["side"] == side] for side in ("before", "after"))
            ended = "ended" if isinstance(why, subprocess.TimeoutExpired) else str(why)
            return replace(outcome, before_ms=before, after_ms=after, unproven=ended)
        self.keep("fix.json", json.dumps(answer, indent=1))
        proof = answer["proof"]
        return replace(
            outcome,
            before_ms=[round(ms, 4) for ms in proof["before_ms"]],
            after_ms=[round(ms, 4) for ms in proof["after_ms"]],
            holds=proof["holds"],
            faster=proof["faster"] if proof["speedup"] else None,
            proof_s=round(time.monotonic() - began, 1),
        )


def mean_of(times: Sequence[float], content: dict[str, Any]) -> float | None:
    """Return what the steps that a verdict is of took in another run; None if it did not make them, or nothing was timed.

    `times` are of the second step and those after it.
    """
    steps = [step for window in timed_windows(Verdict.from_dict(content)) for step in window]
    if not steps or max(steps) - 2 >= len(times) or min(steps) < 2:
        return None
    return mean(times[step - 2] for step in steps)


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
        unnamed_ms=unnamed(verdict),
        findings=len(content["findings"]),
    )
