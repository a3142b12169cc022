"""What the ledger alone finds in a script: kinds and lines without causes or prices, also on the pretend device."""

import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from gpubound.errors import MeasureError
from gpubound.watch import watch
from gpubound.watch.rows import LedgerRow

from .running import run
from .score import Found

WARMUP = 2  # optimizer steps before the ledger opens: the first makes the optimizer's state


def rows(script: Path, arguments: Sequence[str]) -> list[LedgerRow]:
    """The ledger's rows of the steps after the warm-up, to the end of the script.

    Python's own collections are off meanwhile: they fall on any line. Those that the script asks for are still seen.
    """
    ledger, steps, automatic = watch(), 0, gc.isenabled()

    def stepped(*_) -> None:
        nonlocal steps
        steps += 1
        if steps == WARMUP:
            ledger.__enter__()

    hook = register_optimizer_step_post_hook(stepped)
    gc.disable()
    try:
        run(script, arguments)
    finally:
        hook.remove()
        if steps >= WARMUP:
            ledger.__exit__(*sys.exc_info())
        if automatic:
            gc.enable()
    if steps <= WARMUP:
        raise MeasureError(f"{script}: {steps} optimizer steps were seen, wanted more than the {WARMUP} of the warm-up.")
    return ledger.rows


def findings(script: Path, arguments: Sequence[str]) -> list[Found]:
    """Rows that stall a GPU, by their line: the user's, or in backward the forward line that built the node."""
    found = []
    for row in rows(script, arguments):
        site = row.place.site or row.place.built
        if site is not None and _stalls(row):
            found.append(Found(row.kind, site.file, site.line))
    return found


def _stalls(row: LedgerRow) -> bool:
    if row.kind in ("h2d", "d2h"):
        return row.detail != "pinned, non_blocking"
    return row.kind not in ("launch", "alloc", "fallback")
