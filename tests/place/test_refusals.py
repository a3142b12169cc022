"""What is swapped, what stays and why, and swaps that a check refuses."""

import copy
from collections import UserDict

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from gpubound import trace
from gpubound.errors import FallbackError, PlaceError
from gpubound.layers import run_blocks
from gpubound.models import Decoder, DecoderConfig, hf_modules
from gpubound.place import candidates, placer, verify
from gpubound.place.candidates import Fused
from tests.messages import message

from .models import VOCABULARY, assert_close, batch, place, rows, tiny, tokens, training_run, twin


def wrong_swiglu(gate, up=None):
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return torch.nn.functional.silu(gate) * up * 1.001


def test_a_wrong_swap_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("gpubound.layers.block.swiglu", wrong_swiglu)
    monkeypatch.setattr(trace, "_printed", set())
    model = tiny()
    want = training_run(twin(model), batch())
    placement = place(model)
    row = rows(placement)["model.layers.0.mlp"]
    assert row.why.startswith("not swapped: ") and " off by 1." in row.why and row.kernel == "torch"
    assert not isinstance(model.model.layers[0].mlp, Fused) and isinstance(model.model.layers[0].self_attn, Fused)
    assert rows(placement)["model"].why == message("place/refusals:a_wrong_swap_is_refused")
    assert "gpubound: fallback: place: LlamaMLP" in capsys.readouterr().err
    assert_close(training_run(model, batch()), want)


def slow_swiglu(gate, up=None):
    trace.fallback("swiglu", "a test says so")


@pytest.mark.parametrize("broken", ["wrong", "raises", "falls back"])
def test_strict_raises_and_leaves_the_model_as_it_was(monkeypatch, broken):
    if broken == "wrong":
        monkeypatch.setattr("gpubound.layers.block.swiglu", wrong_swiglu)
    elif broken == "falls back":
        monkeypatch.setattr("gpubound.layers.block.swiglu", slow_swiglu)
    else:
        monkeypatch.setattr("gpubound.layers.attention.rope_qkv", lambda qkv, c, s, h, k: 1 / 0)
    model = tiny()
    with pytest.raises(PlaceError, check=message("place/refusals:strict_raises_and_leaves")):
        place(model, strict=True)
    assert not any(isinstance(m, Fused) for m in model.modules())
    with trace.strict(), pytest.raises(FallbackError):
        place(model)
    assert not any(isinstance(m, Fused) for m in model.modules())


def test_a_wrong_loop_is_taken_back(monkeypatch):
    """Every leaf is right; the loop is not."""
    monkeypatch.setattr(hf_modules, "run_blocks", lambda *given: 1.01 * run_blocks(*given))
    model = tiny()
    want = training_run(twin(model), batch())
    placement = place(model)
    assert rows(placement)["model"].why.startswith("not swapped: ")
    assert rows(placement)["model"].why.endswith(" off by 1.0e-02 (limit 1.0e-03)")
    assert_close(training_run(model, batch()), want)
    assert placement.verified


def test_a_wrong_whole_is_taken_back(monkeypatch):
    """Right alone, wrong together: everything goes back, and no line says ready."""
    model = tiny()
    real, calls = verify.compare, []

    def last_one_fails(after, before, dtype):
        calls.append(1)
        verdict = real(after, before, dtype)
        return verdict if len(calls) < 2 else verify.Agreement("loss", 0.5, 1e-3)

    monkeypatch.setattr(verify, "compare", last_one_fails)
    placement = place(model)
    assert not any(isinstance(m, Fused) for m in model.modules())
    assert not placement.verified and "not verified as a whole" in placement.summary
    assert message("place/refusals:a_wrong_whole_is_taken_b").within(str(placement))


def test_eager_attention_is_left_alone():
    model = tiny(attention="eager")
    other = twin(model).eval()
    placement = place(model)
    row = rows(placement)["model.layers.0.self_attn"]
    assert row.why == message("place/refusals:eager_attention_is_left")
    got, want = (m.eval()(tokens(), output_attentions=True) for m in (model, other))
    for a, b in zip(got.attentions, want.attentions):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_attention_implementation_changed_later():
    model = tiny()
    other = twin(model).eval()
    placement = place(model, strict=True)
    model.set_attn_implementation("eager")
    got, want = model.eval()(tokens(), output_attentions=True), other(tokens())
    assert len(got.attentions) == 2
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)
    assert rows(placement)["model.layers.0.self_attn"].reasons == {"the config asks for 'eager' attention": 1}


