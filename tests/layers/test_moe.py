"""Experts beside plain loops, without a host; weights in the host's memory; state_dicts with a storage for each tensor."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpubound as gb
from gpubound import trace
from gpubound.errors import FallbackError
from gpubound.layers import MoE
from gpubound.layers.block import visiting
from gpubound.layers.fused_weights import give_own_storages
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


def storages(state):
    return [t.untyped_storage().data_ptr() for t in state.values()]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.bool]
)
def test_parts_of_one_memory(device, dtype):
    model = nn.Module()
    whole = torch.zeros(10, 3, device=device).to(dtype)
    for name, part in {"first": whole[:4], "second": whole[4:], "turned": whole[:3].t()}.items():
        model.register_buffer(name, part)
    model.register_buffer("alone", torch.zeros(2, device=device))
    give_own_storages(model)
    give_own_storages(model)  # once is enough
    state = model.state_dict()
    assert [t.untyped_storage().nbytes() for t in state.values()] == [t.nbytes for t in state.values()]
    for name, tensor in state.items():
        kept = getattr(model, name)
        assert (tensor.data_ptr(), tensor.shape, tensor.dtype) == (kept.data_ptr(), kept.shape, kept.dtype)
    state["second"].fill_(1)
    assert whole[4:].float().eq(1).all() and whole[:4].float().eq(0).all()
    assert model.second._version == state["second"]._version > 0, "who watches the weight sees the write"


def test_tied_weights_keep_one_storage_and_a_models_own_tensors_theirs(device):
    model, memory = nn.Module(), torch.arange(12.0, device=device)
    model.one, model.other = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])
    model.tied = model.one
    give_own_storages(model)
    one, other, tied = storages(model.state_dict())
    assert one == tied != other
    assert all(t is getattr(model, name) for name, t in model.state_dict(keep_vars=True).items())
    assert len(set(storages(dict(model.named_parameters())))) == 1, "the model's own lie where they lay"
    model.load_state_dict({"one": torch.ones(4), "other": torch.ones(8), "tied": torch.ones(4)})
    assert memory.eq(1).all()


CPU = torch.device("cpu")


class Scaled(nn.Module):
    """Returns a tuple, and says where it was computed."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("factor", torch.full((4,), 2.0))
        self.register_buffer("nothing", None)
        self.seen: list[torch.device] = []

    def forward(self, x, scales=None, fail=False):
        self.seen.append(x.device)
        if fail:
            raise ArithmeticError("in the call")
        return self.inner(x) * self.factor * scales["of"], x


@pytest.fixture
def sim() -> torch.device:
    if torch.cuda.is_available():
        pytest.skip("the pretend device contends with a real one")
    return simgpu()


@torch.no_grad()
def test_a_call_is_computed_there_and_its_result_comes_back(sim):
    module, x, scales = Scaled(), torch.randn(3, 4), {"of": torch.full((4,), 0.5)}
    wanted, own = module(x, scales)[0], dict(module.named_parameters()) | dict(module.named_buffers())
    with visiting([module], sim):
        y, given = module(x, scales=scales)
        assert module.inner.weight.device == CPU, "between two calls the weights are at home"
    assert module.seen == [CPU, sim] and y.device == given.device == CPU
    torch.testing.assert_close(y, wanted)
    now = dict(module.named_parameters()) | dict(module.named_buffers())
    assert now.keys() == own.keys() and all(now[name] is own[name] for name in own)
    module(x, scales)
    assert module.seen[-1] == CPU


@torch.no_grad()
def test_a_call_that_fails_leaves_the_weights_where_they_were(sim):
    module = Scaled()
    own = module.inner.weight
    with visiting([module], sim), pytest.raises(ArithmeticError):
        module(torch.randn(3, 4), fail=True)
    assert module.inner.weight is own and module.seen == [sim]


@torch.no_grad()
def test_what_lies_on_such_a_device_already_is_left_alone(sim):
    module = Scaled().to(sim)
    with visiting([module], sim):
        assert not module._forward_hooks and not module._forward_pre_hooks
