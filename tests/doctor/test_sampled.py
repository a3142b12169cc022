"""The launching thread's stack while the GPU is idle: its lines, the loop, and numbers that add up to the step."""

import linecache
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from gpubound.doctor.finding import Verdict
from gpubound.doctor.price.prices import Prices
from gpubound.doctor.record import located as sampled_module
from gpubound.doctor.record.located import MOST, SampledPhase, Samples
from gpubound.doctor.record.phases import Period, Phases
from gpubound.doctor.report.words import adds_up, ceilings, conclusion, parts, screen
from gpubound.doctor.rules.compute import ENVIRONMENTS, HOST_ELSEWHERE, in_the_way, loop_around, loop_of
from gpubound.doctor.rules.diagnose import diagnose
from gpubound.doctor.rules.remedies import parsed
from gpubound.watch.events import Site, Stack, stack_of

from .evidences import STEPS, at, replace, row, seen, steps

SCRIPT = """\
def train(loader):
    for x in loader:
        x = prepared(x)
        loss = model(x).sum()
        for part in range(2):
            loss.backward()
        update(loss)
        total += loss.item()

def update(loss):
    optimizer.step()

for epoch in range(3):
    train(loader)
"""
BATCH, FORWARD, BACKWARD, UPDATE, READ = 3, 4, 6, 7, 8
ADAM = Site("/somewhere/torch/optim/adam.py", 1, "_multi_tensor_adam", "torch._foreach_add_()", 1)
BACKWARD_OF = Site("/somewhere/torch/_tensor.py", 1, "backward", "torch.autograd.backward()", 1)
ENGINE = Site("/somewhere/torch/autograd/graph.py", 1, "_engine_run_backward", "", 1)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def stack(file: str, line: int, torch_site: Site | None = None, loading: bool = False) -> Stack:
    lines = SCRIPT.splitlines()

    def site(n: int, function: str) -> Site:
        return Site(file, n, function, lines[n - 1].strip(), n)

    inner = (site(11, "update"),) if line == UPDATE else ()
    return Stack((*inner, site(line, "train"), site(14, "<module>")), torch_site, loading)


def sampled(file: str) -> Samples:
    late = {
        stack(file, BATCH): 30, stack(file, FORWARD): 20, stack(file, BACKWARD, ENGINE): 25, stack(file, UPDATE, ADAM): 15,
        stack(file, 2, None, loading=True): 5,
    }  # fmt: skip
    return Samples({**late, stack(file, READ): 5}, late)


def test_a_loop_is_the_innermost_one_of_the_function_that_updates(script):
    assert (loop := loop_around(Site(script, BACKWARD, "train", "", BACKWARD))) and (loop.line, loop.end) == (5, 6)
    assert loop_around(Site(script, 11, "update", "", 11)) is None
    assert loop_around(Site("nowhere.py", 3, "train", "", 3)) is None
    evidence = seen(steps(lambda loop: loop, run=0.2), samples=sampled(script), step_ms=[1.0])
    loop = loop_of(evidence)
    assert loop is not None and (loop.site.line, loop.site.end, loop.site.code) == (2, 8, "for x in loader:")
    assert {site.line: round(ms, 2) for site, ms in loop.late.items()} == {3: 0.3, 6: 0.25, 4: 0.2, 7: 0.15}


@pytest.fixture
def verdict(script) -> Verdict:
    """Of a loop that is bound by launches, and that makes a batch by hand."""
    read = at(READ, "total += loss.item()")
    read = type(read)(Site(script, READ, "train", read.site.code, READ))
    forward = type(read)(Site(script, FORWARD, "train", "loss = model(x).sum()", FORWARD))
    rows = row("sync", "item", read), row("launch", "addmm", forward, 40)
    tape = steps(lambda loop: loop, ahead=300, run=0.2)
    return diagnose(seen(tape, *rows, samples=sampled(script), step_ms=[Prices(seen(tape)).step_ms] * STEPS))


