"""The suite under hard conditions: other instruction sets and thread counts, files in random order, a busy machine.

python tests/hard.py                 every cell of the table below, one after the other
python tests/hard.py one-thread      the named cells
python tests/hard.py --seed 7        with this order of files (each run draws another one and prints it)
python tests/hard.py one-thread -- -x tests/decode    what stands behind -- goes to pytest; files replace the whole suite

Every cell starts as a background job does, with SIGINT ignored. Exit code 0: every cell passed; 1: some failed.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Cell:
    name: str
    capability: str | None  # ATEN_CPU_CAPABILITY: the instruction set of torch's own kernels
    threads: int
    busy: int = 0  # processes that compute at the same time
    onednn: str | None = None  # ONEDNN_MAX_CPU_ISA: the instruction set of matrix products


# Every value of every condition is in at least one cell. Without oneDNN's bf16 instructions, as on a laptop with AVX2 alone,
# products of 16-bit numbers are 20 times slower than those of fp32.
CELLS = [
    Cell("one-thread", "default", 1),
    Cell("two-threads", "avx2", 2),
    Cell("four-threads", None, 4),
    Cell("busy", "avx2", 1, busy=2),
    Cell("busy-four-threads", "default", 4, busy=2),
    Cell("without-bf16", "avx2", 1, onednn="AVX2"),
    Cell("without-bf16-two-threads", "avx2", 2, onednn="AVX2"),
]


def run(cell: Cell, seed: int, options: list[str]) -> bool:
    """Run the suite in this cell and print how it went."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(cell.threads)}
    for name, value in (("ATEN_CPU_CAPABILITY", cell.capability), ("ONEDNN_MAX_CPU_ISA", cell.onednn)):
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    print(f"begins  {cell.name}: {conditions(cell)}, order of files by seed {seed}", flush=True)
    beside = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cell.busy)]
    begun = time.monotonic()
    try:
        done = subprocess.run(command(seed, options), cwd=ROOT, env=environment, preexec_fn=ignore_interrupts)
    finally:
        for process in beside:
            process.kill()
    passed = done.returncode == 0
    print(f"{'passed' if passed else 'FAILED'}  {cell.name} (seed {seed}) in {time.monotonic() - begun:.0f} s", flush=True)
    return passed


def conditions(cell: Cell) -> str:
    sets = f"ATEN_CPU_CAPABILITY={cell.capability or '(unset)'}, ONEDNN_MAX_CPU_ISA={cell.onednn or '(unset)'}"
    return f"{sets}, OMP_NUM_THREADS={cell.threads}, {cell.busy} busy processes"


def command(seed: int, options: list[str]) -> list[str]:
    """pytest over the files in this seed's order; what the options name replaces the whole suite."""
    named = [option for option in options if (ROOT / option.split("::")[0]).exists()]
    rest = [option for option in options if option not in named]
    files = named if named else sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    random.Random(seed).shuffle(files)
    # Without the last option xdist would put the files with the most tests first, whatever their order here.
    dealt = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    return [sys.executable, "-m", "pytest", "-m", "not gpu", *dealt, *rest, *files]


def ignore_interrupts() -> None:
    """As `nohup make test &` in a script leaves it; a test that sends SIGINT must set its own child's handler."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    ours, behind = arguments[:split], arguments[split + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"which of {', '.join(cell.name for cell in CELLS)}")
    parser.add_argument("--seed", type=int, default=None, help="the order of the test files (default: another one each time)")
    asked = parser.parse_args(ours)
    unknown = set(asked.cells) - {cell.name for cell in CELLS}
    if unknown:
        parser.error(f"no cell is named {', '.join(sorted(unknown))}; there are {', '.join(cell.name for cell in CELLS)}")
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(10_000)
    chosen = [cell for cell in CELLS if not asked.cells or cell.name in asked.cells]
    return 0 if all(run(cell, seed, behind) for cell in chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
