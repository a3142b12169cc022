"""Evidence that no GPU is needed for: synthetic tapes, and rows of a ledger as the sensors write them."""

from dataclasses import replace

from gpubound.doctor.price.prices import Measurements
from gpubound.doctor.record.located import Samples
from gpubound.doctor.record.tape import Tape
from gpubound.watch.events import Place, Site, Stack
from gpubound.watch.ledger import LedgerRow

from .tapes import Synthetic

STEPS = 4
TORCH = "/somewhere/site-packages/torch/"


def at(line: int, code: str = "x", via: str = "", function: str = "") -> Place:
    """A line of train.py, and the line of torch that it went through."""
    through = Site(TORCH + via, 1, function, "", 1) if via else None
    return Place(Site("train.py", line, "step", code, line), through)


def row(kind: str, what: str, place: Place, a_step: float = 1, detail: str = "", bytes: int = 0, ms: float = 0.0) -> LedgerRow:
    return LedgerRow(kind, what, place, detail, int(a_step * STEPS), int(bytes * STEPS), ms * STEPS)


def seen(loop: Synthetic | None, *rows: LedgerRow, line: Place | None = None, kinds: tuple = ("sync",), **more) -> Measurements:
    """Evidence of a tape and rows. The tape's calls of `kinds` are located at `line`."""
    tape = loop.tape() if loop else Tape()
    located = {n: line for n, call in enumerate(tape.calls) if line and call.kind in kinds}
    counted = frozenset({"syncs", "pageable_copies"})
    return Measurements("train.py", "a GPU", rows, STEPS, counted, tape, located=located, **more)


def steps(body, ahead: int = 30, run: float = 60.0) -> Synthetic:
    """STEPS steps of a host that is far ahead of its device, with `body(loop)` in the middle of each."""
    loop = Synthetic()
    for _ in range(STEPS):
        loop.launch(run=run, times=ahead)
        body(loop)
        loop.launch(run=run, times=ahead)
        loop.step()
    loop.sync()
    return loop


def quiet(loop: Synthetic) -> Synthetic:
    return loop


def sampled(late: dict[str, int], busy: int = 50) -> Samples:
    """Samples of train.py, `late` by the beginning of a line: lines 2, 3, ... in a loop of line 1."""
    stacks = {Stack((at(n, code).site,)): count for n, (code, count) in enumerate(late.items(), 2)}
    return Samples(stacks | {Stack((at(9, "y = model(x)").site,)): busy}, stacks)


__all__ = ["STEPS", "at", "quiet", "replace", "row", "sampled", "seen", "steps"]