def test_work_on_a_line_and_launching_in_a_loop_are_told_apart(verdict):
    found = {finding.kind: finding for finding in verdict.findings}
    assert found["host_work"].site.line == BATCH and found["host_work"].ms == pytest.approx(0.3 * verdict.step_ms)
    launching = found["launch_bound"]
    assert (launching.site.line, launching.site.end) == (2, 8)
    assert (
        launching.ms > found["host_work"].ms
        and f"line {BACKWARD}" in launching.evidence
        and f"line {READ}" in launching.fix
        and "TrainStep" in launching.fix
    )
    assert verdict.findings[0] is launching and "lines 2 to 8" in conclusion(verdict)


def test_a_loop_besides_the_steps_has_its_part_of_the_launches(tmp_path):
    path = tmp_path / "ppo.py"
    path.write_text("for _ in range(9):\n  for step in range(128):\n    act()\n  for part in parts:\n    optimizer.step()\n")
    rollout = Stack((Site(str(path), 3, "<module>", "act()", 3),))
    update = Stack((Site(str(path), 5, "<module>", "optimizer.step()", 5),), ADAM)
    late = {rollout: 60, update: 30}
    step = Prices(seen(steps(lambda loop: loop, run=0.2))).step_ms
    launches = row("launch", "addmm", type(at(1))(rollout.sites[0]), 1000)
    evidence = seen(steps(lambda loop: loop, run=0.2), launches, samples=Samples(late, late), step_ms=[step] * STEPS)
    verdict = diagnose(evidence)
    first, second = verdict.findings
    assert (first.site.line, first.site.end, first.fix) == (2, 3, HOST_ELSEWHERE) and (second.site.line, second.site.end) == (
        4,
        5,
    )
    assert first.ms == pytest.approx(2 * second.ms) and first.count == pytest.approx(2 * second.count)
    assert first.ms + second.ms == pytest.approx(verdict.step_ms - verdict.device_ms) and "TrainStep" in second.fix


def test_a_loop_that_no_measured_step_ran_is_absent(tmp_path):
    path = tmp_path / "ppo.py"
    path.write_text(
        "for line in config:\n  read(line)\nfor _ in range(9):\n  for step in range(128):\n    for env in envs:\n      act()\n"
        "  for part in parts:\n    for p in part:\n      optimizer.step()\n"
    )
    update = Stack((Site(str(path), 9, "<module>", "optimizer.step()", 9),), ADAM)
    rollout = Stack((Site(str(path), 6, "<module>", "act()", 6),))
    evidence = seen(steps(lambda loop: loop, run=0.2), samples=Samples({update: 30}, {update: 20}), step_ms=[0.3] * STEPS)
    (what,) = diagnose(evidence).absent
    assert "ppo.py:4" in what and "for step in range(128):" in what
    assert not diagnose(replace(evidence, samples=Samples({update: 30, rollout: 1}, {update: 20}))).absent
    path.write_text(path.read_text().replace("act()", "seen[i] = i"))
    linecache.checkcache(str(path))
    parsed.cache_clear()
    assert not diagnose(evidence).absent, "a loop that calls nothing takes no time to sample"


def test_an_environment_s_own_time_is_a_finding_beside_the_read_of_its_action(tmp_path):
    path = tmp_path / "dqn.py"
    path.write_text("for step in range(9):\n    action = q(x).cpu()\n    envs.step(action.numpy())\n    y = x.to(device)\n")
    lines = [Stack((Site(str(path), n, "<module>", code, n),)) for n, code in ((3, "envs.step(action.numpy())"), (4, "y = x"))]
    late = dict.fromkeys(lines, 45)
    places = [type(at(1))(each.sites[0]) for each in lines]
    rows = [row(kind, "copy", place, 1, "pageable, blocking", 8) for kind, place in zip(("d2h", "h2d"), places)]
    evidence = seen(steps(lambda loop: loop, run=0.2), *rows, row("launch", "addmm", at(99), 40), samples=Samples(late, late))
    found = diagnose(replace(evidence, step_ms=[0.3] * STEPS))
    works = [(each.site.line, each.fix) for each in found.findings if each.kind == "host_work"]
    assert works == [(3, ENVIRONMENTS)], "what prepares a copy is part of it"


