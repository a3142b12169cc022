"""What is asked for and not measured yet."""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import bench_wanted, figures, gates, tables, wanted
from benchmarks.results import append
from tests.messages import message

from .example import LINE, TRAIN


class Reached(Exception):
    """A command line was taken, and its benchmark would begin."""


@pytest.mark.parametrize("command", sorted({one.command for one in wanted.WANTED}))
def test_what_is_wanted_has_a_command(command, monkeypatch):
    def begin(kind):
        raise Reached

    name, *options = command.split()
    module = importlib.import_module(f"benchmarks.bench_{name}")
    monkeypatch.setattr(module, "resolve", begin)
    with pytest.raises(Reached):
        module.main(options)


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ({}, 0),
        ({"gate": 0.9}, 1),  # held to less
        ({"gate": None}, 1),
        ({"peer": 3000.0}, 1),  # an older goal
        ({"gpu": "NVIDIA H100 80GB HBM3"}, 1),
        ({"case": "rms_norm forward 350m"}, 1),
    ],
)
def test_what_is_wanted_is_measured_by_a_line_that_is_held_to_it(line, left):
    one = wanted.Wanted(LINE.bench, LINE.case, LINE.peer_name, "kernels", gate=1.0, budget=3600.0)
    assert len(wanted.unmeasured([replace(LINE, **line)], [one])) == left


def test_a_line_of_before_a_change_does_not_count():
    one = wanted.Wanted(LINE.bench, LINE.case, LINE.peer_name, "kernels", since="2026-11-27T08:30")
    days = {"2026-11-27T08:29:59+00:00": 1, "2026-11-27T08:30:00+00:00": 0, "2027-01-01T00:00:00+00:00": 0}
    assert {day: len(wanted.unmeasured([replace(LINE, date=day)], [one])) for day in days} == days


def test_what_is_wanted_is_of_a_benchmark_that_can_be_asked_for():
    assert {one.bench for one in wanted.WANTED} <= set(bench_wanted.BENCHES)


def test_what_is_not_measured_is_told_with_its_command(tmp_path, capsys, monkeypatch):
    append([LINE], tmp_path)
    monkeypatch.setattr(gates, "FOLDER", tmp_path)
    one = wanted.Wanted("ranks", "1b on 2", "one GPU", "ranks --only 1b", gpus=2)
    monkeypatch.setattr(gates, "unmeasured", lambda lines: [one])
    assert gates.main([]) == 1
    assert capsys.readouterr().out == message("results/wanted:what_is_not_measured_is")


def test_what_is_wanted_is_measured_one_command_after_the_other(tmp_path, monkeypatch, capsys):
    """Each once, those of other machines not at all, and all of them though one fails."""
    ran = []

    def run(command):
        ran.append(command[3:])
        return SimpleNamespace(returncode=len(ran) % 2)

    known = [wanted.Wanted(*of, gpus=gpus) for of, gpus in (
        (("decode", "1b far", "budget", "decode --only 1b"), 2), (("decode", "1b syncs", "budget", "decode --only 1b"), 2),
        (("train", "8b", "budget", "train --only 8b"), 2), (("ranks", "8b", "budget", "ranks"), 4),
    )]  # fmt: skip
    monkeypatch.setattr(bench_wanted, "unmeasured", lambda lines: known)
    monkeypatch.setattr(bench_wanted, "resolve", lambda kind: None)
    monkeypatch.setattr(bench_wanted.subprocess, "run", run)
    assert bench_wanted.main(["--gpus", "2", "--results", str(tmp_path)]) == 1
    assert ran == [["bench", *words.split(), "--results", str(tmp_path)] for words in ("decode --only 1b", "train --only 8b")]
    assert message("results/wanted:what_is_wanted_is_measur").within(capsys.readouterr().out)
    assert bench_wanted.main(["--gpus", "2", "--only", "ranks,lora"]) == 0 and len(ran) == 2
    assert bench_wanted.main(["--gpus", "4", "--dry"]) == 0 and len(ran) == 2
    assert capsys.readouterr().out == message("results/wanted:what_is_wanted_is_measur.2")


def test_the_page_names_what_is_not_measured():
    one = wanted.Wanted("ranks", "1b on 2", "peft-compile", "ranks --only 1b", gpus=2)
    found = tables.page([LINE], missing=[one])
    assert message("results/wanted:the_page_names_what_is_n").within(found)
    assert "Asked for" not in tables.page([LINE])
    assert message("results/wanted:the_page_names_what_is_n.2").within(figures.shown([TRAIN]))
