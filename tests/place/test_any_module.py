"""Models of nobody's family: moved, their plain norms swapped, and verified on the caller's example."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
)

from gpubound.models import Decoder, DecoderConfig
from gpubound.place.candidates import Fused
from tests.messages import message

from .models import place, tiny, tokens


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        where = {"dtype": dtype}
        self.conv = nn.Conv1d(6, 8, 3, padding=1, **where)
        self.groups = nn.GroupNorm(4, 8, **where)
        self.inside = nn.ModuleDict({"layer": nn.LayerNorm(8, **where), "rms": nn.RMSNorm(8, eps=1e-5, **where)})
        self.bare = nn.ModuleList([nn.LayerNorm(8, elementwise_affine=False), nn.RMSNorm(8, **where)])
        self.out = nn.Linear(8, 3, **where)
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x, scale=1.0):
        x = self.groups(self.conv(x * scale)).transpose(1, 2)
        for norm in (*self.inside.values(), *self.bare):
            x = norm(x).sin()
        return {"y": self.out(x), "note": ("length", x.shape[1])}


def outputs(net, x):
    y = net(x)["y"]
    return [y, *torch.autograd.grad(y.square().sum(), list(net.parameters()))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_plain_norms_are_swapped(dtype):
    net, x = Net(dtype), torch.randn(2, 6, 9, dtype=dtype, generator=torch.Generator().manual_seed(0))
    want = outputs(net, x)
    placement = place(net, example=x)
    assert placement.verified and placement.swapped == 5 and placement.refused == 0
    assert isinstance(net.groups, Fused) and isinstance(net.bare[0], nn.LayerNorm)
    for a, b in zip(outputs(net, x), want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    placement.undo()
    assert all(torch.equal(a, b) for a, b in zip(outputs(net, x), want))


@pytest.mark.parametrize(
    "example", [{"x": torch.ones(1, 6, 4), "scale": 2.0}, (torch.ones(1, 6, 4), 2.0)], ids=["dict", "tuple"]
)
def test_examples(example):
    assert place(Net(), example=example).verified


def test_without_an_example_nothing_is_claimed():
    placement = place(Net())
    assert placement.swapped == 5 and not placement.verified
    assert "pass example=" in placement.summary and "5 swapped" in placement.summary
    placement = place(Net(), example=torch.ones(2, 5, 4))
    assert not placement.verified and message("place/any_module:without_an_example_nothi.2").within(placement.summary)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch's, of its own rms_norm
def test_autocast_keeps_torchs_own_rules():
    net, x = Net(), torch.randn(2, 6, 9)
    with torch.autocast("cpu", torch.bfloat16):
        want = net(x)["y"]
        place(net)
        assert torch.equal(net(x)["y"], want)


def test_running_statistics_are_the_users():
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False), nn.LayerNorm(3)).train()
    state = {name: t.clone() for name, t in net.state_dict().items()}
    assert place(net, example=torch.randn(5, 4)).verified
    assert all(torch.equal(t, state[name]) for name, t in net.state_dict().items())


def test_families_without_parts_are_moved_and_verified():
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}
    placement = place(GPT2LMHeadModel(GPT2Config(**sizes)), strict=True)
    assert placement.verified and placement.swapped == 3, "its layer norms"
    bert = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20)
    placement = place(BertForMaskedLM(bert), strict=True)
    assert placement.verified and placement.swapped == 4


def test_a_decoder_of_gpubounds_own():
    model = Decoder(DecoderConfig(16, 24, 2, 4, 2, 50, tied=True))
    placement = place(model, strict=True)
    assert placement.verified and placement.swapped == 0
    rows = {row.module: (row.kernel, row.why) for row in placement.rows}
    why = "gpubound's own, tested against the reference"
    assert rows["model.layers.1.self_attn"] == (message("place/any_module:a_decoder_of_gpubounds_o"), why)
    assert rows["lm_head"] == (message("place/any_module:a_decoder_of_gpubounds_o.2"), why)
    assert "model.layers.1.self_attn.q_proj" not in rows and rows["model.embed_tokens"] == ("torch", "unchanged")
    assert ": reference kernels" in placement.summary


def test_a_norm_over_two_dimensions_is_left_alone():
    placement = place(nn.Sequential(nn.LayerNorm([4, 8])), example=torch.ones(2, 4, 8))
    assert placement.rows[0].why == message("place/any_module:a_norm_over_two_dimensio")


def test_a_decoder_inside_something_else():
    class Reward(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.score = tiny().model, nn.Linear(32, 1)

        def forward(self, ids):
            return self.score(self.body(input_ids=ids).last_hidden_state[:, -1])

    model = Reward().train()
    want = model(tokens())
    placement = place(model, example=tokens(), strict=True)
    assert placement.verified and isinstance(model.body, Fused)
    torch.testing.assert_close(model(tokens()), want, rtol=1e-4, atol=1e-5)
    assert placement.fallbacks == 0


@pytest.mark.parametrize("kind", [LlamaModel, LlamaForSequenceClassification])
def test_other_heads_of_a_family(kind):
    config = LlamaConfig(
        hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, vocab_size=50, pad_token_id=0
    )
    model = kind(config)
    model.set_attn_implementation("sdpa")
    want = model.eval()(tokens() % 50)[0]
    placement = place(model, strict=True)
    assert placement.verified
    torch.testing.assert_close(model(tokens() % 50)[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("zeroed", ["lm_head", "self_attn", "mlp", ""], ids=lambda name: name or "everything")
def test_weights_of_zeros_are_no_reason_to_refuse(zeroed):
    """0 / 0 of an error is no error; a head of zeros is how some models begin."""
    model = tiny()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if zeroed in name:
                p.zero_()
    assert place(model, strict=True).verified


def test_dropout_is_off_while_a_module_is_verified_and_alike_in_the_whole():
    placement = place(tiny(attention_dropout=0.5), strict=True)
    assert placement.verified and placement.swapped == 11


class Pair(NamedTuple):
    x: torch.Tensor
    scale: torch.Tensor


def test_an_example_may_be_a_named_tuple():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x, scale):
            return self.norm(x) * scale

    placement = place(Scaled(), example=Pair(torch.randn(2, 3, 8), torch.ones(8)))
    assert placement.verified and placement.swapped == 1, placement.summary
