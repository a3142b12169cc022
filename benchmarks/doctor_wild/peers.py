"""What other tools name in a script: torch's sync debug mode, torch.profiler, and two linters.

    python -m benchmarks.doctor_wild.peers sync_debug_mode SCRIPT [arguments]

runs one of them on a script, in the working folder, and prints what it names as JSON: pairs of first and last line. The debug
mode is given the nearest line of the script on the stack of each warning; by itself it shows the innermost line, often torch's.
The profiler knows no lines: with_stack=True records functions, so a function with a wait in it is what it names.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.doctor_corpus.by_others import RULES, reported
from gpubound.doctor.record.script import Script, Steps, StopScript

from .score import Score, Script as Known

WARMUP, WATCHED, RECORDED = 10, 60, 20  # steps; a profile with stacks is large
WAITS = re.compile("cuda(Stream|Device|Event)Synchronize|cudaMemcpy$")
SYNCS = frozenset({"sync", "h2d", "d2h", "pageable", "repeat"})
FED = frozenset({"data", "h2d", "pageable"})
Span = tuple[int, int]  # first and last line


def steps_of(script: Path, arguments: list[str], steps: int, begin: Callable[[], Any], end: Callable[[], Any]) -> None:
    """Run a script, calling `begin` after its warm-up and `end` after `steps` more, which stops it; or when it ends."""
    done = 0

    def ended() -> None:
        nonlocal done
        done += 1
        if done == WARMUP:
            begin()
        if done == WARMUP + steps:
            end()
            raise StopScript

    with Steps(ended):
        Script(str(script), tuple(arguments)).run()
    if WARMUP <= done < WARMUP + steps:
        end()


def sync_debug_mode(script: Path, arguments: list[str]) -> set[Span]:
    lines: set[Span] = set()

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        own = [frame for frame in traceback.extract_stack() if Path(frame.filename).name == script.name]
        if "called a synchronizing" in str(message) and own:  # another warning is that the mode is a prototype
            lines.add((own[-1].lineno or 0, own[-1].lineno or 0))

    def begin() -> None:
        warnings.simplefilter("always")
        warnings.showwarning = show  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")

    steps_of(script, arguments, WATCHED, begin, lambda: torch.cuda.set_sync_debug_mode("default"))
    return lines


def profiler(script: Path, arguments: list[str]) -> set[Span]:
    profile = torch.profiler.profile(with_stack=True)
    steps_of(script, arguments, RECORDED, profile.start, profile.stop)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        return waiting_functions(script, json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])


def waiting_functions(script: Path, events: list[dict[str, Any]]) -> set[Span]:
    """Return the innermost functions of the script around each wait of a trace."""
    own = re.compile(rf"{re.escape(script.name)}\((\d+)\): ")
    frames = [(e["ts"], e["ts"] + e["dur"], own.search(e["name"])) for e in events if e.get("cat") == "python_function"]
    mine = [(begin, end, int(match[1])) for begin, end, match in frames if match]
    nodes = [n for n in ast.walk(ast.parse(script.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)]
    ends = {node.lineno: node.end_lineno or node.lineno for node in nodes}
    found: set[Span] = set()
    for event in events:
        if WAITS.match(event.get("name", "")) and event.get("ph") == "X":
            around = [each for each in mine if each[0] <= event["ts"] <= each[1]]
            if around and (line := max(around)[2]) in ends:
                found.add((line, ends[line]))
    return found


def linter(tool: str, *command: str) -> Callable[[Path, list[str]], set[Span]]:
    def named(script: Path, arguments: list[str]) -> set[Span]:
        found = reported(tool, *command, str(script))
        return {(line, line) for file, line, rule in found if Path(file).name == script.name and rule in RULES}

    return named


PEERS: dict[str, Callable[[Path, list[str]], set[Span]]] = {
    "sync_debug_mode": sync_debug_mode,
    "profiler": profiler,
    "torch-preflight": linter("torch-preflight", "check", "--format", "json"),
    "torchfix": linter("torchfix", "--select=ALL"),
}
SEES = {"sync_debug_mode": SYNCS, "profiler": SYNCS}  # kinds of stalls that are counted as found at a line; else all


def score_peer(known: Known, peer: str, named: list[Span]) -> Score:
    """Compare the spans that a peer names with the true stalls. A loader stands for what waits for its batches."""
    sees = SEES.get(peer)

    def covers(line: int | str, first: int, last: int) -> bool:
        return isinstance(line, int) and first <= line <= last  # a peer is asked for the script's own lines

    def covered(line: int | str) -> bool:
        return any(covers(line, first, last) for first, last in named)

    def found(line: int | str, kinds: list[str]) -> bool:
        if sees is None and FED & set(kinds) and any(map(covered, known.loaders)):
            return True
        return covered(line) and (sees is None or bool(sees & set(kinds)))

    hit = tuple(line for line, kinds in known.stalls.items() if found(line, kinds))
    true = {*known.stalls, *known.minor, *known.loaders}
    wrong = tuple(f"{known.file}:{first}" for first, last in named if not any(covers(line, first, last) for line in true))
    return Score(hit, tuple(line for line in known.stalls if line not in hit), wrong)


def spans_in(output: str) -> list[Span]:
    """Return the spans that `main` printed last; the script prints, too."""
    return [(first, last) for first, last in json.loads(output.strip().splitlines()[-1])]


def main(argv: list[str]) -> int:
    peer, script, *arguments = argv
    named = PEERS[peer](Path(script), arguments)
    print("\n" + json.dumps(sorted(named)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
