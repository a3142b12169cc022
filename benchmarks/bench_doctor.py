"""How many planted stalls are found, on their lines and at their price, and how often something is found where nothing is.

A stall's true price is what a step takes with it, minus what it takes without: both timed while nothing looks. Scripts share a
few processes, which take turns on the GPU; each one's outcome is kept as soon as it is there, so that a run can be continued.
"""

import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Annotated

import tyro

from gpubound.cli import arguments, guarded
from gpubound.device import resolve
from gpubound.errors import MeasureError

from . import results
from .doctor_corpus.cases import CALM, cases, fits, sample, write_calm, write_clean, write_planted
from .doctor_corpus.crew import MOST, calls
from .doctor_corpus.eyes import DOCTOR, EYES, look
from .doctor_corpus.kinds import PLANTS
from .doctor_corpus.plant import Case, Script
from .doctor_corpus.score import Outcome, Score, Sight, read_outcomes, write_outcomes
from .harness import Bench, chosen
from .tables import BUDGET

# True of the model as it is: its kernels are shorter than their launches.
EXPECTED = {"launch-bound": frozenset({"launch_bound"}), "gpu-bound": frozenset[str]()}
RECALL, PRECISION, PRICE_ERROR, OVERHEAD = 95.0, 98.0, 15.0, 1.0  # the gates, in per cent
LOOKING_S = 30.0  # the gate on one script


@dataclass(frozen=True)
class Doctor:
    """Score what finds stalls on scripts with one planted stall each, on controls without any, and on decoys.

    Example: gpubound bench doctor --only item,gpu-bound/plain,decoy
    """

    eye: str = DOCTOR
    """What looks for stalls: doctor, ledger, torch-preflight, torchfix (if installed) or sync_debug_mode (needs a GPU). What a
    stall costs is timed in the doctor's run, and the others are held against that."""
    only: str = ""
    """Scripts by their names or parts of them, by comma: item/plain/gpu-bound, gpu-bound/plain, control; all when empty. What
    the last run found of the others is kept."""
    from_: Annotated[str, tyro.conf.arg(name="from")] = ""
    """Begin with this script, and keep what the last run found of those before it."""
    sample: bool = False
    """Each kind once, in one host and one model in turn, instead of in all of them."""
    processes: int = 4
    """How many share the GPU. One at a time uses it, while others build a model or read a tape."""
    seconds: float = 3600.0
    """Begin no script after this long, and say how many were left out."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in, and the outcome of each script in its folder corpus."""
    dry: bool = False
    """Tiny sizes on the pretend device: kinds and lines without prices, keeps nothing."""


@dataclass
class Job:
    """One script to look at, and the same script without its stall."""

    name: str
    script: Script
    model: str
    clean: Path | None = None
    same: str = ""
    hidden: bool = False

    def outcome(self, sight: Sight) -> Outcome:
        true_ms = None if sight.alone_ms is None or sight.clean_ms is None else sight.alone_ms - sight.clean_ms
        return Outcome(
            self.name, self.script, sight.found, sight.alone_ms, true_ms, EXPECTED[self.model], sight.step_ms, sight.seconds,
            self.model, self.hidden, self.same,
        )  # fmt: skip


@dataclass
class Jobs:
    """What is to be looked at, in a folder."""

    folder: Path
    jobs: dict[str, Job] = field(default_factory=dict)

    def add_planted(self, case: Case) -> None:
        folder = self.folder / str(len(self.jobs))
        clean, planted = write_clean(case, folder / "clean").path, write_planted(case, folder / "planted")
        text = "\0".join(file.read_text(encoding="utf-8") for file in sorted(clean.parent.iterdir()))
        same = sha256(text.encode()).hexdigest()[:8]
        self.jobs[str(case)] = Job(str(case), planted, case.model, clean, same, case.model in PLANTS[case.name].hidden)

    def add_calm(self, what: str, name: str) -> None:
        calm = CALM[what][name]
        self.jobs[f"{what}/{name}"] = Job(f"{what}/{name}", write_calm(calm, self.folder / str(len(self.jobs))), calm.model)

    def tasks(self, eye: str, dry: bool) -> dict[str, tuple]:
        """The arguments of `look` for each script. Where a stall is priced, its clean script is timed beside it: many of those
        are equal, but a host's speed drifts, and how much it drifts is to be known."""
        lock = self.folder / "lock"
        return {job.name: (lock, eye, job.script.path, job.clean if eye == DOCTOR else None, dry) for job in self.jobs.values()}


