"""Run the doctor on the scripts of a folder, and print how many of their true stalls it finds."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from .peers import PEERS, score_peer, spans_in
from .score import Score, Script, score, scripts


@dataclass(frozen=True)
class Options:
    """Score the doctor on public scripts, which lie in one folder under their names in scripts.yaml."""

    folder: Annotated[Path, tyro.conf.Positional]
    dry_run: bool = False
    """On the pretend device, without prices."""
    eye: str = "doctor"
    """What names stalls: doctor, sync_debug_mode or profiler (both need a GPU), torch-preflight or torchfix (if installed)."""
    only: tuple[str, ...] = ()
    """Names of scripts; all of them by default."""
    seconds: float = 300.0
    """After which a script is ended."""


def result_of(script: Script, folder: Path, options: Options) -> Score | str:
    """Return the score of a run on a copy of the script's folder, since scripts write next to themselves; or why there is none.

    The copy is next to it, so that "../data" is what it was.
    """
    command = [sys.executable, "-m", "gpubound", "doctor", "--json", *(["--dry-run"] if options.dry_run else [])]
    if options.eye != "doctor":
        command = [sys.executable, "-m", "benchmarks.doctor_wild.peers", options.eye]
    with tempfile.TemporaryDirectory(dir=options.folder) as there:
        shutil.copytree(folder, there, dirs_exist_ok=True)
        try:
            ran = subprocess.run(
                [*command, *shlex.split(script.command)], cwd=there, capture_output=True, text=True, timeout=options.seconds
            )
        except subprocess.TimeoutExpired:
            return f"no verdict in {options.seconds:.0f} s"
    if ran.returncode > 1 or not ran.stdout.strip():
        return f"exit code {ran.returncode}: {(ran.stderr.strip().splitlines() or [''])[-1][:100]}"
    if options.eye != "doctor":
        return score_peer(script, options.eye, spans_in(ran.stdout))
    return score(script, json.loads(ran.stdout))


def main(options: Options) -> None:
    if options.eye not in (EYES := ("doctor", *PEERS)):
        raise SystemExit(f"eye: got {options.eye!r}, wanted one of {', '.join(EYES)}.")
    stalls = found = wrong = 0
    for script in scripts().values():
        folder = options.folder / script.name
        if options.only and script.name not in options.only:
            continue
        if not (folder / script.file).is_file():
            print(f"{script.name:22} absent: {script.folder} of {script.repository} at {script.commit}, as {folder}")
            continue
        result = result_of(script, folder, options)
        if isinstance(result, str):
            print(f"{script.name:22} {result}", flush=True)
            continue
        every = len(result.found) + len(result.missed)
        stalls, found, wrong = stalls + every, found + len(result.found), wrong + len(result.wrong)
        missed = f"; missed {', '.join(map(str, result.missed))}" if result.missed else ""
        untrue = f"; wrong {', '.join(result.wrong)}" if result.wrong else ""
        print(f"{script.name:22} {len(result.found)} of {every} stalls{missed}{untrue}", flush=True)
    print(f"{'all':22} {found} of {stalls} stalls, {wrong} wrong" if stalls else "no script was measured")


if __name__ == "__main__":
    main(tyro.cli(Options))
