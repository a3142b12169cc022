"""docs/doctor-json.md names every field and every kind, and the examples of docs/skill.md are commands that parse."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from gpubound.cli import arguments
from gpubound.cli.doctor import Doctor, check_command, split
from gpubound.doctor.finding import KINDS
from tests.doctor.verdicts import judged, looped

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "doctor-json.md").read_text(encoding="utf-8")


def documented(heading: str) -> set[str]:
    """The names in the first column of the table under this heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_field_is_documented():
    verdict = judged(*looped()).as_dict()
    assert documented("The verdict") == set(verdict)
    assert documented("A finding") == set(verdict["findings"][0])
    site = next(each["site"] for each in verdict["findings"] if each["site"])
    row = next(line for line in PAGE.splitlines() if line.startswith("| `site`"))
    assert {"file", "line", "end", "function", "code"} == set(site) <= set(re.findall(r"`(\w+)`", row))


def test_every_kind_is_documented():
    section = PAGE.partition("## Kinds\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", section)) == set(KINDS)


BLOCKS = re.findall(r"^```yml\n(.*?)^```", (DOCS / "skill.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=["action", "pre-commit"])
def test_the_examples_for_ci_are_valid_and_run_the_doctor(block, tmp_path, monkeypatch):
    content = yaml.safe_load(block)
    lines = [step["run"] for job in content.get("jobs", {}).values() for step in job["steps"] if "run" in step]
    lines += [hook["entry"] for repository in content.get("repos", []) for hook in repository["hooks"]]
    (line,) = [line for line in lines if line.startswith("gpubound doctor")]
    command = split(shlex.split(line)[2:])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    options = arguments(Doctor, command.own, "doctor")
    check_command(options, command)
    assert command.target == "train.py" and options.dry_run and options.max_syncs_per_step == 0
