"""What the ledger alone finds in a script: kinds and lines without causes or prices, also on the pretend device."""

import gc
from collections.abc import Sequence
from pathlib import Path

from gpubound.watch import watch
from gpubound.watch.ledger import LedgerRow

from .running import watched
from .score import Found


def findings(script: Path, arguments: Sequence[str]) -> list[Found]:
    """Rows that stall a GPU, by their line: the user's, or in backward the forward line that built the node.

    Python's own collections are off meanwhile: they fall on any line. Those that the script asks for are still seen.
    """
    automatic, ledger = gc.isenabled(), watch()
    gc.disable()
    try:
        watched(script, arguments, ledger)
    finally:
        if automatic:
            gc.enable()
    sites = ((row, row.place.site or row.place.built) for row in ledger.rows if _stalls(row))
    return [Found(row.kind, site.file, site.line) for row, site in sites if site is not None]


def _stalls(row: LedgerRow) -> bool:
    if row.kind in ("h2d", "d2h"):
        return row.detail != "pinned, non_blocking"
    return row.kind not in ("launch", "alloc", "fallback")
