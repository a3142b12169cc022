"""Measure whether a patch makes a script faster, and whether its losses stay the same.

Both are run alternately, in random order, with the same seeds, each in a new process, or in one for each rank.
The speed-up is the median of the rounds' ratios with its 95 % interval; of ranks the slowest counts. Losses, of all ranks, are
compared bit for bit where a patch only schedules; else within a tolerance. The user's files are not written: the patched
process imports the new text in place of the old.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from ...errors import MeasureError
from ...formatting import in_words
from ...measure.comparison import Ratio, compare_samples
from .prove_run import SeededJob

WARMUP = 10  # steps: the first ones allocate, autotune and compile
STEPS = 60
ROUNDS = 5
DRY = "a dry run has no GPU; the losses are compared"
LAUNCHED = re.compile("(LOCAL_)?(RANK|WORLD_SIZE)|(GROUP|ROLE)_.*|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")  # what torchrun sets
TOLERANCE = 1e-2  # of a loss: a few dozen steps apart, products rounded to 10 bits differ by about a thousandth


@dataclass(frozen=True)
class SeededRun:
    """The result of one run: the milliseconds of its steps after the warm-up, and its losses."""

    step_ms: float
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Proof:
    """The measurements of a patch."""

    before_ms: tuple[float, ...]
    after_ms: tuple[float, ...]
    speedup: Ratio
    losses: int
    difference: float
    """The largest difference between a loss before and after, relative to the loss. Infinite where their numbers differ."""
    noise: float
    """The same between runs of the script as it was. Above 0 the script is not deterministic, and bits prove nothing."""
    tolerance: float
    """The most that is allowed: 0 where the patch must not change a bit."""
    timed: bool = True
    """Whether the milliseconds mean anything: those of the pretend device do not."""

    @property
    def faster(self) -> bool:
        """Return whether the whole interval is above 1."""
        return self.timed and self.speedup.low > 1

    @property
    def holds(self) -> bool:
        """Return whether the losses are the same, as far as the script itself repeats them."""
        return self.difference <= max(self.tolerance, self.noise)

    @property
    def sentence(self) -> str:
        """A sentence about the losses."""
        if self.difference == 0:
            return f"{self.losses} losses are equal bit for bit"
        if self.difference == float("inf"):
            return "the losses are not the same in number, or not finite in the same places"
        text = f"{self.losses} losses differ by at most {self.difference:.1e}"
        if self.noise >= self.difference:
            return f"{text}, no more than two runs of the script as it was ({self.noise:.1e})"
        return f"{text} (allowed: {max(self.tolerance, self.noise):.1e})"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"faster": self.faster, "holds": self.holds}

    def __str__(self) -> str:
        losses = f"{'the same' if self.holds else 'NOT the same'}: {self.sentence}"
        if not self.timed:
            return f"not timed: {DRY}\n{losses}"
        before, after = statistics.median(self.before_ms), statistics.median(self.after_ms)
        verdict = "faster" if self.faster else "slower" if self.speedup.high < 1 else "no difference that is sure"
        return (
            f"before {before:.2f} ms, after {after:.2f} ms a step: {self.speedup}, {verdict} "
            f"({len(self.before_ms)} alternating rounds)\n{losses}"
        )


def prove(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    changes: Mapping[Path, bytes],
    equal: bool,
    rounds: int = ROUNDS,
    steps: int = STEPS,
    seed: int = 0,
    module: bool = False,
    marker: str = "",
    dry: bool = False,
    ranks: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> Proof:
    """Run `script` unmodified and with `changes` (a file's new bytes), `rounds` times each.

    equal  no bit of a loss may change. steps: where a run ends. seed: of Python's, NumPy's and torch's generators.
    module  `script` is a module's name, as after `python -m`. marker: what ends a step, if not an optimizer.
    dry  on the pretend device, so that the losses alone are compared.
    ranks  of a script that torchrun starts: so many processes on this machine. 0: it is started by python.
    report  receives a line of progress for each run.
    """
    if rounds < 3:
        raise ValueError(f"prove: rounds: got {rounds}, wanted at least 3: an interval needs them.")
    if steps <= WARMUP + 1:
        raise ValueError(f"prove: steps: got {steps}, wanted more than {WARMUP + 1}: the first {WARMUP} are the warm-up.")
    if not changes:
        raise ValueError("prove: there is no change to prove; no patch was taken.")
    runs: dict[str, list[SeededRun]] = {"after": [], "before": []}
    order, shuffle = list(runs), random.Random(seed).shuffle
    with tempfile.TemporaryDirectory(prefix="gpubound-prove-") as folder:
        patched = {}
        for number, (file, data) in enumerate(changes.items()):
            copy = Path(folder) / f"{number}.py"
            copy.write_bytes(data)
            patched[str(file.resolve())] = str(copy)
        for _ in range(rounds):
            shuffle(order)
            for side in order:
                files = patched if side == "after" else {}
                result = str(Path(folder) / "result.json")
                job = SeededJob(str(script), list(arguments), files, result, seed, steps, module, marker, dry)
                runs[side].append(run_once(job, side, Path(folder), ranks))
                number = sum(map(len, runs.values()))
                report(f"--prove: run {number}/{2 * rounds}, {side}: {in_words(runs[side][-1].step_ms / 1e3)} a step")
    return compare_runs(runs["before"], runs["after"], 0.0 if equal else TOLERANCE, timed=not dry)


def run_once(job: SeededJob, side: str, folder: Path, ranks: int = 0) -> SeededRun:
    """Run once in a new process, or in ranks with a new rendezvous."""
    job.save(folder / "job.json")
    results = [job.result_of(rank) for rank in range(max(ranks, 1))]
    for result in results:
        result.unlink(missing_ok=True)
    start = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks else []
    command = [sys.executable, "-m", *start, "gpubound.doctor.fix.prove_run", str(folder / "job.json")]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, errors="replace")
    if done.returncode != 0 or not all(result.exists() for result in results):
        lines = takewhile(lambda line: "torch/distributed/" not in line and "elastic" not in line, done.stderr.splitlines())
        message = " / ".join([line for line in lines if line.strip()][-2:]).rstrip(".") or "it said nothing"
        what = "with the patch" if side == "after" else "unmodified"
        raise MeasureError(f"prove: the script {what} ended with code {done.returncode}: {message}.")
    runs = [read_run(json.loads(result.read_text(encoding="utf-8"))) for result in results]
    return SeededRun(max(run.step_ms for run in runs), tuple(loss for run in runs for loss in run.losses))


def _environment() -> dict[str, str]:
    """This process's own, but for what a launcher said of it: ranks that are started anew would meet what others have left."""
    home = str(Path(__file__).parents[3])  # where this very gpubound is imported from
    paths = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    environment = {name: value for name, value in os.environ.items() if not LAUNCHED.fullmatch(name)}
    return environment | {"PYTHONHASHSEED": "0", "PYTHONPATH": paths}


def read_run(content: Mapping[str, Any]) -> SeededRun:
    times = content["step_ms"][WARMUP:]
    if not times:
        raise MeasureError(
            f"prove: {len(content['step_ms']) + 1 if content['step_ms'] else 'no'} steps were seen, "
            f"wanted more than {WARMUP + 1}; let the script make more."
        )
    return SeededRun(sum(times) / len(times), tuple(float.fromhex(text) for text in content["losses"]))


def compare_runs(before: Sequence[SeededRun], after: Sequence[SeededRun], tolerance: float, timed: bool = True) -> Proof:
    """The proof that these runs are."""
    old, new = ([run.step_ms for run in side] for side in (before, after))
    ratio = compare_samples({"after": new, "before": old}).ratios["before"]
    first = before[0].losses
    if not first:
        raise MeasureError("prove: backward was called on no single value, so there are no losses to compare.")
    noise = max(difference(first, run.losses) for run in before)
    worst = max(difference(first, run.losses) for run in after)
    return Proof(tuple(old), tuple(new), ratio, len(first), worst, noise, tolerance, timed)


def difference(wanted: Sequence[float], got: Sequence[float]) -> float:
    """The largest relative difference; infinite where one is longer, or only one is NaN or infinite."""
    if len(wanted) != len(got):
        return float("inf")
    return max((_apart(w, g) for w, g in zip(wanted, got)), default=0.0)


def _apart(wanted: float, got: float) -> float:
    if wanted == got or (wanted != wanted and got != got):
        return 0.0
    apart = abs(wanted - got) / max(abs(wanted), abs(got))
    return apart if apart == apart else float("inf")
