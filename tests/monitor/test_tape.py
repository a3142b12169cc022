"""A tape survives what happens to files, and a file that is no tape is named."""

import os

import pytest

from gpubound.errors import DataError
from gpubound.monitor import RunTape
from gpubound.monitor.figures import Figures
from tests.messages import message, refusal

from .tapes import a_run


def test_a_tape_reads_back_what_was_written(tmp_path):
    a_run(tmp_path)
    records = RunTape.open(tmp_path).steps()
    assert [r["step"] for r in records] == list(range(1, 31))
    assert records[-1].pop("elapsed_s") >= 0
    assert records[-1] == {"step": 30, "loss": 4.0, "tokens_per_s": 1030.0}, "what was not measured is absent, not zero"


def test_a_resumed_run_overwrites_the_steps_it_repeats(tmp_path):
    a_run(tmp_path, steps=5)
    again = RunTape.create(tmp_path, resumed=True)
    again.append({"step": 5, "loss": 1.5})
    again.append({"step": 6, "loss": 1.25})
    tape = RunTape.open(tmp_path)
    assert [(r["step"], r["loss"]) for r in tape.steps()][-2:] == [(5, 1.5), (6, 1.25)]
    assert tape.about["name"] == "first" and tape.about["resumed"] is True


def test_half_a_line_is_left_out_aloud(tmp_path, said):
    a_run(tmp_path, steps=3)
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    assert len(RunTape.open(tmp_path).steps()) == 3
    assert said() == message("monitor/tape:half_a_line_is_left_out", tmp_path)


def test_a_line_that_was_cut_off_does_not_swallow_the_next(tmp_path):
    a_run(tmp_path, steps=3)
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    RunTape.create(tmp_path).append({"step": 4, "loss": 1.0})
    assert [r["step"] for r in RunTape.open(tmp_path).steps()] == [1, 2, 3, 4]


def test_rewinding_forgets_what_a_killed_run_wrote_behind_its_checkpoint(tmp_path, said):
    tape = a_run(tmp_path, steps=9)
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write('{"step": 10, "lo')
    tape.rewind(6)
    tape.append({"step": 7, "loss": 0.5})
    assert [r["step"] for r in tape.steps()] == list(range(1, 8)) and tape.steps()[-1]["loss"] == 0.5
    assert "line 10 is cut off" in said()


def test_a_resumed_run_counts_its_time_and_its_starts_together(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("gpubound.monitor.tape.time.monotonic", lambda: clock[0])
    tape = RunTape.create(tmp_path)
    for step in (1, 2):
        clock[0] += 10.0
        tape.append({"step": step})
    clock[0] = 1000.0
    again = RunTape.create(tmp_path)
    again.rewind(1)
    clock[0] += 5.0
    again.append({"step": 2})
    assert Figures(RunTape.open(tmp_path)).seconds == 15.0, "10 s before the stop that count, 5 s after it"
    assert len(again.about["starts"]) == 2
    again.about["starts"] = [{"date": f"2026-11-{day}T08:00:00+00:00", "command": "train"} for day in (20, 21, 22)]
    assert Figures(again).facts()["resumed"] == message("monitor/tape:a_resumed_run_counts_its"), "all starts but the first"


def test_time_goes_on_from_the_last_line(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("gpubound.monitor.tape.time.monotonic", lambda: clock[0])
    tape = RunTape.create(tmp_path)
    for step in (1, 2, 3):
        clock[0] += 10.0
        tape.append({"step": step})
    clock[0] = 500.0
    again = RunTape.create(tmp_path)
    clock[0] += 1.0
    again.append({"step": 4})
    assert [record["elapsed_s"] for record in again.steps()] == [10.0, 20.0, 30.0, 31.0]


def test_a_full_disk(tmp_path):
    tape = RunTape.create(tmp_path)
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    assert refusal(DataError, lambda: tape.append({"step": 1})) == message("monitor/tape:a_full_disk", tmp_path)


def test_a_folder_that_goes_away(tmp_path):
    """Nobody knows what became of the checkpoints, and no space is wanted."""
    tape = RunTape.create(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "away")
    with pytest.raises(DataError) as error:
        tape.append({"step": 1})
    file = tmp_path / "run" / "steps.jsonl"
    assert str(error.value) == message("monitor/tape:a_folder_that_goes_away", file)


def test_not_a_run(tmp_path):
    assert refusal(DataError, lambda: RunTape.open(tmp_path)) == message("monitor/tape:not_a_run", tmp_path)


def test_a_tape_that_is_no_file_is_not_waited_for(tmp_path):
    a_run(tmp_path, steps=1)
    (tmp_path / "steps.jsonl").unlink()
    os.mkfifo(tmp_path / "steps.jsonl")
    with pytest.raises(DataError, check=message("monitor/tape:a_tape_that_is_no_file_i")):
        RunTape.open(tmp_path).steps()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "run.json: is not JSON (Expecting property name"),
        (b"[" * 100_000, "run.json: is not JSON ("),
        (b"\xff", "run.json: is not JSON ('utf-8' codec"),
        (b"[]", "run.json: holds a JSON list, wanted an object; restore it, or move it away and "),
        (b"null", "run.json: holds a JSON NoneType, wanted an object; "),
        (b'{"config": []}', "run.json: config is a list, wanted an object; "),
        (b'{"machine": "x"}', "run.json: machine is a text, wanted an object; "),
        (b'{"name": 5}', "run.json: name is a number, wanted a text; "),
        (b'{"placement": {}}', "run.json: placement is an object, wanted a text; "),
        (b'{"fallbacks": 5}', "run.json: fallbacks is a number, wanted a list; "),
        (
            b'{"fallbacks": [{"what": 1}]}',
            "run.json: fallbacks holds {'what': 1}, wanted objects with what (a text), why (a text), times (a number); ",
        ),
        (b'{"starts": ["now"]}', "run.json: starts holds 'now', wanted objects with date (a text), command (a text); "),
        (
            b'{"starts": [{"date": "", "command": 1e999}]}',
            "run.json: starts holds {'command': inf, 'date': ''}, wanted objects ",
        ),
    ],
)
def test_a_run_json_that_is_none_is_named(tmp_path, text, said):
    (tmp_path / "run.json").write_bytes(text)
    for read in (RunTape.open, RunTape.create):
        with pytest.raises(DataError) as error:
            read(tmp_path)
        assert str(error.value).startswith(f"{tmp_path}/{said}")


