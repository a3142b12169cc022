"""The docstrings name every field and every kind of doctor.json, and the examples of the skill are commands that parse."""

import re
import shlex
from inspect import cleandoc
from pathlib import Path

import pytest
import yaml

from gpubound.cli import arguments
from gpubound.cli.doctor import Doctor, check_command, split
from gpubound.doctor import finding
from gpubound.doctor.finding import Finding, Verdict

from .verdicts import judged, looped

SKILL = Path(__file__).parents[2] / "examples/skills/gpubound-doctor/SKILL.md"


def documented(docstring: str | None) -> dict[str, str]:
    """The names at the beginning of a docstring's lines, each with the text that follows it."""
    rows = re.findall(r"^(?!\s)([a-z_, ]+?)  +(\S.*(?:\n +.*)*)", cleandoc(docstring or ""), re.MULTILINE)
    return {name: text for names, text in rows for name in names.split(", ")}


def test_every_field_is_documented():
    verdict = judged(*looped()).as_dict()
    assert set(documented(Verdict.__doc__)) == set(verdict)
    fields = documented(Finding.__doc__)
    assert set(fields) == set(verdict["findings"][0])
    site = next(each["site"] for each in verdict["findings"] if each["site"])
    assert {"file", "line", "end", "function", "code"} == set(site) == set(re.findall(r"`(\w+)`", fields["built"]))


def test_every_kind_is_documented():
    section = (finding.__doc__ or "").partition("**Kinds.**")[2]
    assert set(re.findall(r"`(\w+)`", section)) == set(finding.KINDS)


BLOCKS = re.findall(r"^```yml\n(.*?)^```", SKILL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


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