def refusal(model, **options):
    with pytest.raises(ValueError) as error:
        place(model, **options)
    return str(error.value)


def test_refuses_whole_models_by_name():
    assert refusal("gpt2") == message("place/refusals:refuses_whole_models_by")

    half = tiny()
    half.model.layers[1].mlp.up_proj.to("meta")
    assert refusal(half) == message("place/refusals:refuses_whole_models_by.2")
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    assert refusal(empty).startswith("place: weight and 1 more tensors are on the meta device")

    spread = tiny()
    spread.hf_device_map = {"model": 0, "lm_head": "cpu"}
    assert refusal(spread) == message("place/refusals:refuses_whole_models_by.3")

    sharded = nn.Linear(2, 2)
    sharded.weight.ds_id = 0
    assert refusal(sharded) == message("place/refusals:refuses_whole_models_by.4")

    with pytest.warns((DeprecationWarning, FutureWarning)):  # torch 2.13, 2.14
        script = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    assert refusal(script) == message("place/refusals:refuses_whole_models_by.6")
    assert refusal(tiny(), device="gpu").startswith("device: got 'gpu', wanted one of auto")


class Int8Linear(nn.Linear):
    """What quantised layers look like: integer weights that only their own forward understands."""

    def __init__(self, linear):
        super().__init__(1, 1, bias=False)
        self.scale = linear.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale).t()


def test_refuses_modules_by_name():
    model = tiny()
    layers = model.model.layers
    layers[0].mlp.up_proj = Int8Linear(layers[0].mlp.up_proj)
    layers[0].self_attn._hf_hook = object()
    layers[1].self_attn.forward = layers[1].self_attn.forward
    layers[1].mlp.up_proj.to(torch.float64)
    layers[1].mlp.register_forward_pre_hook(lambda m, a: None)
    placement = rows(place(model))
    assert placement["model.layers.0.mlp"].why == message("place/refusals:refuses_modules_by_name")
    assert placement["model.layers.0.self_attn"].why == message("place/refusals:refuses_modules_by_name.2")
    assert placement["model.layers.1.self_attn"].why == message("place/refusals:refuses_modules_by_name.3")
    assert placement["model.layers.1.mlp"].why.startswith("not swapped: its verification raised RuntimeError: ")


def test_quantised_models_are_not_moved(monkeypatch):
    model = tiny()
    model.lm_head = Int8Linear(model.lm_head)
    model.is_quantized = True
    monkeypatch.setattr(placer.facts, "resolve", lambda spec: torch.device("cuda", 0))
    assert refusal(model) == message("place/refusals:quantised_models_are_not")


def test_a_subclass_of_ones_own_is_left_alone():
    model = tiny()

    class Louder(type(model.model.layers[0].mlp)):
        def forward(self, x):
            return 2 * super().forward(x)

    model.model.layers[0].mlp.__class__ = Louder
    want = training_run(twin(model), batch())
    placement = place(model)
    assert_close(training_run(model, batch()), want)
    assert type(model.model.layers[0].mlp) is Louder
    assert rows(placement)["model"].why == message("place/refusals:a_subclass_of_ones_own_i")


@pytest.mark.parametrize("example", [5, "text", [1, 2], {"x": 3}, ()], ids=repr)
def test_an_example_without_a_tensor(example):
    with pytest.raises(ValueError, match=f"example: got {type(example).__name__}"):
        place(nn.Linear(2, 2), example=example)


def test_a_mapping_is_keywords():
    """transformers' BatchEncoding is one, and no dict."""
    batch = UserDict(input=torch.ones(1, 2))
    assert place(nn.Linear(2, 2), example=batch).verified


@pytest.mark.parametrize(
    "make",
    [
        tiny,
        lambda: Decoder(DecoderConfig(16, 24, 1, 2, 1, 50)),
        lambda: nn.Sequential(nn.LayerNorm(4)),
        lambda: nn.Linear(2, 2),
    ],
    ids=["transformers", "Decoder", "norms", "nothing to swap"],
)
def test_a_placed_model_is_refused_until_undo(make):
    model = make()
    placement = place(model)
    for again in (model, copy.deepcopy(model), nn.ModuleList([model])):
        with pytest.raises(ValueError, match="placed already"):
            place(again)
    placement.undo()
    place(model)


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
