"""Names, settings and samples are texts on the page and on the terminal: never markup, never orders."""

from collections import Counter
from html.parser import HTMLParser

import pytest

from gpubound.monitor import RunTape, write_report

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
