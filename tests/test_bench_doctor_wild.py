"""Scores on public scripts: what is found, missed and wrong."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.doctor_wild import __main__ as runner, alone, measure, outcome, peers
from benchmarks.doctor_wild.measure import Measurement
from benchmarks.doctor_wild.outcome import Outcome, sums, table
from benchmarks.doctor_wild.peers import score_peer, waiting_functions
from benchmarks.doctor_wild.score import Script, score, scripts
from gpubound import cli
from gpubound.doctor.finding import KINDS, Finding
from gpubound.doctor.fix import prove
from gpubound.doctor.record import located
from gpubound.watch.events import Site

from . import forked
from .doctor.verdicts import judged, looped


def finding(kind: str, line: int, file: str = "main.py", end: int | None = None, via: str = "") -> dict:
    site = Site(file, line, "", "", end or line)
    library = Site(via, 1, "", "", 1) if via else None
    return Finding(kind, site, library, "", None, 1, 1.0, "replayed", "", "").as_dict()


SCRIPT = Script(
    "a", "", "", ".", "main.py --x", "", {6: ["data"], 7: ["h2d"], 9: ["sync"]}, largest=("data",), minor=(12,), small="--tiny"
)


def test_a_stall_is_found_by_a_right_kind_on_its_line():
    verdict = {
        "step_ms": 1.0,
        "findings": [finding("data", 6), finding("launch_bound", 5, end=14), finding("sync", 12), finding("sync", 30)],
        "harmless": [finding("h2d", 7), finding("h2d", 9)],
    }
    result = score(SCRIPT, verdict)
    assert result.found == (6, 7) and result.missed == (9,) and result.wrong == ("main.py:30 sync",)
    dry = score(SCRIPT, verdict | {"step_ms": None, "findings": []})
    assert dry.found == (7,) and dry.missed == (9,), "a dry run cannot time a loader"
    elsewhere = score(SCRIPT, verdict | {"findings": [finding("data", 6, "other.py")]})
    assert 6 in elsewhere.missed and elsewhere.wrong == ("other.py:6 data",)


def test_the_table_names_kinds_lines_and_a_commit():
    for script in scripts().values():
        assert (
            script.stalls
            and script.largest
            and script.file.endswith(".py")
            and script.repository.startswith("https://")
            and script.commit
        )
        largest = [kind.split()[0] for kind in script.largest]
        assert all(kind in KINDS for kinds in [*script.stalls.values(), largest] for kind in kinds)
        assert not set(script.stalls) & set(script.minor)


def test_a_line_of_a_library_s_loop_has_a_stall_for_each_file():
    script = replace(SCRIPT, stalls={"6 via trainer.py": ["sync"], "6 via masking.py": ["sync"], "buffers.py:3": ["h2d"]})
    found = [finding("sync", 6, via="/site-packages/transformers/trainer.py"), finding("h2d", 3, "buffers.py")]
    result = score(script, {"step_ms": 1.0, "findings": found, "harmless": []})
    assert result.found == ("6 via trainer.py", "buffers.py:3") and result.missed == ("6 via masking.py",) and not result.wrong


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "main.py").write_text("text")
    absent = replace(SCRIPT, name="b", commit="77f55b9")
    monkeypatch.setattr(runner, "scripts", lambda: {"a": SCRIPT, "b": absent})
    return tmp_path


STEPS = [8.0] * 60  # of a plain run, from the second one on
TIMED = {"period": 1, "plain_ms": 8.0, "phases": {"warm-up": {"steps": 10}, "plain": {"steps": 20}, "timed": {"steps": 20}}}


def answering(monkeypatch, verdict: dict, answer: dict, code: int = 0, steps: list | None = None) -> list[list[str]]:
    """Let programs of the runner answer so. Return their arguments."""
    ran: list[list[str]] = []

    def run(seconds, command, cwd):
        assert Path(cwd, "main.py").read_text() == "text"
        folder, _, name, *words = command[4:]
        folder = cwd / folder
        folder.mkdir(exist_ok=True)
        ran.append([name, *words])
        if name in ("doctor", "steps"):
            (folder / "notes.json").write_text(json.dumps({"first": 7.0, "start": 6.0, "waited": 2.0, "ended": 18.0}))
            (folder / "patches.json").write_text(json.dumps(answer | {"proof": None}))
            (folder / "windows.json").write_text(json.dumps([{"phase": "timed", "first": 6, "ms": [8.0]}]))
            for file in ("doctor.json", "doctor.html"):
                (folder / file).write_text(json.dumps(verdict))
            return code, "", "why"
        if name == "plain":
            (folder / "steps.json").write_text(json.dumps(STEPS if steps is None else steps))
            return int(steps == []), "", "no"
        assert json.loads((cwd / words[0]).read_text()) == verdict
        for ms in answer["proof"]["before_ms"]:
            with open(cwd / alone.RUNS, "a") as file:
                file.write("".join(json.dumps({"side": s, "step_ms": ms}) + "\n" for s in ("after", "before")))
        if answer["proof"] is LATE:
            raise subprocess.TimeoutExpired(command, seconds)
        return code, json.dumps(answer), "why"

    monkeypatch.setattr(measure, "ran_within", run)
    return ran


LOADER = {"kind": "data", "file": "main.py", "line": 6, "patch": "loader"}
PROOF = {"speedup": {"value": 4.0}, "before_ms": [8.0, 8.0, 9.0], "after_ms": [2.0, 2.0, 2.0], "holds": True, "faster": True}
LATE = {"before_ms": [8.0]}  # a proof that is ended after its second run
ANSWER = {"patched": [LOADER], "refused": [], "expected_ms": 2.0, "proof": PROOF}


def test_the_runner_measures_a_copy_and_keeps_what_it_found(folder, monkeypatch, capsys):
    """Runs of the doctor and of the script alone are in turns, and what they measured is kept before a proof begins."""
    verdict = judged(*looped()).as_dict() | TIMED
    verdict |= {"step_ms": 8.0, "findings": [finding("data", 6), finding("h2d", 7)], "harmless": []}
    ran = answering(monkeypatch, verdict, ANSWER)
    about, asked = {"gpu": "NVIDIA H200", "date": "2026-11-29T12", "commit": "1"}, []
    provenance = lambda device, command: asked.append(command) or about | {"command": command}  # noqa: E731
    monkeypatch.setattr(runner.results, "provenance", provenance)
    stages, write = [], runner.write

    def written(file, about, outcomes):
        write(file, about, outcomes)
        stages.extend(outcome.read(file)[1])

    monkeypatch.setattr(runner, "write", written)
    runner.main(runner.Options(folder, results=folder / "kept", keep=folder / "reports"))
    out = capsys.readouterr().out
    assert sorted(each[0] for each in ran) == ["doctor"] * 3 + ["fix"] + ["plain"] * 3 and "absent" in out and "77f55b9" in out
    assert all("--tiny" not in each and each[-2:] == ["main.py", "--x"] for each in ran if each[0] != "fix")
    about, (kept,) = outcome.read(folder / "kept" / "wild-nvidia-h200.json")
    assert [(each.found, each.patched, each.plain_ms, each.holds) for each in stages] == [
        (["6", "7"], ["loader: data main.py:6"], [8.0] * 3, holds) for holds in (None, True)
    ]
    assert (kept.start_s, kept.seconds) == (6.0, 9.0) and kept.proof_s is not None
    assert len(asked) == 1 and about["gpu"] == "NVIDIA H200" and kept.missed == ["9"] and kept.largest
    assert kept.steps_ms == [8.0] * 3 and kept.beside_plain == 1.0 and kept.as_plain
    assert kept.expected == [0.75] * 3 and kept.saved == (0.75, 0.75) and kept.foreseen and kept.faster
    assert {file.name for file in (folder / "reports").iterdir()} == {
        "a-doctor-1.json", "a-doctor-2.json", "a-doctor-3.json", "a-doctor.html", "a-fix.json", "a-steps.json",
    }  # fmt: skip
    assert "2 of 3" in out and "1.000: yes" in out and "75.0 (75.0 to 75.0) / 75.0 (75.0 to 77.8) % = 1.00: yes" in out


def test_a_proof_that_is_ended_leaves_the_verdict_and_the_runs_until_then(folder, monkeypatch, capsys):
    verdict = judged(*looped()).as_dict() | TIMED | {"step_ms": 8.0, "findings": [finding("data", 6)], "harmless": []}
    answering(monkeypatch, verdict, ANSWER | {"proof": LATE})
    runner.main(runner.Options(folder))
    out = capsys.readouterr().out
    assert "1 of 3 " in out and "unproven: ended; before [8.0], after [8.0] ms" in out and "8.00 (8.00 to 8.00) ms" in out


def test_steps_alone_are_compared_without_a_proof(folder, monkeypatch, capsys):
    verdict = judged(*looped()).as_dict() | TIMED | {"step_ms": 8.0, "findings": [finding("data", 6)], "harmless": []}
    ran = answering(monkeypatch, verdict, ANSWER)
    runner.main(runner.Options(folder, rounds=4, steps_only=True))
    out = capsys.readouterr().out
    assert sorted(each[0] for each in ran) == ["plain"] * 4 + ["steps"] * 4 and "= 1.000: yes" in out
    assert "the first finding is the largest loss (wanted 90 %): 1" not in out, "such verdicts are not alone while they record"
    for more in ({"results": folder}, {"dry_run": True}, {"rounds": 0}, {"eye": "profiler"}):
        with pytest.raises(SystemExit, match="steps-only: got it with"):
            runner.main(runner.Options(folder, steps_only=True, **more))


def test_a_plain_run_that_fails_costs_its_own_times_alone(folder, monkeypatch, capsys):
    verdict = judged(*looped()).as_dict() | TIMED | {"step_ms": 8.0, "findings": [finding("data", 6)], "harmless": []}
    answering(monkeypatch, verdict, ANSWER, steps=[])
    runner.main(runner.Options(folder))
    out = capsys.readouterr().out
    assert "1 of 3 " in out and "step 8.00 ms" in out and "losses the same" in out


def test_only_the_steps_that_the_doctor_timed_are_compared():
    """A script that speeds up, and a loop of 16 steps, of which the doctor's windows hold whole rounds."""
    phases = {"warm-up": {"steps": 10}, "plain": {"steps": 20}, "surveyed": {"steps": 32}, "timed": {"steps": 18, "drained": 2}}
    verdict = judged(*looped()).as_dict() | {"phases": phases, "period": 16, "plain_ms": 1.0}
    times = [float(step) for step in range(2, 100)]
    wanted = [*range(15, 31), *range(65, 81)]
    assert measure.mean_of(times, verdict) == sum(wanted) / len(wanted)
    assert measure.mean_of(times[:70], verdict) is None, "it ended before"
    assert measure.mean_of(times, verdict | {"plain_ms": None}) == sum(range(65, 81)) / 16
    assert measure.mean_of(times, verdict | {"phases": {}}) is None


