"""The reports of a run in a folder."""

from __future__ import annotations

import json
from pathlib import Path

from ...files import make_folder, read_json, write_whole
from ...pages import check_page, write_page
from ..finding import Verdict
from ..prove import Proof
from ..recorded import Recorded
from .page import page
from .sarif import sarif

JSON, PAGE, SARIF = "doctor.json", "doctor.html", "doctor.sarif"


def check_reports(folder: Path) -> None:
    """Raise ValueError if a report would replace a file in `folder` that the doctor did not write."""
    if (folder / PAGE).is_file():
        check_page(folder / PAGE)
    for name, key in ((JSON, "findings"), (SARIF, "runs")):
        if (folder / name).is_file() and key not in read_json(folder / name, "give another folder with --out"):
            raise ValueError(f"out: {folder / name} was not written by the doctor; give another folder.")


def write_reports(
    folder: Path, verdict: Verdict, recording: Recorded | None = None, proof: Proof | None = None, patch: str = ""
) -> list[Path]:
    """Write doctor.json, doctor.html and doctor.sarif; return their paths. `recording`, `proof` and `patch` go to the page."""
    make_folder(folder)
    write_whole(folder / JSON, json.dumps(verdict.as_dict(), indent=1) + "\n")
    write_page(folder / PAGE, page(verdict, recording, proof, patch))
    write_whole(folder / SARIF, sarif(verdict) + "\n")
    return [folder / name for name in (JSON, PAGE, SARIF)]
