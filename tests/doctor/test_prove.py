"""A proof runs what it says, changes no file, records the losses to the last bit, and says no more than was measured."""

import json
import math
import py_compile
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpubound.doctor.finding import Verdict
from gpubound.doctor.fix import prove as proving
from gpubound.doctor.fix.prove import (
    Proof,
    Recorder,
    SeededJob,
    SeededRun,
    compare_runs,
    difference,
    error_lines,
    prove,
    run,
    run_once,
)
from gpubound.errors import MeasureError
from gpubound.train.device_step import DeviceStep
from gpubound.train.graph_cache import GraphCache
from tests.messages import message

from .. import forked
from .verdicts import judged, looped

HELPER = "SCALE = 1.0\n"
SCRIPT = """\
import sys
import torch
import helper

assert __name__ == "__main__" and sys.modules["__main__"].helper is helper
weight = torch.nn.Parameter(torch.rand(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(int(sys.argv[1])):
    loss = (weight * torch.rand(3)).sum() * helper.SCALE
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper.py").write_text(HELPER)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def expected(scale: float, steps: int, seed: int) -> list[float]:
    """The losses of SCRIPT by the formula: the gradient of a weighted sum is its weights."""
    torch.manual_seed(seed)
    weight, losses = torch.rand(3), []
    for _ in range(steps):
        factors = torch.rand(3)
        losses.append(float((weight * factors).sum() * scale))
        weight -= 0.1 * (factors * scale)
    return losses


def recorded(script, patched=None, steps=0) -> Recorder:
    recorder = Recorder(steps, enough=lambda: None)
    run(SeededJob(str(script), ["4"], patched or {}, "", seed=7), recorder)
    sys.modules.pop("helper")
    return recorder


def test_a_run_records_the_script_s_losses(script):
    argv, path, main = list(sys.argv), list(sys.path), sys.modules["__main__"]
    found = recorded(script).as_dict()
    assert [float.fromhex(text) for text in found["losses"]] == pytest.approx(expected(1.0, 4, 7), rel=1e-6)
    assert len(found["step_ms"]) == 3 and all(ms > 0 for ms in found["step_ms"])
    assert (sys.argv, sys.path, sys.modules["__main__"]) == (argv, path, main)


def test_a_run_that_trains_watches_no_module_after_its_first_backward(tmp_path):
    """Hooks of all modules take 4 µs a call, and cleanrl's PPO makes 108 calls a step."""
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nfrom torch.nn.modules import module\nmodel = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters())\nseen = []\n"
        "for step in range(3):\n    seen.append(len(module._global_forward_hooks) + len(module._global_forward_pre_hooks))\n"
        "    model(torch.ones(2, 3)).sum().backward()\n    optimizer.step()\nassert seen[0] > seen[1] == seen[2], seen\n"
    )
    recorder = Recorder(0, enough=lambda: None)
    run(SeededJob(str(path), [], {}, ""), recorder)
    assert len(recorder.losses) == 3


EVALUATION = """\
import torch

model = torch.nn.Linear(3, 1).cuda().eval()
with torch.no_grad():
    for step in range(60):
        seen = model(torch.rand(4, 3, device="cuda"))
"""


def test_a_dry_run_that_ends_by_itself_and_trains_nothing_is_proven_by_outputs(tmp_path, sim):
    path = tmp_path / "evaluation.py"
    path.write_text(EVALUATION)
    recorder = Recorder(0, enough=lambda: None)
    run(SeededJob(str(path), [], {}, "", seed=7, dry=True), recorder)
    content = recorder.as_dict()  # its events are the pretend device's, which the run has left
    torch.manual_seed(7)
    model = torch.nn.Linear(3, 1)
    sums = [model(torch.rand(4, 3)).sum(dtype=torch.float64).item() for _ in range(len(content["losses"]))]
    assert len(sums) > 50 and [float.fromhex(text) for text in content["losses"]] == sums


