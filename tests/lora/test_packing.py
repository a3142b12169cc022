"""Adapters of q, k and v, and of gate and up, are one matrix each, and stay so when their memory is moved."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gpubound as gb
from gpubound import trace
from gpubound.errors import FallbackError
from gpubound.kernels import lora as lora_ops
from gpubound.kernels.accumulate import join_rows

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
