"""The corpus of planted stalls is what it says it is: every script runs, its truth is on the right lines, its score adds up."""

import json
import math
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import bench_doctor
from benchmarks.doctor_corpus import by_doctor, by_others, child
from benchmarks.doctor_corpus.by_ledger import findings
from benchmarks.doctor_corpus.cases import CALM, cases, sample, write_calm, write_clean, write_planted
from benchmarks.doctor_corpus.hosts import write
from benchmarks.doctor_corpus.kinds import PLANTS
from benchmarks.doctor_corpus.plant import HERE, Case, Script
from benchmarks.doctor_corpus.running import run, step_ms
from benchmarks.doctor_corpus.score import Found, Outcome, Score, Sight
from gpubound.errors import MeasureError
from gpubound.watch.pretend import simgpu

TINY = ["--size", "tiny", "--steps", "4"]
DRY = [case for case in sample() if PLANTS[case.name].dry]
OTHERS = [case for case in sample() if not PLANTS[case.name].dry]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def sim() -> torch.device:
    if torch.cuda.is_available():
        pytest.skip("the pretend device needs CUDA_VISIBLE_DEVICES=")
    return simgpu()


def test_there_are_as_many_as_it_says():
    assert (len(PLANTS), len(cases())) == (30, 180)
    assert {what: len(scripts) for what, scripts in CALM.items()} == {"control": 10, "decoy": 6}
    assert {(case.host, case.model) for case in sample()} == {(case.host, case.model) for case in cases()}
    assert len({case.name for case in sample()}) == 30


def test_every_blamed_line_is_a_planted_one(tmp_path):
    """In all 180 scripts: the lines of the truth hold the plant's own marked code, and the clean script differs."""
    for case in cases():
        plant, script = PLANTS[case.name], write_planted(case, tmp_path / str(case))
        code = "\n".join(plant.planted.values()).split("\n")
        marked = {line.removesuffix(HERE).strip() for line in code if line.endswith(HERE)}
        assert marked, case
        texts = {path.name: path.read_text() for path in script.path.parent.iterdir()}
        for name, text in texts.items():
            compile(text, name, "exec")
            assert HERE not in text
        blamed = {texts[name].split("\n")[line - 1].strip() for name, line in script.blamed}
        loops = {line for line in blamed if line.startswith("for step, (x, y) in zip(")}
        assert blamed - loops == marked and bool(loops) == plant.loop, case
        clean = write_clean(case, tmp_path / "clean" / str(case)).path.parent
        assert {path.name: path.read_text() for path in clean.iterdir()} != texts


@pytest.mark.parametrize("case", DRY, ids=str)
def test_the_ledger_names_the_line_and_nothing_without_the_plant(case, sim, tmp_path):
    outcome = Outcome(str(case), script := write_planted(case, tmp_path / "planted"), findings(script.path, TINY))
    assert outcome.located, outcome.found
    if PLANTS[case.name].clean:
        assert findings(write_clean(case, tmp_path / "clean").path, TINY) == []


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_a_plant_that_needs_a_gpu_runs_on_a_cpu(case, sim, tmp_path):
    run(write_planted(case, tmp_path / "planted").path, TINY)
    run(write_clean(case, tmp_path / "clean").path, TINY)


@pytest.mark.parametrize(("what", "name"), [(what, name) for what, scripts in CALM.items() for name in scripts])
def test_nothing_is_found_where_nothing_is(what, name, sim, tmp_path):
    assert findings(write_calm(CALM[what][name], tmp_path).path, ["--size", "tiny", "--steps", "6"]) == []


def test_step_ms_is_the_time_between_steps(tmp_path, monkeypatch):
    """By a clock that is one second on at each reading: 1 s for the four steps between the second and the sixth."""
    clock = iter(range(100))
    monkeypatch.setattr("benchmarks.doctor_corpus.running.perf_counter", lambda: next(clock))
    script = write(tmp_path, {}, host="plain", model="launch-bound").path
    assert step_ms(script, ["--size", "tiny"], 6, 2) == 250.0
    rare = write(tmp_path / "rare", {"update": "if step < 3:\n    optimizer.step()"}, host="plain", model="launch-bound").path
    with pytest.raises(MeasureError, match="3 optimizer steps were seen, wanted 9"):
        step_ms(rare, ["--size", "tiny"], 9, 2)


