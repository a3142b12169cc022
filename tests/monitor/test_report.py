"""The report shows what the tape holds and nothing else, its charts too, and fits a desk and a phone in a real browser."""

import doctest
import html
import json
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import pytest

from gpubound import formatting
from gpubound.monitor import RunTape, changed, report, write_report
from gpubound.monitor.figures import Axis, Figures, Series, large_chart, line_chart, warnings
from tests.messages import message, refusal

from .tapes import PLACEMENT, a_run, diverged_run, gpu_run


def test_a_nan_loss_is_kept(tmp_path):
    tape = RunTape.create(tmp_path)
    tape.append({"step": 1, "loss": float("nan")})
    assert json.loads((tmp_path / "steps.jsonl").read_text())["loss"] == "nan"
    assert "loss" in write_report([tape]).read_text()


def test_a_line_begins_anew_with_each_phase(tmp_path):
    """The held-out losses of two phases are of different data: no line between them."""
    tape = RunTape.create(tmp_path, name="first")
    for step in range(1, 7):
        tape.append({"step": step, "held_out": float(step), "phase": "books" if step < 4 else "chats"})
    page = write_report([tape]).read_text()
    assert [len(points.split()) for points in re.findall(r'points="([^"]+)"', page)] == [3, 3]
    assert re.findall(r'<text class="mark"[^>]*>(\w+)<', page) == ["books", "chats"], "and each has its name above"
    assert page.count('<line class="mark"') == 1, "a line between them"


def test_settings_in_words(tmp_path):
    for module in (report, formatting):
        found = doctest.testmod(module)
        assert found.attempted and not found.failed
    config = {"data": ["a/", "b/"], "lr": 1e-3, "phases": [{"name": "books", "steps": 3}, {"name": "chats", "steps": 2}]}
    tape = RunTape.create(tmp_path, name="first", config=config, mfu="MFU = 1 / 2")
    tape.append({"step": 1, "loss": 2.0})
    page = write_report([tape]).read_text()
    assert "<td>data</td><td>a/ b/</td>" in page and message("monitor/report:settings_in_words").within(page)
    assert message("monitor/report:settings_in_words.2").within(page)


def test_the_report_compares_two_runs(tmp_path):
    runs = [a_run(tmp_path / "a", "slow"), a_run(tmp_path / "b", "fast", slope=2.0)]
    assert [Figures(run).gauges()["loss, last"] for run in runs] == ["4", "3"]
    page = write_report(runs, tmp_path / "both.html").read_text()
    assert "slow against fast" in page and page.count("<polyline") == 6 and "MFU" not in page
    assert not re.search(r'(src|href)="http', page), "the page must not reach for the network"


def test_of_two_runs_each_has_a_colour_and_each_figure_a_dash(tmp_path):
    runs = [RunTape.create(tmp_path / name, name=name) for name in ("one", "two")]
    for run in runs:
        run.append({"step": 1, "loss": 2.0, "held_out": 2.5})
    table = write_report(runs[:1]).read_text().partition("<h2>Figures")[2].partition("<h2>")[0]
    assert "held-out loss, last" not in table, "a figure above is not repeated"
    key = re.findall(
        r'<span class="([^"]+)"><i class="key"></i>([^<]+)', write_report(runs, tmp_path / "both.html").read_text()
    )
    lines = [("s0", "one"), ("s1", "two"), ("s0 d1", "one, held-out loss"), ("s1 d1", "two, held-out loss")]
    assert key == lines
    alone = re.findall(r'<span class="([^"]+)"><i class="key"></i>([^<]+)', write_report(runs[:1]).read_text())
    assert alone == [("s0", "one"), ("s1", "one, held-out loss")]