def test_what_a_program_has_started_is_ended_with_it(tmp_path, monkeypatch):
    def late(program, timeout):
        while not (file := tmp_path / "child").exists() or not file.read_text().strip():
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("sh", timeout)

    with pytest.raises(subprocess.TimeoutExpired), monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "communicate", late)
        measure.ran_within(0.0, ["sh", "-c", "sleep 300 & echo $! > child; wait"], tmp_path)
    child = Path(f"/proc/{int((tmp_path / 'child').read_text())}/stat")
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] not in "ZX":
        time.sleep(0.01)
    assert measure.ran_within(300.0, ["sh", "-c", "echo out; echo why >&2; exit 3"], tmp_path) == (3, "out\n", "why\n")


def test_a_saving_that_scatters_is_neither_as_expected_nor_not():
    def foreseen(expected: list[float], after_ms: list[float]) -> bool | None:
        return Outcome("a", expected=expected, before_ms=[10.0] * 3, after_ms=after_ms).foreseen

    assert foreseen([0.1], [9.1, 9.0, 8.95]) and foreseen([0.5], [5.2, 5.5, 5.0])
    assert foreseen([0.5], [6.0, 6.1, 6.2]) is False and foreseen([0.2, 0.5, 0.9], [5.2, 5.5, 5.0]), "medians are compared"
    assert foreseen([0.03], [8.0, 8.8, 9.9]) is None and foreseen([0.03], [8.0, 8.8, 9.6]) is False