@pytest.mark.parametrize("name", ["run.json", "steps.jsonl"])
def test_a_damaged_file_that_is_moved_away_as_the_sentence_says_is_begun_anew(tmp_path, name):
    a_run(tmp_path, steps=1)
    (tmp_path / name).write_bytes(b"\xff")
    with pytest.raises(DataError, check=message("monitor/tape:a_damaged_file_that_is_m")):
        RunTape.create(tmp_path).steps()
    (tmp_path / name).rename(tmp_path / "damaged")
    tape = RunTape.create(tmp_path)
    tape.append({"step": 2, "loss": 1.0})
    assert [record["step"] for record in RunTape.open(tmp_path).steps()] == ([1, 2] if name == "run.json" else [2])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "is not readable JSON: Expecting property name"),
        (b"", "is not readable JSON: "),
        (b"[" * 100_000, "is not readable JSON: "),
        (b"3", "holds a number, wanted an object with a step; remove the line."),
        (b"null", "holds null, wanted an object with a step; "),
        (b"{}", "step is None, wanted a whole number; "),
        (b'{"step": true}', "step is True, wanted a whole number; "),
        (b'{"step": -1}', "step is -1, wanted a whole number; "),
        (b'{"step": 1e3}', "step is 1000.0, wanted a whole number; "),
        (b'{"step": "1"}', "step is '1', wanted a whole number; "),
        (b'{"step": 9007199254740992}', "step is 9007199254740992, wanted a whole number; "),
        (b'{"step": 1, "loss": "low"}', "loss is 'low', wanted a number; "),
        (b'{"step": 1, "loss": [2.0]}', "loss is [2.0], wanted a number; "),
        (b'{"step": 1, "held_out": true}', "held_out is True, wanted a number; "),
        (b'{"step": 1, "skipped": {}}', "skipped is {}, wanted a number; "),
        (b'{"step": 1, "tokens": 1' + b"0" * 400 + b"}", "tokens is 1000"),
        (b'{"step": 1, "elapsed_s": ""}', "elapsed_s is '', wanted a number; "),
        (b'{"step": 1, "phase": 2}', "phase is 2, wanted a text; "),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path, line, said):
    a_run(tmp_path, steps=1)
    with open(tmp_path / "steps.jsonl", "ab") as file:
        file.write(line + b'\n{"step": 3}\n')
    with pytest.raises(DataError) as error:
        RunTape.open(tmp_path).steps()
    told = str(error.value).removeprefix(f"{tmp_path}/steps.jsonl, line 2").removeprefix(":").strip()
    assert told.startswith(said) and len(told) < 200


def test_figures_that_are_not_finite_are_read(tmp_path):
    tape = RunTape.create(tmp_path)
    (tmp_path / "steps.jsonl").write_text('{"step": 1, "loss": "nan"}\n{"step": 2, "loss": NaN}\n{"step": 3, "loss": 1e999}\n')
    assert [str(float(record["loss"])) for record in tape.steps()] == ["nan", "nan", "inf"]
