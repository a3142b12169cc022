"""The corpus of planted stalls is what it says it is: every script runs, its truth is on the right lines, its score adds up."""

import fcntl
import math
import operator
import os
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from benchmarks import bench_doctor
from benchmarks.doctor_corpus import by_doctor, by_others, crew
from benchmarks.doctor_corpus.by_ledger import findings
from benchmarks.doctor_corpus.cases import CALM, cases, fits, sample, write_calm, write_clean, write_planted
from benchmarks.doctor_corpus.eyes import DRY as DRY_STEPS
from benchmarks.doctor_corpus.hosts import write
from benchmarks.doctor_corpus.kinds import PLANTS
from benchmarks.doctor_corpus.plant import HERE, Case, Script
from benchmarks.doctor_corpus.running import FIRST, Alone, run, timed
from benchmarks.doctor_corpus.score import Found, Outcome, Score, Sight, read_outcomes, write_outcomes
from gpubound.errors import MeasureError
from gpubound.watch.pretend import simgpu
from tests.messages import message

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
def test_ledger_and_doctor_name_the_line_and_the_ledger_nothing_without_the_plant(case, sim, tmp_path):
    outcome = Outcome(str(case), script := write_planted(case, tmp_path / "planted"), findings(script.path, TINY))
    assert outcome.located, outcome.found
    sight = by_doctor.look(script.path, DRY_STEPS, nullcontext(), dry=True)
    assert Outcome(str(case), script, sight.found).located, sight.found
    if PLANTS[case.name].clean:
        assert findings(write_clean(case, tmp_path / "clean").path, TINY) == []


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_a_plant_that_needs_a_gpu_runs_on_a_cpu(case, sim, tmp_path):
    run(write_planted(case, tmp_path / "planted").path, TINY)
    run(write_clean(case, tmp_path / "clean").path, TINY)


@pytest.mark.parametrize(("what", "name"), [(what, name) for what, scripts in CALM.items() for name in scripts])
def test_nothing_is_found_where_nothing_is(what, name, sim, tmp_path):
    script = write_calm(CALM[what][name], tmp_path)
    assert findings(script.path, DRY_STEPS) == []
    assert not Outcome(name, script, by_doctor.look(script.path, DRY_STEPS, nullcontext(), dry=True).found).wrong


