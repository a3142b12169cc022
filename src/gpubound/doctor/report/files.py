"""The reports of a run in a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ...files import write_whole
from ...pages import write_page
from ...watch.site import Place
from ..finding import Verdict
from ..prove import Proof
from ..tape import Tape
from .page import page
from .perfetto import perfetto
from .sarif import sarif

JSON, PAGE, SARIF, TRACE = "doctor.json", "doctor.html", "doctor.sarif", "doctor.trace.json"


def write_reports(
    folder: Path,
    verdict: Verdict,
    tape: Tape | None = None,
    located: Mapping[int, Place] | None = None,
    proof: Proof | None = None,
    patch: str = "",
    places: Mapping[str, Place] | None = None,
) -> list[Path]:
    """Write doctor.json, doctor.html and doctor.sarif, and with a tape doctor.trace.json for Perfetto; returns their paths.
    The arguments are those of `page`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / JSON, json.dumps(verdict.as_dict(), indent=1) + "\n")
    write_page(folder / PAGE, page(verdict, tape, located, proof, patch, places))
    write_whole(folder / SARIF, sarif(verdict) + "\n")
    if tape is not None:
        write_whole(folder / TRACE, perfetto(tape, located))
    return [folder / name for name in (JSON, PAGE, SARIF, *([TRACE] if tape is not None else []))]
