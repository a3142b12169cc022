"""A merged model computes what it did, without its adapters' products; unmerged, its weights are bit for bit what they were."""

import copy

import pytest
import torch

import gpubound as gb
from gpubound.lora import layers
from gpubound.models import Decoder, DecoderConfig, load_hf, save_hf
from tests.messages import message, refusals

from ..place.models import assert_near, tiny, tokens
from .cases import adapted, adapted_layers, placed, records, refusal


def weights(model):
    values = {key: value.clone() for key, value in model.state_dict().items() if ".lora_" not in key}
    return {key.replace(".base_layer", ""): value for key, value in values.items()}


@pytest.mark.parametrize("make", [tiny, placed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_there_and_back(dtype, make):
    model = make(dtype=dtype)
    adapted(model)
    adapted(model, seed=5, name="second", targets=["q_proj"])
    before, want = weights(model), model(tokens()).logits
    error = gb.lora.merge(model)
    assert not any(layers.read(layer).adapters for layer in adapted_layers(model)), "nothing is left to multiply"
    got = model(tokens()).logits
    limit = 1e-5 if dtype == torch.float32 else 5e-2
    assert (got - want).norm() <= limit * want.norm()
    gb.lora.unmerge(model)
    assert all(torch.equal(value, before[key]) for key, value in weights(model).items())
    assert torch.equal(model(tokens()).logits, want)
    assert error < 1e-6 if dtype == torch.float32 else 1e-4 < error < 1e-1


def test_the_error_is_measured():
    """Half of bf16's last bit, added to ones, is lost whole."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, dtype=torch.bfloat16))
    gb.lora.add(model, 1)
    with torch.no_grad():
        model[0].base_layer.weight.fill_(1.0)
        model[0].lora_A["default"].weight.fill_(2.0**-9)
        model[0].lora_B["default"].weight.fill_(1.0)
    assert gb.lora.merge(model) == 1.0
    assert gb.lora.merge(model) == 0.0, "nothing is left to merge"


def test_one_after_the_other():
    model = adapted(tiny())
    adapted(model, seed=5, name="second")
    before, want = weights(model), model(tokens()).logits
    gb.lora.merge(model, "second")
    assert_near(model(tokens()).logits, want)
    gb.lora.merge(model)
    assert_near(model(tokens()).logits, want)
    gb.lora.unmerge(model)
    assert all(torch.equal(value, before[key]) for key, value in weights(model).items())


def test_one_that_is_off_is_not_merged():
    model = adapted(tiny())
    before = weights(model)
    with gb.lora.disable(model):
        gb.lora.merge(model)
    assert all(torch.equal(value, before[key]) for key, value in weights(model).items())


def test_a_copy_is_unmerged_on_its_own():
    model = adapted(tiny())
    before = weights(model)
    gb.lora.merge(model)
    other = copy.deepcopy(model)
    gb.lora.unmerge(other)
    assert all(torch.equal(value, before[key]) for key, value in weights(other).items())
    assert not torch.equal(weights(model)["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])


def test_what_would_be_lost_is_refused():
    model = adapted(tiny(), targets=["v_proj"])
    gb.lora.merge(model)
    name = "model.layers.0.self_attn.v_proj"
    assert refusal(lambda: gb.lora.remove(model)) == message("lora/merge:what_would_be_lost_is_re", name)
    assert refusal(lambda: gb.lora.disable(model)) == message("lora/merge:what_would_be_lost_is_re.2", name)
    with torch.no_grad():
        model.get_submodule(name).base_layer.weight.mul_(2)
    assert refusal(lambda: gb.lora.unmerge(model)) == message("lora/merge:what_would_be_lost_is_re.3", name)


def test_a_models_own_files_have_no_place_for_adapters(tmp_path):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocabulary=50, hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    adapted(model)
    refusals("lora/merge:a_models_own_files_have", lambda: save_hf(model, tmp_path))
    with gb.lora.disable(model):
        save_hf(model, tmp_path)
    assert all(torch.equal(t, before[name]) for name, t in load_hf(tmp_path).state_dict().items())
    gb.lora.merge(model)
    save_hf(model, tmp_path / "merged")
    ids = torch.arange(12)[None]
    torch.testing.assert_close(load_hf(tmp_path / "merged")(ids), model(ids))


def test_for_good():
    """What is on becomes part of the weights and is gone; what is off stays as it was."""
    model = adapted(tiny())
    adapted(model, seed=4, name="off", targets=["q_proj"])
    adapted(model, seed=5, name="before", targets=["v_proj"])
    gb.lora.disable(model, "off")
    want = model(tokens()).logits
    gb.lora.merge(model, "before")
    assert gb.lora.merge(model, for_good=True) < 1e-3
    assert_near(model(tokens()).logits, want)
    assert len(gb.lora.parameters(model)) == 2 * len(model.model.layers), "of the one that is off"
    assert not any(records(model)) and not any("default" in name for name in model.state_dict())
    merged = weights(model)
    gb.lora.unmerge(model)
    assert all(torch.equal(value, merged[key]) for key, value in weights(model).items())
    gb.lora.enable(model, "off")
    assert not torch.allclose(model(tokens()).logits, want)
