"""PEFT's files, both ways: the same logits; what does not fit is refused in a sentence, and the model stays as it was."""

import json

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model

import gpubound as gb
from tests.messages import message

from ..place.models import assert_near, place, tiny, tokens
from .cases import adapted, records, refusal

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


def test_several_ranks_in_one_file(tmp_path):
    model = adapted(tiny(), targets=["q_proj"])
    adapted(model, rank=2, alpha=3, targets=["v_proj"])
    gb.lora.save(model, tmp_path)
    theirs, again = peft.PeftModel.from_pretrained(tiny(), tmp_path), tiny()
    gb.lora.load(again, tmp_path)
    for other in (theirs, again):
        assert_near(other(tokens()).logits, model(tokens()).logits)


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


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "lora_dropout": 0.1, "rank_pattern": {"q_proj": 2}}], ids=str)
def test_what_peft_saves_is_loaded(tmp_path, options, placed):
    torch.manual_seed(3)
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False} | options
    theirs = peft.get_peft_model(tiny(), peft.LoraConfig(**config)).eval()
    theirs.save_pretrained(tmp_path)
    model = tiny().eval()
    if placed:
        place(model, strict=True)
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


REFUSED = {
    "another shape": (
        narrower,
        "{w}: the adapter of model.layers.1.self_attn.v_proj has A (4, 32) and B (15, 4), wanted (4, 32) and (16, 4) for a "
        "weight of 16 x 32; load it on the model that it was trained on.",
    ),
    "another rank than the config's": (
        option(r=8),
        "{w}: the adapter of model.layers.0.self_attn.v_proj has A (4, 32) and B (16, 4), wanted (8, 32) and (16, 8) for a "
        "weight of 16 x 32; load it on the model that it was trained on.",
    ),
    "a layer that is not there": (
        stranger,
        "{w}: base_model.model.other.lora_A.weight is no half of a low-rank adapter of a layer of LlamaForCausalLM; load it on "
        "the model that it was trained on.",
    ),
    "a pickle": (
        lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
        "{b}: is a pickle, which may run code as it is read, and is not read here; load it with PEFT, and save it by "
        "save_pretrained, whose files are adapter_model.safetensors.",
    ),
    "whole numbers": (
        whole_numbers,
        "{w}: base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight has torch.int32 values, wanted floating-point; "
        "save it again.",
    ),
    "another kind": (
        option(lora_bias=True),
        "{c}: lora_bias is True, and only plain LoRA and DoRA are read here; load it with PEFT.",
    ),
    "DoRA without its lengths": (
        option(use_dora=True),
        "{w}: the adapter of model.layers.0.self_attn.v_proj has A (4, 32) and B (16, 4) and magnitudes None, wanted (4, 32) "
        "and (16, 4) and (16,) for a weight of 16 x 32; load it on the model that it was trained on.",
    ),
    "another method": (
        option(peft_type="IA3"),
        "{c}: peft_type is 'IA3', and only plain LoRA and DoRA are read here; load it with PEFT.",
    ),
    "a changed base": (
        option(init_lora_weights="pissa_niter_4"),
        "{c}: init_lora_weights is 'pissa_niter_4', which changed the base's weights, too; let PEFT convert the adapter as it "
        "saves it: save_pretrained(..., path_initial_model_for_weight_conversion=...).",
    ),
    "a base changed by gradients": (
        option(init_lora_weights="lora_ga"),
        "{c}: init_lora_weights is 'lora_ga', which changed the base's weights, too; let PEFT convert the adapter as it saves "
        "it: save_pretrained(..., path_initial_model_for_weight_conversion=...).",
    ),
    "a model of layers used twice": (
        option(layer_replication=[[0, 1], [0, 1]]),
        "{c}: layer_replication is [[0, 1], [0, 1]], and only plain LoRA and DoRA are read here; load it with PEFT.",
    ),
    "no alpha": (option(lora_alpha=None), "{c}: lora_alpha has None, wanted a number; save the adapter again."),
    "a rank of words": (option(r="4"), "{c}: r has '4', wanted a rank; save the adapter again."),
    "a table that is none": (option(rank_pattern=5), "{c}: rank_pattern has '5', wanted a rank; save the adapter again."),
    "a broken pattern": (
        option(alpha_pattern={"(": 3}),
        "{c}: alpha_pattern has '(', no regular expression (missing ), unterminated subpattern at position 0); save the "
        "adapter again.",
    ),
    "no safetensors": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 40),
        "{w}: is not in safetensors' format",
    ),
    "nothing": (lambda folder: (folder / "adapter_config.json").unlink(), "{c}: cannot be read"),
}


