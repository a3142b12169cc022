"""A family that can be trained is a file in its folder and its name in TRAINABLE: a run asks it for everything else."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gpubound.errors import DataError
from gpubound.models import registry
from gpubound.models.llama import checkpoint as llama
from gpubound.models.registry import Sizes, family_of, is_named, presets
from gpubound.train.prepare import prepare
from gpubound.train.recipe import Recipe


class Bag(nn.Module):
    """Logits from a token alone."""

    def __init__(self, vocabulary, positions):
        super().__init__()
        self.table, self.positions = nn.Embedding(vocabulary, 16), positions

    def forward(self, input_ids):
        return self.table(input_ids) @ self.table.weight.T


@pytest.fixture
def bags(monkeypatch):
    """A family whose only model is "bag"; a folder of one holds bag.pt."""

    def save(model, folder, tokenizer, weights, overwrite=False):
        folder.mkdir(exist_ok=True)
        torch.save(dict(weights), folder / "bag.pt")
        return folder

    def load(folder, device, dtype=None):
        weights = torch.load(f"{folder}/bag.pt")
        model = Bag(len(weights["table.weight"]), 8).to(device)
        model.load_state_dict(weights)
        return model

    names = {"PRESETS": {"bag": None}, "MODELS": {"bag": None, "bag-tiny": None}}
    family = SimpleNamespace(
        **names,
        make=lambda name, vocabulary, positions, device: Bag(vocabulary, positions).to(device),
        reads=lambda folder: (folder / "bag.pt").exists(),
        load=load,
        save=save,
        sizes=lambda model: Sizes(model.table.num_embeddings, model.table.weight.numel(), 1, 0),
        table=lambda: ["bag  one table"],
    )
    monkeypatch.setitem(sys.modules, "gpubound.models.bag.checkpoint", family)
    monkeypatch.setattr(registry, "TRAINABLE", ("llama", "bag"))
    return family


def test_a_run_trains_and_exports_a_model_of_any_family(bags, tmp_path, monkeypatch):
    monkeypatch.setattr("gpubound.device.interpreted", lambda: False)
    (tmp_path / "book.txt").write_text("nothing like it, " * 300)
    common = {"data": (str(tmp_path / "book.txt"),), "vocabulary": 270, "device": "cpu", "seq": 8, "micro_batch": 2}
    run = prepare(Recipe(**common, model="bag", steps=3, out=str(tmp_path / "run")), progress=False)
    assert isinstance(run.model, Bag) and run.model.positions == 8
    losses = []
    run.go(lambda record: losses.append(record["loss"]))
    assert losses[-1] < losses[0]
    folder = run.export(tmp_path / "exported")
    again = prepare(
        Recipe(**common | {"tokenizer": str(tmp_path / "run" / "corpus")}, model=str(folder), out=str(tmp_path / "again")),
        progress=False,
    )
    assert torch.equal(again.model.table.weight, run.model.table.weight)


def test_names_and_folders_find_their_family(bags, tmp_path):
    assert presets()[-1] == "bag" and "10m" in presets() and is_named("bag-tiny") and is_named("10m-tiny")
    assert family_of("bag-tiny") is bags and family_of("10m") is llama
    assert not is_named(str(tmp_path)) and family_of(str(tmp_path)) is llama
    with pytest.raises(DataError, match=r"no config\.json"):
        llama.load(str(tmp_path), "cpu")
    (tmp_path / "bag.pt").write_text("")
    assert family_of(str(tmp_path)) is bags


def test_windows_that_only_the_config_has():
    """Masks of transformers hide by the config what the layers would see: their decoder is that of other models."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16}
    sizes |= {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "sliding_window": 8}

    def refusal(name, **options):
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes | options))
        return registry.reader_of(model).refusal(64)

    types = ["sliding_attention", "full_attention"]
    assert "layer 0 is of type 'sliding_attention'" in refusal("SmolLM3", layer_types=types, use_sliding_window=False)
    assert refusal("SmolLM3", layer_types=types, use_sliding_window=True) is None
    assert refusal("Mistral", sliding_window=0) == "its sliding_window is 0" and refusal("Mistral") is None
