"""Copies between host and device that make the host wait."""

from collections.abc import Iterator
from dataclasses import replace

from ...watch.events import DOWNLOAD, HOST_DATA, UPLOAD
from ...watch.rows import LedgerRow
from ...words import readable
from ..claim import Claim, StallRule
from ..evidence import Evidence
from ..finding import KINDS
from ..lines import by_line, calls_at, size, times
from ..preparing import preparing
from ..prices import Prices
from .saving import saves

FREE = "pinned, non_blocking"
ROUND_TRIP = "keep it on the device: what goes down here comes up again"
CONVERTED = "the host prepares it first: copy it as it is, and convert on the device: x.to(device, non_blocking=True).to(dtype)"
BUILT = ("torch.tensor(", "as_tensor(")


def look(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    for rows in by_line(evidence, "h2d", "d2h"):
        rows = [row for row in rows if row.detail != FREE and not saves(row)]
        if not rows:
            continue
        kind, fix = judged(rows)
        count = times(evidence, rows)
        said = f"{readable(size(evidence, rows))} a step ({rows[0].detail})"
        calls = calls_at(evidence, rows[0].place)
        prepared = preparing(evidence.tape, calls) if evidence.tape else frozenset[int]()
        fix = CONVERTED if prepared and kind != "d2h" else fix
        claim = Claim(kind, rows[0].place, count, said, calls, prepared, fix=fix, waits=True)
        if fix == ROUND_TRIP and (ms := prices.without_work(calls, 1.0, prepared)) is not None:  # the copies go, too
            claim = replace(claim, ms=ms, certainty="estimate")
        yield claim


def judged(rows: list[LedgerRow]) -> tuple[str, str]:
    """(the kind, what to write instead) of one line's copies."""
    first, site = rows[0], rows[0].place.site
    if len({row.kind for row in rows}) == 2:
        return "d2h", ROUND_TRIP
    if first.kind == "d2h":
        return "d2h", DOWNLOAD.remedy
    if first.detail == "pageable, non_blocking":  # said to be non_blocking: the driver stages it, and the host waits
        return "pageable", KINDS["pageable"].remedy
    if site and any(call in site.code for call in BUILT):
        return "h2d", HOST_DATA.remedy
    return "h2d", UPLOAD.remedy if first.pageable else "pass non_blocking=True: the memory is pinned"


RULE = StallRule(
    "copies",
    ("h2d", "d2h", "pageable"),
    "blocking or pageable copies, non_blocking on pageable memory, gradients through the host",
    "0.5 % of the step, by replay",
    "a pageable copy under 64 kB does not keep its host, so its kind says too little",
    look,
)
