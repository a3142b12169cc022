"""Which gates hold, and how one that falls short is told."""

from dataclasses import replace

from benchmarks import gates
from benchmarks.results import append, ratio
from tests.messages import message

from .example import LINE


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
