"""Takes the lines of stalls from a tape recorded under sensors to a tape recorded without them.

The sensors slow the host, so their tape has no true times; the other one has no lines. Both show the same steps. So the
blocking calls of a step are matched by their order, each with its thread, kind and bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import TypeVar

from ...watch.source_line import Place
from .tape import Call, Tape

Id = TypeVar("Id")
Key = tuple[bool, str, int]


def lines_by_mark(tape: Tape, places: Mapping[str, Place]) -> dict[int, Place]:
    """The blocking calls of a tape with marks, each with its line: that of the last mark on its thread before it.

    A mark belongs to the next blocking call of its thread, and for the wait of this call if that is a copy. A call of which no
    sensor knew would else get the line of another one.
    """
    lines: dict[int, Place] = {}
    newest: dict[int, str] = {}
    spent: dict[int, tuple[str, bool]] = {}  # thread -> the mark that it used last, and whether a copy did
    events = sorted([(m.at, 0, n) for n, m in enumerate(tape.marks)] + [(c.start, 1, n) for n, c in enumerate(tape.calls)])
    for _, is_call, n in events:
        if not is_call:
            mark = tape.marks[n]
            newest[mark.thread] = mark.site
            spent.pop(mark.thread, None)
            continue
        call = tape.calls[n]
        if not _blocking(call) or call.thread not in newest:
            continue
        used = spent.get(call.thread)
        if used is None or (used[1] and call.kind == "sync"):
            if newest[call.thread] in places:
                lines[n] = places[newest[call.thread]]
            spent[call.thread] = (newest[call.thread], call.kind == "copy")
    return lines


def match_lines(clean: Tape, located: Tape, lines: Mapping[int, Place]) -> dict[int, Place]:
    """`lines` of the calls of `located`, as those of `clean`. A call that has no counterpart is not in it."""
    matched: dict[int, Place] = {}
    known = _by_step(located)
    for mine in _by_step(clean):
        keys = [key for key, _ in mine]
        best = max(known, key=lambda other: SequenceMatcher(None, keys, [k for k, _ in other], False).ratio(), default=[])
        for block in SequenceMatcher(None, keys, [key for key, _ in best], False).get_matching_blocks():
            for (_, here), (_, other) in zip(mine[block.a : block.a + block.size], best[block.b : block.b + block.size]):
                if other in lines:
                    matched[here] = lines[other]
    return matched


def _blocking(call: Call) -> bool:
    return call.waits or call.kind == "copy"


def _by_step(tape: Tape) -> list[list[tuple[Key, int]]]:
    """The blocking calls of each step, with what tells them apart."""
    home = _home(tape)
    steps = tape.steps or (tape.window,)
    rows: list[list[tuple[Key, int]]] = [[] for _ in steps]
    for n, call in enumerate(tape.calls):
        if _blocking(call):
            step = next((s for s, (start, end) in enumerate(steps) if start <= call.start < end), None)
            if step is not None:
                rows[step].append(((call.thread == home, call.kind, call.bytes), n))
    return [sorted(row, key=lambda entry: (not entry[0][0], entry[1])) for row in rows]


def _home(tape: Tape) -> int | None:
    """The thread that runs the steps: the one that updates, or else the one that makes most calls."""
    if updates := [span.thread for span in tape.spans if span.kind == "optimizer"]:
        return updates[-1]
    threads = [call.thread for call in tape.calls]
    return max(set(threads), key=threads.count, default=None)
