"""Commands answer help, a mistyped option and a missing file before torch is imported, which takes seconds."""

import os
import subprocess
import sys

import pytest

from gpubound import cli

CODE = """
import contextlib, io, sys
from gpubound.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
    codes = [main(line.split()) for line in sys.argv[1:]]
    loaded = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
print(codes, loaded, err.getvalue().count("Traceback"))
"""
FILES = {  # command -> what names a file that is not there
    "train": ["nowhere.yaml", "nowhere.yaml --steps 3"],
    "plan": ["nowhere.yaml"],
    "generate": ["nowhere --prompt x", ". --file nowhere.txt"],
    "doctor": ["nowhere.py --epochs 3", "nowhere.json"],
    "place": ["nowhere"],
    "report": ["nowhere"],
}


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_options_are_read_before_torch_is_imported(command, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("steps: 3\nlora: {rank: 4}\n")
    mistyped = ["--no-such-option 1", *([f"{config} --no-such-option 1"] if command in ("train", "plan") else [])]
    lines = ["--help", *mistyped, *FILES.get(command, [])]
    argv = [f"{command} {line}" for line in lines]
    done = subprocess.run([sys.executable, "-c", CODE, *argv], capture_output=True, text=True, check=True)
    assert done.stdout == f"{[0] + [2] * (len(lines) - 1)} [] 0\n", done.stderr


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