def test_a_step_differs_if_its_runs_differ_significantly():
    def of(steps_ms: list[float], plain_ms: list[float]) -> Outcome:
        return Outcome("a", steps_ms=steps_ms, plain_ms=plain_ms)

    three, four = of([10.1, 10.2, 10.4], [6.6, 9.4, 9.6]), of([10.1, 10.2, 10.3, 10.4], [9.2, 9.3, 9.4, 9.5])
    assert three.p_value == 2 / 20 and three.as_plain is None, "three runs a side show no difference, however large"
    assert four.p_value == 2 / 70 and four.as_plain is False
    assert of(four.plain_ms, four.steps_ms).as_plain is False, "shorter steps differ, too"
    assert of([10.1, 9.3, 10.3, 9.4], [9.2, 10.2, 10.4, 9.5]).as_plain and of([8.0], [8.0]).p_value == 1.0
    assert outcome.p_value_of([three, three]) == 2 / 20**2, "two scripts show together what neither does alone"
    assert outcome.p_value_of([three, of(three.plain_ms, three.steps_ms)]) == 1.0
    (line,) = [line for line in sums([three, four]) if "geometric mean of 2: 1.09" in line]
    assert "(p = 0.001)" in line


def test_scripts_are_begun_together_and_proven_after_their_verdicts(folder, monkeypatch):
    began, meeting = [], threading.Barrier(2)

    def named(how, script, number, tell):
        began.append((script.name, number))
        if not meeting.broken:
            meeting.wait(timeout=60)
        tell(Outcome(script.name))
        return Outcome(script.name)

    monkeypatch.setattr(Measurement, "named", named)
    monkeypatch.setattr(Measurement, "proven", lambda how, script, number, *_: began.append(("proof", number)))
    monkeypatch.setattr(runner, "scripts", lambda: {name: replace(SCRIPT, name=name, at="a") for name in "abcd"})
    runner.main(runner.Options(folder, processes=2))
    numbers = [measure.NUMBERS * script for script in range(4)]
    for names, (one, two), some in (("ab", numbers[:2], began[:4]), ("cd", numbers[2:], began[4:])):
        assert sorted(some[:2]) == [(names[0], one), (names[1], two)] and sorted(some[2:]) == [("proof", one), ("proof", two)]
    meeting.abort()
    runner.main(runner.Options(folder, only=("b", "a"), processes=1))
    assert [name for name, _ in began[8:]] == ["b", "proof", "a", "proof"], "a run that is cut short has all of the first"
    with pytest.raises(SystemExit, match="only: got 'e', wanted some of a, b"):
        runner.main(runner.Options(folder, only=("a", "e")))


