"""Scores on public scripts: what is found, missed and wrong."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

from benchmarks.doctor_wild import __main__ as runner
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