def test_a_line_and_what_it_calls_are_one_cause(tmp_path):
    """A replay buffer's own line, and the one of the loop that draws from it. A line that others call as well is its own."""
    path, buffer = tmp_path / "dqn.py", str(tmp_path / "buffers.py")
    path.write_text("for step in range(9):\n    data = rb.sample(128)\n    other = rb.draw()\n    optimizer.step()\n")
    drawn, shared = (Site(buffer, line, "draw", "next_obs = self.next[rows]", line) for line in (404, 90))
    sample, other = (Site(str(path), line, "<module>", code, line) for line, code in ((2, "rb.sample"), (3, "rb.draw")))
    late = {
        Stack((sample,)): 30, Stack((drawn, sample)): 20, Stack((shared, sample)): 10, Stack((shared, other)): 10,
        Stack((Site(str(path), 4, "<module>", "optimizer.step()", 4),), ADAM): 5,
    }  # fmt: skip
    evidence = seen(steps(lambda loop: loop, run=0.2), samples=Samples(late, late), step_ms=[1.0])
    verdict = diagnose(evidence)
    works = {finding.site.line: finding for finding in verdict.findings if finding.kind == "host_work"}
    assert set(works) == {2, 90} and works[2].ms == pytest.approx(2.5 * works[90].ms) and "buffers.py:404" in works[2].evidence


def test_a_line_that_launches_through_a_library_is_no_work_of_the_host(script):
    """The launches of a model from a library belong to the user's line that calls it, as its samples do."""
    forward = Site(script, FORWARD, "train", "loss = model(x).sum()", FORWARD)
    inner = Site("/venv/lib/python3/site-packages/models/layer.py", 9, "forward", "return self.down(x)", 9)
    late = {Stack((inner, forward)): 50, stack(script, BACKWARD, ENGINE): 10}
    row_of_it = row("launch", "addmm", type(at(1))(forward, inner), 40)
    evidence = seen(steps(lambda loop: loop, run=0.2), row_of_it, samples=Samples(late, late), step_ms=[0.3])
    assert "host_work" not in {finding.kind for finding in diagnose(evidence).findings}
    alone = seen(steps(lambda loop: loop, run=0.2), samples=Samples(late, late), step_ms=[0.3])
    assert "host_work" in {finding.kind for finding in diagnose(alone).findings}


def test_torch_s_own_code_and_lines_with_a_finding_of_their_own_are_no_work_of_the_host(script):
    """A module of torch launches many kernels in one op, and a loader and an op of the CPU have findings of their own."""
    rnn = Site("/somewhere/torch/nn/modules/rnn.py", 1100, "forward", "result = _VF.lstm(", 1100)
    place = {n: type(at(1))(Site(script, n, "train", "", n)) for n in (2, BATCH)}
    late = {
        Stack((Site(script, FORWARD, "train", "", FORWARD),), rnn): 40, stack(script, BACKWARD, BACKWARD_OF): 20,
        Stack((place[2].site,)): 20, Stack((place[BATCH].site,)): 20,
    }  # fmt: skip

    def body(loop):
        return loop.doing("data", 20.0, name="data 1")

    rows = row("cpu_op", "stack", place[BATCH]), row("launch", "addmm", at(99))
    tape = steps(body, ahead=300, run=0.2)
    evidence = seen(tape, *rows, samples=Samples(late, late), step_ms=[3.0], named_lines={"data 1": place[2]})
    kinds = {(finding.kind, finding.site.line) for finding in diagnose(evidence).findings if finding.site}
    assert ("cpu_op", BATCH) in kinds and "host_work" not in {kind for kind, _ in kinds}
    alone = replace(evidence, rows=[rows[1]], named_lines={})
    assert {f.site.line for f in diagnose(alone).findings if f.kind == "host_work"} == {2, BATCH}
    short = replace(alone, samples=Samples(late | {Stack((place[2].site,)): 5, Stack((place[BATCH].site,)): 3}, {}))
    short = replace(short, samples=replace(short.samples, late=short.samples.stacks))
    found = {f.site.line for f in diagnose(short).findings if f.kind == "host_work"}
    assert found == {2}, "0.22 ms is some, 0.13 ms is what a late sample may have taken from the lines before"


