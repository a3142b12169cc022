"""Patches on disk and of a verdict: the diff of a repair, and files that are written whole or not at all."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gpubound.doctor.finding import Finding
from gpubound.doctor.fix.repair import Repair, Target, expected_ms, patched, repair
from gpubound.errors import DataError
from gpubound.watch.events import Site
from tests.messages import message, refusal

from .verdicts import judged, looped


def mended(folder: Path, text: str) -> Repair:
    """The repair of a text whose last line has a gradient that is filled with zeros."""
    path = folder / "train.py"
    path.write_bytes(text.encode())
    return repair([Target("zero_grad", str(path), len(text.rstrip("\n").split("\n")))])


def test_the_diff_is_one_that_git_applies(tmp_path):
    """Also beside what only str.splitlines takes for an end of a line."""
    above = "a('\u2028', '\x0c')\n\x0c\n"
    made = mended(tmp_path, above + "o.zero_grad(False) # here")
    (tmp_path / "doctor.patch").write_text(made.diff(tmp_path))
    assert made.diff(tmp_path).startswith("--- a/train.py\n+++ b/train.py\n@@ ")
    subprocess.run(
        ["git", "apply", "doctor.patch"],
        cwd=tmp_path,
        check=True,
        env={"GIT_CEILING_DIRECTORIES": str(tmp_path.parent), "PATH": "/usr/bin:/bin"},
    )
    assert (tmp_path / "train.py").read_bytes().decode() == above + "o.zero_grad() # here"


def test_a_file_that_changed_meanwhile_is_left_alone(tmp_path):
    made = mended(tmp_path, "o.zero_grad(False)  # here\n")
    path = tmp_path / "train.py"
    path.write_text("other = 1\n")
    assert refusal(DataError, lambda: made.apply()) == message("doctor/fix_files:a_file_that_changed_mean", path)
    assert path.read_text() == "other = 1\n"


def test_code_that_was_made_while_the_script_ran_has_no_file():
    target = Target("sync", "<string>", 1)
    assert repair([target]).refused == {target: "the file cannot be read (No such file or directory)"}


def test_a_line_that_changed_while_the_script_ran_is_left_alone(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("o.zero_grad(False)\no.zero_grad(False)  # new\n")
    first, second = (Target("zero_grad", str(path), line, "o.zero_grad(False)") for line in (1, 2))
    made = repair([first, second])
    assert list(made.patches) == [first] and made.changes[path][1] == b"o.zero_grad()\no.zero_grad(False)  # new\n"
    assert made.refused == {second: "the line was changed since the script ran; look for the findings again"}


def test_a_link_stays_a_link_and_a_program_a_program(tmp_path):
    path, link = tmp_path / "train.py", tmp_path / "link.py"
    path.write_text("o.zero_grad(False)\n")
    path.chmod(0o750)
    link.symlink_to(path)
    repair([Target("zero_grad", str(link), 1)]).apply()
    assert link.is_symlink() and path.read_text() == "o.zero_grad()\n" and path.stat().st_mode & 0o777 == 0o750


def test_files_are_written_all_or_none(tmp_path, monkeypatch):
    paths = [tmp_path / name for name in ("a.py", "b.py")]
    for path in paths:
        path.write_text("o.zero_grad(False)\n")
    made = repair([Target("zero_grad", str(path), 1) for path in paths])

    def full(handle, mode):
        if len(list(tmp_path.iterdir())) == 4:  # the second one
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left on device"):
        patch.setattr(os, "fchmod", full)
        made.apply()
    monkeypatch.setattr(os, "access", lambda path, mode: path != paths[1])
    with pytest.raises(DataError, check=message("doctor/fix_files:files_are_written_all_or")):
        made.apply()
    assert sorted(tmp_path.iterdir()) == paths and {path.read_text() for path in paths} == {"o.zero_grad(False)\n"}


SCRIPT = """\
import torch
total = 0.0
for step in range(9):
    optimizer.zero_grad(False)
    torch.cuda.synchronize()
    total += loss.item()
"""


def test_findings_get_their_patches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def found(kind: str, line: int | None) -> Finding:
        site = Site(str(script), line, "<module>", "", line) if line else None
        return Finding(kind, site, None, "", None, 1, 0.5, "replayed", "", "mend it")

    harmless = found("sync", 6)
    verdict = replace(
        judged(*looped()),
        findings=[found("zero_grad", 4), found("sync", 5), found("precision", 3), found("launch_bound", None)],
        harmless=[harmless],
    )
    after, made = patched(verdict)
    first, second, third, whole = (finding.patch for finding in after.findings)
    assert first.splitlines()[:2] == ["--- a/train.py", "+++ b/train.py"]
    assert message("doctor/fix_verdict:findings_get_their_patch").within(first) and "-    torch" not in first
    assert "-    torch.cuda.synchronize()\n" in second and "zero_grad()" not in second
    assert (third, whole) == ("", "") and list(after.harmless) == [harmless]
    assert made.changes[script][1].decode() == SCRIPT.replace("(False)", "()").replace("    torch.cuda.synchronize()\n", "")
    assert len(made.patches) == 2 and len(made.refused) == 1  # what has no line is no target
    assert expected_ms(replace(verdict, step_ms=10.0, together_ms=4.0), made) == 10.0 - 0.5 - 0.5
    assert expected_ms(replace(verdict, step_ms=10.0, together_ms=0.6), made) == 9.4, "their waits overlap"
    assert expected_ms(replace(verdict, step_ms=10.0, loader={"workers": 1, "ms": 10.0}), made) == 10.0, "the loader is late"
    assert expected_ms(replace(verdict, step_ms=None), made) is None
    asked, _ = patched(verdict, asked=["tf32"])
    assert "+torch.set_float32_matmul_precision" in asked.findings[2].patch
