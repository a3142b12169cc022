"""Tapes survive what happens to files, and the report shows what the tape holds and nothing else."""

import doctest
import json
import re
from io import StringIO

import pytest
from rich.console import Console

from gpubound import trace
from gpubound.errors import DataError
from gpubound.monitor import Live, Tape, report, write_report
from gpubound.monitor.chart import Series, line_chart
from gpubound.monitor.report import summary


def a_run(path, name="first", steps=30, slope=1.0):
    tape = Tape.create(path, name=name, verdict="ran on the CPU")
    for step in range(1, steps + 1):
        tape.append({"step": step, "loss": 5.0 - slope * step / steps, "tokens_per_s": 1000.0 + step, "mfu": None})
    return tape


def test_a_tape_reads_back_what_was_written(tmp_path):
    a_run(tmp_path)
    records = Tape.open(tmp_path).steps()
    assert [r["step"] for r in records] == list(range(1, 31))
    assert records[-1] == {"step": 30, "loss": 4.0, "tokens_per_s": 1030.0}, "what was not measured is absent, not zero"


def test_a_resumed_run_overwrites_the_steps_it_repeats(tmp_path):
    a_run(tmp_path, steps=5)
    again = Tape.create(tmp_path, resumed=True)
    again.append({"step": 5, "loss": 1.5})
    again.append({"step": 6, "loss": 1.25})
    tape = Tape.open(tmp_path)
    assert [(r["step"], r["loss"]) for r in tape.steps()][-2:] == [(5, 1.5), (6, 1.25)]
    assert tape.about["name"] == "first" and tape.about["resumed"] is True


def test_half_a_line_is_left_out_aloud(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trace, "_said", set())
    a_run(tmp_path, steps=3)
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    assert len(Tape.open(tmp_path).steps()) == 3
    assert capsys.readouterr().err == f"gpubound: {tmp_path}/steps.jsonl: line 4 is cut off and was left out\n"


def test_rewinding_forgets_what_a_killed_run_wrote_behind_its_checkpoint(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trace, "_said", set())
    tape = a_run(tmp_path, steps=9)
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write('{"step": 10, "lo')
    tape.rewind(6)
    tape.append({"step": 7, "loss": 0.5})
    assert [r["step"] for r in tape.steps()] == list(range(1, 8)) and tape.steps()[-1] == {"step": 7, "loss": 0.5}
    assert "line 10 is cut off" in capsys.readouterr().err


def test_a_full_disk(tmp_path):
    tape = Tape.create(tmp_path)
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    with pytest.raises(DataError) as error:
        tape.append({"step": 1})
    assert str(error.value) == (
        f"{tmp_path}/steps.jsonl could not be written: [Errno 28] No space left on device; the checkpoints beside it are "
        f"intact. Free space, then go on with --resume."
    )


def test_not_a_run(tmp_path):
    with pytest.raises(DataError) as error:
        Tape.open(tmp_path)
    assert str(error.value) == f"{tmp_path} is not a run: it has no run.json; give the folder that train or demo wrote."


def test_a_nan_loss_is_kept(tmp_path):
    tape = Tape.create(tmp_path)
    tape.append({"step": 1, "loss": float("nan")})
    assert json.loads((tmp_path / "steps.jsonl").read_text()) == {"step": 1, "loss": "nan"}
    assert "loss" in write_report([tape]).read_text()


def test_the_chart_draws_the_data():
    """Of two points at the extremes, the line starts at the bottom left and ends at the top right."""
    svg = line_chart("speed", [Series("a", [0, 10], [0.0, 100.0])])
    (x0, y0), (x1, y1) = (tuple(map(float, p.split(","))) for p in re.search(r'points="([^"]+)"', svg)[1].split())
    assert (x0, y0) == (56.0, 174.0) and (x1, y1) == (548.0, 10.0)


def test_a_line_begins_anew_with_each_phase(tmp_path):
    """The held-out losses of two phases are of different data: no line between them."""
    tape = Tape.create(tmp_path, name="first")
    for step in range(1, 7):
        tape.append({"step": step, "held_out": float(step), "phase": "books" if step < 4 else "chats"})
    page = write_report([tape]).read_text()
    assert [len(points.split()) for points in re.findall(r'points="([^"]+)"', page)] == [3, 3]


def test_settings_in_words(tmp_path):
    assert doctest.testmod(report).failed == 0
    config = {"data": ["a/", "b/"], "lr": 1e-3, "phases": [{"name": "books", "steps": 3}, {"name": "chats", "steps": 2}]}
    tape = Tape.create(tmp_path, name="first", config=config, mfu="share of the matrix rate = 1 / 2")
    tape.append({"step": 1, "loss": 2.0})
    page = write_report([tape]).read_text()
    assert "data <b>a/ b/</b>" in page and "phases <b>books: steps 3; chats: steps 2</b>" in page
    assert "share of the matrix rate = 1 / 2" in page