def test_a_script_leaves_the_process_as_it_found_it(sim, tmp_path):
    argv, path = list(sys.argv), list(sys.path)
    run(write(tmp_path, {}, host="helper", model="gpu-bound").path, TINY)
    assert (sys.argv, sys.path) == (argv, path) and "helper" not in sys.modules


def test_an_unknown_slot_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"doctor_corpus: there is no slot 'forwards'; wanted some of imports, classes"):
        write(tmp_path, {"forwards": ""}, host="plain", model="gpu-bound")


def test_the_doctor_s_json_is_read(tmp_path, monkeypatch):
    """What it prints, after whatever the script printed; and an exit code that says it could not measure."""
    entry = {"kind": "sync", "file": "train.py", "line": 7, "count": 1.0, "ms": 0.5, "certainty": "replayed"}
    whole = {"kind": "launch_bound", "file": None, "line": None, "count": 400, "ms": None, "certainty": "estimate"}
    asked = []

    def doctor(argv: list[str]) -> int:
        asked.append(argv)
        os.write(
            1, ("the script's own line\n" + json.dumps({"step_ms": 4.5, "findings": [whole], "harmless": [entry]})).encode()
        )
        os.write(2, b"gpubound doctor: no step was seen\n")
        return 3 if "--steps" in argv else 0

    monkeypatch.setattr(by_doctor.cli, "main", doctor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    script = tmp_path / "train.py"
    sight = by_doctor.look(script, ["--size", "tiny"])
    assert sight.step_ms == 4.5
    assert sight.found == [Found("launch_bound", "", 0), Found("sync", "train.py", 7, 0.5, harmless=True)]
    assert asked == [["doctor", "--json", str(script), "--size", "tiny"]]
    with pytest.raises(MeasureError, match="gpubound doctor ended with code 3: gpubound doctor: no step was seen"):
        by_doctor.look(script, ["--steps", "9"])


def test_what_linters_say_is_read(tmp_path, monkeypatch):
    """Their own words, of torch-preflight 0.5.0 and TorchFix 0.7.0."""
    script = tmp_path / "train.py"
    said = {
        "torch-preflight": '{"version": 1, "diagnostics": [{"code": "TG013", "path": "a/train.py", "line": 51}, '
        '{"code": "TG008", "path": "a/train.py", "line": 1}], "failures": []}',
        "torchfix": "a/train.py:59:15: TOR401 Detected DataLoader\na/train.py:1:1: TOR203 Consider\nFinished checking\n",
    }
    monkeypatch.setattr(by_others, "_said", lambda tool, *_: said[tool])
    assert by_others.torch_preflight(script, []) == [Found("h2d", "a/train.py", 51), Found("repeat", "a/train.py", 51)]
    assert by_others.torchfix(script, []) == [Found("data", "a/train.py", 59)]
    monkeypatch.undo()
    with pytest.raises(MeasureError, match="no-such-linter is not installed: pip install no-such-linter"):
        by_others._said("no-such-linter")


@pytest.mark.gpu
def test_the_debug_mode_of_torch_names_a_read(tmp_path):
    script = write_planted(Case("item", "plain", "launch-bound"), tmp_path)
    found = by_others.sync_debug_mode(script.path, TINY)
    assert Outcome("item", script, found).located


def script_of(tmp_path, *kinds: str, blamed=frozenset({("train.py", 7)})) -> Script:
    return Script(tmp_path / "train.py", kinds, blamed if kinds else frozenset())


def test_the_score_adds_up(tmp_path):
    right, elsewhere = Found("sync", "/a/train.py", 7, ms=1.1), Found("sync", "/a/train.py", 8, ms=1.1)
    planted, quiet = script_of(tmp_path, "sync", "h2d"), script_of(tmp_path)
    score = Score(
        [
            Outcome("found", planted, [right], step_ms=10.0, true_ms=1.0),
            Outcome("found in two parts", planted, [right, right], step_ms=10.0, true_ms=2.0),
            Outcome("another line", planted, [elsewhere], step_ms=10.0, true_ms=1.0),
            Outcome("another kind", planted, [Found("gc", "/a/train.py", 7)], step_ms=10.0, true_ms=1.0),
            Outcome("too small to price", planted, [right], step_ms=10.0, true_ms=0.3),
            Outcome("costs nothing here", planted, [right], step_ms=10.0, true_ms=0.01),
            Outcome("said to be harmless", planted, [Found("sync", "/a/train.py", 7, 0.0, True)], step_ms=10.0, true_ms=0.01),
            Outcome("control", quiet, []),
            Outcome("launches", quiet, [Found("launch_bound", "", 0)], expected=frozenset({"launch_bound"})),
        ]
    )
    assert score.recall_by_kind == 80.0 and score.recall == 60.0  # of five that cost something
    assert score.precision == 75.0  # of four
    assert score.price_error == pytest.approx(10.0)  # both priced ones are 10 % off
    assert score.table() == [
        "MISSED  another line: wanted sync at train.py:7, found sync at train.py:8",
        "MISSED  another kind: wanted sync at train.py:7, found gc at train.py:7",
        "WRONG   costs nothing here: sync at train.py:7",
    ]
    assert Score().recall is None and Score().price_error is None and Score().overhead is None and Score().seconds is None


def test_the_overhead_is_of_the_step_and_the_seconds_are_of_the_looking(tmp_path):
    script = script_of(tmp_path)
    told = [(10.1, 10.0, 4.0), (10.3, 10.0, 5.0), (22.0, 20.0, 9.0), (None, 10.0, None)]
    score = Score([Outcome("", script, [], alone, said_step_ms=said, seconds=seconds) for said, alone, seconds in told])
    assert score.overhead == pytest.approx(3.0) and score.seconds == 5.0
    assert Score([Outcome("faster", script, [], 10.0, said_step_ms=9.0)]).overhead == 0.0


def test_a_call_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(child, "PRELOAD", [])
    assert child.call(os.getpid) != os.getpid()
    with pytest.raises(MeasureError, match="TypeError: must be real number, not str"):
        child.call(math.sqrt, "two")
    with pytest.raises(MeasureError, match="_exit: its process ended with code 7"):
        child.call(os._exit, 7)
    with pytest.raises(MeasureError, match=r"sleep: no result after 0\.2 s"):
        child.call(time.sleep, 60, timeout_s=0.2)


def test_the_bench_reports_what_was_missed(sim, monkeypatch, capsys):
    """With eyes that see only `.item()`: one of two plants, and no false alarm."""
    monkeypatch.setattr(bench_doctor, "call", lambda function, *arguments: function(*arguments))

    def half_blind(script: Path, arguments: list[str]) -> Sight:
        return Sight([found for found in findings(script, arguments) if ".item()" in script.read_text()])

    monkeypatch.setitem(bench_doctor.EYES, "doctor", half_blind)
    monkeypatch.setattr(bench_doctor, "CALM", {"decoy": {"item_of_a_cpu_tensor": CALM["decoy"]["item_of_a_cpu_tensor"]}})
    code = bench_doctor.main(["--dry", "--kinds", "item,printed", "--hosts", "plain", "--models", "gpu-bound"])
    said = capsys.readouterr()
    assert code == 0  # a dry run holds nothing to a gate
    assert "item/plain/gpu-bound                                   found" in said.out
    assert "MISSED  printed/plain/gpu-bound: wanted sync at train.py:" in said.err
    assert "50.0 %" in said.out and "2 scripts with a stall, 1 without" in said.out
