"""Run the doctor, or another tool, on the scripts of a folder, and print and keep what it finds, foresees and fixes."""

from __future__ import annotations

import tempfile
import threading
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from benchmarks import results

from .measure import Measurement
from .outcome import Outcome, saving_of, step_of, sums, table, write
from .peers import PEERS
from .score import Script, scripts


@dataclass(frozen=True)
class Options:
    """Score the doctor on public scripts, which lie in one folder under their names in scripts.yaml."""

    folder: Annotated[Path, tyro.conf.Positional]
    dry_run: bool = False
    """On the pretend device, without prices."""
    eye: str = "doctor"
    """What names stalls: doctor, sync_debug_mode or profiler (both need a GPU), torch-preflight or torchfix (if installed)."""
    only: tuple[str, ...] = ()
    """Names of scripts, the most doubtful first; all of them by default."""
    rounds: int = 3
    """How often the doctor and a script alone run, in turns, and a proof runs it, unmodified and patched. 0: the doctor runs
    once, and patches are made and not run. Fewer than 4 cannot show that a step differs."""
    steps_only: bool = False
    """Compare steps alone, so that there is time for more rounds: no results are kept, and no proof runs."""
    processes: int = 4
    """How many scripts are measured at the same time, with a process a run. One at a time runs its timed steps."""
    seconds: float = 300.0
    """After which a verdict is ended, or a proof."""
    budget: float = inf
    """Seconds after which nothing begins, and what runs is ended."""
    results: Path | None = None
    """Keep what was measured in this folder, as wild-GPU.json."""
    keep: Path | None = None
    """Keep the reports of each script in this folder."""


def main(options: Options) -> None:
    if options.eye not in (EYES := ("doctor", *PEERS)):
        raise SystemExit(f"eye: got {options.eye!r}, wanted one of {', '.join(EYES)}.")
    if 0 < options.rounds < 3:
        raise SystemExit(f"rounds: got {options.rounds}, wanted 0 or at least 3.")
    if options.steps_only and (options.results or options.dry_run or not options.rounds or options.eye != "doctor"):
        raise SystemExit("steps-only: got it with --results, --dry-run, --rounds 0 or --eye; leave one of them out.")
    wanted: list[Script] = []
    known = scripts()
    if unknown := set(options.only) - set(known):
        raise SystemExit(f"only: got {min(unknown)!r}, wanted some of {', '.join(known)}.")
    for script in (known[name] for name in options.only or known):
        folder = options.folder / script.place
        if (folder / script.file).is_file():
            wanted.append(script)
        else:
            print(f"{script.name:22} absent: {script.folder} of {script.repository} at {script.commit}, as {folder}")
    if not wanted:
        raise SystemExit("no script was measured")
    outcomes: dict[str, Outcome] = {}
    about: dict[str, Any] = {}
    if options.results is not None and not options.dry_run:  # asked once: git and the driver are programs, which disturb others
        command = f"python -m benchmarks.doctor_wild FOLDER --rounds {options.rounds}"
        about = results.provenance(torch.device("cuda"), command)
    lock, began = threading.Lock(), time.monotonic()

    def tell(outcome: Outcome) -> None:
        with lock:
            outcomes[outcome.name] = outcome
            print(f"{time.monotonic() - began:5.0f} s  {line_of(outcome)}", flush=True)
            keep(options, about, [outcomes[script.name] for script in wanted if script.name in outcomes])

    with tempfile.TemporaryDirectory() as turns:
        how = Measurement(
            options.folder.resolve(), Path(turns) / "turn", options.keep and options.keep.resolve(), options.rounds,
            options.seconds, time.monotonic() + options.budget, options.dry_run, options.eye, options.steps_only,
        )  # fmt: skip
        how.all(wanted, 1 if options.dry_run else options.processes, tell)
    measured = [outcomes[script.name] for script in wanted]
    print("\n".join(["", *table(measured), "", *sums(measured)] if options.eye == "doctor" else sums(measured)[:2]))


def line_of(outcome: Outcome) -> str:
    """Return what is printed when more is known of a script."""
    name = f"{outcome.name:20}"
    if outcome.failed:
        return f"{name} {outcome.failed}"
    if outcome.holds is not None or outcome.unproven:
        ended = f"unproven: {outcome.unproven}" if outcome.unproven else f"losses {'the same' if outcome.holds else 'differ'}"
        return f"{name} {ended}; before {outcome.before_ms}, after {outcome.after_ms} ms; saving {saving_of(outcome)}"
    every = len(outcome.found) + len(outcome.missed)
    missed = f"; missed {', '.join(outcome.missed)}" if outcome.missed else ""
    untrue = f"; wrong {', '.join(outcome.wrong)}" if outcome.wrong else ""
    patches = f"; {len(outcome.patched)} of {outcome.findings} patched" if outcome.findings else ""
    steps = f"; step {step_of(outcome)}" if outcome.steps_ms else ""
    return f"{name} {len(outcome.found)} of {every} stalls{missed}{untrue}{patches}{steps}"


def keep(options: Options, about: dict[str, Any], outcomes: list[Outcome]) -> None:
    """Write what was measured so far, so that a run which is cut short keeps what it had."""
    if options.results is None or not about:
        return
    file = options.results / f"wild-{results.file_of(about['gpu']).stem}.json"
    if options.eye != "doctor":
        ran = [each for each in outcomes if not each.failed]
        found, missed, wrong = (sum(len(getattr(each, name)) for each in ran) for name in ("found", "missed", "wrong"))
        about |= {"peers": {options.eye: {"found": found, "stalls": found + missed, "wrong": wrong}}}
        outcomes = []
    write(file, about, outcomes)


if __name__ == "__main__":
    main(tyro.cli(Options))