def test_the_page_says_when_how_and_how_long_it_ran(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/usr/bin/gpubound", "train", "--data", "my texts"])
    monkeypatch.setattr("gpubound.monitor.tape.time.monotonic", iter([100.0, 100.0, 184.5]).__next__)
    tape = RunTape.create(tmp_path, name="first")
    tape.append({"step": 1, "loss": 3.0, "tokens": 1000})
    tape.append({"step": 2, "loss": 2.0, "tokens": 1024})
    date = json.loads((tmp_path / "run.json").read_text())["starts"][0]["date"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", date)
    page = write_report([tape]).read_text()
    rows = re.findall(r"<tr><td>([^<]+)</td><td>(?:<code>)?([^<]+)<", page)
    assert rows[:5] == [
        ("started", date.replace("T", " ").replace("+00:00", " UTC")),
        ("command", "gpubound train --data &#39;my texts&#39;"),
        ("trained for", "1 min 24 s"),
        ("steps", "2"),
        ("tokens", "2,024"),
    ]


def test_where_it_ran_is_a_table(tmp_path):
    page = write_report([gpu_run(tmp_path, steps=3)]).read_text()
    assert "<th>module</th><th>device</th><th>dtype</th><th>kernel</th><th>fallbacks</th><th>why</th>" in page
    assert "<td>lm_head</td><td>cuda:0</td><td>bfloat16</td><td>loss without whole logits: triton" in page
    assert page.count("<td>cuda:0</td>") == 5 and f'<p class="soft">{PLACEMENT.splitlines()[-1]}</p>' in page


def losses(*values, key="loss", **also):
    return [{"step": step, key: value} | also for step, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], []),
        (losses(*[3.0 - step / 100 for step in range(100)]), []),
        (losses(3.0, 2.5, float("nan"), float("nan")), ["the loss was not finite after step 2"]),
        (losses(float("inf"), "nan"), ["the loss was never finite"]),
        (losses(*[3.0] * 10, *[3.3] * 10), []),
        (losses(*[3.0] * 10, *[3.4] * 10), ["the loss rose from 3.000 to 3.400"]),
        ([*losses(*[1.0] * 20, phase="a"), *({"step": 30 + i, "loss": 2.0, "phase": "b"} for i in range(20))], []),
        (losses(*[3.0] * 9, 9.0), []),
        (losses(0, 1, 1, 1, key="skipped"), ["step 2 was skipped: the loss or the gradient was not finite"]),
        (
            [*losses(0, 2, 2, key="skipped", phase="a"), {"step": 4, "skipped": 1, "phase": "b"}],  # counted anew
            ["3 of 4 steps were skipped, the first at step 2: the loss or the gradient was not finite"],
        ),
        (
            [*losses(0, 2, key="skipped", phase="a"), {"step": 4, "skipped": 2, "phase": "b"}],
            ["4 of 3 steps were skipped, the first at step 2: the loss or the gradient was not finite"],
        ),
        (losses(2.55, 2.41, 2.45, key="held_out"), []),
        ([*losses(1.0, 1.0, key="held_out", phase="a"), {"step": 3, "held_out": 2.0, "phase": "b"}], []),  # of other data
        (losses(2.55, 2.41, 2.55, key="held_out"), ["the held-out loss was lowest at step 2 (2.410) and 2.550 at the end"]),
    ],
)
def test_what_went_wrong_is_said_first(records, said):
    assert warnings(records) == said


def test_the_page_of_a_run_that_diverged(tmp_path):
    page = write_report([diverged_run(tmp_path)]).read_text()
    assert message("monitor/report:the_page_of_a_run_that_d").within(page)
    assert page.count("<figure>") == 5, "loss with both axes, gradient norm, learning rate, skipped"
    quiet = write_report([gpu_run(tmp_path / "well", steps=30)]).read_text()
    assert '<p class="warn">' not in quiet


def test_a_gauge_is_summed_up_by_a_value_that_was_measured(tmp_path):
    """The lower of two in the middle: of one slow step and one fast one there is no step between them."""
    tape = RunTape.create(tmp_path)
    for step, pace in enumerate((100.0, 900.0, 300.0, "nan", 200.0), 1):
        tape.append({"step": step, "tokens_per_s": pace})
    assert Figures(tape).gauges() == {"tokens per second, median": "200"}


def test_no_run():
    assert refusal(ValueError, lambda: write_report([])) == message("monitor/report:no_run")


def test_an_evaluation_before_the_first_step_is_no_step(tmp_path):
    tape = RunTape.create(tmp_path, name="rewards")
    for step in (0, 1, 2):
        tape.append({"step": step, "reward": 0.5})
    assert Figures(tape).facts()["steps"] == "2" and Figures(tape).as_dict()["steps"] == 2


@dataclass
class Recipe:
    model: str = "10m"
    data: tuple[str, ...] = ()
    lora: dict = field(default_factory=dict)
    lr: float = 3e-4


def test_settings_at_their_defaults_are_folded_away(tmp_path):
    recipe = Recipe(data=("books/",), lr=1e-3)
    assert changed(recipe) == ["data", "lr"] and changed(Recipe()) == []
    tape = RunTape.create(tmp_path, name="first", config=asdict(recipe), changed=changed(recipe))
    page = write_report([tape]).read_text()
    shown, folded = page.partition("<details>")[::2]
    assert "books/" in shown and "0.001" in shown and "10m" not in shown and "10m" in folded
    tape.tell(changed=None)  # a log that was written before
    assert "<details>" not in write_report([tape]).read_text() and "10m" in write_report([tape]).read_text()


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

