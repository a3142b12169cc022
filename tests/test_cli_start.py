"""Commands answer help, a mistyped option and a missing file before torch is imported, which takes seconds."""

import json
import os
import subprocess
import sys

import pytest

from gpubound import cli

CODE = """
import contextlib, io, json, sys
from gpubound.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
    found = [(main(line.split()), [m for m in ("torch", "transformers", "numpy") if m in sys.modules]) for line in sys.argv[1:]]
print(json.dumps([found, err.getvalue().count("Traceback")]))
"""
FILES = {  # command -> what names a file that is not there
    "train": ["nowhere.yaml", "nowhere.yaml --steps 3"],
    "plan": ["nowhere.yaml"],
    "generate": ["nowhere --prompt x", ". --file nowhere.txt"],
    "doctor": ["nowhere.py --epochs 3", "nowhere.json"],
    "fix": ["nowhere.json --try"],
    "report": ["nowhere"],
    "serve": ["nowhere", ". --token-file nowhere", ". --max-batch 0", ". --host 0.0.0.0"],
}


@pytest.mark.slow
def test_options_are_read_before_torch_is_imported(tmp_path):
    """All in one process: the first command that imports torch is the first that is found with it."""
    config = tmp_path / "config.yaml"
    config.write_text("steps: 3\nlora: {rank: 4}\n")
    wanted = {}
    for command in cli.COMMANDS:
        mistyped = ["--no-such-option 1", *([f"{config} --no-such-option 1"] if command in ("train", "plan") else [])]
        wanted |= {f"{command} --help": 0, **{f"{command} {line}": 2 for line in (*mistyped, *FILES.get(command, []))}}
    done = subprocess.run([sys.executable, "-c", CODE, *wanted], capture_output=True, text=True, check=True)
    found, tracebacks = json.loads(done.stdout)
    assert dict(zip(wanted, found)) == {line: [code, []] for line, code in wanted.items()} and tracebacks == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "users", "wanted"),
    [
        ("train", {}, "passive"),
        ("train", {"OMP_WAIT_POLICY": "active"}, "active"),
        ("train", {"GOMP_SPINCOUNT": "10000"}, None),
        ("doctor", {}, None),
    ],
)
def test_threads_sleep_while_they_wait(command, users, wanted, monkeypatch, capsys):
    """Spinning, they take the cores from each other beside other processes; a script under the doctor runs as it is."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # or it would not be restored after the test
        monkeypatch.delenv(name)
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    assert cli.main([command, "nowhere.yaml"]) == 2
    assert os.environ.get("OMP_WAIT_POLICY") == wanted and "nowhere.yaml" in capsys.readouterr().err


def test_a_host_without_memory_is_one_sentence(capsys, monkeypatch):
    def full(argv):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 34359738368 bytes. Error code 12")

    assert cli.guarded("train", full, []) == 2
    line = "gpubound train: out of memory: the host has not 34.4 GB more; free some, or take shorter sequences, fewer at once, "
    assert capsys.readouterr().err == f"{line}or a smaller model.\n"
    with pytest.raises(RuntimeError, match="something else"):
        cli.guarded("train", lambda argv: (_ for _ in ()).throw(RuntimeError("something else")), [])


@pytest.mark.parametrize("command", ["init", "completion"])
def test_an_argument_that_is_one_of_a_few_is_asked_for(command, capsys):
    assert cli.main([command]) == 2
    assert capsys.readouterr().err.startswith(f"gpubound {command}: got nothing, wanted one of ")
