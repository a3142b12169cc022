"""Which cases fall short of their gate, and which are asked for and not measured: `make gates`.

Reads the newest line of each case. Exit code 0: every gate holds; 1: what does not hold, or is not measured, is listed;
3: nothing is measured. Of another folder than the project's own only what was measured there is told.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from gpubound.cli import guarded

from .results import COUNTS, FLOOR, FOLDER, MEMORY, Line, newest, read
from .wanted import unmeasured


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1 or (argv and argv[0].startswith("-")):
        print("usage: python -m benchmarks.gates [FOLDER or FILE.jsonl]", file=sys.stderr)
        return 2
    source = Path(argv[0]) if argv else FOLDER
    lines = read(source) if argv or source.exists() else []
    gated = [line for line in newest(lines) if line.gate is not None]
    if not gated:
        print("no gate was measured: run `make bench ARGS=kernels` on a GPU first", file=sys.stderr)
        return 3
    short = [line for line in gated if line.short]
    missing = [] if argv else unmeasured(gated)
    for said in (*map(sentence, short), *(one.sentence for one in missing)):
        print(said)
    more = f"; {len(missing)} more are not measured" if missing else ""
    print(f"{len(gated) - len(short)} of {len(gated)} gates hold{more}")
    return 1 if short or missing else 0


def sentence(line: Line) -> str:
    """One line a reader can act on: what, by how much, how sure, and how to see it again."""
    assert line.gate is not None
    where = f"{line.gpu}, {line.commit}, {line.command}"
    if line.unit in COUNTS:
        counted = f"{figure(line.ours, line.unit)}, {line.peer_name} {figure(line.peer, line.unit)}"
        return f"SHORT  {line.bench}: {line.case}: {counted} ({where})"
    gap = (line.gate - line.ratio) / line.gate
    sure = "" if line.spread is None else f", spread ±{line.spread:.1%}"
    return (
        f"SHORT  {line.bench}: {line.case}: {_measured(line)} of {line.peer_name}, gate {line.share(line.gate)}, "
        f"short by {gap:.1%}{sure} ({figure(line.ours, line.unit)}, {where})"
    )


def _measured(line: Line) -> str:
    return line.share(line.ratio) if line.peer_name == FLOOR else f"{line.ratio:.3f}"


def beside(line: Line) -> str:
    """How a peer did: the ratio to it, or its count."""
    theirs = figure(line.peer, line.unit).split()[0] if line.unit in COUNTS else line.share(line.ratio)
    theirs = figure(line.peer, line.unit) if line.peer_name in MEMORY else theirs
    return f"{line.peer_name} {theirs}{' SHORT' if line.short else ''}"


def figure(value: float, unit: str) -> str:
    """
    >>> figure(3912.4, "GB/s")
    '3,912 GB/s'
    >>> figure(0.0271, "nats")
    '0.0271 nats'
    """
    if unit == "nats":
        return f"{value:.3g} nats"
    digits = 0 if unit in COUNTS or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


if __name__ == "__main__":
    sys.exit(guarded("gates", main, sys.argv[1:]))