# The page in a frame of each width, measured in one visit: what does not fit, and text of a chart beyond its drawing.
FRAMES = """<!doctype html>{frames}<script>
addEventListener("load", () => {{
  const seen = [...document.querySelectorAll("iframe")].map(frame => {{
    const page = frame.contentDocument, all = s => [...page.querySelectorAll(s)], box = e => e.getBoundingClientRect();
    const free = all("figure, svg, table, h1, p, span, td, pre").filter(e => !e.closest(".wide"));
    return {{
      width: frame.clientWidth, scroll: page.documentElement.scrollWidth, right: Math.max(...free.map(e => box(e).right)),
      charts: all("svg").length, lines: all("polyline").map(l => l.getTotalLength()), text: page.body.innerText,
      clipped: all("svg text").filter(e => {{
        const [text, drawing] = [box(e), box(e.closest("svg"))];
        return text.right > drawing.right + 0.5 || text.left < drawing.left - 0.5 || text.bottom > drawing.bottom + 0.5;
      }}).map(e => e.textContent),
      attacked: all("script, img, [onload], [onerror]").length + (page.defaultView.attacked || 0),
    }};
  }});
  document.body.textContent = JSON.stringify(seen);
}});
</script>"""
WIDTHS = (390, 500, 1280)
ATTACK = "</pre></title><script>attacked = 1</script><img src=x onerror='attacked = 1'>"


def runs(folder):
    tapes = []
    for name in ("first", "second, with a name that does not end soon"):
        tape = gpu_run(folder / name[:5], name, steps=60)
        tape.tell(
            sample=ATTACK, fallbacks=[{"what": "a kernel", "why": "because " * 20, "times": 3}],
            config=tape.about["config"] | {"out": "runs/a/b/c", "data": ["a_long_folder_name/"] * 9, ATTACK: ATTACK},
            mfu="share of the rate = " + "6 · P " * 30, placement=tape.about["placement"] + "\n" + "x" * 300,
        )  # fmt: skip
        tapes.append(tape)
    return tapes


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_it_fits_and_runs_nothing_that_a_tape_says(tmp_path):
    page = html.escape(write_report(runs(tmp_path)).read_text())
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{page}"></iframe>' for width in WIDTHS)
    (tmp_path / "frames.html").write_text(FRAMES.format(frames=frames))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    done = subprocess.run(
        [*command, "--window-size=1400,1000", f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'frames.html'}"],
        capture_output=True,
        text=True,
    )
    seen = json.loads(html.unescape(re.search(r"<body>(\[.*\])\s*</body>", done.stdout, re.S)[1]))
    assert [found["width"] for found in seen] == list(WIDTHS)
    for found in seen:
        assert found["scroll"] <= found["width"] and found["right"] <= found["width"] and found["clipped"] == []
        assert found["charts"] == 13 and len(found["lines"]) == 56 and sum(length > 50 for length in found["lines"]) > 40
        assert found["attacked"] == 0 and ATTACK in found["text"]
        assert "first against second" in found["text"] and "books: data" in found["text"]


def test_the_chart_draws_the_data():
    """Of two points at the extremes, the line starts at the bottom left and ends at the top right."""
    svg = line_chart("speed", [Series("a", [0, 10], [0.0, 100.0])])
    (x0, y0), (x1, y1) = (tuple(map(float, p.split(","))) for p in re.search(r'points="([^"]+)"', svg)[1].split())
    assert (x0, y0) == (72.0, 186.0) and (x1, y1) == (544.0, 22.0)


def test_many_points_are_averaged_not_sampled():
    spiky = [0.0, 2.0] * 3000  # taking every tenth point would show 0 or 2 only
    svg = line_chart("spikes", [Series("a", list(range(6000)), spiky)])
    assert svg.count("<circle") == 600 and svg.count(": 1</title></circle>") == 600, (
        "each point is the mean of the ten it stands for"
    )
    steps = re.findall(r"step ([\d,]+): ", svg)
    assert steps[0] == "9" and steps[-1] == "5,999", "and lies where the last of them does"


def test_a_few_values_far_off_do_not_set_the_scale():
    """The first steps of a run, say: the top 1 % of many values lies at the upper edge; of few, every one counts."""
    values = [1000.0, *(1.0 + i / 99 for i in range(99))]
    assert max(float(label) for label in ticks(line_chart("loss", [Series("a", list(range(100)), values)]))[0]) <= 3
    few = [1000.0, *values[-19:]]
    assert max(float(label) for label in ticks(line_chart("loss", [Series("a", list(range(20)), few)]))[0]) >= 1000


