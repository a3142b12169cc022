"""Tapes that were damaged or made up: a page or one sentence, never a traceback. Finds are kept in test_tape.py."""

import json
import re
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from gpubound.cli import main
from gpubound.monitor.tape import FIGURES, KINDS
from tests import drawn

BOUNDED = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | drawn.text(max_size=8) | st.sampled_from(["nan", "inf", 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(drawn.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
ABOUTS = st.dictionaries(st.sampled_from([*KINDS, "finished", "other"]), VALUES, max_size=4)
STARTS = st.lists(st.fixed_dictionaries({"date": VALUES | drawn.text(), "command": VALUES | drawn.text()}), max_size=2)
NUMBERS = st.floats() | st.integers(-(10**6), 10**6) | st.sampled_from(["nan", "inf", "-inf", 1e308, -1e308, 5e-324])
RECORDS = st.fixed_dictionaries(
    {"step": st.integers(0, 2**53 - 1) | st.integers(0, 9)},
    optional=dict.fromkeys(FIGURES, NUMBERS) | {"phase": drawn.text(max_size=6), "other": VALUES},
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


@pytest.mark.slow
@BOUNDED
@given(ABOUTS, STARTS, st.lists(RECORDS, max_size=5))
def test_a_made_up_tape_is_a_page(about, starts, records):
    """Whatever numbers a step has, its page is drawn; an about of other kinds is refused by its key."""
    about = json.dumps(about | {"starts": starts}).encode()
    code, err, page = report(about, "".join(json.dumps(record) + "\n" for record in records).encode())
    if code == 0:
        for points in re.findall(r'points="([^"]*)"', page):
            assert re.fullmatch(r"[\d. ,]+", points), "within the chart, and finite"
    else:
        assert code == 2 and re.search(r"run\.json: \w+ (is|holds) ", err) and "Traceback" not in err


@pytest.mark.slow
@BOUNDED
@given(st.binary(max_size=12), st.integers(0, 120), st.booleans())
def test_a_damaged_tape_is_a_page_or_a_sentence(junk, at, in_steps):
    """Bytes anywhere in either file are read, or refused with the file's name."""
    about = b'{"name": "first", "config": {"lr": 0.1}, "fallbacks": [{"what": "a", "why": "b", "times": 1}], "starts": []}'
    steps = b'{"step": 1, "loss": 2.5, "phase": "a"}\n{"step": 2, "loss": "nan", "held_out": 1, "skipped": 1}\n'
    damaged = steps if in_steps else about
    at = min(at, len(damaged))
    damaged = damaged[:at] + junk + damaged[at + len(junk) :]
    code, err, _ = report(about if in_steps else damaged, damaged if in_steps else steps)
    assert code in (0, 2) and "Traceback" not in err
    assert code == 0 or ("steps.jsonl" if in_steps else "run.json") in err