def test_a_dry_run_is_small_and_times_nothing(folder, monkeypatch, capsys):
    verdict = judged(*looped()).as_dict() | {"step_ms": None, "findings": [finding("h2d", 7)], "harmless": [], "phases": {}}
    untimed = {"speedup": None, "before_ms": [], "after_ms": [], "holds": True, "faster": False}
    ran = answering(monkeypatch, verdict, ANSWER | {"expected_ms": None, "proof": untimed})
    runner.main(runner.Options(folder, dry_run=True))
    assert [each[0] for each in ran] == ["doctor", "fix"] and ran[0][-1] == "--tiny" and "--dry-run" in ran[0]
    assert "1 of 2 stalls; missed 9" in capsys.readouterr().out
    answering(monkeypatch, verdict, ANSWER, code=3)
    runner.main(runner.Options(folder, dry_run=True))
    assert "exit code 3: why" in capsys.readouterr().out
    answering(monkeypatch, verdict, ANSWER | {"patched": [{}]})
    runner.main(runner.Options(folder, dry_run=True))
    assert "KeyError: 'patch'" in capsys.readouterr().out, "what one script's programs leave out ends no survey"
    runner.main(runner.Options(folder, dry_run=True, budget=0.0))
    assert "not begun" in capsys.readouterr().out


