"""Scores on public scripts: what is found, missed and wrong."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

from benchmarks.doctor_wild import __main__ as runner, peers
from benchmarks.doctor_wild.peers import score_peer, waiting_functions
from benchmarks.doctor_wild.score import Script, score, scripts
from gpubound.doctor.finding import KINDS


def finding(kind: str, line: int, file: str = "main.py", end: int | None = None) -> dict:
    site = {"file": file, "line": line, "end": end or line}
    return {"kind": kind, "file": file, "line": line, "site": site, "built": None}


SCRIPT = Script("a", "", "", ".", "main.py --x", "", {6: ["data"], 7: ["h2d"], 9: ["sync"]}, (12,))


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
        assert script.stalls and script.file.endswith(".py") and script.repository.startswith("https://") and script.commit
        assert all(kind in KINDS for kinds in script.stalls.values() for kind in kinds)
        assert not set(script.stalls) & set(script.minor)


def test_the_runner_takes_a_folder_and_names_what_is_absent(tmp_path, monkeypatch, capsys):
    ran: list[str] = []

    def run(command, cwd, **_):
        ran.append(Path(cwd, "main.py").read_text())
        verdict = {"step_ms": None, "findings": [finding("h2d", 7)], "harmless": []}
        return subprocess.CompletedProcess(command, 0, json.dumps(verdict), "")

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "main.py").write_text("text")
    monkeypatch.setattr(runner, "scripts", lambda: {"a": SCRIPT, "b": replace(SCRIPT, name="b", commit="77f55b9")})
    monkeypatch.setattr(runner.subprocess, "run", run)
    runner.main(runner.Options(tmp_path, dry_run=True))
    out = capsys.readouterr().out
    assert ran == ["text"] and "1 of 2 stalls; missed 9" in out and "absent" in out and "77f55b9" in out


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