def test_a_patched_module_is_read_in_place_of_the_file(script, tmp_path):
    """Also when the file's bytecode is cached. The file and its bytecode stay what they are."""
    py_compile.compile(str(tmp_path / "helper.py"))
    plain = recorded(script)
    cached = {path: path.read_bytes() for path in (tmp_path / "__pycache__").glob("*")}
    (tmp_path / "0.py").write_text("SCALE = 2.0\n")
    patched = recorded(script, {str(tmp_path / "helper.py"): str(tmp_path / "0.py")})
    assert torch.stack(plain.losses).tolist() == pytest.approx(expected(1.0, 4, 7), rel=1e-6)
    assert torch.stack(patched.losses).tolist() == pytest.approx(expected(2.0, 4, 7), rel=1e-6)
    assert {path: path.read_bytes() for path in (tmp_path / "__pycache__").glob("*")} == cached != {}
    assert (tmp_path / "helper.py").read_text() == HELPER


def test_a_patched_script_is_run_in_place_of_the_file(script, tmp_path):
    (tmp_path / "0.py").write_text(SCRIPT.replace("helper.SCALE", "3.0"))
    found = recorded(script, {str(script): str(tmp_path / "0.py")})
    assert torch.stack(found.losses).tolist() == pytest.approx(expected(3.0, 4, 7), rel=1e-6)