def test_a_step_alone_is_the_time_of_many(sim, tmp_path, monkeypatch):
    """By a clock that only a step takes on: short ones until there are many, long ones until there are a few."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for step_s, steps in ((1 / 1024, 308), (1 / 128, 40), (1 / 16, 13), (2.0, 10)):
        alone = Alone()
        alone.begin()
        while alone.done < alone.steps:
            now[0] += step_s
            alone.step()
        alone.end()
        assert (alone.done, alone.ms) == (steps, pytest.approx(1e3 * step_s))
    rare = write(tmp_path, {"update": f"if step < {FIRST}:\n    optimizer.step()"}, host="plain", model="launch-bound").path
    with pytest.raises(MeasureError, check=message("bench_doctor:a_step_alone_is_the_time")):
        timed(rare, ["--size", "tiny", "--steps", "30"])


def test_a_script_leaves_the_process_as_it_found_it(sim, tmp_path):
    argv, path = list(sys.argv), list(sys.path)
    run(write(tmp_path, {}, host="helper", model="gpu-bound").path, TINY)
    assert (sys.argv, sys.path) == (argv, path) and "helper" not in sys.modules


def test_an_unknown_slot_is_refused(tmp_path):
    with pytest.raises(ValueError, check=message("bench_doctor:an_unknown_slot_is_refus")):
        write(tmp_path, {"forwards": ""}, host="plain", model="gpu-bound")


def test_the_doctor_looks_in_its_turn_and_thinks_outside(sim, tmp_path, monkeypatch):
    """A read, its line and its kind; and the judge is asked when the next script may have the device."""
    case, order, judged = Case("item", "helper", "gpu-bound"), [], by_doctor.judge

    @contextmanager
    def turn():
        order.append("begins")
        yield
        order.append("ends")

    monkeypatch.setattr(by_doctor, "judge", lambda evidence: (order.append("judged"), judged(evidence))[1])
    script = write_planted(case, tmp_path)
    sight = by_doctor.look(script.path, DRY_STEPS, turn(), dry=True)
    assert order == ["begins", "ends", "judged"]
    assert Outcome(str(case), script, sight.found).located and sight.seconds > 0 and sight.alone_ms is None


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
    with pytest.raises(MeasureError, check=message("bench_doctor:what_linters_say_is_read")):
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
        message("bench_doctor:the_score_adds_up"),
        message("bench_doctor:the_score_adds_up.2"),
        message("bench_doctor:the_score_adds_up.3"),
    ]
    assert Score().recall is None and Score().price_error is None and Score().overhead is None and Score().seconds is None


def test_a_price_is_held_only_against_a_truth_that_stands_above_the_noise(tmp_path):
    """Of one model two timings of a script differ by 10 %, of the other by 0.2 %: there a plant of 0.1 % is none. Of a third
    the timings agree, but those of equal scripts without their stalls are 10 and 14 ms."""
    script, right = script_of(tmp_path, "sync"), Found("sync", "/a/train.py", 7, ms=2.0)

    def outcome(model: str, said: float, true: float, step: float = 10.0, same: str = "") -> Outcome:
        return Outcome("", script, [right], step, true, said_step_ms=said, model=model, same=same)

    unsteady = [outcome("launches", said, true, same=f"{true}") for said, true in ((9.0, 3.0), (11.0, 5.0), (11.0, -2.0))]
    steady = [outcome("products", said, true, same=f"{true}") for said, true in ((10.02, 3.0), (10.02, 0.01))]
    drifting = [outcome("drifting", step, true, step, "a") for step, true in ((36.0, 26.0), (20.0, 6.0))]
    score = Score([*unsteady, *steady, *drifting]).judged()
    assert [o.noise for o in score.outcomes] == pytest.approx([0.1] * 3 + [0.002] * 2 + [1 / 6] * 2)
    assert [o.stalls for o in score.outcomes] == [True, True, True, True, False, True, True]
    errors = [o.price_error for o in score.outcomes]
    assert errors == [None, pytest.approx(0.6), None, pytest.approx(1 / 3), None, pytest.approx(24 / 26), None]


def test_the_overhead_is_of_the_step_and_the_seconds_are_of_the_looking(tmp_path):
    script = script_of(tmp_path)
    told = [(10.1, 10.0, 4.0), (10.3, 10.0, 5.0), (22.0, 20.0, 9.0), (None, 10.0, None)]
    score = Score([Outcome("", script, [], alone, said_step_ms=said, seconds=seconds) for said, alone, seconds in told])
    assert score.overhead == pytest.approx(3.0) and score.seconds == 5.0
    assert Score([Outcome("faster", script, [], 10.0, said_step_ms=9.0)]).overhead == 0.0


def test_calls_in_a_few_processes(monkeypatch):
    """A process does several, or as many as it is told; one that dies or hangs costs its own task alone."""
    monkeypatch.setattr(crew, "PRELOAD", ["benchmarks.doctor_corpus.crew"])
    found = dict(crew.calls(operator.call, {str(n): (os.getpid,) for n in range(4)}, processes=2))
    assert len(found) == 4 and len(set(found.values())) <= 2 and os.getpid() not in found.values()
    alone = dict(crew.calls(operator.call, {str(n): (os.getpid,) for n in range(3)}, processes=1, most=1))
    assert len(set(alone.values())) == 3
    tasks = {"dies": (os._exit, 7), "fails": (math.sqrt, "two"), "works": (math.sqrt, 4)}
    found = dict(crew.calls(operator.call, tasks, processes=1))
    assert str(found["dies"]) == message("bench_doctor:calls_in_a_few_processes") and found["works"] == 2.0
    assert message("bench_doctor:calls_in_a_few_processes.2").within(str(found["fails"]))
    ((_, late),) = crew.calls(operator.call, {"hangs": (time.sleep, 600)}, processes=1, timeout_s=0.1)
    assert str(late) == "no result after 0.1 s"
    assert list(crew.calls(operator.call, tasks, processes=1, until=0.0)) == []


def test_one_at_a_time_has_its_turn(tmp_path):
    with crew.turn(tmp_path / "lock"), open(tmp_path / "lock") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(tmp_path / "lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.fixture
def half_blind(monkeypatch):
    """The doctor sees only `.item()`, in this process, and each step of a script without a stall takes 2 ms, else 3."""

    def look(lock: Path, eye: str, script: Path, clean: Path | None, dry: bool) -> Sight:
        seen.append((eye, clean is not None))
        found = [
            Found("sync", str(script), n, 1.1) for n, line in enumerate(script.read_text().split("\n"), 1) if ".item()" in line
        ]
        return Sight(found, alone_ms=None if dry else 3.0, clean_ms=None if dry else 2.0)

    def calls(function, tasks, **options):
        return ((name, look(*arguments)) for name, arguments in tasks.items())

    seen: list[tuple[str, bool]] = []
    monkeypatch.setattr(bench_doctor, "calls", calls)
    monkeypatch.setattr(bench_doctor, "CALM", {"decoy": {"to_where_it_is": CALM["decoy"]["to_where_it_is"]}})
    return seen


def test_the_bench_reports_what_was_missed(half_blind, capsys):
    """One of two plants, and no false alarm."""
    code = bench_doctor.main(["--dry", "--only", "item/plain/gpu-bound,printed/plain/gpu-bound,decoy"])
    said = capsys.readouterr()
    assert code == 0  # a dry run holds nothing to a gate
    assert message("bench_doctor:the_bench_reports_what_w").within(said.out)
    assert message("bench_doctor:the_bench_reports_what_w.2").within(said.err)
    assert "50.0 %" in said.out and message("bench_doctor:the_bench_reports_what_w.3").within(said.out)
    assert half_blind == [("doctor", True)] * 2 + [("doctor", False)]


def test_a_run_goes_on_where_the_last_one_ended(half_blind, monkeypatch, tmp_path, capsys):
    """Outcomes are kept one by one. Each script is timed beside its own clean one, and another eye is held against that."""
    monkeypatch.setattr(bench_doctor, "resolve", lambda wanted: torch.device("cpu"))
    run_bench = ["--results", str(tmp_path), "--only", "item/launch-bound,printed/launch-bound"]
    assert bench_doctor.main([*run_bench, "--from", "printed/plain/launch-bound"]) == 1  # it finds nothing
    (kept,) = (tmp_path / "corpus").iterdir()
    assert [outcome.true_ms for outcome in read_outcomes(kept)] == [1.0] * 3 and kept.name.startswith("doctor-")
    assert bench_doctor.main(["--results", str(tmp_path), "--only", "item"]) == 1
    said = capsys.readouterr().out
    assert message("bench_doctor:a_run_goes_on_where_the").within(said)
    assert message("bench_doctor:a_run_goes_on_where_the.2").within(said) and "44.4 %" in said
    outcomes = read_outcomes(kept)
    write_outcomes(tmp_path / "again", outcomes)
    assert len(outcomes) == 9 and read_outcomes(tmp_path / "again") == outcomes
    assert half_blind == [("doctor", True)] * 9
    assert bench_doctor.main(["--results", str(tmp_path), "--only", "item", "--eye", "ledger"]) == 0
    (seen,) = [file for file in (tmp_path / "corpus").iterdir() if file.name.startswith("ledger-")]
    assert half_blind[9:] == [("ledger", False)] * 6 and {outcome.true_ms for outcome in read_outcomes(seen)} == {1.0}


def test_parts_of_names_choose_scripts():
    asked = bench_doctor.asked(bench_doctor.Doctor(only="gpu-bound/plain/item,decoy"))
    assert asked[0] == "item/plain/gpu-bound" and len(asked) == 1 + 6 and fits("control", "control/fed")
    assert (
        len(bench_doctor.asked(bench_doctor.Doctor(from_="item/plain/gpu-bound")))
        < 196
        == len(bench_doctor.asked(bench_doctor.Doctor()))
    )
    with pytest.raises(ValueError, check=message("bench_doctor:parts_of_names_choose_sc")):
        bench_doctor.asked(bench_doctor.Doctor(only="items"))
    with pytest.raises(ValueError, check=message("bench_doctor:parts_of_names_choose_sc.2")):
        bench_doctor.asked(bench_doctor.Doctor(from_="item"))
