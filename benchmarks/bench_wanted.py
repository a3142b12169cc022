"""What is asked for and no line has measured (wanted.py), measured on this machine, one command after the other."""

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpubound.cli import arguments, guarded
from gpubound.device import resolve

from . import results
from .harness import chosen
from .results import FOLDER, newest, read
from .wanted import unmeasured

BENCHES = ["decode", "train", "lora", "ranks", "checkpoint"]  # of which something may be wanted


@dataclass(frozen=True)
class Missing:
    """Measure what is wanted of a machine with so many GPUs, one command after the other.

    Example: gpubound bench wanted --gpus 2
    """

    gpus: int = 1
    """Those of the machine."""
    only: str = ""
    """Of these benchmarks alone, by comma: decode, train, lora, ranks, checkpoint."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """Name the commands, and run none."""


def main(argv: Sequence[str]) -> int:
    """The highest exit code of them all."""
    options = arguments(Missing, argv, "bench wanted")
    only = chosen("--only", options.only, BENCHES) if options.only else BENCHES
    mine = [one for one in unmeasured(newest(read(FOLDER))) if one.gpus == options.gpus and one.bench in only]
    resolve("cpu" if options.dry else "require")
    codes = [0]
    for number, command in enumerate(commands := list(dict.fromkeys(one.command for one in mine)), 1):
        print(f"[{number} of {len(commands)}] gpubound bench {command}", flush=True)
        if options.dry:
            continue
        begun = time.monotonic()
        whole = [sys.executable, "-m", "gpubound", "bench", *command.split(), "--results", str(options.results)]
        codes.append(subprocess.run(whole).returncode)
        print(f"    exit code {codes[-1]}, {time.monotonic() - begun:.0f} s", flush=True)
    return max(codes)


if __name__ == "__main__":
    sys.exit(guarded("bench wanted", main, sys.argv[1:]))
