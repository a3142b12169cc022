"""The flat layout: every parameter once, neighbours stay neighbours, decayed ones first, strides and values kept."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gpubound.graph.memory import CopyBudget, StorageCopy
from gpubound.kernels.accumulate import ensure_record, join_rows
from gpubound.train.accumulate import ALIGN, lay_out
from gpubound.train.adamw import Weights, _joined_parts, _numbers, quantised_bytes
from tests import messages

from .test_build_model import peak


def packed(*rows: int, width: int = 8, dtype=torch.float32) -> list[nn.Parameter]:
    """Parameters that are row slices of one buffer, as placed layers keep theirs."""
    buffer = torch.randn(sum(rows), width).to(dtype)
    return [nn.Parameter(part) for part in buffer.split(list(rows))]


def named(**parameters) -> list[tuple[str, nn.Parameter]]:
    return list(parameters.items())


def test_decaying_first_and_aligned():
    layout = lay_out(
        named(gain=nn.Parameter(torch.ones(5)), w=nn.Parameter(torch.ones(3, 5)), bias=nn.Parameter(torch.ones(3)))
    )
    assert [(slot.name, slot.start) for slot in layout.slots] == [("w", 0), ("gain", ALIGN), ("bias", 2 * ALIGN)]
    (group,) = layout.groups
    assert (group.start, group.decay_stop, group.stop, layout.size) == (0, ALIGN, 3 * ALIGN, 3 * ALIGN)


def test_dtypes_become_groups_of_their_own():
    mixed = named(a=nn.Parameter(torch.ones(2, 2)), b=nn.Parameter(torch.ones(2, 2).bfloat16()), c=nn.Parameter(torch.ones(3)))
    assert [(g.dtype, g.start, g.stop) for g in lay_out(mixed).groups] == [
        (torch.float32, 0, 2 * ALIGN),
        (torch.bfloat16, 2 * ALIGN, 3 * ALIGN),
    ]
    assert [g.dtype for g in lay_out(mixed, torch.bfloat16).groups] == [torch.bfloat16]


def test_neighbours_stay_neighbours_in_the_storages_order():
    q, k, v = packed(4, 3, 2)
    other = nn.Parameter(torch.randn(7, 3))
    layout = lay_out(named(v=v, other=other, q=q, k=k))
    assert [slot.name for slot in layout.slots] == ["q", "k", "v", "other"]
    before = torch.cat([p.detach().clone() for p in (q, k, v)])
    weights = Weights(layout, masters=None)
    assert join_rows([q.detach(), k.detach(), v.detach()]).equal(before)
    assert q.untyped_storage().data_ptr() == weights.flat[0].untyped_storage().data_ptr()
    gradient = torch.arange(float(layout.size))
    mains = [slot.view(gradient) for slot in layout.slots[:3]]
    assert join_rows(mains).shape == (9, 8)


def test_a_frozen_neighbour_stays_behind():
    q, k, v = packed(4, 3, 2)
    k.requires_grad_(False)
    address, values = k.data_ptr(), k.detach().clone()
    layout = lay_out(named(q=q, k=k, v=v))
    Weights(layout, masters=None)
    assert [slot.name for slot in layout.slots] == ["q", "v"]
    assert k.data_ptr() == address and k.equal(values)


def test_tied_once_and_still_tied():
    embed, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = embed.weight
    model = nn.ModuleDict({"embed": embed, "head": head})
    layout = lay_out([*model.named_parameters(), ("again", head.weight)])
    assert [slot.name for slot in layout.slots] == ["embed.weight"]
    Weights(layout, masters=torch.float32)
    assert head.weight is embed.weight


def test_values_and_strides_survive_the_cast():
    conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    start, strides = conv.weight.detach().clone(), conv.weight.stride()
    weights = Weights(lay_out(conv.named_parameters(), torch.bfloat16), masters=torch.float32)
    assert conv.weight.dtype == torch.bfloat16 and conv.weight.stride() == strides
    assert conv.weight.equal(start.bfloat16())
    assert weights.layout.slots[0].view(weights.masters[0]).equal(start), "the master keeps all of the fp32 weight"
    assert conv(torch.randn(1, 3, 4, 4).bfloat16()).dtype == torch.bfloat16


def test_padding_is_zero_and_round_masters():
    model = nn.Linear(3, 5)
    weights = Weights(lay_out(model.named_parameters(), torch.bfloat16), masters=torch.float32)
    used = sum(p.numel() for p in model.parameters())
    assert weights.flat[0].count_nonzero() == weights.masters[0].count_nonzero() == used
    weights.masters[0].fill_(1.5)
    weights.round_masters()
    assert model.weight.eq(1.5).all()


message = partial(messages.refusal, ValueError)


def test_errors():
    weight = nn.Parameter(torch.ones(2, 2))
    assert message(lambda: lay_out(named(a=nn.Parameter(torch.ones(2), requires_grad=False)))) == (
        messages.message("train/flat_buffers:errors")
    )
    assert message(lambda: lay_out(named(a=nn.Parameter(torch.ones(2).double())))) == (
        messages.message("train/flat_buffers:errors.2")
    )
    assert message(lambda: lay_out(named(a=nn.Parameter(torch.ones(2, device="meta"))))) == (
        messages.message("train/flat_buffers:errors.3")
    )
    assert message(lambda: lay_out(nn.LazyLinear(3).named_parameters())) == messages.message("train/flat_buffers:errors.4")
    assert message(lambda: lay_out(named(a=weight, b=nn.Parameter(torch.ones(2, device="meta"))))) == (
        messages.message("train/flat_buffers:errors.5")
    )


@pytest.mark.parametrize("how", ["trained", "frozen", "a buffer"])
def test_what_lies_over_a_trained_weight_is_named(how):
    """The weight moves into a flat buffer; what was over it would stay behind."""
    weight = nn.Parameter(torch.ones(4, 2))
    over = nn.Parameter(weight.detach()[1:3], requires_grad=how == "trained")
    if how == "a buffer":
        given = {"named": named(a=weight), "others": named(b=over.detach())}
    else:
        given = {"named": named(a=weight, b=over, c=nn.Parameter(torch.ones(2)))}
    assert message(lambda: lay_out(**given)) == messages.message("train/flat_buffers:what_lies_over_a_trained")


def test_frozen_tensors_may_lie_over_one_another():
    still = nn.Parameter(torch.ones(4), requires_grad=False)
    again = nn.Parameter(still.detach()[:2], requires_grad=False)
    layout = lay_out(named(a=still, b=again, c=nn.Parameter(torch.ones(2))), others=named(d=still.detach()[2:]))
    assert [slot.name for slot in layout.slots] == ["c"]


def test_moved_parameter_is_named():
    model = nn.Linear(3, 5)
    weights = Weights(lay_out(model.named_parameters(), torch.bfloat16), masters=torch.float32)
    weights.check()
    model.float()
    assert message(weights.check) == messages.message("train/flat_buffers:moved_parameter_is_named")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masters", "moments"])
def test_a_comparison_joins_and_dequantises_in_little_memory(kind):
    """Beside a graph it stays reserved: 0.45 GiB of updates in backward with parts of 16 million masters."""
    count, cpu = 20 << 20, torch.device("cpu")
    storage = torch.zeros(quantised_bytes(count) if kind == "moments" else 2 * count, dtype=torch.uint8)
    flat = torch.zeros(count if kind == "masters" else 0, dtype=torch.bfloat16)
    record = partial(_joined_parts, flat) if kind == "masters" else partial(_numbers, size=count, dtype=torch.uint8)
    ensure_record(storage).numbers = record
    copy = StorageCopy(storage, "", CopyBudget(cpu))
    copy.saved = storage.clone()
    storage[::5] = 1
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        assert not copy.difference().bitwise
    assert 16 << 20 < peak(profiled) < 160 << 20
