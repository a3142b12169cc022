"""The layers that `lora.add` adapts: the output layer of a plain module is left out, and a pattern cannot run for minutes."""

import json

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound.errors import DataError

from ..place.models import tiny
from .cases import adapted

VOCABULARY = 50


class Nano(nn.Module):
    """A GPT of one's own, without `get_output_embeddings`."""

    def __init__(self, tied):
        super().__init__()
        block = nn.ModuleDict({"c_attn": nn.Linear(16, 48), "c_proj": nn.Linear(16, 16), "c_fc": nn.Linear(16, VOCABULARY)})
        tables = {"wte": nn.Embedding(VOCABULARY, 16), "wpe": nn.Embedding(8, 16)}
        self.transformer = nn.ModuleDict({**tables, "h": nn.ModuleList([block])})
        self.lm_head = nn.Linear(16, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.transformer["wte"].weight


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "change", [lambda model: gb.lora.add(model, rank=4), lambda model: gb.lora.quantize_base(model, "int8")]
)
def test_the_output_layer_of_a_plain_module_is_left_out(tied, change):
    assert change(Nano(tied)) == [f"transformer.h.0.{name}" for name in ("c_attn", "c_proj", "c_fc")]


def test_a_tied_target_is_refused_with_names_that_can_be_adapted():
    with pytest.raises(ValueError, match=r"targets=\['c_attn', 'c_fc'\]"):
        gb.lora.add(Nano(tied=True), rank=4, targets=["lm_head", "c_attn", "c_fc"])


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(.*)*x", "(a|aa)*b", "(a?){40}a{40}", ".*.*.*.*.*.*q", "(" * 5000, "a{99999999999}"]
)
def test_a_pattern_that_backtracks_is_refused(pattern, tmp_path):
    with pytest.raises(ValueError):
        gb.lora.add(tiny(), rank=4, targets=pattern)
    gb.lora.save(adapted(tiny()), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"rank_pattern": {pattern: 4}}))
    with pytest.raises(DataError):
        gb.lora.load(tiny(), tmp_path)


@pytest.mark.parametrize(
    "pattern", [r".*\.(q|v)_proj", r".*layers.*attn.*q.*", r"model\.layers\.(\d+)\.(self_attn|mlp)\.\w+_proj"]
)
def test_a_usual_pattern_is_matched(pattern):
    added = gb.lora.add(tiny(), rank=4, targets=pattern)
    assert added and all("q_proj" in name or "v_proj" in name or "layers.*" not in pattern for name in added)


@pytest.mark.parametrize("change", [gb.lora.merge, gb.lora.remove, gb.lora.disable, gb.lora.enable])
def test_a_model_without_an_adapter_is_refused(change):
    with pytest.raises(ValueError, match=r"gb\.lora\.add"):
        change(tiny())
    model = adapted(tiny())
    gb.lora.remove(model)
    with pytest.raises(ValueError, match=r"gb\.lora\.add"):
        change(model)
    assert torch.isfinite(model(torch.ones(1, 2, dtype=torch.long)).logits).all()