def test_a_table_of_outcomes_names_what_is_apart(tmp_path):
    proof = {"expected": [0.5], "before_ms": [8.0], "after_ms": [3.0], "holds": True, "faster": True}
    good = Outcome(
        "vae", ["95"], [], [], "data main.py:95", True, [8.0], [7.9, 8.1, 8.0], patched=["loader"], findings=1, **proof
    )
    good = replace(good, seconds=9.0)
    late = Outcome(
        "dcgan",
        ["1"],
        ["2"],
        ["main.py:3 sync"],
        "sync main.py:3",
        False,
        [8.0] * 4,
        [5.0] * 4,
        seconds=50.0,
        findings=2,
        holds=False,
    )
    lines = table([good, late, Outcome("ppo", failed="exit code 2: no module")])
    assert len({len(line) for line in lines}) == 1 and "not the largest" in lines[3]
    assert "50.0 (50.0 to 50.0) / 62.5 (62.5 to 62.5) % = 0.80: no" in lines[2]
    assert "8.00 (8.00 to 8.00) / 8.00 (7.90 to 8.10) ms = 1.000: yes" in lines[2] and "= 1.600: no" in lines[3]
    assert "losses differ" in lines[3] and "no module" in lines[4]
    outcome.write(
        tmp_path / "wild-gpu.json", {"gpu": "GPU", "torch": "2", "date": "2026-11-29", "commit": "1", "command": "c"}, [good]
    )
    assert "## The doctor on public scripts, GPU" in outcome.section(tmp_path) and "= 0.80: no" in outcome.section(tmp_path)
    scattered = replace(good, steps_ms=[1.0, 9.5, 99.0], plain_ms=[5.0, 8.0, 10.0])
    assert scattered.as_plain is None and "= 1.188: not decided, p = 1.00" in outcome.step_of(scattered)
    assert "step further from the plain one, not significantly: vae (p = 1.00)" in sums([scattered])
    assert "step within 5 % of the plain one: 1 of 2 scripts" in sums([good, scattered]), "what is not decided is not the same"
    text = "\n".join(sums([good, late]))
    assert "2 of 3" in text and "1 of 3" in text and text.count("1 of 2 scripts") == 4 and "0 of 1 scripts" in text


def test_what_another_tool_names_is_kept_beside(folder, monkeypatch, capsys):
    monkeypatch.setattr(measure, "ran_within", lambda *_: (0, "[[9, 9]]\n", ""))
    about = {"gpu": "GPU", "torch": "2", "date": "2026-11-29T12", "commit": "1"}
    monkeypatch.setattr(runner.results, "provenance", lambda device, command: about | {"command": command})
    outcome.write(folder / "wild-gpu.json", about | {"command": "c"}, [Outcome("vae", ["95"])])
    runner.main(runner.Options(folder, eye="profiler", results=folder))
    kept, (vae,) = outcome.read(folder / "wild-gpu.json")
    assert kept["peers"] == {"profiler": {"found": 1, "stalls": 3, "wrong": 0}} and vae.found == ["95"]
    assert "| profiler | 1 of 3 | 0 |" in outcome.section(folder)


