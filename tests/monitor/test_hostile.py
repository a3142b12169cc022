"""Tapes and texts that were damaged or made up: never markup, never a traceback, a page or one sentence."""

import json
import re
import tempfile
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from gpubound.cli import main
from gpubound.monitor import RunTape, write_report
from gpubound.monitor.tape import FIGURES, KINDS
from tests import drawn

from .test_live import shown

NASTY = "</pre><script>alert(1)</script><img src=x onerror='alert(2)'>\"'><svg onload=alert(3)> {{7*7}} & \ud800"


class Page(HTMLParser):
    """What a browser would make of it: the elements, their attributes, and the text between them."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.text = Counter(), ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements[tag, *(name for name, _ in attrs)] += 1

    def handle_data(self, data):
        self.text += data


def run_saying(folder, text, name):
    """A run that says `text` wherever it may say anything."""
    tape = RunTape.create(
        folder, name=name, verdict=text, mfu=text, sample=text, placement=text,
        fallbacks=[{"what": text, "why": text, "times": 3}], machine={text: text},
        config={text: text, "data": [text], "phases": [{"name": text, text: text}]},
    )  # fmt: skip
    for step in range(1, 7):
        tape.append({"step": step, "loss": 3.0 - step / 9, "held_out": 2.5, "phase": text if step < 4 else f"{text}2"})
    return tape


def page_saying(folder, text, count):
    tapes = [run_saying(folder / str(i), text, f"{text}{i}") for i in range(count)]
    return Page(write_report(tapes, folder / "page.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_that_a_tape_says_is_markup(tmp_path, count):
    tame, shown = "x" * len(NASTY), NASTY.replace("\ud800", "?")
    wanted, found = page_saying(tmp_path / "tame", tame, count), page_saying(tmp_path / "nasty", NASTY, count)
    assert found.elements == wanted.elements
    assert found.text.count(shown) == wanted.text.count(tame) > 12 * count


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("name", ["[/b]", "[red]x", ":smile:", "{task}"])
def test_a_name_is_shown_as_it_is(name, terminal):
    text = shown(1, [{"step": 1, "loss": 2.0, "phase": name}], name, force_terminal=terminal, color_system=None)
    assert text.count(name) >= 2


def test_a_name_does_not_steer_the_terminal():
    assert shown(1, [{"step": 1, "phase": "b\x1b]0;c\x07"}], "a\x1b[2J") == "a\\x1b[2J 1/1  b\\x1b]0;c\\x07\n"


def test_a_series_without_a_finite_point_beside_one_that_has_some(tmp_path):
    """A run that diverged at once: its loss is never finite, its held-out loss was."""
    tape = RunTape.create(tmp_path, name="hot")
    tape.append({"step": 1, "loss": float("nan"), "held_out": 9.0})
    tape.append({"step": 2, "loss": float("inf"), "held_out": float("nan")})
    assert "hot, held-out loss: last 9<" in write_report([tape]).read_text()


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