@pytest.mark.parametrize("change, sentence", REFUSED.values(), ids=REFUSED)
def test_refused_and_nothing_changed(tmp_path, change, sentence):
    gb.lora.save(adapted(tiny(), targets=["v_proj"]), tmp_path)
    change(tmp_path)
    model = tiny()
    with pytest.raises(gb.DataError) as error:
        gb.lora.load(model, tmp_path)
    where = {
        "w": tmp_path / "adapter_model.safetensors",
        "b": tmp_path / "adapter_model.bin",
        "c": tmp_path / "adapter_config.json",
    }
    assert str(error.value).startswith(sentence.format(**where))
    assert all(p.requires_grad for p in model.parameters()) and not any(records(model))


@pytest.mark.parametrize(
    "kind, options, why",
    [
        ("gemma", {}, "is of model.embed_tokens, which is a transformers.GemmaTextScaledWordEmbedding, not an nn.Linear"),
        ("llama", {"use_dora": True}, "is DoRA of an nn.Embedding, which is read of nn.Linear alone; load it with PEFT."),
    ],
)
def test_a_layer_that_takes_none_is_named_with_its_reason(tmp_path, kind, options, why):
    config = peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM", **options)
    peft.get_peft_model(tiny(kind), config).save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(gb.DataError, match=why):
        gb.lora.load(tiny(kind), tmp_path)


def test_a_model_with_more_layers_than_the_adapters_is_told_of(tmp_path):
    gb.lora.save(adapted(tiny(), targets=["v_proj", "q_proj"]), tmp_path)
    with gb.strict():
        gb.lora.load(tiny(), tmp_path)
    deeper, said = (
        tiny(num_hidden_layers=3),
        "has none for model.layers.2.self_attn.q_proj and 1 more; load it on",
    )
    with gb.strict(), pytest.raises(gb.FallbackError, match=said):
        gb.lora.load(deeper, tmp_path)
    assert not any(records(deeper)), "nothing is changed"
    assert len(gb.lora.load(deeper, tmp_path)) == 4


def test_over_other_layers_is_refused(tmp_path):
    gb.lora.save(adapted(tiny(), targets=["v_proj"]), tmp_path)
    model = adapted(tiny(), targets=["q_proj"])
    with pytest.raises(gb.DataError, check=message("lora/files:over_other_layers_is_ref")):
        gb.lora.load(model, tmp_path)


def test_two_sorts_in_one_file_are_refused(tmp_path):
    model = adapted(tiny(), targets=["q_proj"])
    adapted(model, targets=["v_proj"], dropout=0.5)
    gb.lora.save(adapted(tiny(), targets=["q_proj"]), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, check=message("lora/files:two_sorts_in_one_file_ar")):
        gb.lora.save(model, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before, "what was there is still whole"


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
    there, key = "is on the meta device, without values; load the model's weights first.", "model.layers.0.self_attn.v_proj"
    bare = tiny().to("meta")
    assert refusal(lambda: gb.lora.load(bare, tmp_path)) == f"lora.load: {key} {there}"
    assert not any(records(bare))
    adapted(bare, targets=["v_proj"])
    assert refusal(lambda: gb.lora.save(bare, tmp_path)) == f"lora.save: {key} {there}"
    assert refusal(lambda: gb.lora.merge(bare)) == f"lora.merge: {key} {there}"
