"""Families without fused attention and MLP: what any model has is swapped where it is shown to be the same, and it is said."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from gpubound.errors import PlaceError
from gpubound.place import candidates
from gpubound.place.candidates import Fused

from .models import VOCABULARY, assert_close, batch, place, rows, tiny, tokens, training_run, twin

SIZES = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_DROPOUT = dict.fromkeys(
    ("resid_dropout", "resid_pdrop", "embed_dropout", "embd_pdrop", "attention_dropout", "attn_pdrop"), 0.0
)
CONFIGS = {
    "stablelm": {"hidden_dropout": 0.0},
    "gpt_neox": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "opt": {"ffn_dim": 40, "dropout": 0.0},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5, **NO_DROPOUT},
    "gptj": {"rotary_dim": 4},
    "gpt_bigcode": {"multi_query": False, **NO_DROPOUT},
    "hyperclovax": {"logits_scaling": 4.0},
}
SWAPPED = {"hyperclovax": 9, "gptj": 4}  # of the others 6
NORMS_ALONE = ("hyperclovax",)  # its logits are scaled


def made(kind, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | CONFIGS[kind] | options))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
    return model.to(dtype)


@pytest.mark.parametrize("kind", CONFIGS)
def test_norms_and_loss_are_swapped_and_the_rest_is_named(kind):
    model = made(kind)
    other = twin(model)
    placement = place(model)
    assert (placement.swapped, placement.verified) == (SWAPPED.get(kind, 6), True)
    assert placement.unsupported == placement.as_dict()["unsupported"] == kind
    assert f"{kind!r} is not among the families" in placement.summary
    assert isinstance(model, Fused) is (kind not in NORMS_ALONE)
    assert_close(training_run(model, batch()), training_run(other, batch()))
    torch.testing.assert_close(model.eval()(tokens()).logits, other.eval()(tokens()).logits, rtol=1e-4, atol=1e-5)
    placement.undo()
    assert_close(training_run(model, batch()), training_run(other, batch()), 1e-6)


def test_in_bf16():
    model = made("stablelm", torch.bfloat16)
    other = twin(model).float()
    place(model, strict=True)
    got, want = training_run(model, batch()), training_run(other, batch())
    assert got["loss"].item() == pytest.approx(want["loss"].item(), rel=2e-2)


def test_known_families_say_nothing_of_it():
    placement = place(tiny())
    assert placement.unsupported is None and "families" not in placement.summary
    assert place(nn.Sequential(nn.LayerNorm(4)), example=torch.ones(2, 4)).unsupported is None


@pytest.mark.skipif("hyperclovax" not in CONFIGS, reason="this release of transformers has no family whose logits are scaled")
def test_a_scaled_loss_stays_as_it_was():
    model = made("hyperclovax")
    placement = place(model)
    assert rows(placement)["(the model)"].why.startswith(
        "not swapped: its forward does more than head(hidden states): the logits"
    )
    with pytest.raises(PlaceError, match="does more than head"):
        place(made("hyperclovax"), strict=True)
    assert place(made("hyperclovax", logits_scaling=1.0), strict=True).swapped == SWAPPED["hyperclovax"] + 1


def test_a_loss_of_ones_own_and_a_users_class_are_left_alone():
    model = made("stablelm")
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.square().mean()
    assert not candidates._is_other_causal_lm(model)
    model = made("stablelm")
    model.__class__ = type("Mine", (type(model),), {"__module__": __name__})
    place(model)
    assert not isinstance(model, Fused)