def main(argv: Sequence[str]) -> int:
    options = arguments(Doctor, argv, "bench doctor")
    device = resolve("cpu" if options.dry else "require")
    (eye,) = chosen("--eye", options.eye, list(EYES))
    bench = Bench.of(options, "doctor", device, argv)
    names = asked(options)
    folder_kept, file = options.results / "corpus", results.file_of(bench.origin["gpu"]).name
    kept = None if options.dry else folder_kept / f"{eye}-{file}"
    truth = {} if eye == DOCTOR or options.dry else truth_of(folder_kept / f"{DOCTOR}-{file}")
    score, began = Score(), perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        jobs = written(names, Path(folder))
        if kept is not None and (options.only or options.from_):
            score.outcomes = [each for each in read_outcomes(kept) if each.name not in names]
        for outcome in outcomes(jobs, eye, options, bench, began):
            outcome = beside(outcome, truth.get(outcome.name))
            score.outcomes.append(outcome)
            print(said(outcome), flush=True)
            if kept is not None:
                write_outcomes(kept, score.outcomes)
    report(bench, score.judged() if eye == DOCTOR else score, eye, perf_counter() - began)
    return bench.finish()


def truth_of(kept: Path) -> dict[str, Outcome]:
    """What stalls cost, as the doctor's own run has timed them: all eyes are held against the same."""
    return {outcome.name: outcome for outcome in Score(read_outcomes(kept)).judged().outcomes}


def beside(outcome: Outcome, truth: Outcome | None) -> Outcome:
    if truth is None:
        return outcome
    return replace(outcome, step_ms=truth.step_ms, true_ms=truth.true_ms, noise=truth.noise)


def asked(options: Doctor) -> list[str]:
    """The names of the scripts to look at. On the pretend device ledger and doctor get only plants that show there."""
    shows = {kind for kind in PLANTS if PLANTS[kind].dry or not options.dry or options.eye not in ("doctor", "ledger")}
    every = [str(case) for case in (sample() if options.sample else cases()) if case.name in shows]
    every += [f"{what}/{name}" for what, scripts in CALM.items() for name in scripts]
    words = [word for word in options.only.split(",") if word]
    if unknown := [word for word in words if not any(fits(word, name) for name in every)]:
        raise ValueError(f"--only: {unknown[0]!r} fits no script; wanted names or parts of them, such as item or decoy.")
    if options.from_:
        if options.from_ not in every:
            raise ValueError(f"--from: got {options.from_!r}, wanted the name of a script, such as {every[0]}.")
        every = every[every.index(options.from_) :]
    return [name for name in every if not words or any(fits(word, name) for word in words)]


def written(names: Iterable[str], folder: Path) -> Jobs:
    jobs = Jobs(folder)
    for name in names:
        what, _, rest = name.partition("/")
        if what in CALM:
            jobs.add_calm(what, rest)
        else:
            jobs.add_planted(Case(what, *rest.split("/")))
    return jobs


def outcomes(jobs: Jobs, eye: str, options: Doctor, bench: Bench, began: float) -> Iterator[Outcome]:
    """Each script's, as soon as it is there; what fails is said at the end."""
    over = began + options.seconds
    processes, most = (1, MOST) if options.dry else (options.processes, 1 if eye == DOCTOR else MOST)  # see by_doctor.look
    for name, sight in calls(look, jobs.tasks(eye, options.dry), processes=processes, most=most, until=over):
        if isinstance(sight, MeasureError):
            bench.unmeasured.append(f"{name}: {eye}: {sight}")
        else:
            yield jobs.jobs[name].outcome(sight)
    if perf_counter() > over:
        bench.unmeasured.append(f"the {options.seconds:g} s were over: go on --from the first script that is not above")


def said(outcome: Outcome) -> str:
    verdict = "found" if outcome.located else "missed" if outcome.stalls else "wrong" if outcome.wrong else "quiet"
    price = ""
    if outcome.true_ms is not None and outcome.step_ms is not None:
        told = [f.ms for f in outcome.located if f.ms is not None]
        price = f"  {outcome.true_ms:8.2f} of {outcome.step_ms:.2f} ms" + (f", said {sum(told):.2f}" if told else "")
    return f"{outcome.name:54} {verdict}{price}"


def report(bench: Bench, score: Score, eye: str, seconds: float) -> None:
    for line in score.by_kind():
        print(line)
    for line in score.table():
        print(line, file=sys.stderr)
    figures = {
        "stalls found by kind": ("%", score.recall_by_kind, RECALL),
        "stalls found by kind and line": ("%", score.recall, RECALL),
        "calm scripts left alone": ("%", score.precision, PRECISION),
        "price, median error": ("% off", score.price_error, PRICE_ERROR),
        "step time, median overhead": ("% off", score.overhead, OVERHEAD),
        "looking at a script, median": ("s", score.seconds, LOOKING_S),
    }
    for case, (unit, value, wanted) in figures.items():
        if value is not None:
            bench.figure(f"{eye}: {case}", unit, max(value, 0.01), {BUDGET: wanted}, {BUDGET: 1.0} if eye == DOCTOR else {})
    print(f"{len(score.stalls)} scripts with a stall, {len(score.calm)} without, in {seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(guarded("bench doctor", main, sys.argv[1:]))
