"""Run a benchmark next to its peers and keep the result.

The benchmarks live in the source checkout, in benchmarks/bench_<name>.py; each takes --help and --dry.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import MeasureError
from ..formatting import hint
from . import fill

USAGE = """usage: gpubound bench NAME [options]

Run a benchmark next to its peers and keep the result in benchmarks/results. Exit code 1: a case disagrees with a peer or falls
short of its gate. 3: something could not be measured.

benchmarks: {names}

example: gpubound bench kernels --only rms_norm --peers eager,liger

`gpubound bench NAME --help` lists a benchmark's own options; --dry runs it tiny, on any machine, and keeps nothing."""

MISSING = "The benchmarks are not in the installed package: run this command inside a checkout of the source."


def main(argv: Sequence[str]) -> int:
    root = checkout()
    names = sorted(path.stem.removeprefix("bench_") for path in (root / "benchmarks").glob("bench_*.py")) if root else []
    if not argv or argv[0] in ("-h", "--help"):
        text = USAGE.format(names=", ".join(names) or f"none here. {MISSING}")
        print("\n\n".join(fill(paragraph) for paragraph in text.split("\n\n")))
        return 0
    if root is None:
        raise MeasureError(MISSING)
    name, *rest = argv
    if name not in names:
        raise ValueError(f"there is no benchmark {name!r}; {hint(name, names, 'wanted one of')}")
    paths = os.pathsep.join(filter(None, (str(root), str(root / "src"), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", f"benchmarks.bench_{name}", *rest]
    code = subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": paths}).returncode
    return code if code >= 0 else 128 - code  # ended by a signal, as a shell reports it


def checkout() -> Path | None:
    """Return the source checkout: the working folder or one above it, else that of this file; None without any."""
    for folder in (Path.cwd(), *Path.cwd().parents, Path(__file__).parents[3]):
        if (folder / "benchmarks" / "harness.py").exists() and (folder / "src" / "gpubound").is_dir():
            return folder
    return None
