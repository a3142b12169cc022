"""Which layers get adapters, which of them are one matrix each, and adapters whose layer has another weight since."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode

import gpubound as gb
from gpubound import trace
from gpubound.errors import DataError, FallbackError
from gpubound.kernels import lora as lora_ops
from gpubound.kernels.accumulate import join_rows

from ..place.models import tiny
from .cases import adapted, placed

FALLBACK = "lora: the adapters of layers that are multiplied as one, as one matrix"


class Concatenations(TorchDispatchMode):
    """Count aten.cat of matrices."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op is torch.ops.aten.cat.default and args[0][0].dim() == 2
        return op(*args, **kwargs or {})


def model(**options):
    return adapted(placed(hidden_size=64, intermediate_size=128, head_dim=16, num_hidden_layers=1), **options)


def there_and_back(model):
    return model.to(torch.float64).to(torch.float32)


def assigned(model):
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    return model


MOVES = {"as added": lambda model: model, ".to()": there_and_back, "deepcopy": copy.deepcopy, "assign": assigned}


def of_one_product(model):
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]


def packed(model):
    return [
        join_rows([getattr(layer, half)["default"].weight.detach() for layer in layers]) is not None
        for layers in of_one_product(model)
        for half in ("lora_A", "lora_B")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("move", [MOVES["as added"], MOVES["assign"]], ids=["as added", "assign"])
def test_a_step_of_a_moved_model_launches_as_much(move, monkeypatch):
    """In the interpreter: four gradients of adapters a block, of qkv, o, gate and up, and down, and nothing concatenated."""
    moved, gradients, op, ids = move(model()), [], lora_ops.lora_gradients, torch.randint(64, (1, 8))
    step = gb.TrainStep(moved.train(), "causal_lm", precision="fp32", graph="off")
    step([{"input_ids": ids, "labels": ids}])  # stacks the weights of q, k and v
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(lora_ops, "lora_gradients", lambda *args: gradients.append(args) or op(*args))
    with gb.strict(), Concatenations() as concatenations:
        step([{"input_ids": ids, "labels": ids}])
    step.close()
    assert len(gradients) == 4 and concatenations.count == 0


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_the_first_product_packs_a_moved_model(move):
    moved, ids = move(model()), torch.randint(64, (1, 8))
    with gb.strict():
        got = moved(ids).logits
    assert packed(moved) == [True] * 4
    torch.testing.assert_close(got, model()(ids).logits)


def test_parameters_that_must_stay_are_copied_and_counted():
    """A TrainStep holds its parameters in a buffer: here in the order in which a frozen adapter was left out of it."""
    adapted_model, ids = model(), torch.randint(64, (1, 8))
    adapted_model.model.layers[0].self_attn.k_proj.requires_grad_(False)
    step = gb.TrainStep(adapted_model.train(), "causal_lm", precision="fp32", graph="off")
    trace.fallbacks.clear()
    adapted_model(ids)
    assert FALLBACK in {what for what, _ in trace.fallbacks}
    with pytest.raises(FallbackError), gb.strict():
        adapted_model(ids)
    step.close()


X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Two(nn.Module):
    """Two layers, and the formula of what they and their adapters compute."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.first, self.second = nn.Linear(8, 6, device=device), nn.Linear(6, 5, device=device)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

    def wanted(self, x):
        for layer in (self.first, self.second):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            base = layer.base_layer
            x = x @ base.weight.t() + base.bias + layer.scaling["default"] * (x @ a.t()) @ b.t()
            x = torch.relu(x) if layer is self.first else x
        return x


def two(device="cpu"):
    return adapted(Two(device), rank=2)


def other_weight(model):
    model.first.base_layer.weight = nn.Parameter(torch.randn(6, 8))


def other_half(model):
    model.second.lora_B["default"].weight = nn.Parameter(torch.randn(5, 2))


def pruned(model):
    prune.l1_unstructured(model.first.base_layer, "weight", 0.5)


def normed(model):
    parametrizations.weight_norm(model.second.base_layer)
    model.second.base_layer.parametrizations.weight.original0.data.mul_(2)


@pytest.mark.parametrize("change", [other_weight, other_half, pruned, normed])
def test_they_follow_a_change(change):
    model = two()
    before = model(X)
    change(model)
    for p in model.parameters():
        p.requires_grad_(False)  # a weight that a hook computes of one that trains cannot be copied
    assert not torch.allclose(model(X), before)
    for one in (model, copy.deepcopy(model)):
        torch.testing.assert_close(one(X), one.wanted(X))
        with gb.lora.disable(one):
            assert not torch.allclose(one(X), one.wanted(X))


def test_they_follow_a_model_that_leaves_the_meta_device():
    model = two("meta").to_empty(device="cpu")
    torch.manual_seed(1)
    for p in model.parameters():
        nn.init.normal_(p)
    torch.testing.assert_close(model(X), model.wanted(X))


@pytest.mark.parametrize("which", ["", "lora_", "base_layer"])
def test_a_call_with_parameters_of_functional_call(which):
    model, other = two(), two()
    with torch.no_grad():
        for p in other.parameters():
            p.normal_()
    passed = {key: p for key, p in other.named_parameters() if which in key}
    before, want = model(X), copy.deepcopy(model)
    want.load_state_dict(passed, strict=False)
    for values in (passed, {key: p.detach() for key, p in passed.items()}):
        torch.testing.assert_close(torch.func.functional_call(model, values, (X,)), want.wanted(X))
    assert torch.equal(model(X), before)


def test_gradients_by_torch_func():
    model = two()
    passed = dict(model.named_parameters())
    got = torch.func.grad(lambda passed: torch.func.functional_call(model, passed, (X,)).square().sum())(passed)
    for p in passed.values():
        p.requires_grad_(True)
    want = torch.autograd.grad(model.wanted(X).square().sum(), list(passed.values()))
    for (key, gradient), wanted in zip(got.items(), want, strict=True):
        torch.testing.assert_close(gradient, wanted, msg=key)


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
