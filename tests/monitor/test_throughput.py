"""A run whose throughput falls by half is warned about while it runs and in the report; pauses and slow starts are not."""

from io import StringIO

import pytest
from rich.console import Console

from gpubound.monitor import LiveLine, RunTape, write_report
from gpubound.monitor.figures import Figures, Throughput

FAST = 1216.0


def run(*parts, tokens=512):
    """Records of (number of steps, tokens per second[, phase]) one after another."""
    paces = [(pace, *phase) for count, pace, *phase in parts for _ in range(count)]
    return [
        {"step": step, "tokens": tokens, "tokens_per_s": pace, "seconds": tokens / pace, "loss": 2.0}
        | ({"phase": phase[0]} if phase else {})
        for step, (pace, *phase) in enumerate(paces, 1)
    ]


def slow_blocks(records):
    throughput, found = Throughput(), []
    for record in records:
        if throughput.add(record):
            found.append(throughput.slow)
    return found, throughput


@pytest.mark.parametrize(
    "records",
    [
        run((800, FAST)),
        run((60, FAST / 20), (740, FAST)),  # a slow start: compilation, a cold cache
        run(*[(1, FAST / 50), (9, FAST)] * 60),  # an evaluation every tenth step
        run((300, FAST), (8, FAST / 30), (300, FAST)),  # a checkpoint
        run((20_000, 1e6), (30, 1e4), (20_000, 1e6), tokens=5_000),  # 15 s of slow steps among steps of 5 ms
        run((300, FAST, "short"), (300, FAST / 4, "long")),  # another sequence length
        run((300, FAST), (300, FAST * 0.6)),
        run((30, FAST), (15, FAST / 18)),  # ends before a whole block was slow
        [{"step": step, "tokens_per_s": "nan"} for step in range(100)],
    ],
    ids=["steady", "start", "evaluation", "checkpoint", "short-steps", "phases", "less-than-half", "end", "nan"],
)
def test_no_alarm(records):
    found, throughput = slow_blocks(records)
    assert not found and throughput.worst is None


@pytest.mark.parametrize("share", [0.5, 1 / 18])
def test_a_fall_by_half_is_found_within_two_blocks(share):
    (block,), throughput = slow_blocks(run((390, FAST), (200, FAST * share)))
    assert 390 - 48 < block.first <= 391 + 48 and block.last <= 390 + 2 * 48
    assert block.best == FAST and FAST * share <= throughput.worst.tokens_per_s <= FAST * 0.5


def test_each_fall_is_reported_once_and_ends_when_the_speed_is_back():
    found, throughput = slow_blocks(run((400, FAST), (200, FAST / 4), (400, FAST), (200, FAST / 8)))
    assert len(found) == 2 and throughput.worst.tokens_per_s == FAST / 8 and throughput.slow is not None


def test_the_report_and_the_live_line_warn(tmp_path):
    records = run((390, FAST), (110, 68.0))
    tape, out = RunTape.create(tmp_path, name="busy machine"), StringIO()
    with LiveLine(len(records), "demo", Console(file=out, width=200)) as live:
        for record in records:
            tape.append(record)
            live.show(record)
    (warning,) = Figures(tape).warnings
    assert "1.22k" in warning and "68" in warning and "1.22k" in write_report([tape]).read_text()
    lines = out.getvalue().splitlines()
    slow = [int(line.split()[1].split("/")[0]) for line in lines if "SLOW" in line]
    assert len(lines) == 12, "a tenth of the run each, the first step, and the step that completed the first slow block"
    assert 390 < slow[0] < 440 and slow[1:] == [450, 500]
