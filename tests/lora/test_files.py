"""PEFT's files, both ways: the same logits; what does not fit is refused in a sentence, and the model stays as it was."""

import json

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model

import gpubound as gb
from tests.messages import message

from ..place.models import assert_near, tiny, tokens
from .cases import adapted, placed, refusal

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
FORMS = {
    "all-linear": {},
    "some, with rslora": {"targets": ["q_proj", "up_proj"], "rslora": True, "dropout": 0.1},
    "one layer": {"targets": r".*layers\.1.*v_proj"},
}


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_peft_loads_what_is_saved_here(tmp_path, options):
    model = adapted(tiny(), **options)
    gb.lora.save(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(tiny(), tmp_path)
    model.eval()
    assert_near(theirs(tokens()).logits, model(tokens()).logits)
    adapters = sum("lora_" in name for name, _ in theirs.named_parameters())
    assert adapters == len(gb.lora.parameters(model)), "no layer more"


@pytest.mark.parametrize("base", [None, "nf4", "int8", "fp8"])
def test_safetensors_takes_the_whole_model(tmp_path, base):
    """Adapters of q, k and v are one matrix in memory, of which it refuses parts, and accelerate would leave two out."""
    model = adapted(tiny(hidden_size=64, head_dim=16), base=base).eval()
    want, storages = model(tokens()).logits, [t.untyped_storage().data_ptr() for t in model.buffers()]
    model.state_dict(keep_vars=True)  # which gives the model's own
    assert storages == [t.untyped_storage().data_ptr() for t in model.buffers()]
    state = model.state_dict()
    assert len({t.untyped_storage().data_ptr() for t in state.values()}) == len(state)
    save_model(model, tmp_path / "model.safetensors")
    with torch.no_grad():
        for p in gb.lora.parameters(model):
            p.zero_()
    load_model(model, tmp_path / "model.safetensors")
    assert model(tokens()).logits.equal(want)


@pytest.mark.parametrize("make", [tiny, placed])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "lora_dropout": 0.1, "rank_pattern": {"q_proj": 2}}], ids=str)
def test_what_peft_saves_is_loaded(tmp_path, options, make):
    torch.manual_seed(3)
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False} | options
    theirs = peft.get_peft_model(tiny(), peft.LoraConfig(**config)).eval()
    theirs.save_pretrained(tmp_path)
    model = make().eval()
    gb.lora.load(model, tmp_path)
    assert_near(model(tokens()).logits, theirs(tokens()).logits)
    assert {p.requires_grad for p in gb.lora.parameters(model)} == {True}


def test_into_an_adapter_that_is_there(tmp_path):
    model = adapted(tiny())
    gb.lora.save(model, tmp_path)
    want, before = model(tokens()).logits, gb.lora.parameters(model)
    with torch.no_grad():
        for p in before:
            p.zero_()
    gb.lora.load(model, tmp_path)
    assert torch.equal(model(tokens()).logits, want)
    assert all(p is q for p, q in zip(before, gb.lora.parameters(model))), "an optimizer's parameters"
    gb.lora.load(model, tmp_path, name="twice")
    assert not torch.allclose(model(tokens()).logits, want)