def test_findings_and_the_gpu_add_up_to_the_step(verdict):
    assert sum(parts(verdict).values()) == pytest.approx(verdict.step_ms)
    prices = sum(finding.ms for finding in verdict.findings)
    assert prices == pytest.approx(verdict.together_ms) == pytest.approx(verdict.step_ms - verdict.device_ms)
    (line,) = adds_up(verdict)
    terms = [float(term.split()[-1]) for term in line.partition(" = ")[2].split(" + ")]
    assert sum(terms) == pytest.approx(float(line.split()[0])) and line in screen(verdict, 140)
    (alone, _), (launched, _) = ceilings(verdict)
    assert alone == verdict.device_ms < launched == verdict.ceiling_ms
    assert adds_up(Verdict.from_dict(verdict.as_dict())) == [line]


def test_what_is_read_rarely_does_not_stand_in_a_graph_s_way(script):
    loop = Site(script, 2, "train", "", 8)
    often, rare, outside = (
        row("sync", "item", type(at(1))(Site(script, n, "train", "", n)), count) for n, count in ((7, 1), (8, 0.25), (12, 1))
    )
    assert len(in_the_way(seen(None, often, rare, outside), loop)) == 1
    work = row("cpu_op", "mul", type(at(1))(Site(script, 3, "train", "", 3)))
    assert in_the_way(seen(None, often, work), loop) == ["line 3, which computes on the CPU", "line 7, which reads the GPU"]


class Waiting:
    def __init__(self):
        self.late = False

    def __call__(self):
        return lambda: self.late


def test_the_thread_s_lines_are_sampled():
    """Whatever the clock, this thread is in one line until three samples were taken, of which two found the device idle."""
    idle, before = iter([True, True, False]), sys.getswitchinterval()
    enough = threading.Event()

    def device() -> bool:
        late = next(idle, None)
        if late is None:
            enough.set()
        return bool(late)

    phase = SampledPhase(2, Period(), lambda: device)
    with Phases([phase], keep_going=True):
        assert sys.getswitchinterval() == pytest.approx(sampled_module.SWITCH_S)
        assert enough.wait(timeout=5)
    assert sys.getswitchinterval() == pytest.approx(before)
    assert phase.samples.total >= 3 and sum(phase.samples.late.values()) == 2
    assert any("test_sampled" in stack.user.file for stack in phase.samples.late)


def test_sampling_goes_on_for_a_while_and_ends_before_a_capture(monkeypatch):
    now = SimpleNamespace(perf_counter=lambda: 0.0)
    monkeypatch.setattr(sampled_module, "time", now)
    phase = SampledPhase(4, Period(8), Waiting())
    with Phases([phase], keep_going=True) as phases:
        for _ in range(2 * MOST):
            phases.ended()
    assert phase.done == 104, "whole periods, the first that are at least MOST"
    captured: list[str] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda *_: captured.append("begun"))
    phase = SampledPhase(4, Period(), Waiting())
    with Phases([phase], keep_going=True):
        torch.cuda.CUDAGraph.capture_begin(None)
        phase._thread.join(timeout=5)
        assert not phase._thread.is_alive() and captured == ["begun"]
    assert phase.absent


def test_a_stack_has_the_user_s_lines_and_torch_s_innermost(monkeypatch):
    found: list[Stack] = []

    class Module(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.gelu(x)

    monkeypatch.setattr(torch.nn.functional, "gelu", lambda x: found.append(stack_of(sys._getframe())) or x)
    Module()(torch.ones(1))
    (first,) = found
    assert [site.function for site in first.sites[:2]] == ["<lambda>", "forward"] and first.torch is None
    loader = torch.utils.data.DataLoader([1], collate_fn=lambda items: stack_of(sys._getframe()))
    (inside,) = loader
    assert inside.loading and not first.loading
