"""Heads that are normed and turned: both mirrors beside the formula in fp64, sentences."""

import re

import pytest
import torch

from gpubound import kernels

from .cases import assert_inside, banded, draw
from .test_experts import SOURCES, run


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "pairs", "normed", "gained", "back"),
    [(40, 4, True, True, False), (32, 16, True, False, False), (48, 6, False, False, True)],
)
def test_heads_are_normed_and_turned(source, dtype, width, pairs, normed, gained, back, device):
    x, weight = draw(device, dtype, 3, 2, width), draw(device, torch.float32, width, seed=1) if gained else None
    position = torch.tensor([4, 0, 7], device=device, dtype=torch.int32)
    angle = draw(device, torch.float32, 8, pairs, seed=2)
    whole, out = banded((3, 2, width), device, dtype)
    run(source, "turn_heads", x, position, angle.cos(), angle.sin(), out, weight, 0.1 if normed else None, back)
    assert_inside(whole, out)
    y = x.double()
    if normed:
        y = y / (y.square().mean(-1, keepdim=True) + 0.1).sqrt()
    if weight is not None:
        y = y * weight.double()
    still = width - 2 * pairs
    plane = torch.view_as_complex(y[..., still:].unflatten(-1, (pairs, 2)).contiguous())
    turns = angle.double()[position.long()][:, None] * (-1 if back else 1)
    turned = torch.view_as_real(plane * torch.polar(torch.ones_like(turns), turns)).flatten(-2)
    want = torch.cat([y[..., :still], turned], -1)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("source", SOURCES)
def test_heads_go_to_slots_of_a_ring(source, device):
    """Others stay as they are; one that is none is written nowhere."""
    x, position = draw(device, torch.float32, 4, 2, 16), torch.tensor([4, 0, 7, 1], device=device, dtype=torch.int32)
    angle = draw(device, torch.float32, 8, 3, seed=2)
    given = position, angle.cos(), angle.sin()
    plain = run(source, "turn_heads", x, *given, torch.empty_like(x), None, 0.1)
    whole, ring = banded((6, 2, 16), device, torch.bfloat16)
    ring.fill_(5.0)
    slot = torch.tensor([5, -1, 0, 6], device=device, dtype=torch.int32)
    run(source, "turn_heads", x, *given, ring, None, 0.1, False, slot)
    assert_inside(whole, ring)
    torch.testing.assert_close(ring[[5, 0]], plain[[0, 2]].bfloat16(), rtol=0, atol=2e-2)
    assert (ring[1:5] == 5.0).all()


WRONG = {
    "a slot for other tokens": (
        lambda x, table: kernels.turn_heads(x, torch.zeros(3).int(), table, table, x.clone(), slot=torch.zeros(2).int()),
        "turn_heads: slot must be a contiguous torch.int32 (3,), got torch.int32 (2,); it says where each token is kept.",
    ),
    "more pairs than channels": (
        lambda x, table: kernels.turn_heads(x, torch.zeros(3).int(), table, table, x.clone()),
        "turn_heads: cos must have at most 4 pairs for heads of 8, got 5.",
    ),
    "a gain without a norm": (
        lambda x, table: kernels.turn_heads(x, torch.zeros(3).int(), table, table, x.clone(), torch.ones(8)),
        "turn_heads: weight is of a norm, which eps=None leaves out; pass its eps.",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(what):
    call, sentence = WRONG[what]
    table = torch.ones(6, 5)
    if what != "more pairs than channels":
        table = torch.ones(6, 2).expand(6, 2).contiguous()
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        call(torch.ones(3, 2, 8), table)
