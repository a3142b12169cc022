"""Write the HTML report of a run, or of several compared.

gpubound report runs/first                     writes runs/first/report.html
gpubound report runs/first runs/second -o both.html
"""

import argparse
import json

from ..monitor import Tape, write_report
from ..monitor.figures import Figures


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "gpubound report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a folder that train or demo wrote; several are drawn over each other"
    )
    parser.add_argument("-o", "--out", metavar="FILE", help="where to write the page (default: report.html in the first run)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of writing a page")
    options = parser.parse_args(argv)
    tapes = [Tape.open(run) for run in options.runs]
    if options.json:
        runs = [{"run": run} | Figures(tape).as_dict() for run, tape in zip(options.runs, tapes)]
        print(json.dumps({"runs": runs}, indent=1))
    else:
        print(write_report(tapes, options.out))
    return 0