def test_outcomes_of_several_runs_are_merged(tmp_path, monkeypatch):
    monkeypatch.setattr(outcome, "FOLDER", tmp_path / "results")
    about = {"gpu": "GPU", "torch": "2", "date": "2026-11-29T12", "commit": "1", "command": "c"}
    vae, mnist = Outcome("vae", ["95"], steps_ms=[8.0]), Outcome("mnist", failed="no verdict")
    outcome.write(tmp_path / "wild-gpu.json", about, [mnist, vae])
    outcome.main([str(tmp_path / "wild-gpu.json")])
    later = about | {"date": "2026-11-30T12", "commit": "2"}
    outcome.write(tmp_path / "wild-gpu.json", later, [Outcome("vae", failed="not begun"), Outcome("mnist", ["38"])])
    outcome.main([str(tmp_path / "wild-gpu.json")])
    _, kept = outcome.read(tmp_path / "results" / "wild-gpu.json")
    assert [(each.name, each.found, each.commit) for each in kept] == [("vae", ["95"], "1"), ("mnist", ["38"], "2")]


UNWAITED = """
import fcntl, json
from benchmarks.doctor_wild import alone
lockf = fcntl.lockf
alone.fcntl.lockf = lambda file, how, *part: lockf(file, how if how == fcntl.LOCK_UN else how | fcntl.LOCK_NB, *part)
turn = alone.Turn(*json.loads({!r}))
{}
"""


@pytest.mark.slow
def test_one_is_measured_while_no_other_starts(tmp_path):
    files = [str(tmp_path / "lock"), str(tmp_path / "notes")]

    def may(then: str, number: int = 9) -> bool:
        """Whether another process may start now, and then may do so, without waiting."""
        program = UNWAITED.format(json.dumps([files[0], str(tmp_path / "others"), number]), then)
        ran = subprocess.run([forked.python(), "-c", program], capture_output=True, text=True)
        assert ran.returncode == 0 or "BlockingIOError" in ran.stderr
        return ran.returncode == 0

    timed = "turn.at = 1; turn.stepped()"
    first = alone.Turn(*files, 1, at=2)
    first.stepped()
    assert may("") and not may(timed), "several may start, and none is measured while another does"
    first.stepped()
    assert not may("") and Path(files[0]).read_text() == str(os.getpid())
    first.measured()  # it reports while others start
    assert may("") and not may(timed)
    assert not Path(files[0]).read_text(), "the next one waits for the end of nobody"
    noted = json.loads((tmp_path / "notes" / "notes.json").read_text())
    assert noted["first"] == first.first > 0 and noted["waited"] == first.waited >= 0 and noted["start"] == first.start >= 0
    first._lock(fcntl.LOCK_UN, alone.ROOM)
    assert may(timed, number=2)
    first._lock(fcntl.LOCK_EX, alone.ORDER + 1)  # as before it is measured
    assert may(timed, number=3) and not may(timed, number=2), "runs of one script are measured in their order"
    os.close(first.file)  # as when the process has ended
    assert may(timed, number=2) and first.file >= alone.LAST


def test_a_process_has_ended_when_its_threads_have():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not alone.has_ended(child.pid) and not alone.has_ended(os.getpid())
        child.kill()
        while not alone.has_ended(child.pid):  # its files are closed, also before anybody asks for its exit code
            time.sleep(0.01)
    assert alone.has_ended(child.pid)


@pytest.mark.slow
def test_the_next_one_waits_for_the_end_of_the_last(tmp_path, monkeypatch):
    (tmp_path / "lock").write_text("1")
    turn = alone.Turn(str(tmp_path / "lock"), str(tmp_path / "notes"), 1, at=1)
    asked = []
    monkeypatch.setattr(alone, "has_ended", lambda process: asked.append(process) or len(asked) == 3)
    turn.stepped()
    assert asked == [1, 1, 1] and turn.waited >= alone.SETTLED_S
    turn.measured()
    next_one = alone.Turn(str(tmp_path / "lock"), str(tmp_path / "next"), 2, at=1)
    next_one.stepped()
    assert len(asked) == 3 and next_one.waited >= alone.SETTLED_S, "after one that goes on later, it begins as long afterwards"
    os.close(turn.file)
    os.close(next_one.file)


