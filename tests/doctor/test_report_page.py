"""The page in a real browser: its prices are the replay's, it fits a desk and a phone, and nothing that a name says is run."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import chain, combinations, pairwise
from pathlib import Path

import pytest

from gpubound.doctor.fix.prove import Proof
from gpubound.doctor.price.idle import idle_times
from gpubound.doctor.price.prices import Replay
from gpubound.doctor.record.tape import Tape
from gpubound.doctor.report import files as page_module
from gpubound.doctor.report.files import Pick, page, program, snippet
from gpubound.measure.timing import Ratio
from gpubound.watch.events import Place, Site
from tests.messages import message

from .tapes import AUTOGRAD, MAIN, Synthetic
from .verdicts import ITEM, judged, looped, measured

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
TEMPLATES = Path(page_module.__file__).parent / "templates"
ATTACK = "</pre></script><script>attacked = 1</script><img src=x onerror='attacked = 1'>\ud800{{7*7}}"
WIDTHS = (390, 1280)


def visited(folder: Path, frames: str, cases: list) -> dict:
    """What visit.html finds in frames with the page at each width, and in the replay alone: all is measured in one visit."""
    text = Path(__file__).with_name("visit.html").read_text()
    replay = (TEMPLATES / "replay.js").read_text()
    for place, part in (("/*CASES*/", json.dumps(cases)), ("/*REPLAY*/", replay), ("<!--FRAMES-->", frames)):
        text = text.replace(place, part, 1)
    (folder / "visit.html").write_text(text, errors="replace")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=9000", f"--user-data-dir={folder / 'profile'}", f"file://{folder / 'visit.html'}"],
        capture_output=True,
        text=True,
    )
    return json.loads(html.unescape(re.search(r"<body>(\{.*\})\s*</body>", done.stdout, re.S)[1]))


def backward(steps: int = 3) -> Tape:
    """Autograd's thread, two streams that wait for each other, a collection inside a wait for data, and a full allocator."""
    loop = Synthetic()
    for _ in range(steps):
        loop.doing("data", 200, "loader").copy("h2d", run=30, stream=9).record("uploaded", stream=9).wait_event(
            "uploaded", stream=7
        )
        loop.launch(run=40, times=8).hand(AUTOGRAD).launch(run=25, times=9, thread=AUTOGRAD).item(thread=AUTOGRAD)
        loop.hand(MAIN, AUTOGRAD).stop("alloc", 80).launch(run=12, times=5).copy(run=90, pageable=True).item().step()
    tape = loop.tape()
    inner = [replace(span, kind="gc", start=span.start + 50, end=span.end + 20) for span in tape.spans if span.kind == "data"]
    return replace(tape, spans=(*tape.spans, *inner))


def priced(tape: Tape) -> tuple[dict, list[float]]:
    """(what the browser gets, what `Replay` says) for every set of picks: two waits, the data, the collections."""
    replay = Replay(tape)
    waits = sorted(replay.waits)
    by_kind = [frozenset(n for n, span in enumerate(tape.spans) if span.kind == kind) for kind in ("data", "gc")]
    chosen = [Pick(frozenset(waits[::2])), Pick(frozenset(waits[1::2])), *(Pick(spans=spans) for spans in by_kind)]
    subsets = list(chain.from_iterable(combinations(range(1, 5), size) for size in range(5)))
    wanted = []
    for subset in subsets:
        calls = frozenset().union(*(chosen[n - 1].calls for n in subset))
        spans = frozenset().union(*(chosen[n - 1].spans for n in subset))
        wanted.append(replay.step_ms - replay.saved(calls, spans))
    case = {"program": program(replay, chosen), "subsets": [*subsets, [0]]}
    return case, [*wanted, replay.ceiling(), replay.launch_free()]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_the_page_in_a_browser(tmp_path):
    tape, located = looped()
    verdict = judged(tape, located)
    nasty = replace(verdict.findings[1], evidence=ATTACK, fix=ATTACK, patch=f"+{ATTACK}\n-x")
    verdict = replace(
        verdict, script=ATTACK, step_ms=0.5 * verdict.step_ms, findings=[verdict.findings[0], nasty, *verdict.findings[2:]]
    )
    proof = Proof((4.0, 4.2, 4.1), (2.0, 2.1, 2.2), Ratio(2.0, 1.9, 2.1), 60, 0.0, 0.0, 0.0)
    places = {"loader": Place(verdict.findings[0].site)}
    written = page(verdict, measured(tape, located, places), proof, "-old()\n+new()")
    text = html.escape(written.encode("utf-8", "replace").decode())
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{text}"></iframe>' for width in WIDTHS)
    cases, wanted = zip(*(priced(one) for one in (tape, backward())))
    found = visited(tmp_path, frames, list(cases))
    for prices, truth in zip(found["prices"], wanted):
        assert prices == pytest.approx(truth, rel=1e-9) and len({round(price, 6) for price in truth}) > 6
    replay = Replay(tape)
    left = replay.step_ms - (verdict.findings[0].ms or 0)
    timed = 0.5 * replay.step_ms / idle_times(tape).step_ms  # the verdict's step was timed at half of the recorded one
    for seen, width in zip(found["seen"], WIDTHS):
        assert seen["width"] == width and seen["scroll"] <= width and seen["wide"] == 0
        assert seen["before"] == f"{timed * replay.step_ms:.2f} ms a step"
        assert seen["after"].startswith(f"{timed * replay.step_ms:.2f} ms → {timed * left:.2f} ms a step")
        assert seen["idle"] > 8 and seen["lead"] > 300 and seen["zoomed"]
        few, many = seen["marks"]  # a mark a step where there is room
        assert len(few) == 5 and len(many) == 12 and min(b - a for a, b in pairwise(many)) >= 24
        assert "idle: data" in seen["data"] and "for batch in loader:" in seen["data"]
        assert "train.py:" in seen["tip"] and "idle: a sync" in seen["tip"]
        assert (seen["panels"], seen["turned"]) == ([False, True], [True, False]) and seen["change"] == "-old()\n+new()"
        assert min(seen["rounds"][:3]) > max(seen["rounds"][3:]) and message("doctor/report_page:the_page_in_a_browser").within(
            seen["text"]
        )
        assert seen["attacked"] == 0 and seen["text"].count("<script>attacked = 1</script>") >= 3 and "{{7*7}}" in seen["text"]


