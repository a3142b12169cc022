"""The corpus of planted stalls is what it says it is: every script runs, its truth is on the right lines, its score adds up."""

import gc
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from benchmarks import bench_doctor
from benchmarks.doctor_corpus import by_doctor, by_others
from benchmarks.doctor_corpus.by_ledger import findings
from benchmarks.doctor_corpus.cases import CALM, cases, sample, write_calm, write_clean, write_planted
from benchmarks.doctor_corpus.eyes import DRY as DRY_STEPS
from benchmarks.doctor_corpus.kinds import PLANTS
from benchmarks.doctor_corpus.plant import HERE, Case, Script
from benchmarks.doctor_corpus.running import run
from benchmarks.doctor_corpus.score import Found, Outcome, Score, Sight
from gpubound.errors import MeasureError
from gpubound.watch.pretend import simgpu
from tests.messages import message

TINY = ["--size", "tiny", "--steps", "4"]
DRY = [case for case in sample() if PLANTS[case.name].dry]
OTHERS = [case for case in sample() if not PLANTS[case.name].dry]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True, scope="module")
def few_objects():
    """One plant collects garbage in each step: of all that the suite has left by then, for 0.2 s."""
    gc.collect()
    gc.freeze()


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


def test_the_doctor_looks_in_its_turn_and_thinks_outside(sim, tmp_path, monkeypatch):
    """A read, its line and its kind; and the judge is asked when the next script may have the device."""
    case, order, judged = Case("item", "helper", "gpu-bound"), [], by_doctor.diagnose

    @contextmanager
    def turn():
        order.append("begins")
        yield
        order.append("ends")

    monkeypatch.setattr(by_doctor, "diagnose", lambda evidence: (order.append("judged"), judged(evidence))[1])
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
