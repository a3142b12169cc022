"""The line of a running training: what was measured, on a terminal and in a log."""

import re
from io import StringIO

from rich.console import Console

from gpubound.monitor import LiveLine


def test_what_is_measured_seldom_stays_in_the_line():
    out = StringIO()
    with LiveLine(10, "demo", Console(file=out, width=200)) as live:
        live.show({"step": 1, "loss": 3.0, "memory_bytes": 5e8, "held_out": 3.25})
        live.show({"step": 2, "loss": 2.0})
    assert out.getvalue().splitlines()[-1] == "demo 2/10  loss 2.000  held out 3.250  500.0 MB"


def test_another_phase_has_another_held_out_loss():
    out = StringIO()
    with LiveLine(10, "demo", Console(file=out, width=200)) as live:
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
    with LiveLine(100, "demo", Console(file=out, width=200)) as live:
        for step in range(57, 63):
            live.show({"step": step, "loss": 2.0})
    assert out.getvalue().splitlines() == ["demo 57/100  loss 2.000", "demo 60/100  loss 2.000"]


def test_on_a_terminal_of_80_columns_the_bar_and_all_figures_are_seen():
    out = StringIO()
    figures = {"loss": 3.21, "held_out": 3.5, "tokens_per_s": 192_000, "mfu": 0.494, "gpu_busy": 0.97, "power_w": 690}
    with LiveLine(2000, "first", Console(file=out, force_terminal=True, width=80)) as live:
        live.show({"step": 1200, "phase": "pretrain", **figures, "memory_bytes": 2.37e10, "skipped": 1})
    bar, *below = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue().split("\x1b[2K")[-1]).splitlines()
    assert bar.startswith("first ━") and "1200/2000" in bar
    assert " ".join(" ".join(below).split()) == (
        "pretrain loss 3.210 held out 3.500 192k tok/s 49.4% of the matrix rate GPU busy 97% 690 W 23.7 GB 1 skipped"
    )


def test_live_without_a_terminal_prints_ten_lines():
    out = StringIO()
    with LiveLine(100, "demo", Console(file=out, width=200)) as live:
        for step in range(1, 101):
            live.show({"step": step, "loss": 2.0, "tokens_per_s": 192_400, "syncs": 0})
    lines = out.getvalue().splitlines()
    assert len(lines) == 11 and lines[-1] == "demo 100/100  loss 2.000  192k tok/s  0 syncs/step"
