"""Any list of arguments to any command: an answer or one told mistake, never a traceback. No call here comes to do its work."""

import os
import subprocess
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from gpubound import cli
from gpubound.cli.demo import Demo
from gpubound.cli.env import Env
from gpubound.cli.generate import Generate
from gpubound.cli.place import PlaceOptions
from gpubound.cli.train_options import Train
from tests import drawn

# A GPU that no machine has: whatever else is right, the command ends there.
NOWHERE = ["--device", "cuda:99"]
OPTIONS = {
    command: [f"--{field.name.replace('_', '-')}" for field in fields(kind)]
    for command, kind in (("train", Train), ("demo", Demo), ("env", Env), ("generate", Generate), ("place", PlaceOptions))
} | {"report": ["--out", "--json", "-o"], "bench": ["--only", "--dry"]}
WORDS = [
    "", " ", "-", "--", "-1", "0", "1e400", "nan", "inf", "9" * 30, "9" * 5000, "None", "[/b]", "{}", "a\x1b[2J", "\udcff", "ü",
    "\0", "/", ".", "/dev/null", "no/such/file", "x:y", "os:getcwd", "cuda:99", "a=b", "--help", "--no-such", "a" * 300,
]  # fmt: skip


def call(argv, capsys):
    """(exit code, stderr); whatever the command raises is the test's failure."""
    code = cli.main(argv)
    return code, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("command", OPTIONS)
def test_no_arguments_end_in_a_traceback(command, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda called, **_: subprocess.CompletedProcess(called, 0))  # of bench
    words = st.sampled_from(OPTIONS[command]) | st.sampled_from(WORDS) | drawn.text(max_size=6)

    @settings(max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(words, max_size=4))
    def check(found):
        where = [] if command in ("report", "bench") else NOWHERE
        code, said = call([command, *found, *where], capsys)
        assert code in (0, 2, 3) and "Traceback" not in said
        assert code == 0 or said.strip(), "a mistake is told"
        assert not [name for name in os.listdir(tmp_path) if name != "runs"], "and nothing is written"

    check()


@pytest.mark.parametrize("word", WORDS, ids=lambda word: repr(word)[:12])
def test_a_word_that_is_no_command(word, capsys):
    code, said = call([word], capsys)
    assert code == (0 if word == "--help" else 2) and (code == 0 or said.startswith("gpubound: "))


def test_a_list_given_twice(capsys):
    """argparse would keep the second alone, and lose data."""
    code, said = call(["train", "--data", "a", "--model", "10m", "--data", "b"], capsys)
    assert code == 2 and "--data is given twice" in said and "after one --data" in said
    assert cli.arguments(Generate, ["c", "--prompt", "a", "--prompt", "b"], "generate").prompt == ("a", "b")  # which appends