def test_many_points_are_averaged_not_sampled():
    spiky = [0.0, 2.0] * 3000  # taking every tenth point would show 0 or 2 only
    svg = line_chart("spikes", [Series("a", list(range(6000)), spiky)])
    assert svg.count("<circle") == 600 and svg.count(": 1<") == 600, "each point is the mean of the ten it stands for"


def test_a_single_point_is_a_dot():
    assert '<g class="s0 few">' in line_chart("held out", [Series("a", [7], [3.0])])
    assert '<g class="s0">' in line_chart("loss", [Series("a", list(range(100)), list(range(100)))])


def test_several_lines_have_a_key():
    chart = line_chart("loss", [Series("a", [0, 1], [0.0, 1.0]), Series("b", [0, 1], [1.0, 0.0])])
    assert '<span class="s0"><i class=key></i>a</span><span class="s1"><i class=key></i>b</span>' in chart


def test_names_are_escaped():
    assert "<script>" not in line_chart("t", [Series("<script>", [0, 1], [0.0, 1.0])])


def test_the_report_compares_two_runs(tmp_path):
    runs = [a_run(tmp_path / "a", "slow"), a_run(tmp_path / "b", "fast", slope=2.0)]
    assert dict(summary(runs))["loss, last"] == ["4", "3"]
    page = write_report(runs, tmp_path / "both.html").read_text()
    assert "slow against fast" in page and page.count("<polyline") == 4 and "share of this machine" not in page
    assert not re.search(r'(src|href)="http', page), "the page must not reach for the network"


def test_no_run():
    with pytest.raises(ValueError) as error:
        write_report([])
    assert str(error.value) == "write_report: got no run; give at least one run folder."


def test_what_is_measured_seldom_stays_in_the_line():
    out = StringIO()
    with Live(10, "demo", Console(file=out, width=200)) as live:
        live.show({"step": 1, "loss": 3.0, "memory_bytes": 5e8, "held_out": 3.25})
        live.show({"step": 2, "loss": 2.0})
    assert out.getvalue().splitlines()[-1] == "demo 2/10  loss 2.000  held out 3.250  500MB"


def test_another_phase_has_another_held_out_loss():
    out = StringIO()
    with Live(10, "demo", Console(file=out, width=200)) as live:
        live.show({"step": 4, "loss": 3.0, "held_out": 3.25, "phase": "books"})
        live.show({"step": 5, "loss": 2.0, "phase": "books"})
        live.show({"step": 6, "loss": 1.0, "phase": "chats"})
    assert out.getvalue().splitlines() == [
        "demo 4/10  books  loss 3.000  held out 3.250",
        "demo 5/10  books  loss 2.000  held out 3.250",
        "demo 6/10  chats  loss 1.000",
    ]


def test_the_first_step_of_a_resumed_run_is_shown():
    out = StringIO()
    with Live(100, "demo", Console(file=out, width=200)) as live:
        for step in range(57, 63):
            live.show({"step": step, "loss": 2.0})
    assert out.getvalue().splitlines() == ["demo 57/100  loss 2.000", "demo 60/100  loss 2.000"]


def test_on_a_terminal_of_80_columns_the_bar_and_all_figures_are_seen():
    out = StringIO()
    figures = {"loss": 3.21, "held_out": 3.5, "tokens_per_s": 192_000, "mfu": 0.494, "gpu_busy": 0.97, "power_w": 690}
    with Live(2000, "first", Console(file=out, force_terminal=True, width=80)) as live:
        live.show({"step": 1200, "phase": "pretrain", **figures, "memory_bytes": 2.37e10, "skipped": 1})
    bar, *below = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue().split("\x1b[2K")[-1]).splitlines()
    assert bar.startswith("first ━") and "1200/2000" in bar
    assert " ".join(" ".join(below).split()) == (
        "pretrain loss 3.210 held out 3.500 192k tok/s 49.4% of the matrix rate GPU busy 97% 690 W 23.7GB 1 skipped"
    )


def test_live_without_a_terminal_prints_ten_lines():
    out = StringIO()
    with Live(100, "demo", Console(file=out, width=200)) as live:
        for step in range(1, 101):
            live.show({"step": step, "loss": 2.0, "tokens_per_s": 192_400, "syncs": 0})
    lines = out.getvalue().splitlines()
    assert len(lines) == 11 and lines[-1] == "demo 100/100  loss 2.000  192k tok/s  0 syncs/step"