def narrower(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    key = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    tensors[key] = tensors[key][:-1].contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")


def stranger(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.other.lora_A.weight"] = torch.ones(2)
    save_file(tensors, folder / "adapter_model.safetensors")


def whole_numbers(folder):
    file = folder / "adapter_model.safetensors"
    save_file({key: tensor.int() for key, tensor in load_file(file).items()}, file)


def option(**changes):
    def change(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def as_a_pickle(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def no_safetensors(folder):
    (folder / "adapter_model.safetensors").write_bytes(b"x" * 40)


def no_config(folder):
    (folder / "adapter_config.json").unlink()


REFUSED = {
    "another shape": (narrower, r"v_proj\.lora_B\.weight is \(15, 4\), wanted \(16, 4\)"),
    "another rank than the config's": (option(r=8), r"is \((4, 32|16, 4)\), wanted \((8, 32|16, 8)\)"),
    "a layer that is not there": (stranger, r"other\.lora_A\.weight"),
    "a pickle": (as_a_pickle, r"adapter_model\.bin"),
    "integers": (whole_numbers, r"torch\.int32"),
    "DoRA without its magnitudes": (option(use_dora=True), "lora_magnitude_vector"),
    "another method": (option(peft_type="IA3"), "'IA3'"),
    "a changed base": (option(init_lora_weights="pissa_niter_4"), "'pissa_niter_4'"),
    "a base changed by gradients": (option(init_lora_weights="lora_ga"), "'lora_ga'"),
    "layers used twice": (option(layer_replication=[[0, 1], [0, 1]]), "layer_replication"),
    "trained biases": (option(bias="all"), "'all'"),
    "no alpha": (option(lora_alpha=None), "lora_alpha has None"),
    "a rank in quotes": (option(r="4"), "r has '4'"),
    "a table that is none": (option(rank_pattern=5), "rank_pattern has 5"),
    "a broken pattern": (option(alpha_pattern={"(": 3}), r"alpha_pattern has '\('"),
    "targets that backtrack": (option(target_modules="(a+)+b"), "target_modules"),
    "no targets in the model": (option(target_modules=["c_attn"]), "c_attn"),
    "no safetensors": (no_safetensors, "safetensors"),
    "nothing": (no_config, r"adapter_config\.json"),
}


@pytest.mark.parametrize("change, fact", REFUSED.values(), ids=REFUSED)
def test_refused_and_nothing_changed(tmp_path, change, fact):
    gb.lora.save(adapted(tiny(), targets=["v_proj"]), tmp_path)
    change(tmp_path)
    model = tiny()
    names = list(model.state_dict())
    with pytest.raises(gb.DataError, match=fact):
        gb.lora.load(model, tmp_path)
    assert all(p.requires_grad for p in model.parameters()) and list(model.state_dict()) == names
    assert gb.lora.parameters(model) == [] and not hasattr(model, "peft_config")


def test_layers_without_an_adapter_in_the_file_are_counted(tmp_path):
    gb.lora.save(adapted(tiny(), targets=["v_proj", "q_proj"]), tmp_path)
    with gb.strict():
        gb.lora.load(tiny(), tmp_path)
    deeper = tiny(num_hidden_layers=3)
    with gb.strict(), pytest.raises(gb.FallbackError, match=r"model\.layers\.2\.self_attn\.q_proj and 1 more"):
        gb.lora.load(deeper, tmp_path)
    assert gb.lora.parameters(deeper) == [], "nothing is changed"
    gb.lora.load(deeper, tmp_path)


@pytest.mark.parametrize(
    "options", [{"targets": ["q_proj"]}, {"targets": ["v_proj"], "alpha": 3}, {"targets": ["v_proj", "q_proj"]}], ids=str
)
def test_another_adapter_of_the_same_name_is_refused(tmp_path, options):
    gb.lora.save(adapted(tiny(), targets=["v_proj"]), tmp_path)
    model = adapted(tiny(), **options)
    before = [p.clone() for p in gb.lora.parameters(model)]
    with pytest.raises(gb.DataError):
        gb.lora.load(model, tmp_path)
    assert all(map(torch.equal, before, gb.lora.parameters(model)))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("a file's")
    with pytest.raises(gb.DataError, check=message("lora/files:a_folder_that_cannot_be")):
        gb.lora.save(adapted(tiny(), targets=["v_proj"]), tmp_path / "file")


def test_nothing_is_loaded_into_what_is_merged(tmp_path):
    model = adapted(tiny(), targets=["v_proj"])
    gb.lora.save(model, tmp_path)
    gb.lora.merge(model)
    assert refusal(lambda: gb.lora.load(model, tmp_path)) == message("lora/files:nothing_is_loaded_into_w")


def test_without_values_nothing_is_saved_loaded_or_merged(tmp_path):
    gb.lora.save(adapted(tiny(), targets=["v_proj"]), tmp_path)
    bare = tiny().to("meta")
    assert "meta device" in refusal(lambda: gb.lora.load(bare, tmp_path))
    adapted(bare, targets=["v_proj"])
    for call in (lambda: gb.lora.save(bare, tmp_path / "new"), lambda: gb.lora.merge(bare)):
        assert "model.layers.0.self_attn.v_proj is on the meta device" in refusal(call)
