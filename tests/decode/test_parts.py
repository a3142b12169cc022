"""A layer takes any parts with the methods of its own: here a weight format and an MLP that the library does not have."""

import sys
from dataclasses import dataclass
from inspect import signature

import pytest
import torch
import torch.nn.functional as F

import gpubound as gb
from gpubound.decode import layer as layer_parts
from gpubound.decode.layer import DenseMLP
from gpubound.decode.transformer import PARTS, FusedRunner
from gpubound.decode.weights import FORMATS, DenseLinear, LiveFormat, PackedFormat
from gpubound.device import Chip
from gpubound.kernels import activate_rows, decode_attention, norm_product
from gpubound.kernels.decode_product import EARLY, FENCE, LATE
from gpubound.kernels.plans import Job, plan_for
from gpubound.models import hf_modules as family
from gpubound.models.decoding import DenseWeights, Linear, plain_linear, plain_norm
from gpubound.models.reader import Reader
from tests.messages import message

from . import cases


class SixteenBits(LiveFormat):
    """Copies rounded to bf16, in the model's dtype."""

    kind, reads = "sixteen", "copies in 16 bits"

    def stacked(self, *layers):
        rounded = (layer.weight.detach().bfloat16().to(layer.weight.dtype) for layer in layers)
        return DenseLinear(*map(Linear, rounded, (layer.bias for layer in layers)))

    gate_up = stacked

    def head(self, layer):
        return self.stacked(layer)


@pytest.mark.slow
def test_a_weight_format(monkeypatch, device):
    monkeypatch.setitem(FORMATS, "sixteen", SixteenBits)
    model = cases.build("Qwen2", device=device, tie_word_embeddings=False)
    fast = gb.decoder(model, 9, cases.ROOM, weights="sixteen", cache="int8", pages=18)
    assert "over copies in 16 bits" in str(fast) and fast.certificate.logits_error < 1.5 * fast.certificate.cache_error
    assert fast.accuracy(cases.prompts(20)[0]).kind == "sixteen, int8 cache"
    fast = gb.decoder(model, 9, cases.ROOM, weights="sixteen")
    with torch.no_grad():
        for weight in (model.lm_head.weight, *(w for w in model.model.layers.parameters() if w.dim() > 1)):
            weight.copy_(weight.bfloat16())
    for rows in (1, 9):
        cases.assert_greedy(fast, cases.prompts(*range(3, 3 + rows)), 12)


@dataclass(frozen=True)
class ReluWeights(DenseWeights):
    def define(self, x, number, choices):
        h = plain_norm(x, self.norm)
        gated = F.relu(plain_linear(h, self.gate)) * plain_linear(h, self.up)
        return plain_linear(gated, self.down)


class ReluMLP(DenseMLP):
    """Gated by relu, in plain torch."""

    def prompt(self, h):
        gate, up = (F.linear(h, weight) for weight in self.gate_up.matrices())
        return F.linear(F.relu(gate) * up, self.down.matrices()[0])

    def gemm_step(self, x, mode):
        x += self.prompt(plain_norm(x, self.weights.norm).to(self.workspace.dtype))

    def step(self, x, mode):
        self.gemm_step(x, mode)

    def report(self):
        return [("norm, MLP", "torch", "relu")]


class ReluReader(Reader):
    """A family that the library does not have: Llama's, with another MLP."""

    def activation(self):
        return "silu"  # which no step asks for

    def mlp(self, block):
        return ReluWeights(**vars(super().mlp(block)))


@pytest.mark.slow
def test_an_mlp(monkeypatch, device):
    """Over rounded weights too, which know nothing of it."""
    model = cases.build("Llama", device=device, hidden_act="relu")
    assert message("decode/parts:an_mlp").within(gb.decoder(model, 1, cases.ROOM).path)
    monkeypatch.setitem(family.DECODING, "ForCausalLM", ReluReader)
    monkeypatch.setitem(PARTS, ReluWeights, ReluMLP)
    fast = gb.decoder(model, 9, cases.ROOM)
    assert ("2 x norm, MLP", "torch", "relu") in fast.body.report()
    for rows in (1, 9):
        cases.assert_greedy(fast, cases.prompts(*range(3, 3 + rows)), 12)
    assert gb.decoder(model, 1, cases.ROOM, weights="int8", cache="fp8").certificate is not None


@pytest.mark.parametrize(("heads", "keys"), [(4, 256), (8, 512)])
def test_parts_of_several_rows_keys_are_what_was_measured(heads, keys):
    """350m's and 1b's, in tiles of the plan that rows beyond a GEMV's have; a single row's are a tile each."""
    h200 = Chip(90, 232_448, 132, "")
    (_, tiles), (_, tile) = layer_parts._splits(16, heads), layer_parts._splits(1, heads)
    plan = plan_for(Job("decode_attention", "several", (4, 32, heads, 2), 2, h200))
    assert (tiles * plan.keys, tile) == (keys, 1)
    assert layer_parts._splits(16, heads, 4) == layer_parts.GEMM_SPLITS


