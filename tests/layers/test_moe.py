"""Experts beside plain loops, forward and gradients; and that no host is asked who chose what."""

import pytest
import torch
import torch.nn.functional as F

import gpubound as gb
from gpubound import trace
from gpubound.errors import FallbackError
from gpubound.layers import MoE
from gpubound.layers.moe import grouped_product
from gpubound.models.richards import RichardsConfig, RichardsDecoder
from gpubound.train.objectives import objective_class
from gpubound.watch import no_stall
from gpubound.watch.pretend import simgpu


def loops(module, x):
    """Expert by expert, over the tokens that chose it."""
    odds = (x @ module.router.weight.T).softmax(-1)
    shares, ids = odds.topk(module.router.slots)
    shares = shares / shares.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for e, (gate_up, down) in enumerate(zip(module.gate_up_proj, module.down_proj)):
        row, slot = (ids == e).nonzero(as_tuple=True)
        gate, up = (x[row] @ gate_up.T).chunk(2, -1)
        y = y.index_add(0, row, shares[row, slot, None] * ((F.silu(gate) * up) @ down.T))
    return y


@pytest.mark.parametrize("dtype,close", [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("unused", [False, True])
def test_outputs_and_gradients_are_those_of_plain_loops(dtype, close, unused):
    torch.manual_seed(0)
    module = MoE(16, 8, 6, 2, dtype=torch.float64)
    x = torch.randn(11, 16, dtype=torch.float64, requires_grad=True)
    if unused:
        with torch.no_grad():  # nobody chooses the last two
            x[:, 0], module.router.weight[4:] = 9.0, 0.0
            module.router.weight[4:, 0] = -9.0
    upstream = torch.randn(11, 16, dtype=torch.float64)
    want = loops(module, x)
    wanted = torch.autograd.grad(want, [x, *module.parameters()], upstream)
    there = MoE(16, 8, 6, 2, dtype=dtype)
    there.load_state_dict(module.state_dict())
    near = x.detach().to(dtype).requires_grad_()
    got = there(near)
    assert (got - want).norm() < close * want.norm()
    for a, b in zip(torch.autograd.grad(got, [near, *there.parameters()], upstream.to(dtype)), wanted):
        assert (a - b).norm() < 5 * close * b.norm()


def config(**options) -> RichardsConfig:
    return RichardsConfig(16, 24, 2, 2, 2, 32, mlp="moe", experts=4, **options)


def test_an_uneven_load_costs_what_its_definition_says():
    """As a part of a step's loss, by the words that count; nothing of it in evaluation."""
    torch.manual_seed(0)
    model = RichardsDecoder(config(balance=0.5), dtype=torch.float64)
    ids = torch.randint(32, (2, 9))
    routed = []
    for block in model.model.layers:
        block.mlp.router.register_forward_hook(lambda m, x, found: routed.append(found))
    objective = objective_class("next_token")()
    labels = ids.roll(-1, 1)
    labels[:, -3:] = -100
    total, count = objective(model.train(), {"input_ids": ids, "labels": labels})
    costs = []
    for odds, _, chosen in routed[-2:]:
        load = [(chosen == e).double().mean() for e in range(4)]
        costs.append(4 * sum(load[e] * odds[:, e].mean() for e in range(4)))
    plain = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    assert count == 12 and total.item() == pytest.approx((plain + 12 * 0.5 * sum(costs) / 2).item(), rel=1e-6)
    assert min(costs) > 1.0 and total.requires_grad
    scaled, _ = objective(model, {"input_ids": ids, "labels": labels}, scale=torch.tensor(3.0))
    assert scaled.item() == pytest.approx(3 * total.item(), rel=1e-6)
    held, _ = objective(model.eval(), {"input_ids": ids, "labels": labels})
    assert held.item() == pytest.approx(plain.item(), rel=1e-6)


def test_what_backward_computes_again_costs_no_more(monkeypatch):
    """Blocks that are computed twice, their load with them, give the gradients of blocks that are computed once."""
    ids, found = torch.randint(32, (2, 9)), []
    for recompute in ("none", "blocks"):
        torch.manual_seed(0)
        model = RichardsDecoder(config(balance=0.5))
        step = gb.TrainStep(model, "causal_lm", gb.AdamW(lr=1e-2), precision="fp32", recompute=recompute)
        found.append([step({"input_ids": ids, "labels": ids}).read().loss for _ in range(3)])
        step.close()
    assert found[0] == pytest.approx(found[1], rel=1e-5) and found[0][2] < found[0][0]


def test_a_step_with_experts_never_waits_for_the_device():
    if torch.cuda.is_available():
        pytest.skip("the pretend device contends with a real one; tests/models/richards/test_gpu.py has the real one's")
    sim = simgpu()
    model = RichardsDecoder(config(), device=sim)
    ids = torch.randint(32, (2, 8)).to(sim)
    model(ids).sum().backward()
    with no_stall():
        model(ids).sum().backward()


def test_experts_of_another_dtype_are_a_counted_cast():
    experts, ends = torch.ones(2, 8, 8), torch.tensor([1, 2], dtype=torch.int32)
    with trace.strict(), pytest.raises(FallbackError, match=r"float32 experts are cast to .*bfloat16"):
        grouped_product(torch.ones(2, 8, dtype=torch.bfloat16), experts, ends)
