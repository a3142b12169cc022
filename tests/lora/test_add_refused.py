"""What `gb.lora.add` refuses, word for word, and that nothing is changed then."""

from functools import partial

import pytest
from torch import nn

import gpubound as gb
from tests.messages import message, refusals

from ..place.models import tiny
from .cases import adapted, records, refusal


def test_refused_in_words():
    model, on_k = tiny(), {"targets": ["k_proj"]}
    wrong = [
        {"targets": ["q_prj"]}, {"targets": ["model.norm"]}, on_k | {"rank": 21}, on_k | {"rank": 0}, {"dropout": 1.0},
        {"init": "pissa"}, {"init": "orthogonal", "rank": 3, "targets": r".*layers\.0.*k_proj"},
        {"init": "orthogonal", "targets": ["embed_tokens"]}, {"targets": []}, {"targets": ["q_proj", 3]},
        {"targets": "q_proj("}, on_k | {"rank": True}, {"alpha": "16"}, on_k | {"rank": "4"}, {"alpha": True},
        {"alpha": float("nan")}, {"alpha": 0.0}, {"dropout": "0.1"}, {"name": "train"}, {"name": 5}, {"name": "a.b"},
    ]  # fmt: skip
    refusals("lora/add_refused:refused_in_words", *(partial(gb.lora.add, model, **{"rank": 4} | options) for options in wrong))
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
