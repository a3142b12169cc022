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
from typing import Annotated, Any

import tyro

from .score import Script, score, scripts


@dataclass(frozen=True)
class Options:
    """Score the doctor on public scripts, which lie in one folder under their names in scripts.yaml."""

    folder: Annotated[Path, tyro.conf.Positional]
    dry_run: bool = False
    """On the pretend device, without prices."""
    only: tuple[str, ...] = ()
    """Names of scripts; all of them by default."""
    seconds: float = 300.0
    """After which a script is ended."""


def verdict_on(script: Script, folder: Path, options: Options) -> dict[str, Any] | str:
    """Return the verdict on a copy of the script's folder, since scripts write next to themselves; or why there is none.

    The copy is next to it, so that "../data" is what it was.
    """
    command = [sys.executable, "-m", "gpubound", "doctor", "--json", *(["--dry-run"] if options.dry_run else [])]
    with tempfile.TemporaryDirectory(dir=options.folder) as there:
        shutil.copytree(folder, there, dirs_exist_ok=True)
        try:
            ran = subprocess.run(
                [*command, *shlex.split(script.command)], cwd=there, capture_output=True, text=True, timeout=options.seconds
            )
        except subprocess.TimeoutExpired:
            return f"no verdict in {options.seconds:.0f} s"
    if ran.returncode > 1:
        return f"exit code {ran.returncode}: {(ran.stderr.strip().splitlines() or [''])[-1][:100]}"
    return json.loads(ran.stdout)


def main(options: Options) -> None:
    stalls = found = 0
    for script in scripts().values():
        folder = options.folder / script.name
        if options.only and script.name not in options.only:
            continue
        if not (folder / script.file).is_file():
            print(f"{script.name:22} absent: {script.folder} of {script.repository} at {script.commit}, as {folder}")
            continue
        verdict = verdict_on(script, folder, options)
        if isinstance(verdict, str):
            print(f"{script.name:22} {verdict}")
            continue
        result = score(script, verdict)
        every = len(result.found) + len(result.missed)
        stalls, found = stalls + every, found + len(result.found)
        missed = f"; missed {', '.join(map(str, result.missed))}" if result.missed else ""
        wrong = f"; wrong {', '.join(result.wrong)}" if result.wrong else ""
        print(
            f"{script.name:22} {len(result.found)} of {len(result.found) + len(result.missed)} stalls{missed}{wrong}",
            flush=True,
        )
    print(f"{'all':22} {found} of {stalls} stalls" if stalls else "no script was measured")


if __name__ == "__main__":
    main(tyro.cli(Options))
