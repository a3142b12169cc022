"""Logs of any numbers: a page, never a traceback."""

import json
import re
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from hypothesis import HealthCheck, given, settings, strategies as st

from gpubound.cli import main
from gpubound.monitor.tape import FIGURES

BOUNDED = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
NUMBERS = st.floats() | st.integers(-(10**6), 10**6) | st.sampled_from(["nan", "inf", "-inf", 1e308, -1e308, 5e-324])
RECORDS = st.fixed_dictionaries(
    {"step": st.integers(0, 2**53 - 1) | st.integers(0, 9)},
    optional=dict.fromkeys(FIGURES, NUMBERS) | {"phase": st.text(max_size=6)},
)


def report(about: bytes, steps: bytes) -> tuple[int, str, str]:
    """(exit code, stderr, the page) of `gpubound report` and `--json`, which must agree."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.json").write_bytes(about)
        Path(folder, "steps.jsonl").write_bytes(steps)
        err, out = StringIO(), StringIO()
        with redirect_stderr(err), redirect_stdout(out):
            code = main(["report", folder])
            assert main(["report", folder, "--json"]) == code
        page = Path(folder, "report.html")
        if code == 0:
            json.loads(out.getvalue().split("\n", 1)[1], parse_constant=lambda name: 1 / 0)  # no NaN in JSON
        return code, err.getvalue(), page.read_text(encoding="utf-8") if page.exists() else ""


@BOUNDED
@given(st.lists(RECORDS, max_size=5))
def test_a_made_up_log_is_a_page(records):
    """Whatever numbers a step has, its page is drawn."""
    code, err, page = report(b"{}", "".join(json.dumps(record) + "\n" for record in records).encode())
    assert code == 0, err
    for points in re.findall(r'points="([^"]*)"', page):
        assert re.fullmatch(r"[\d. ,]+", points), "within the chart, and finite"
