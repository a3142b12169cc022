"""How many planted stalls are found, on their lines and at their price, and how often something is found where nothing is.

Every script runs in a process of its own. Its stall's true price is what a step takes with it, minus what it takes without.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from gpubound.cli import arguments, guarded
from gpubound.device import resolve
from gpubound.errors import MeasureError

from . import results
from .doctor_corpus import by_doctor, by_ledger, by_others
from .doctor_corpus.cases import CALM, cases, sample, write_calm, write_clean, write_planted
from .doctor_corpus.child import call
from .doctor_corpus.hosts import HOSTS, MODELS
from .doctor_corpus.kinds import PLANTS
from .doctor_corpus.plant import Case, Script
from .doctor_corpus.running import step_ms
from .doctor_corpus.score import Found, Outcome, Score, Sight
from .harness import Bench, chosen
from .tables import BUDGET

# True of the model as it is: its kernels are shorter than their launches.
EXPECTED = {"launch-bound": frozenset({"launch_bound"}), "gpu-bound": frozenset[str]()}
RECALL, PRECISION, PRICE_ERROR, OVERHEAD = 95.0, 98.0, 15.0, 1.0  # the gates, in per cent
LOOKING_S = 30.0  # the gate on one script, its own start included
TIMED_STEPS, TIMED_WARMUP = 60, 20
LOOKED_STEPS = {"doctor": 200}  # it stops by itself when it has seen enough

Eye = Callable[[Path, Sequence[str]], Sight]


def only_found(findings: Callable[[Path, Sequence[str]], list[Found]]) -> Eye:
    """The eye of what says nothing but its findings."""
    return lambda script, arguments: Sight(findings(script, arguments))


EYES: dict[str, Eye] = {
    "doctor": by_doctor.look,
    "ledger": only_found(by_ledger.findings),
    "torch-preflight": only_found(by_others.torch_preflight),
    "torchfix": only_found(by_others.torchfix),
    "sync_debug_mode": only_found(by_others.sync_debug_mode),
}


@dataclass(frozen=True)
class Doctor:
    """Score what finds stalls on scripts with one planted stall each, on controls without any, and on decoys.

    Example: gpubound bench doctor --sample --seconds 240
    """

    eye: str = "doctor"
    """What looks for stalls: doctor, ledger, torch-preflight, torchfix (if installed) or sync_debug_mode (needs a GPU)."""
    kinds: str = ""
    """Kinds of stall, by comma; all when empty."""
    hosts: str = ""
    """Scripts that they are planted into, by comma; all when empty."""
    models: str = ""
    """launch-bound, gpu-bound or both, by comma."""
    sample: bool = False
    """Each kind once, in one host and one model in turn, instead of in all of them."""
    untimed: bool = False
    """Do not time the scripts with their stalls and without: no prices, and every plant counts as a stall."""
    seconds: float = 3600.0
    """Begin no script after this long, and say how many were left out."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """Tiny sizes on the pretend device: kinds and lines without prices, keeps nothing."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Doctor, argv, "bench doctor")
    device = resolve("cpu" if options.dry else "require")
    (eye,) = chosen("--eye", options.eye, list(EYES))
    wanted = asked(options)
    bench = Bench.of(options, "doctor", device, argv)
    score, began = Score(), perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [partial(planted, case, eye, options) for case in wanted]
        jobs += [partial(calm, what, name, eye, options) for what, scripts in CALM.items() for name in scripts]
        for done, job in enumerate(jobs):
            if perf_counter() - began > options.seconds:
                bench.unmeasured.append(f"{len(jobs) - done} of {len(jobs)} scripts: the {options.seconds:g} s were over")
                break
            try:
                score.outcomes.append(outcome := job(Path(folder) / str(done)))
            except MeasureError as error:
                bench.unmeasured.append(str(error))
                continue
            print(said(outcome), flush=True)
    report(bench, score, eye, perf_counter() - began)
    return bench.finish()


def asked(options: Doctor) -> list[Case]:
    """The plants to run. On the pretend device ledger and doctor get only those that show there."""
    kinds = chosen("--kinds", options.kinds, list(PLANTS))
    hosts, models = chosen("--hosts", options.hosts, list(HOSTS)), chosen("--models", options.models, list(MODELS))
    every = sample() if options.sample else cases(kinds, hosts, models)
    shows = {kind for kind in kinds if PLANTS[kind].dry or not options.dry or options.eye not in ("doctor", "ledger")}
    return [case for case in every if case.name in shows and case.host in hosts and case.model in models]


def planted(case: Case, eye: str, options: Doctor, folder: Path) -> Outcome:
    """Look at a script with a plant, and time it beside the same script without."""
    script, clean = write_planted(case, folder / "planted"), write_clean(case, folder / "clean")
    sight = looked(str(case), eye, script.path, options)
    outcome = _outcome(str(case), script, sight, case.model)
    if not options.untimed and not options.dry:
        slow, fast = (timed(str(case), path) for path in (script.path, clean.path))
        outcome.step_ms, outcome.true_ms = slow, slow - fast
    return outcome


def calm(what: str, name: str, eye: str, options: Doctor, folder: Path) -> Outcome:
    script = write_calm(CALM[what][name], folder)
    sight = looked(name, eye, script.path, options)
    return _outcome(f"{what} {name}", script, sight, CALM[what][name].model)


def _outcome(name: str, script: Script, sight: Sight, model: str) -> Outcome:
    return Outcome(name, script, sight.found, expected=EXPECTED[model], said_step_ms=sight.step_ms, seconds=sight.seconds)


def looked(name: str, eye: str, script: Path, options: Doctor) -> Sight:
    try:
        return call(look, eye, script, options.dry)
    except MeasureError as error:
        raise MeasureError(f"{name}: {eye}: {error}") from None


def look(eye: str, script: Path, dry: bool) -> Sight:
    """In a process of its own."""
    if dry:
        from gpubound.watch.pretend import simgpu

        torch.set_num_threads(1)
        simgpu()
    began = perf_counter()
    sight = EYES[eye](script, ["--size", "tiny", "--steps", "6"] if dry else ["--steps", str(LOOKED_STEPS.get(eye, 12))])
    return replace(sight, seconds=perf_counter() - began)


def timed(name: str, script: Path) -> float:
    try:
        return call(step_ms, script, [], TIMED_STEPS, TIMED_WARMUP)
    except MeasureError as error:
        raise MeasureError(f"{name}: timed: {error}") from None


def said(outcome: Outcome) -> str:
    verdict = "wrong" if outcome.wrong else "quiet" if not outcome.stalls else "found" if outcome.located else "missed"
    price = ""
    if outcome.true_ms is not None and outcome.step_ms is not None:
        told = [f.ms for f in outcome.located if f.ms is not None]
        price = f"  {outcome.true_ms:8.2f} of {outcome.step_ms:.2f} ms" + (f", said {sum(told):.2f}" if told else "")
    return f"{outcome.name:54} {verdict}{price}"


def report(bench: Bench, score: Score, eye: str, seconds: float) -> None:
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
            bench.figure(f"{eye}: {case}", unit, max(value, 0.01), {BUDGET: wanted}, {BUDGET: 1.0})
    print(f"{len(score.stalls)} scripts with a stall, {len(score.calm)} without, in {seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(guarded("bench doctor", main, sys.argv[1:]))
