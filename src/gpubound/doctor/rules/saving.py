"""Checkpoints that are written while the device waits."""

from collections.abc import Iterator

from ...watch.rows import LedgerRow
from ...watch.site import Place
from ..claim import Claim, StallRule
from ..evidence import Evidence
from ..lines import calls_at, line_of, taped
from ..prices import Prices

WRITERS = ("torch/serialization.py", "torch/storage.py", "torch/distributed/checkpoint/", "safetensors/torch.py")


def saves(row: LedgerRow) -> bool:
    """Whether a file of weights was being written."""
    via = row.place.via
    return via is not None and any(writer in via.file.replace("\\", "/") for writer in WRITERS)


def look(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    spans = [n for n, span in enumerate(evidence.tape.spans) if span.kind == "checkpoint"] if evidence.tape else []
    rows = [row for row in evidence.rows if saves(row) and row.kind in ("sync", "d2h")]
    places = [evidence.places.get(evidence.tape.spans[n].name) for n in spans] if evidence.tape else []
    place = next((p for p in [*places, *(row.place for row in rows)] if p is not None and line_of(p)), Place())
    if not spans and not rows:
        return
    calls = prices.inside(lambda span: span.kind == "checkpoint")
    for row in rows:
        calls |= calls_at(evidence, row.place)
    count = len(spans) / taped(evidence) if spans else 1 / max(evidence.steps, 1)
    waits = frozenset(n for n in calls if evidence.tape and evidence.tape.calls[n].waits)
    yield Claim("checkpoint", place, count, f"{count:.3g} checkpoints a step", waits, frozenset(spans))


RULE = StallRule(
    "saving",
    ("checkpoint",),
    "torch.save and its kin while the device waits",
    "0.5 % of the step, by replay",
    "a checkpoint that is rare enough costs nothing a step",
    look,
)
