"""Weights that lie in the host's memory come to a device for a call. The pretend device refuses the CPU's tensors."""

import pytest
import torch
from torch import nn

from gpubound.layers.block import visiting
from gpubound.watch.pretend import simgpu

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
