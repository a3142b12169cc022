"""The lookup: nn.Embedding's numbers; its gradient in main_grad, unrounded, also of a tied table; calls where it is more."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpubound import trace
from gpubound.errors import FallbackError
from gpubound.layers import embedding_and_head, linear, look_up
from gpubound.layers.embedding_and_head import table_rows
from gpubound.train.accumulate import Accumulators

IDS = torch.tensor([[1, 3, 1], [0, 1, 2]])


def table(dtype=torch.float32, **options) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(5, 8, dtype=dtype, **options)


@pytest.fixture
def deliveries(monkeypatch) -> list:
    made, own = [], embedding_and_head.deliver_rows
    monkeypatch.setattr(embedding_and_head, "deliver_rows", lambda *given: (made.append(given[0]), own(*given))[1])
    return made


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("around", [lambda f, ids: f(ids), lambda f, ids: checkpoint(f, ids, use_reentrant=False)])
def test_the_gradient_is_the_modules(around, padding, deliveries):
    ours, plain = table(padding_idx=padding), table(padding_idx=padding)
    sums, factors = Accumulators(ours.named_parameters()), torch.randn(2, 3, 8)
    for _ in range(2):  # the second adds to the first
        x = around(lambda ids: look_up(ours, ids), IDS)
        assert x.equal(plain(IDS))
        (x * factors).sum().backward()
        (plain(IDS) * factors).sum().backward()
    torch.testing.assert_close(ours.weight.main_grad, plain.weight.grad)
    assert len(deliveries) == 2 and ours.weight.grad is None
    sums.release()


def test_what_16_bits_would_lose():
    """256 + 1 of one id: 256 in a bf16 table."""
    ours = table(torch.bfloat16)
    Accumulators(ours.named_parameters())
    factors = torch.tensor([256.0, 1.0], dtype=torch.bfloat16)
    (look_up(ours, torch.tensor([4, 4])) * factors[:, None]).sum().backward()
    assert ours.weight.main_grad[4].eq(257).all() and not ours.weight.main_grad[:4].any()


@pytest.mark.parametrize("fresh", [True, False])
def test_a_tied_table(fresh):
    """The head's product and the lookup give to one accumulator; where a sum begins, whoever is first writes over the last."""
    ours, plain = table(), table()
    sums = Accumulators(ours.named_parameters())
    sums.gradient.fill_(float("nan"))
    sums.begin() if fresh else sums.zero()
    linear(look_up(ours, IDS), ours.weight).square().sum().backward()
    sums.finish()
    (plain(IDS) @ plain.weight.t()).square().sum().backward()
    torch.testing.assert_close(ours.weight.main_grad, plain.weight.grad)


class Scaled(nn.Embedding):
    def forward(self, ids):
        return 2 * super().forward(ids)


def hooked() -> nn.Embedding:
    module = table()
    module.register_forward_hook(lambda module, args, out: 2 * out)
    return module


def strided() -> nn.Embedding:
    module = table()
    module.weight.data = torch.randn(8, 5).t()
    return module


MORE = {
    "a subclass": lambda: Scaled(5, 8),
    "a hook": hooked,
    "renormalised rows": lambda: table(max_norm=0.5),
    "scaled gradients": lambda: table(scale_grad_by_freq=True),
    "a strided table": strided,
    "no accumulator": None,
    "frozen": None,
    "no gradient": None,
}


@pytest.mark.parametrize("what", MORE)
def test_what_is_more_than_a_lookup_is_called(what, deliveries):
    module = (MORE[what] or table)()
    if what == "frozen":
        module.requires_grad_(False)
        module.weight.main_grad = torch.zeros(5, 8)
    elif what != "no accumulator":
        Accumulators(module.named_parameters())
    with torch.set_grad_enabled(what != "no gradient"):
        x = look_up(module, IDS)
    assert x.equal(module(IDS))
    if x.requires_grad:
        x.sum().backward()
    assert not deliveries


def test_a_lookup_into_a_main_grad_that_is_not_contiguous_is_counted():
    weight = torch.nn.Parameter(torch.ones(5, 3))
    weight.main_grad = torch.zeros(3, 5).t()
    with trace.strict(), pytest.raises(FallbackError, match="not contiguous"):
        table_rows(weight, torch.tensor([1]))
    table_rows(weight, torch.tensor([1])).sum().backward()
    assert weight.grad[1].tolist() == [1, 1, 1]
