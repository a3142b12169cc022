"""Commands answer help, a mistyped option and a missing file before torch is imported, which takes seconds."""

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
