"""The doctor's verdict of a training run, from the run's own tape: nothing is run again, and nothing was hooked for it.

The run has timed its steps on the device's clock, and watched one now and then under the ledger (train/loop.py). So its waits
have lines and counts. They have no prices: those need a recorded tape, which `gpubound doctor` makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from ..watch.rows import LedgerRow
from .evidence import Evidence
from .finding import Verdict
from .judge import judge

NO_DEVICE = "the CPU computes the steps itself, so no device waits for its host"
UNWATCHED = "no step was watched: a run's sixth is the first"
UNRECORDED = "the run was counted, not recorded"
EAGER = "the steps were not captured, and gaps between the launches of an eager step are not seen from outside"


def of_run(name: str, device: str, records: Iterable[Mapping[str, Any]]) -> Verdict:
    """`records` are the lines of the run's tape; `device` in words."""
    records = list(records)
    watched = [record for record in records if "syncs" in record]
    on_device = any("host_lead_ms" in record for record in records)
    busy, leads = (
        [record[name] for record in records if record.get(name) is not None] for name in ("gpu_busy", "host_lead_ms")
    )
    absent = {
        "counts": UNWATCHED if on_device and not watched else None,
        "the busy share": EAGER if on_device and not busy else None,
        "prices": UNRECORDED if on_device else NO_DEVICE,
    }
    evidence = Evidence(
        script=name,
        device=device,
        rows=[LedgerRow.of_record(told) for record in watched for told in record.get("stalls", ())],
        steps=len(watched),
        counted=frozenset({"syncs", "pageable_copies"}) if watched else frozenset(),
        step_ms=[1e3 * record["seconds"] for record in records if record.get("seconds") is not None],
        absent={what: why for what, why in absent.items() if why},
    )
    shares = {"shares": {"busy": 100 * median(busy)}} if busy else {}
    return replace(judge(evidence), bar=shares, lead_ms=median(leads) if leads else None)