SCRIPT_TEXT = (
    "import torch\nw = torch.zeros(2, requires_grad=True)\n"
    "opt, other = torch.optim.SGD([w], lr=0.1), torch.optim.SGD([w], lr=0.1)\n"
    "for step in range(40):\n    w.sum().backward()\n    opt.step()\n    other.step()\n"
)


def test_a_run_takes_its_turn_before_its_timed_steps_if_it_has_any(tmp_path, monkeypatch):
    script = tmp_path / "main.py"
    script.write_text(SCRIPT_TEXT)
    (tmp_path / "number").write_text("7")
    monkeypatch.setattr(prove, "RUN", prove.RUN)
    monkeypatch.chdir(tmp_path)
    did, turns, turn = [], [], alone.Turn
    monkeypatch.setattr(alone, "Turn", lambda *args: turns.append(turn(*args)) or turns[-1])
    monkeypatch.setattr(
        alone.fcntl, "lockf", lambda file, how, length, part: did.append((how, part, len(turns) and turns[-1].steps))
    )
    own = alone.ORDER + 7
    started = [(fcntl.LOCK_EX, alone.QUEUE), (fcntl.LOCK_SH, alone.ROOM), (fcntl.LOCK_UN, alone.QUEUE), (fcntl.LOCK_EX, own)]
    timed = [
        (fcntl.LOCK_UN, alone.ROOM),
        (fcntl.LOCK_SH, alone.QUEUE),
        (fcntl.LOCK_SH, own - 1),
        (fcntl.LOCK_UN, own - 1),
        (fcntl.LOCK_EX, alone.TURN),
        (fcntl.LOCK_EX, alone.ROOM),
    ]
    for deterministic in (False, True):
        did.clear()
        turns.clear()
        job = prove.SeededJob(str(script), [], {}, str(tmp_path / "result"), deterministic=deterministic, warmup=30, steps=0)
        job.save(tmp_path / "job.json")
        assert alone.main([str(tmp_path / "lock"), "", "", "run", str(tmp_path / "job.json")]) == 0
        assert did == [(*each, 0) for each in started] + [(*each, 30 - alone.BEFORE) for each in timed if not deterministic]
    assert len(json.loads((tmp_path / "result").read_text())["losses"]) == 40
    assert json.loads((tmp_path / "notes.json").read_text())["waited"] >= 0
    assert alone.main([str(tmp_path / "lock"), "fix", "1", "fix", str(tmp_path / "absent.json")]) == 2
    assert prove.RUN[1] == str(tmp_path / "lock"), "its runs take turns, not the process that starts them"


