"""From a preset to a folder and back: a run trains, goes on where it was stopped, exports, and what it wrote is read again."""

import json

import pytest
import torch

import gpubound as gb
from gpubound.cli import main
from gpubound.errors import DataError
from gpubound.models.registry import family_of
from gpubound.models.richards import load_richards, save_richards
from tests.train.runs import assert_same, build_corpus, losses, recipe, train

from .test_decoding import greedy
from .test_model import made, reference_kernels  # noqa: F401


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return build_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.slow
def test_a_run_goes_on_and_exports(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gpubound.device.interpreted", lambda: False)
    once, records = train(recipe(corpus, tmp_path / "once", model="richards-tiny"))
    assert losses(records)[12] < losses(records)[1]
    train(recipe(corpus, tmp_path / "twice", model="richards-tiny"), until=6)
    again, _ = train(recipe(corpus, tmp_path / "twice", model="richards-tiny"), resume=True)
    assert_same(once, again)
    folder = once.export(tmp_path / "exported")
    read = family_of(str(folder)).load(folder)
    ids = torch.arange(24).view(2, 12)
    with once.best_weights(), torch.no_grad():
        torch.testing.assert_close(read.eval()(ids), once.model.eval()(ids).float(), rtol=1e-4, atol=1e-5)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"][0] == once.tokenizer.eos
    capsys.readouterr()
    prompt = once.tokenizer.encode("def main(")
    assert main(["generate", str(folder), "--prompt", "def main(", "--max-new-tokens", "8", "--ignore-eos", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["sequences"][0]
    assert written["tokens"] == greedy(read, torch.tensor(prompt), 8)


def test_the_table_of_a_placed_model_names_every_part(tmp_path, capsys):
    """On a CPU, in fp32: what a run and `gpubound place` print of the folder is the same table."""
    model = made(torch.float32, causal=False)
    rows = {row.module: row for row in gb.place(model, "cpu").rows}
    assert {name for name, m in model.named_modules() if m._parameters and not name.endswith("_proj")} <= rows.keys()
    assert rows["model.layers.1.self_attn"].kernel.endswith("rope_qkv; SDPA")
    assert {row.device for row in rows.values()} == {"cpu"} and {row.dtype for row in rows.values()} == {"float32"}
    assert main(["place", str(save_richards(model, tmp_path)), "--device", "cpu", "--json"]) in (0, 3)
    assert {row["module"] for row in json.loads(capsys.readouterr().out)["rows"]} == rows.keys()


@pytest.mark.parametrize("options", [{"tied": True}, {"causal": False, "rope": False}], ids=str)
def test_a_folder_holds_the_whole_model(options, tmp_path):
    model = made(torch.bfloat16, **options)
    read = load_richards(save_richards(model, tmp_path))
    assert read.config == model.config and next(read.parameters()).dtype == torch.bfloat16
    for (name, p), (other, q) in zip(model.named_parameters(), read.named_parameters(), strict=True):
        assert name == other and torch.equal(p, q)


@pytest.mark.parametrize(
    "change,named",
    [
        ({"layer": 2}, "layer is unknown; did you mean 'layers'"),
        ({"hidden": "24"}, "RichardsConfig: hidden: got '24', wanted a value of type int"),
        ({"causal": 1}, "RichardsConfig: causal: got 1, wanted a value of type bool"),
        ({"mlp": "swigul"}, "RichardsConfig: mlp: got 'swigul'; did you mean 'swiglu'"),
        ({"layers": 10**9}, "layers: got 1000000000"),
    ],
)
def test_a_config_that_was_changed(change, named, tmp_path):
    file = save_richards(made(torch.float32), tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DataError, match=f"^{file}: {named}"):
        load_richards(tmp_path)
