"""Which gates hold, how one that falls short is told, and docs/figures.md."""

from dataclasses import replace

from benchmarks import beside, gates, tables
from benchmarks.results import FLOOR, append, ratio
from tests.messages import message

from .example import LINE, MISSED, SYNCS


def test_gates_hold(tmp_path, capsys):
    append([LINE, replace(LINE, peer_name="eager", gate=None, ratio=0.1)], tmp_path)
    assert gates.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "1 of 1 gates hold\n"


def test_a_case_that_falls_short_is_listed_with_its_gap(tmp_path, capsys):
    short = replace(LINE, peer_name="copy rate", ratio=0.765, gate=0.85)
    append([LINE, short], tmp_path)
    assert gates.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == message("results/gates:a_case_that_falls_short")


def test_a_count_is_printed_as_a_count(tmp_path, capsys):
    """No ratio stands behind "0 syncs, 4.00 x": its denominator would be invented."""
    counts = {"case": "350m host syncs", "unit": "syncs", "peer_name": "budget", "peer": 0.0, "gate": 1.0, "spread": None}
    over = replace(LINE, ours=2.0, ratio=ratio("syncs", 2, 0), **counts)
    held = replace(LINE, ours=0.0, ratio=ratio("syncs", 0, 0), **counts)
    append([over], tmp_path)
    assert gates.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == message("results/gates:a_count_is_printed_as_a")
    assert not held.short and gates.beside(held) == "budget 0" and gates.beside(over) == "budget 0 SHORT"
    liger = replace(held, peer_name="liger", peer=3.0, ratio=4.0, gate=None)  # as an older line has it
    assert gates.beside(liger) == "liger 3" and gates.beside(LINE) == "liger 1.09"


def test_a_newer_measurement_clears_the_gate(tmp_path):
    append([replace(LINE, ratio=0.9), replace(LINE, date="2026-11-22T00:00:00+00:00", ratio=1.1)], tmp_path)
    assert gates.main([str(tmp_path)]) == 0


def test_nothing_measured_is_not_green(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gates, "FOLDER", tmp_path / "results")  # a fresh clone has none
    assert gates.main([]) == 3
    capsys.readouterr()
    append([replace(LINE, gate=None)], tmp_path)
    assert gates.main([str(tmp_path)]) == 3
    assert capsys.readouterr().err == message("results/gates:nothing_measured_is_not")


def test_a_ratio_that_is_no_number_is_short():
    assert replace(LINE, ratio=float("nan")).short


def row(text: str, case: str) -> str:
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {case} |")]
    return found


def test_the_page_shows_wins_and_losses():
    text = tables.page([LINE, MISSED, replace(LINE, peer_name="eager", ratio=0.9, gate=None)])
    assert row(text, "rms_norm forward 8b") == message("results/page:the_page_shows_wins_and")
    losses = text[text.index("## Where it falls short") : text.index("## Kernels")]
    assert "1 of 2 gates hold" in losses
    assert message("results/page:the_page_shows_wins_and.2").within(losses)
    assert message("results/page:the_page_shows_wins_and.3").within(losses)


def test_each_gpu_has_its_own_losses_and_the_one_with_the_most_cases_comes_first():
    text = tables.page([replace(MISSED, gpu="NVIDIA H100"), LINE, MISSED])
    first, second = (text.index(f"## Where it falls short{where}\n") for where in ("", ", NVIDIA H100"))
    assert "1 of 2 gates hold" in text[first:second] and "0 of 1 gates hold" in text[second:]
    assert text.index("## Kernels\n") < text.index("## Kernels, NVIDIA H100\n")
    assert message("results/page:each_gpu_has_its_own_los").within(text)


def test_a_miss_by_a_hair_does_not_look_like_a_pass():
    assert "**0.998** (gate 1.00)" in tables.page([replace(LINE, ratio=0.998)])