def test_a_long_tape_is_cut_to_steps_and_a_long_step_has_no_timeline(monkeypatch):
    tape, located = looped(steps=12)
    verdict = judged(tape, located)
    assert message("doctor/report_page:a_long_tape_is_cut_to_st").within(page(verdict, measured(tape, located)))
    assert "<td>phase: timing</td><td>steps 20, seconds 1.5</td>" in page(verdict)
    monkeypatch.setattr(page_module, "MOST", 9000)
    cut = re.search(r"this page holds (\d+) of 12 recorded steps", page(verdict, measured(tape, located)))
    assert cut and 1 <= int(cut[1]) < 12
    monkeypatch.setattr(page_module, "MOST", 1000)
    none = page(verdict, measured(tape, located))
    assert "too many for a page" in none and 'id="doctor"' not in none and "train.py:88" in none


def test_a_page_names_what_it_draws_and_without_prices_counts():
    tape, located = looped()
    verdict = judged(tape, located)
    text = page(verdict, measured(tape, located))
    legend = text.partition('id="time"')[2].partition("<noscript>")[0]
    assert "garbage collection" in legend and "compilation" not in legend and "checkpoint" not in legend
    left = verdict.step_ms - verdict.together_ms
    assert f"<b>{left:.2f} ms</b><span>a step without all findings" in text
    dry = page(replace(verdict, step_ms=None, findings=[replace(each, ms=None) for each in verdict.findings]))
    assert "<th>times</th>" in dry and '<td class="ms">1 a step</td>' in dry and ">not priced<" not in dry


def test_a_tape_without_prices_says_why_there_is_no_what_if():
    tape, located = looped()
    verdict = judged(tape, located)
    lost = replace(tape, work=tuple(replace(work, correlation=0) for work in tape.work))
    assert "No what-if: " in page(verdict, measured(lost, located)) and 'id="time"' in page(verdict, measured(lost, located))
    verdict = replace(verdict, bar=verdict.bar | {"late": {"sync": 24.0}})  # a leaf may be called as a method of dict is: copy
    guessed = replace(verdict, findings=[replace(f, certainty="estimate") for f in verdict.findings])
    boxes = [page(each, measured(tape, located)).count("<input") for each in (verdict, guessed)]
    assert boxes == [4, 0], "a box replays, so a price that is no replay's has none"
    assert 'type="checkbox"' not in page(verdict) and "train.py:88" in page(verdict)


def test_a_page_without_findings_plays_nothing_again_but_keeps_its_timeline():
    """Its script looked for the boxes, which are not there, and stopped before the timeline."""
    tape, located = looped()
    verdict = judged(tape, located)
    packed = [page_module._content(one, measured(tape, located))[0] for one in (verdict, replace(verdict, findings=[]))]
    assert ["program" in content for content in packed] == [True, False] and packed[1]["gaps"]


def test_the_snippet_is_the_file_s_where_the_line_is_still_there(tmp_path):
    tape, located = looped()
    finding = judged(tape, located).findings[0]
    file = tmp_path / "train.py"
    file.write_text("a = 1\nb = 2\nx = loss.item()\nc = 3\n")
    here = Site(str(file), 3, "step", "x = loss.item()", 3)
    assert snippet(replace(finding, site=here)) == [
        (1, "a = 1", False), (2, "b = 2", False), (3, "x = loss.item()", True), (4, "c = 3", False),
    ]  # fmt: skip
    assert snippet(replace(finding, site=replace(here, code="y = 1"))) == [(3, "y = 1", True)], "the file has changed"
    assert snippet(replace(finding, site=ITEM)) == [(88, ITEM.code, True)] and snippet(replace(finding, site=None)) == []