def noting(choose, made: list):
    """Return `implementation` that notes (op, dependent) of each call in `made`."""

    def chosen(op, *about):
        function = choose(op, *about)

        def run(*given):
            made.append((op, signature(function).bind(*given).arguments.get("dependent", 0)))
            return function(*given)

        return run

    return chosen


def test_attention_reads_positions_and_old_keys_behind_a_fence(monkeypatch, device):
    """Between the launch that wrote them and every attention stands one that let its successor in behind its wait."""
    body, made = cases.shared("Llama", str(device)).body, []
    for op in (norm_product, decode_attention):
        file = sys.modules[op.__module__]
        monkeypatch.setattr(file, "implementation", noting(file.implementation, made))
    token, position = torch.tensor([[3], [5]], device=device, dtype=torch.int32)
    launches = 2 * 5 + 1  # two layers of q k v, attention, output, gate and up, down; the head
    for mode, fence in ((EARLY, FENCE), (LATE, LATE), (0, 0)):
        monkeypatch.setattr(FusedRunner, "mode", lambda self, rows, mode=mode: mode)
        body.begin(token)
        body.step(token, position)
        assert [dependent for _, dependent in made] == [fence] + [mode] * (launches - 1)
        made.clear()


@pytest.mark.parametrize(
    ("bounds", "which"),
    [
        ((8, 2, 2048), (1, 1)),
        ((8, 2, 9), (1, 0)),
        ((512, 2, 2048), (0, 0)),
        ((8, 1, 2048), (0, 0)),
    ],
    ids=["all layers", "those with a window", "narrow heads", "many heads of keys"],
)
def test_small_products_begin_at_once_beside_attention_by_query(bounds, which, device, monkeypatch):
    """In a LATE chain. A layer's own inputs are small products in any case."""
    monkeypatch.setattr(layer_parts, "BY_QUERY", bounds)
    body, made = gb.decoder(cases.build("Gemma4", torch.bfloat16).to(device), 1, cases.ROOM, verify=False).body, []
    for op in (norm_product, decode_attention):
        file = sys.modules[op.__module__]
        monkeypatch.setattr(file, "implementation", noting(file.implementation, made))
    monkeypatch.setattr(FusedRunner, "mode", lambda self, rows: LATE)
    token = torch.tensor([3], device=device)
    body.begin(token)
    body.step(token, torch.tensor([0], device=device, dtype=torch.int32))
    _, *layers, head = (call for call in made if call[0] not in ("norm_rows", "add_norm"))  # first all layers' own inputs
    assert head == ("norm_product", LATE)
    for number, own in enumerate(which * 2):
        soon = EARLY if own else LATE
        assert layers[7 * number : 7 * number + 7] == [
            ("norm_product", FENCE if own and not number else soon),
            ("decode_attention", LATE),
            ("add_product", soon),
            ("norm_gate_up", LATE),
            ("add_product", LATE),
            ("norm_product", EARLY),
            ("add_product", EARLY),
        ]


@pytest.mark.parametrize(
    ("form", "width", "hidden", "bits", "mode"),
    [
        (LiveFormat, 8192, 2048, 16, EARLY),
        (LiveFormat, 9216, 2560, 16, LATE),
        (LiveFormat, 14336, 4096, 16, LATE),
        (PackedFormat, 14336, 4096, 4.125, EARLY),
        (PackedFormat, 14336, 4096, 8.125, LATE),
    ],
)
def test_large_gate_and_up_launch_late(form, width, hidden, bits, mode, monkeypatch):
    """As whole steps of 1b, Qwen3.5-4B and 8b were faster on an H200, and 8b in int4 and int8."""
    body = cases.shared("Llama").body
    monkeypatch.setattr(body, "can_chain", True)
    monkeypatch.setattr(body, "early_bytes", form.early_bytes)
    monkeypatch.setattr(body, "gate_up_bytes", 2 * width * hidden * bits / 8)
    assert body.mode(1) == mode


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("kind", ["Gemma4", "GPT2"])
def test_an_activation_is_a_launch_only_after_packed_weights(kind, weights, monkeypatch, device):
    """Of an MLP without a gate, and of Gemma 4's gate of a layer's own input."""
    fast, launched = gb.decoder(cases.build(kind).to(device), 1, cases.ROOM, weights=weights), []
    file = sys.modules[activate_rows.__module__]
    choose = file.implementation
    monkeypatch.setattr(file, "implementation", lambda op, *about: launched.append(op) or choose(op, *about))
    fast.body.begin(torch.tensor([3], device=device))
    fast.body.step(torch.tensor([3], device=device), torch.tensor([0], device=device, dtype=torch.int32))
    assert launched.count("activate_rows") == (0 if weights is None else len(fast.body.layers))