def test_counts_and_budgets_are_shown_as_such_never_as_ratios():
    first = replace(LINE, case="first step", unit="s", ours=12.4, peer=10.0, peer_name="budget", ratio=0.81)
    text = tables.page([SYNCS, first])
    assert row(text, "loss host syncs") == message("results/page:counts_and_budgets_are_s")
    assert row(text, "first step") == message("results/page:counts_and_budgets_are_s.2")
    assert "4.00" not in text


def test_a_floor_is_told_in_multiples_of_it():
    """And is nobody that a user could run instead."""
    priced = {"unit": "us", "peer_name": FLOOR, "spread": None, "ours": 20.0, "peer": 10.0}
    over = replace(LINE, **priced, ratio=0.5, gate=1 / 1.8)
    held = replace(LINE, **priced, case="wide", ratio=0.8, gate=1 / 1.35)
    assert gates.beside(held) == f"{FLOOR} 1.25 x" and gates.beside(over) == f"{FLOOR} 2.00 x SHORT"
    assert message("results/page:a_floor_is_told_in_multi", FLOOR).within(gates.sentence(over))
    text = tables.page([over, held])
    assert row(text, "wide") == message("results/page:a_floor_is_told_in_multi.2")
    assert row(text, "rms_norm forward 8b") == message("results/page:a_floor_is_told_in_multi.3")
    assert "a peer is ahead" not in text and not tables.is_peer(held)


def test_whole_work_stands_beside_every_kind_of_rival():
    """The fastest of each kind; limits, budgets, other units and single kernels are not there."""
    work = replace(LINE, unit="tok/s", ours=100.0, gate=None)
    steps = replace(work, bench="train", case="350m x8")
    lines = [
        replace(work, bench="decode", case="350m batch 16", peer_name="graph", ratio=4.5),
        replace(work, bench="decode", case="350m batch 2", peer_name="graph", ratio=5.6),
        replace(steps, peer_name="liger-autocast", ratio=1.4),
        replace(steps, peer_name="liger", ratio=0.98),
        replace(steps, peer_name="hf", ratio=17.2),
        replace(steps, peer_name="bf16 rate", ratio=0.6),
        replace(steps, unit="GiB", peer_name="liger", ratio=0.5),
        LINE,
    ]
    said = [line for line in beside.table(lines).splitlines() if line.startswith("|")]
    assert said == [
        message("results/page:whole_work_stands_beside"),
        "|---|---|---|---|---|",
        message("results/page:whole_work_stands_beside.2"),
        message("results/page:whole_work_stands_beside.3"),
        message("results/page:whole_work_stands_beside.4"),
    ]
    assert beside.table([LINE]) == ""


def test_every_run_that_a_figure_is_from_is_named():
    older = [replace(LINE, case=f"case {i}", commit="1de191e", date=f"2026-11-20T1{i}:00:00+00:00") for i in range(3)]
    other = replace(LINE, case="another", command="gpubound bench kernels --only rope", date="2026-11-19T10:00:00+00:00")
    said = [line for line in tables.page([other, *older, LINE]).splitlines() if "commit" in line]
    machine = "- NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0"
    assert said == [
        message("results/page:every_run_that_a_figure", machine),
        message("results/page:every_run_that_a_figure.2", machine),
        message("results/page:every_run_that_a_figure.3", machine),
    ]


def test_memory_by_phase_is_beside_figures_that_are_no_peers():
    memory = replace(LINE, bench="memory", case="full_1b memory, first step", unit="GiB", ours=12.5, spread=None, gate=None)
    lines = [
        replace(memory, peer_name="the limit", peer=10.0, ratio=0.8, gate=1.0),
        replace(memory, peer_name="allocated", peer=12.0, ratio=0.96),
        replace(memory, peer_name="predicted", peer=12.25, ratio=0.98),
    ]
    text = tables.page(lines)
    cells = [cell.strip() for cell in row(text, "full_1b memory, first step").strip("|").split("|")]
    assert [cell.split()[0].strip("*") for cell in cells[1:]] == ["12.5", "10.0", "12.0", "12.2"]
    assert cells[2].startswith("**") and not any(map(tables.is_peer, lines)) and "a peer is ahead" not in text
