"""`gpubound fix`: patches from a doctor.json, without a second run for a diff."""

import json
from pathlib import Path

import pytest

from gpubound.cli import main
from gpubound.doctor.fix import prove
from gpubound.doctor.record import run as recording
from gpubound.watch.pretend import simgpu

from .test_cli_doctor_prove import READS, run_here

PATCHED = READS.replace("loss.item()", "loss.detach().to(torch.float64, copy=True)").replace(
    "print(total)", "print(float(total))"
)


@pytest.fixture
def script(tmp_path, monkeypatch) -> Path:
    """A script with its doctor.json, after which no measurement is possible."""
    monkeypatch.chdir(tmp_path)
    simgpu()
    path = tmp_path / "train.py"
    path.write_text(READS)
    assert main(["doctor", "--dry-run", "train.py"]) == 0
    monkeypatch.setattr(recording, "measure_script", None)
    monkeypatch.setattr(prove, "run_once", run_here)
    return path


def test_a_diff_needs_no_second_run(script, capsys):
    capsys.readouterr()
    assert main(["fix"]) == 0
    assert "+    total += loss.detach()" in capsys.readouterr().out and script.read_text() == READS


@pytest.mark.slow
def test_what_is_tried_is_written_if_the_losses_are_the_same(script, capsys):
    capsys.readouterr()
    assert main(["fix", ".doctor/doctor.json", "--try", "--rounds", "3", "--apply", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["applied"] and answer["proof"]["difference"] == 0 and answer["proof"]["losses"] > 10
    assert [(each["file"], each["patch"]) for each in answer["patched"]] == [("train.py", "reads")] and answer["refused"] == []
    assert script.read_text() == PATCHED


def test_a_line_that_was_changed_since_is_refused(script, capsys):
    script.write_text(READS.replace("total += loss.item()", "total += loss.item() / 2"))
    capsys.readouterr()
    assert main(["fix", "--apply", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["diff"] == "" and "changed since" in answer["refused"][0]["reason"]


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("gpubound doctor trace.json", "no script"),
        ("", "no script"),
        ("gpubound doctor train.py --hub-token ...", "secret"),
    ],
)
def test_a_command_that_cannot_be_run_again(script, capsys, command, part):
    file = Path(".doctor/doctor.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"command": command}))
    assert main(["fix", "--try"]) == 2 and part in capsys.readouterr().err


def test_options_are_checked(script, capsys):
    assert main(["fix", "--also", "tf23"]) == 2 and "tf32" in capsys.readouterr().err
    assert main(["fix", "--try", "--rounds", "2"]) == 2 and "3" in capsys.readouterr().err