@pytest.mark.slow
@pytest.mark.parametrize("known", [20, None])
def test_a_plain_run_is_python_s_and_makes_the_steps_of_the_doctor_s(tmp_path, known):
    """The script has the name, arguments and folder that python gives it, and nothing of this library."""
    (tmp_path / "beside.py").write_text("")
    own = "__name__ == '__main__' and sys.argv == ['main.py', '--x'] and 'gpubound' not in sys.modules"
    (tmp_path / "main.py").write_text(f"import sys, beside\nassert {own}\n{SCRIPT_TEXT}")
    if known is not None:
        (tmp_path / "doctor-1").mkdir()
        (tmp_path / "doctor-1" / "timed.json").write_text(str(known))
    command = [
        sys.executable,
        "-m",
        "benchmarks.doctor_wild.alone",
        "lock",
        "plain",
        "2",
        "plain",
        "doctor-1",
        "main.py",
        "--x",
    ]
    folders = os.pathsep.join(filter(None, (str(Path(alone.__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": folders}, check=True, capture_output=True)
    wanted = 40 if known is None else min(int(alone.MORE * known), 40)
    assert len(json.loads((tmp_path / "plain" / "steps.json").read_text())) == wanted - 1, "of the first optimizer alone"


@pytest.mark.parametrize(
    "name, wanted", [("doctor", ["sampled", "measured", "located"]), ("steps", ["measured", "sampled", "located"])]
)
def test_the_doctor_gives_the_machine_back_when_it_has_measured(tmp_path, monkeypatch, name, wanted):
    did: list[str] = []
    monkeypatch.setattr(alone.Turn, "measured", lambda turn: did.append("measured"))
    for phase, begun in ((located.SampledPhase, "sampled"), (located.LocatedPhase, "located")):
        monkeypatch.setattr(phase, "begin", lambda _, begun=begun: did.append(begun))

    def command(argv: list[str]) -> int:
        assert argv[0] == "doctor" and argv[-1] == "main.py"
        located.SampledPhase.begin(None)
        located.LocatedPhase.begin(None)
        return 2

    monkeypatch.setattr(cli, "main", command)
    assert alone.main([str(tmp_path / "lock"), str(tmp_path / "doctor-1"), "1", name, "main.py"]) == 2
    assert did == wanted and (tmp_path / "doctor-1" / "timed.json").read_text() == "0"


def test_runs_that_take_turns_are_noted_and_start_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = partial(alone.noted, 3, lambda *_: prove.SeededRun(7.0, ()))
    job = prove.SeededJob("main.py", [], {}, "")
    for each in (job, replace(job, deterministic=True), replace(job, dry=True)):
        assert run(each, "before", tmp_path, 0).step_ms == 7.0
    (noted,) = map(json.loads, (tmp_path / alone.RUNS).read_text().splitlines())
    assert noted == {"side": "before", "step_ms": 7.0} and (tmp_path / "number").read_text() == "3"
    assert [alone.together(dict, dry=dry)["at_once"] for dry in (False, True)] == [alone.AT_ONCE, 1]


def test_a_peer_is_scored_by_the_lines_or_functions_that_it_names():
    result = score_peer(SCRIPT, "sync_debug_mode", [(9, 9), (12, 12), (30, 30)])
    assert result.found == (9,) and result.missed == (6, 7) and result.wrong == ("main.py:30",)
    assert score_peer(SCRIPT, "profiler", [(5, 14)]).found == (7, 9), "it does not see why a loader is slow"
    assert score_peer(SCRIPT, "torchfix", [(6, 6)]).found == (6,)
    loader = score_peer(replace(SCRIPT, loaders=(2,)), "torchfix", [(2, 2)])
    assert loader.found == (6, 7) and not loader.wrong, "a linter names the loader, not the lines that wait for it"


def test_the_functions_that_wait_in_a_trace(tmp_path):
    script = tmp_path / "main.py"
    script.write_text("def outer():\n    inner()\n\n\ndef inner():\n    read()\n")

    def event(name, ts, dur, cat):
        return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat}

    frames = [event("main.py(1): outer", 0, 100, "python_function"), event("main.py(5): inner", 10, 50, "python_function")]
    waits = [event("cudaStreamSynchronize", 20, 5, "cuda_runtime"), event("cudaLaunchKernel", 70, 5, "cuda_runtime")]
    assert waiting_functions(script, [*frames, *waits]) == {(5, 6)}
    outside = [event("cudaStreamSynchronize", 200, 5, "cuda_runtime")]
    assert not waiting_functions(script, [*frames, *outside])


def test_a_peer_runs_the_script_until_its_steps_are_over(tmp_path, monkeypatch):
    script = tmp_path / "main.py"
    script.write_text(
        "import torch\nw = torch.zeros(2, requires_grad=True)\nopt = torch.optim.SGD([w], lr=0.1)\n"
        "for step in range(1000):\n    opt.step()\nraise SystemExit('not stopped')\n"
    )
    seen = []
    peers.steps_of(script, [], 5, lambda: seen.append("begin"), lambda: seen.append("end"))
    assert seen == ["begin", "end"]