def test_a_single_point_is_a_dot():
    assert '<g class="s0 few">' in line_chart("held out", [Series("a", [7], [3.0])])
    assert '<g class="s0">' in line_chart("loss", [Series("a", list(range(100)), list(range(100)))])


def test_several_lines_have_a_key():
    chart = line_chart("loss", [Series("a", [0, 1], [0.0, 1.0]), Series("b", [0, 1], [1.0, 0.0], colour=1, dash=1)])
    assert message("monitor/chart:several_lines_have_a_key").within(chart)


def ticks(chart):
    """(y labels, x labels) of a chart."""
    found = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="\w+">([^<]*)</text>', chart)
    return [label for x, label in found if x == "66"], [label for x, label in found if x != "66"]


@pytest.mark.parametrize(
    ("xs", "ys", "axis", "wanted"),
    [
        ([31], [0.0], Axis(), ["31"]),
        ([1, 2, 3], [1.0, 2.0, 3.0], Axis(), ["1", "2", "3"]),
        ([12_340, 12_352], [0.991, 0.994], Axis(".0%"), ["12,340", "12,342", "12,344", "12,346", "12,348", "12,350", "12,352"]),
    ],
)
def test_labels_of_an_axis_differ_and_steps_are_whole(xs, ys, axis, wanted):
    y, x = ticks(line_chart("t", [Series("a", xs, ys)], axis))
    assert x == [*wanted, "step"], "the last is the axis' name"
    assert len(set(y)) == len(y) >= 3


def test_labels_of_values_that_hardly_differ():
    labels = ticks(line_chart("lr", [Series("a", [0, 100], [0.00012345, 0.00012385])], Axis(".2g")))[0]
    assert len(set(labels)) == len(labels) and labels[0] == "1.234e-4", "0.0001234 would not fit beside the axis"


def test_a_share_goes_from_none_to_all():
    chart = line_chart("busy", [Series("a", [0, 100], [0.991, 0.994])], Axis(".0%", low=0, high=1))
    assert ticks(chart)[0][:3] == ["0%", "50%", "100%"]


def lines_of(svg: str) -> dict[str, list[tuple[float, float]]]:
    """The points of each line, by its classes."""
    groups = re.findall(r'<g class="([^"]+)">(.*?)</g>', svg, re.DOTALL)
    return {
        classes: [tuple(map(float, p.split(","))) for points in re.findall(r'points="([^"]+)"', body) for p in points.split()]
        for classes, body in groups
    }


def test_a_smoothed_line_has_the_mean_of_its_neighbours_and_stays_within_its_piece():
    """Noise of one sign after the other goes, the trend and the step between two phases stay."""
    values = [10.0 - i / 100 + (0.5 if i % 2 else -0.5) - (3.0 if i >= 400 else 0.0) for i in range(600)]
    html = large_chart("loss", [Series("a", list(range(1, 601)), values, begins=[401])])
    linear = html.partition('<div class="logged">')[0]
    raw, smooth = lines_of(linear)["s0 raw"], lines_of(linear)["s0 smooth"]

    def jumps(points):
        return sorted(abs(b - a) for (_, a), (_, b) in pairwise(points))

    assert len(raw) == len(smooth) == 600
    assert jumps(smooth)[-9] < jumps(raw)[9] / 4, "but at the ends of the pieces, where there are few neighbours"
    assert jumps(smooth)[-1] > 10 * jumps(smooth)[-9], "the next phase begins at once"
    assert html.count('class="smooth-on" checked') == html.count('class="log-on"') == 1


def test_a_power_law_is_a_straight_line_on_logarithmic_axes():
    html = large_chart("loss", [Series("a", list(range(1, 101)), [8.0 * x**-0.5 for x in range(1, 101)])])
    (points,) = (points for name, points in lines_of(html.partition('<div class="logged">')[2]).items() if "smooth" not in name)
    (x0, y0), (x1, y1) = points[0], points[-1]
    assert all(abs(y - (y0 + (y1 - y0) * (x - x0) / (x1 - x0))) < 0.2 for x, y in points)
    assert "both axes logarithmic" in html


def test_a_chart_has_only_the_switches_that_it_needs():
    few = large_chart("loss", [Series("a", [1, 2, 3], [3.0, 2.0, 1.0])])
    assert "<input" not in few and few.count("<svg") == 1
    negative = large_chart("log-likelihood", [Series("a", list(range(1, 200)), [-1.0 / x for x in range(1, 200)])])
    assert "log-on" not in negative and "smooth-on" in negative
    one = large_chart("loss", [Series("a", list(range(1, 200)), [2.0] * 199)])
    assert one.count("<svg") == 2, "a constant loss has logarithmic axes too"
