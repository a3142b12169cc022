"""One vocabulary: whatever is counted or forbidden has a cause and a remedy, and those who refuse say the same."""

import pytest
import torch

from gpubound.errors import StallError
from gpubound.watch import events, no_stall, ops, watch
from gpubound.watch.ledger import TOTALS
from tests.messages import message


def test_every_kind_that_a_ledger_counts_has_a_cause_and_a_remedy():
    kinds = {kind for kinds, _ in TOTALS.values() for kind in kinds.split()}
    assert kinds == events.KINDS.keys()
    causes = [*events.KINDS.values(), *events.WAITING_CALLS.values(), *events.THROUGH.values()]
    for cause in (*causes, *(cause for _, cause in events.WAITING_OPS.values())):
        assert cause.does and cause.remedy and not str(cause).endswith(".")


@pytest.mark.parametrize(
    ("kind", "what", "through", "cause"),
    [
        ("sync", "item", "", events.READ),
        ("sync", "boolean mask", "", events.MASK),
        ("sync", "item", "torch/optim/", events.THROUGH["torch/optim/"]),
        ("sync", "stream synchronize", "", events.WAIT),
        ("h2d", "copy to device", "torch/optim/", events.UPLOAD),
        ("gc", "generation 2", "", events.KINDS["gc"]),
    ],
)
def test_the_cause_of_an_event(kind, what, through, cause):
    assert events.cause_of(kind, what, through) == cause


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (lambda x: x[x > 0], events.MASK),
        (lambda x: x.nonzero(), events.WAITING_OPS["nonzero"][1]),
        (lambda x: torch.nn.utils.clip_grad_norm_([x.requires_grad_()], 1.0, error_if_nonfinite=True), None),
        (print, events.PRINT),
    ],
)
def test_a_guard_says_what_to_write_instead(sim, line, cause):
    x = torch.ones(3, device=sim)
    x.grad = torch.ones_like(x)
    with pytest.raises(StallError) as error, no_stall():
        line(x)
    wanted = cause or events.THROUGH["torch/nn/utils/clip_grad"]
    assert message("watch/events:a_guard_says_what_to_wri", wanted.remedy).within(str(error.value))


def test_a_cpu_can_stand_for_the_device_whose_waits_count():
    mask, x = torch.tensor([True, False]), torch.ones(2)
    index, cpu = torch.ops.aten.index.Tensor, torch.device("cpu")
    assert not ops.moves(index, (x, [mask]), {})
    assert [(move.kind, move.cause) for move in ops.moves(index, (x, [mask]), {}, home=cpu)] == [("sync", events.MASK)]
    assert not ops.moves(index, (x, [torch.tensor([0])]), {}, home=cpu)
    item = torch.ops.aten._local_scalar_dense.default
    assert not ops.moves(item, (x[0],), {}) and len(ops.moves(item, (x[0],), {}, home=cpu)) == 1
    repeat = torch.ops.aten.repeat_interleave.Tensor
    assert not ops.moves(repeat, (torch.tensor([1]),), {"output_size": 1}, home=cpu)
    assert len(ops.moves(repeat, (torch.tensor([1]),), {}, home=cpu)) == 1


def test_the_backward_of_a_masked_scatter_waits(sim):
    source, mask = torch.ones(4, device=sim).requires_grad_(), (torch.arange(4) % 2 == 0).to(sim)
    with watch() as ledger:
        torch.zeros(4, device=sim).masked_scatter(mask, source).sum().backward()
    (row,) = [row for row in ledger.rows if row.kind == "sync"]
    assert events.cause_of(row.kind, row.what) == events.WAITING_OPS["masked_scatter_backward"][1]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (lambda x: x.histc(4), events.BOUNDS),
        (lambda x: torch.linspace(0.0, x[0], 4, device=x.device), events.READ),
        (lambda x: torch.linalg.pinv(x[None]), events.FACTORISED),
        (lambda x: torch.normal(x, x), events.DEVIATION),
        (lambda x: x.masked_fill(x > 0, x[0]), events.FILL_VALUE),
    ],
)
def test_ops_that_read_inside_are_named_with_their_remedy(sim, line, cause):
    with pytest.raises(StallError) as error, no_stall():
        line(torch.ones(4, device=sim))
    assert cause.remedy in str(error.value)


@pytest.mark.parametrize(
    "line",
    [
        lambda x, index: x.masked_fill(x > 0, torch.tensor(1.0)),
        lambda x, index: x.fill_(torch.tensor(1.0)),
        lambda x, index: torch.normal(x, 1.0),
        lambda x, index: torch.where(x > 0, x, 0.0),
        lambda x, index: x.index_fill_(0, index, 1.0),
        lambda x, index: x.__setitem__(x > 0, 1.0),
        lambda x, index: x[torch.arange(4) > 1],
        lambda x, index: x.histc(4, 0, 1),
        lambda x, index: torch.linspace(0.0, 1.0, 4, device=x.device),
    ],
)
def test_a_number_that_becomes_an_argument_of_the_kernel_does_not_wait(sim, line):
    x, index = torch.ones(4, device=sim), torch.tensor([1, 2]).to(sim)
    with no_stall():
        line(x, index)
