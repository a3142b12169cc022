"""What `gb.lora.add` refuses, word for word, and that nothing is changed then."""

import pytest
from torch import nn

import gpubound as gb
from tests.messages import message, refusals

from ..place.models import tiny
from .cases import adapted, records, refusal

REFUSED = {
    "an unknown target": (
        {"targets": ["q_prj"]},
        "lora.add: no layer of LlamaForCausalLM is named 'q_prj'; those that can be adapted end in down_proj, "
        "embed_tokens, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj.",
    ),
    "no layer of a known kind": (
        {"targets": ["model.norm"]},
        "lora.add: model.norm is a transformers.LlamaRMSNorm, not an nn.Linear, nn.Conv2d or nn.Embedding; name other layers.",
    ),
    "a rank above the matrix": (
        {"rank": 21, "targets": ["k_proj"]},
        "lora.add: rank must be an integer from 1 to 16 for model.layers.0.self_attn.k_proj, whose weight is 16 x 32, got 21.",
    ),
    "a rank of nothing": (
        {"rank": 0, "targets": ["k_proj"]},
        "lora.add: rank must be an integer from 1 to 16 for model.layers.0.self_attn.k_proj, whose weight is 16 x 32, got 0.",
    ),
    "too much dropout": ({"dropout": 1.0}, "lora.add: dropout must be from 0 up to, not including, 1, got 1.0."),
    "an unknown beginning": (
        {"init": "pissa"},
        "lora.add: init must be True, False, 'gaussian' or 'orthogonal', got 'pissa'.",
    ),
    "an odd rank of what is orthogonal": (
        {"init": "orthogonal", "rank": 3, "targets": r".*layers\.0.*k_proj"},
        "lora.add: init 'orthogonal' is for nn.Linear of an even rank, got rank 3 of model.layers.0.self_attn.k_proj.",
    ),
    "an orthogonal table": (
        {"init": "orthogonal", "targets": ["embed_tokens"]},
        "lora.add: init 'orthogonal' is for nn.Linear of an even rank, got rank 4 of model.embed_tokens.",
    ),
    "targets of nothing": (
        {"targets": []},
        "lora.add: targets must be 'all-linear', 'all-linear-and-conv', a regular expression, or a list of names' ends, got "
        "[].",
    ),
    "a target that is no word": (
        {"targets": ["q_proj", 3]},
        "lora.add: targets must be 'all-linear', 'all-linear-and-conv', a regular expression, or a list of names' ends, got "
        "['q_proj', 3].",
    ),
    "no regular expression": (
        {"targets": "q_proj("},
        "lora.add: targets is 'q_proj(', no regular expression (missing ), unterminated subpattern at position 6); list names.",
    ),
    "a rank that is an answer": (
        {"rank": True, "targets": ["k_proj"]},
        "lora.add: rank must be an integer from 1 to 16 for model.layers.0.self_attn.k_proj, whose weight is 16 x 32, got "
        "True.",
    ),
    "an alpha of words": ({"alpha": "16"}, "lora.add: alpha must be a finite number, got '16'."),
    "a rank of words": (
        {"rank": "4", "targets": ["k_proj"]},
        "lora.add: rank must be an integer from 1 to 16 for model.layers.0.self_attn.k_proj, whose weight is 16 x 32, got '4'.",
    ),
    "an alpha that is an answer": ({"alpha": True}, "lora.add: alpha must be a finite number, got True."),
    "an alpha of no size": ({"alpha": float("nan")}, "lora.add: alpha must be a finite number, got nan."),
    "an alpha that silences": (
        {"alpha": 0.0},
        "lora.add: alpha must not be 0, the scale's numerator: the adapters would add nothing and learn nothing.",
    ),
    "dropout of words": ({"dropout": "0.1"}, "lora.add: dropout must be from 0 up to, not including, 1, got '0.1'."),
    "a name of torch's": (
        {"name": "train"},
        "lora.add: torch's modules have an attribute named 'train'; give the adapter another name.",
    ),
    "a number for a name": ({"name": 5}, "lora.add: name must be a word without dots, got 5."),
    "a name with a dot": ({"name": "a.b"}, "lora.add: name must be a word without dots, got 'a.b'."),
}


@pytest.mark.parametrize("options, sentence", REFUSED.values(), ids=REFUSED)
def test_refused_in_words(options, sentence):
    model = tiny()
    assert refusal(lambda: gb.lora.add(model, **{"rank": 4} | options)) == sentence
    assert all(p.requires_grad for p in model.parameters()) and not any(records(model)), "nothing is changed"


@pytest.mark.parametrize("call", [lambda it: gb.lora.add(it, 4), lambda it: gb.lora.load(it, "x"), gb.lora.merge])
def test_what_is_no_model_is_refused(call):
    """A placement, or a step, in the place of its model."""
    assert refusal(lambda: call(object())).endswith(": model must be a torch.nn.Module, got a object; pass the model itself.")


def test_a_double_add_is_refused():
    model = adapted(tiny(), targets=["v_proj"])
    assert "'default'" in refusal(lambda: gb.lora.add(model, 4))
    assert len(gb.lora.parameters(model)) == 2 * len(model.model.layers)


def test_an_unknown_name_is_refused():
    model = tiny()
    assert refusal(lambda: gb.lora.disable(model, "x")) == message("lora/add_refused:an_unknown_name_is_refus")
    adapted(model)
    assert refusal(lambda: gb.lora.remove(model, "x")) == message("lora/add_refused:an_unknown_name_is_refus.2")


@pytest.mark.parametrize("call", [gb.lora.merge, gb.lora.remove, gb.lora.disable, gb.lora.enable])
def test_a_model_without_adapters_is_refused(call):
    assert "has no adapter" in refusal(lambda: call(tiny()))


def test_layers_of_one_weight_are_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    assert refusal(lambda: gb.lora.add(model, 2, targets=["0"])) == message("lora/add_refused:layers_of_one_weight_are")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_model_of_pefts_is_refused():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    assert "PeftModel" in refusal(lambda: gb.lora.add(model, 4, name="second"))


def test_what_torch_reads_without_calling_it_is_refused():
    """In eval mode torch's encoder layer gives its weights to one fused op: an adapter would be missed."""
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 4))
    assert gb.lora.add(model, 2) == ["1"]
    assert refusal(lambda: gb.lora.add(model, 2, targets=["linear1"])) == message("lora/add_refused:what_torch_reads_without")


def test_all_linear_says_what_it_leaves_out():
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), Other(8, 8))
    with gb.strict(), pytest.raises(gb.FallbackError, check=message("lora/add_refused:all_linear_says_what_it")):
        gb.lora.add(model, 2)
    assert gb.lora.add(model, 2) == ["0"]


def test_a_model_of_layers_that_take_no_adapter_says_which_do():
    refusals(
        "lora/add_refused:a_model_of_layers_that_t", lambda: gb.lora.add(nn.Sequential(nn.Conv1d(4, 4, 1), nn.ReLU()), rank=2)
    )