def test_a_module_of_a_package_is_run_with_its_relative_imports(tmp_path, monkeypatch):
    """As `python -m trainer`: the package's __main__, its sibling patched."""
    (tmp_path / "trainer").mkdir()
    for name, text in {
        "__init__": "",
        "helper": HELPER,
        "__main__": SCRIPT.replace("import helper", "from . import helper"),
    }.items():
        (tmp_path / "trainer" / f"{name}.py").write_text(text)
    (tmp_path / "0.py").write_text("SCALE = 2.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    recorder = Recorder(0, enough=lambda: None)
    patched = {str(tmp_path / "trainer" / "helper.py"): str(tmp_path / "0.py")}
    run(SeededJob("trainer", ["4"], patched, "", seed=7, module=True), recorder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "trainer"]:
        del sys.modules[name]
    assert torch.stack(recorder.losses).tolist() == pytest.approx(expected(2.0, 4, 7), rel=1e-6)
    with pytest.raises(ValueError, check=message("doctor/prove:a_module_of_a_package_is")):
        run(SeededJob("trainr", [], {}, "", module=True), recorder)


@pytest.mark.slow
def test_a_run_in_a_process_of_its_own_ends_after_its_steps(script, tmp_path, monkeypatch):
    """The script would make a million steps."""
    monkeypatch.setattr("sys.executable", forked.python())
    done = run_once(SeededJob(str(script), ["1000000"], {}, str(tmp_path / "result.json"), 7, steps=13), "before", tmp_path)
    assert done.losses == pytest.approx(expected(1.0, 13, 7), rel=1e-5) and done.step_ms > 0


def test_a_script_that_fails_is_no_proof(script, tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 3, "", "Traceback:\n  line\nKeyError: 'x'\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(MeasureError) as error:
        run_once(SeededJob(str(script), [], {}, str(tmp_path / "none.json")), "after", tmp_path)
    assert str(error.value) == message("doctor/prove:a_script_that_fails_is_n")
    frames = "".join(f"frame #{n}: _start + 0x25 (0x65 in /usr/bin/python3)\n" for n in range(3))
    aborted = (
        f"terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: device-side assert\n{frames}"
    )
    assert error_lines(aborted)[-1].endswith("device-side assert") and error_lines("one\n\ntwo\n") == ["one", "two"]


def test_ranks_are_started_together_and_the_slowest_counts(tmp_path, monkeypatch):
    """They meet at a place of their own: what torchrun has said of this process is not passed on."""
    for name in ("RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ROLE_NAME"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LOCAL_MODELS", "kept")
    job = SeededJob("train.py", [], {}, str(tmp_path / "result"))

    def started(command, env, **options):
        assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        assert "LOCAL_MODELS" in env and not {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ROLE_NAME"} & env.keys()
        for rank in range(2):
            found = {"step_ms": [float(1 + rank)] * 12, "losses": [float(rank).hex()] * 2}
            job.result_of(rank).write_text(json.dumps(found))
        return subprocess.CompletedProcess(command, code, "", said)

    monkeypatch.setattr(subprocess, "run", started)
    code, said = 0, ""
    assert run_once(job, "before", tmp_path, ranks=2) == SeededRun(2.0, (0.0, 0.0, 1.0, 1.0))
    code, said = 1, "ValueError: no data\ntrain.py failed\n/x/torch/distributed/elastic: E1123 failed\nRoot Cause\n"
    with pytest.raises(MeasureError, check=message("doctor/prove:ranks_are_started_togeth")):
        run_once(job, "before", tmp_path, ranks=2)


def test_too_few_steps_are_no_proof():
    with pytest.raises(MeasureError) as error:
        proving.read_run({"step_ms": [1.0] * 8, "losses": []}, 10)
    assert str(error.value) == message("doctor/prove:too_few_steps_are_no_pro")


def test_the_sides_take_turns(script, monkeypatch):
    """Each round runs both, only one of them patched; a patch that halves the time is shown to."""
    rounds = []

    def fake(job, side, folder, ranks) -> SeededRun:
        rounds.append((side, {name: Path(copy).read_text() for name, copy in job.patched.items()}, job.seed))
        return SeededRun({"before": 10.0, "after": 5.0}[side] + 0.01 * len(rounds), (1.0, 0.5))

    monkeypatch.setattr(proving, "run_once", fake)
    proof = prove(script, ["4"], changes={script: b"new"}, equal=True, rounds=4, seed=3)
    assert [{side for side, *_ in rounds[n : n + 2]} for n in range(0, 8, 2)] == [{"before", "after"}] * 4
    assert all(patched == ({str(script): "new"} if side == "after" else {}) and seed == 3 for side, patched, seed in rounds)
    assert proof.faster and proof.holds and proof.speedup.value == pytest.approx(2.0, rel=0.01)
    assert str(proof).endswith("faster (4 alternating rounds)\nthe same: 2 losses are equal bit for bit")


def test_runs_are_started_together_or_not_at_all(script, monkeypatch):
    """Where runs take turns, all of them start at once; after one that failed, none begins that was to follow."""
    meeting, began = threading.Barrier(6), []

    def fake(job, side, folder, ranks) -> SeededRun:
        began.append(Path(job.result).parent)
        meeting.wait(timeout=60)
        return SeededRun(10.0, (1.0,))

    monkeypatch.setattr(proving, "run_once", fake)
    assert prove(script, changes={script: b"new"}, equal=True, rounds=3, at_once=6).holds and len(set(began)) == 6
    began.clear()
    meeting.abort()
    with pytest.raises(threading.BrokenBarrierError):
        prove(script, changes={script: b"new"}, equal=True, rounds=3)
    assert len(began) == 1


def of(before, after, tolerance=0.0) -> Proof:
    """A proof from runs of one loss each."""
    sides = ([SeededRun(1.0, (loss,)) for loss in losses] for losses in (before, after))
    return compare_runs(*sides, tolerance)


def test_one_bit_is_a_difference_where_none_is_allowed():
    bit = math.nextafter(1.0, 2.0)
    assert of([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]).holds
    proof = of([1.0, 1.0, 1.0], [1.0, bit, 1.0])
    assert not proof.holds and message("doctor/prove:one_bit_is_a_difference").within(str(proof))
    assert of([1.0, 1.0, 1.0], [1.0, 1.005, 1.0], tolerance=0.01).holds
    assert not of([1.0, 1.0, 1.0], [1.0, 1.02, 1.0], tolerance=0.01).holds


def test_a_script_that_does_not_repeat_itself_sets_the_limit():
    proof = of([1.0, 1.5, 1.0], [1.0, 1.2, 1.0])
    assert proof.holds and proof.sentence.endswith("no more than two runs of the script as it was (3.3e-01)")
    assert not of([1.0, 1.1, 1.0], [1.3, 1.3, 1.3]).holds
    assert of([1.0, 1.1, 1.2], [1.0, 1.2, 1.6]).holds, "one of three differs more than three pairs of others do, by chance"
    assert not of([1.0, 1.1, 1.2], [1.0, 1.2, math.nan]).holds


@pytest.mark.parametrize("repeats, patched, holds", [(True, 1.0, True), (True, 1.1, False), (False, 1.1, True)])
def test_losses_that_scatter_are_compared_under_deterministic_algorithms(script, monkeypatch, repeats, patched, holds):
    """A patch that changes numbers does not hide in the scatter, and chance does not fail a right one."""
    asked, scatter = [], iter([1.0, 1.3, 1.1, 1.4, 1.2, 1.25, 1.0])

    def fake(job, side, folder, ranks) -> SeededRun:
        if not job.deterministic:
            return SeededRun(10.0, (next(scatter),))
        asked.append((side, job.steps, bool(job.patched)))
        assert not job.warmup
        return SeededRun(10.0, (patched if side == "after" else 1.0 if repeats or len(asked) < 3 else 1.05,))

    monkeypatch.setattr(proving, "run_once", fake)
    proof = prove(script, changes={script: b"new"}, equal=True, rounds=3, warmup=50, steps=100)
    pair = [("before", 60, False), ("after", 60, True)]
    assert proof.holds is holds and asked == (pair if patched == 1.0 else [*pair, pair[0]])
    assert ("under deterministic algorithms" in proof.sentence) is repeats and (proof.scattered > 0) is repeats


def test_deterministic_kernels_are_chosen_in_a_script_that_asks_for_fast_ones(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    before = torch.are_deterministic_algorithms_enabled()
    with proving.deterministic():
        torch.backends.cudnn.benchmark = True
        assert torch.are_deterministic_algorithms_enabled()
        torch.nn.Linear(2, 2)(torch.ones(2))
        assert not torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    torch.nn.Linear(2, 2)(torch.ones(2))
    assert torch.backends.cudnn.benchmark and torch.are_deterministic_algorithms_enabled() == before


def test_a_proof_times_the_steps_that_the_doctor_timed():
    phases = {"warm-up": {"steps": 10}, "plain": {"steps": 10}, "surveyed": {"steps": 20}, "timed": {"steps": 22, "drained": 2}}
    verdict = Verdict.from_dict(judged(*looped()).as_dict() | {"phases": phases | {"sampled": {"steps": 90}}})
    early = proving.timed_steps(replace(verdict, plain_ms=1.0, period=4))
    assert early == {"warmup": 11, "steps": 62}, "from the last two periods of the plain steps on, the 13th"
    window = proving.timed_steps(verdict)
    times = [float(n) for n in range(2, window["steps"] + 1)]  # of the second step, and those after it
    run = proving.read_run({"step_ms": times, "losses": []}, window["warmup"])
    assert window["steps"] == 62 and run.step_ms == sum(range(43, 63)) / 20, "the 20 steps after 42"
    assert proving.timed_steps(Verdict.from_dict(judged(*looped()).as_dict() | {"phases": {}})) == {}


def test_other_numbers_of_losses_and_nan():
    assert difference([1.0], [1.0, 2.0]) == math.inf == difference([1.0], [math.nan]) == difference([math.inf], [1.0])
    assert difference([math.nan, 2.0], [math.nan, 2.0]) == 0.0 and difference([2.0], [1.0]) == 0.5
    assert not of([1.0] * 3, [math.nan] * 3, tolerance=0.5).holds


def test_bad_arguments(script):
    changes = {script: b""}
    for options, said in [
        ({"rounds": 2}, message("doctor/prove:wrong_rounds")),
        ({"steps": 11}, message("doctor/prove:wrong_steps")),
        ({"changes": {}}, message("doctor/prove:no_change")),
    ]:
        with pytest.raises(ValueError) as error:
            prove(script, **({"changes": changes, "equal": True} | options))
        assert str(error.value) == said


GAN = """\
import torch
first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
one, other = torch.optim.SGD([first], lr=0.5), torch.optim.SGD([second], lr=0.5)
for step in range(6):
    for weight, optimizer in ((first, one), (second, other)):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
torch.manual_seed(0)
"""


def test_steps_are_the_doctor_s(tmp_path):
    """Of two optimizers the first ends a step, and what the user names does so instead."""
    (tmp_path / "gan.py").write_text(GAN)
    counted = []
    for marker in ("", "torch:manual_seed"):
        recorder = Recorder(0, enough=lambda: None)
        run(SeededJob(str(tmp_path / "gan.py"), [], {}, "", marker=marker), recorder)
        counted.append((len(recorder.ends), len(recorder.losses)))
    assert counted == [(6, 12), (1, 12)]


TRAINED = """\
import torch
import gpubound as gb

model = torch.nn.Linear(2, 1)
step = gb.TrainStep(model, lambda model, batch: (model(batch).square().sum(), 4.0), {}, precision="fp32", graph="{}")
for _ in range(6):
    step([torch.ones(4, 2)])
assert step([torch.ones(4, 2)]) is not None and step(iter(())) is None
"""


@pytest.mark.parametrize(
    ("optimizer", "graph", "called"),
    [
        ("gb.AdamW(lr=0.1)", "require", "backward"),
        ("lambda p: torch.optim.Adam(p, lr=0.1)", "auto", "step"),
    ],
    ids=["captured", "a torch optimizer"],
)
def test_a_train_step_is_one_step_whatever_is_called_inside(tmp_path, monkeypatch, optimizer, graph, called):
    """A capture warms up and certifies, so it calls backward several times; a torch optimizer calls its step."""
    (tmp_path / "trained.py").write_text(TRAINED.format(optimizer, graph))
    heard, ended = [], []
    runs = GraphCache if called == "backward" else DeviceStep  # which runs a step
    original = runs.run

    def counted(name: str, call):
        return lambda *args, **kwargs: (heard.append(name), call(*args, **kwargs))[1]

    def replayed(*args) -> torch.Tensor:
        return torch.arange(7.0) + len(recorder.ends) if recorder.ends else original(*args)

    monkeypatch.setattr(torch.autograd, "backward", counted("backward", torch.autograd.backward))
    monkeypatch.setattr(torch.optim.Adam, "step", counted("step", torch.optim.Adam.step))
    monkeypatch.setattr(runs, "run", replayed)
    recorder = Recorder(4, enough=lambda: ended.append(len(recorder.losses)))
    run(SeededJob(str(tmp_path / "trained.py"), [], {}, "", steps=4), recorder)
    assert (len(recorder.ends), torch.stack(recorder.losses)[1:].tolist()) == (7, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert ended == [4]  # a run that ends with its last step has that step's loss
    assert heard.count(called) > (2 if called == "backward" else 0)


SCATTERS = """\
import torch

torch.backends.cudnn.benchmark = True
net = torch.nn.Sequential(torch.nn.ConvTranspose2d(3, 32, 4, 2, 1), torch.nn.ReLU(), torch.nn.Conv2d(32, 8, 3)).cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
rows = torch.randint(100, (1 << 20,), device="cuda")
for step in range(14):
    summed = torch.zeros(100, device="cuda").index_add(0, rows, torch.rand(1 << 20, device="cuda"))
    loss = net(torch.randn(16 + step % 2, 3, 32, 32, device="cuda")).square().mean() * summed.std()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.gpu
def test_a_script_that_scatters_repeats_itself_under_deterministic_algorithms(tmp_path):
    """Sums of a million numbers into a hundred in any order, and convolutions whose algorithms are chosen by time."""
    (tmp_path / "train.py").write_text(SCATTERS)
    job = SeededJob(str(tmp_path / "train.py"), [], {}, str(tmp_path / "result.json"), deterministic=True)
    one, other = (run_once(job, "before", tmp_path) for _ in range(2))
    assert len(one.losses) == 14 and one.losses == other.losses
