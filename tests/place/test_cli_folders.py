"""`gpubound place FOLDER` on folders that are damaged or not to be trusted: one sentence on stderr, exit code 2."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import save_file

from gpubound.cli import main
from tests.messages import message

from .models import tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model of a family with parts, one of another family, and one without weights."""
    home = tmp_path_factory.mktemp("folders")
    tiny().save_pretrained(home / "llama")
    tiny("phi3").save_pretrained(home / "phi3")
    shutil.copytree(home / "llama", home / "bare")
    (home / "bare" / "model.safetensors").unlink()
    return home


def config(**changes):
    def change(folder):
        about = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({k: v for k, v in (about | changes).items() if v != "(absent)"}))

    return change


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def lacking(folder):
    save_file({"model.norm.weight": torch.ones(32)}, folder / "model.safetensors", metadata={"format": "pt"})


WEIGHTS = {
    "truncated": truncated,
    "garbage": written("model.safetensors", b"\xff" * 999),
    "empty": written("model.safetensors", b""),
    "tensors missing": lacking,
    "another width": config(hidden_size=64),
    "another vocabulary": config(vocab_size=77),
    "more layers": config(num_hidden_layers=10**9),
}
CONFIGS = {
    "negative layers": config(num_hidden_layers=-1),
    "no heads": config(num_attention_heads=0),
    "null width": config(hidden_size=None),
    "a text for a number": config(intermediate_size="many"),
    "unknown dtype": config(dtype="float3", torch_dtype="float3"),
    "unknown family": config(model_type="nobody"),
    "no family": config(model_type="(absent)", architectures="(absent)"),
    "no JSON": written("config.json", b"{"),
    "a list": written("config.json", b"[1]"),
    "not UTF-8": written("config.json", b"\xff\xfe{"),
}
SIZES = {
    "a billion layers": config(num_hidden_layers=10**9),
    "a hundred terabytes": config(hidden_size=2**18, intermediate_size=2**24),
}
CASES = [
    *[pytest.param(kind, damage, id=f"{kind} {name}") for kind in ("llama", "phi3") for name, damage in WEIGHTS.items()],
    *[
        pytest.param(kind, damage, id=f"{kind} {name}")
        for kind in ("llama", "phi3", "bare")
        for name, damage in CONFIGS.items()
    ],
    *[pytest.param("bare", damage, id=f"bare {name}") for name, damage in SIZES.items()],
]


def test_a_model_larger_than_the_memory_is_never_allocated(folders, tmp_path, capsys):
    """Some systems grant 16 TiB and kill the process that fills them."""
    folder = tmp_path / "model"
    shutil.copytree(folders / "bare", folder)
    SIZES["a hundred terabytes"](folder)
    assert main(["place", str(folder), "--device", "cpu"]) == 2
    assert message("place/cli_folders:a_model_larger_than_the").within(capsys.readouterr().err)


@pytest.mark.parametrize("kind, damage", CASES)
@pytest.mark.filterwarnings("ignore")  # transformers' own, on its way to failing
def test_a_damaged_folder_is_one_sentence(kind, damage, folders, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(folders / kind, folder)
    damage(folder)
    assert main(["place", str(folder), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    said = [line for line in err.splitlines() if line.startswith("gpubound place: ")]
    assert len(said) == 1 and str(folder) in said[0] and "Traceback" not in err and not out


CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from transformers import LlamaConfig, LlamaForCausalLM
class TheirConfig(LlamaConfig):
    model_type = "theirs"
class TheirModel(LlamaForCausalLM):
    config_class = TheirConfig
"""


@pytest.mark.parametrize("kind", ["llama", "bare"])
def test_a_folders_python_runs_only_when_it_is_trusted(kind, folders, tmp_path, capsys, monkeypatch):
    """transformers would ask on stdout, where --json is read, and take the answer from stdin."""
    folder = tmp_path / "model"
    shutil.copytree(folders / kind, folder)
    (folder / "theirs.py").write_text(CODE)
    names = {"AutoConfig": "theirs.TheirConfig", "AutoModelForCausalLM": "theirs.TheirModel"}
    config(model_type="theirs", architectures=["TheirModel"], auto_map=names)(folder)
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert main(["place", str(folder), "--device", "cpu", "--json"]) == 2
    out, err = capsys.readouterr()
    assert not out and "--trust-remote-code" in err and not list(tmp_path.rglob("ran"))
