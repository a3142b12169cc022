"""`gpubound place` by its output and exit codes."""

import json
import sys
import textwrap

import pytest

from gpubound import trace
from gpubound.cli import main
from gpubound.cli.place import call
from tests.messages import message

from .models import tiny


@pytest.fixture(autouse=True)
def a_module_of_the_users(tmp_path, monkeypatch):
    (tmp_path / "users.py").write_text(
        textwrap.dedent(
            """
            import torch
            from torch import nn

            def with_example():
                return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), torch.ones(3, 4)

            def without():
                return nn.Linear(2, 2)

            def refused():
                return nn.LayerNorm([2, 2]), torch.ones(2, 2, 2)

            def broken():
                return 1 / 0

            def no_model():
                return 7

            def three():
                return 1, 2, 3
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("users", None)


def place(*arguments):
    return main(["place", *arguments, "--device", "cpu"])


def test_a_function(capsys):
    assert place("users:with_example") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["module", "device", "dtype", "kernel", "fallbacks", "why"]
    assert lines[1].startswith("0       cpu     float32  reference layer_norm  0          verified: ")
    assert lines[2].split() == ["1", "cpu", "float32", "torch", "0", "unchanged"]
    assert ": reference kernels" in lines[3]


def test_json(capsys):
    assert place("users:with_example", "--json", "--no-fuse") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verified"] and found["swapped"] == 0 and [row["module"] for row in found["rows"]] == ["0", "1"]


def test_a_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trace, "_printed", set())
    tiny().save_pretrained(tmp_path / "weights")
    assert place(str(tmp_path / "weights"), "--strict") == 0
    assert "11 swapped, 0 refused" in capsys.readouterr().out
    (tmp_path / "weights" / "model.safetensors").unlink()
    assert place("weights", "--strict", "--dtype", "float32") == 0
    assert message("place/cli:a_folder").within(capsys.readouterr().err)


def test_a_family_without_sdpa(tmp_path, capsys):
    """transformers refuses to load it with any attention but the one it has."""
    tiny("gemma2").save_pretrained(tmp_path / "gemma2")
    assert place(str(tmp_path / "gemma2")) == 0
    assert message("place/cli:a_family_without_sdpa").within(capsys.readouterr().out)


def test_exit_codes(capsys):
    assert place("users:without") == place("users.py:without") == 3
    assert "not verified as a whole" in capsys.readouterr().out
    assert place("users:refused", "--strict") == 1
    assert capsys.readouterr().err.strip().splitlines()[-1] == message("place/cli:exit_codes.2")


SAID = {
    "users:broken": "users:broken raised ZeroDivisionError: division by zero",
    "users:three": "users:three returned a tuple of 3, wanted a model, or a model and an example batch.",
    "users:nothing": "users:nothing raised AttributeError: module 'users' has no attribute 'nothing'",
    "absent:f": "absent:f raised ModuleNotFoundError: No module named 'absent'",
    "nowhere": "target: got 'nowhere', wanted a folder with a config.json, MODULE:FUNCTION or FILE.py:FUNCTION.",
    "users:no_model": "model must be a torch.nn.Module, got int; pass the model itself.",
}


@pytest.mark.parametrize("target", SAID)
def test_bad_input(target, capsys):
    assert place(target) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"gpubound place: {SAID[target]}"


def test_help_has_an_example(capsys):
    assert main(["place", "--help"]) == 0
    assert "gpubound place path/to/checkpoint --json" in capsys.readouterr().out


def test_a_dtype_for_a_function_is_refused(capsys):
    """It had no effect, and nothing said so."""
    assert place("users:without", "--dtype", "bfloat16") == 2
    assert capsys.readouterr().err == message("place/cli:a_dtype_for_a_function_i")


@pytest.mark.parametrize("name", ["json", "configured_model"])
def test_a_file_may_hold_dataclasses_and_be_called_as_another_module(tmp_path, name):
    """A dataclass whose annotations are texts looks its module up."""
    path = tmp_path / f"{name}.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Config:\n    width: int = 8\n"
        "def build():\n    import json\n    return (lambda: json.dumps(Config().width)),\n"
    )
    (made,) = call(f"{path}:build")
    assert made() == "8"


@pytest.mark.parametrize("code", [0, 3])
def test_a_target_that_ends_the_process_is_told(tmp_path, code):
    """Code 0 would say that the model was placed, code 3 that it was not verified."""
    (tmp_path / "ends.py").write_text(f"raise SystemExit({code})")
    with pytest.raises(ValueError, match=rf"ends\.py:build raised SystemExit: {code}$"):
        call(f"{tmp_path / 'ends.py'}:build")
