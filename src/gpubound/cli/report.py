"""Write the HTML report of a run, or of several compared.

gpubound report runs/first                     writes runs/first/report.html
gpubound report runs/first runs/second -o both.html
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from ..errors import DataError
from ..monitor import RunTape, write_report
from ..monitor.figures import Figures
from . import arguments


@dataclass(frozen=True)
class Report:
    """Write the HTML report of a run, or of several compared.

    The page needs no network and no script. With --json the figures are printed as JSON instead: for each run its numbers under
    the names that steps.jsonl has for them, the last of loss, held_out, grad_norm, lr and memory, the median of the others.

    Examples: gpubound report runs/first
              gpubound report runs/first runs/second -o both.html
    """

    runs: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="(at least one)")
    ]
    """Folders that train or demo wrote. Several are drawn over each other."""
    out: Annotated[str | None, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = None
    """Where to write the page. By default: report.html in the first run."""
    json: bool = False
    """Print the figures as JSON instead of writing a page."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Report, argv, "report")
    if not options.runs:
        raise ValueError("runs: got none; give at least one run folder, as in gpubound report runs/first.")
    tapes = [RunTape.open(run) for run in options.runs]
    if options.json:
        runs = [{"run": run} | Figures(tape).as_dict() for run, tape in zip(options.runs, tapes)]
        print(json.dumps({"runs": runs}, indent=1))
    else:
        page = tapes[0].path / "report.html" if options.out is None else options.out
        try:
            print(write_report(tapes, page))
        except DataError as error:
            if str(page) in str(error):
                raise DataError(f"{error} Or give another file with -o.") from error
            raise
    return 0
