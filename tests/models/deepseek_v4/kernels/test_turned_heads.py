"""Heads that are normed and turned: both mirrors beside the formula in fp64, several parts in a launch, sentences."""

import pytest
import torch

from gpubound.kernels.registry import load
from gpubound.models.deepseek_v4 import kernels
from gpubound.models.deepseek_v4.kernels.attention import TurnedHeads
from tests.kernels.cases import SOURCES, assert_inside, banded, draw


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
    load(source, "turn_heads")([TurnedHeads(x, out, weight, 0.1 if normed else None)], position, angle.cos(), angle.sin(), back)
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
    (plain,) = load(source, "turn_heads")([TurnedHeads(x, torch.empty_like(x), None, 0.1)], *given)
    whole, ring = banded((6, 2, 16), device, torch.bfloat16)
    ring.fill_(5.0)
    slot = torch.tensor([5, -1, 0, 6], device=device, dtype=torch.int32)
    load(source, "turn_heads")([TurnedHeads(x, ring, None, 0.1, slot)], *given)
    assert_inside(whole, ring)
    torch.testing.assert_close(ring[[5, 0]], plain[[0, 2]].bfloat16(), rtol=0, atol=2e-2)
    assert (ring[1:5] == 5.0).all()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("count", [2, 3])
def test_parts_of_a_launch_have_the_numbers_of_their_own(source, count, device):
    """Each as wide, with as many heads and with the norm that it has. One lies in a ring."""
    position = torch.tensor([4, 0, 9], device=device, dtype=torch.int32)  # the last has no angles
    angle, slot = draw(device, torch.float32, 8, 4, seed=2), torch.tensor([1, 4, 0], device=device, dtype=torch.int32)
    given = position, angle.cos(), angle.sin()
    weight = draw(device, torch.float32, 24, seed=6)

    def parts() -> list[TurnedHeads]:
        x = [draw(device, torch.float32, 3, heads, width, seed=width) for heads, width in ((4, 40), (1, 24), (2, 16))]
        ring = torch.full((5, 1, 24), 7.0, device=device, dtype=torch.bfloat16)
        made = [TurnedHeads(x[0], torch.empty_like(x[0]), None, 0.1), TurnedHeads(x[1], ring, weight, 1e-5, slot)]
        return [*made, TurnedHeads(x[2], torch.empty_like(x[2]))][:count]

    together = load(source, "turn_heads")(parts(), *given)
    alone = [load(source, "turn_heads")([part], *given)[0] for part in parts()]
    assert len(together) == count
    for one, other in zip(together, alone):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert together[0][2].isnan().all() and not together[0][:2].isnan().any() and (together[1][2:4] == 7.0).all()


def of(x: torch.Tensor, table: torch.Tensor, *rest: object) -> object:
    return kernels.turn_heads([TurnedHeads(x, x.clone(), *rest)], torch.zeros(3).int(), table, table)


WRONG = {
    r"slot must be a contiguous torch.int32 \(3,\), got torch.int32 \(2,\)": lambda x, table: of(
        x, table, None, None, torch.zeros(2).int()
    ),
    "cos must have at most 4 pairs for heads of 8, got 5": lambda x, table: of(x, torch.ones(6, 5)),
    "weight is of a norm, which eps=None leaves out": lambda x, table: of(x, table, torch.ones(8)),
    "got 4 tensors of heads, wanted 1 to 3": lambda x, table: kernels.turn_heads(
        [TurnedHeads(x, x.clone())] * 4, torch.zeros(3).int(), table, table
    ),
    r"x must be .* \(3, heads, width\), got torch.float32 \(2, 2, 8\)": lambda x, table: kernels.turn_heads(
        [TurnedHeads(x, x.clone()), TurnedHeads(x[:2], x[:2].clone())], torch.zeros(3).int(), table, table
    ),
}


@pytest.mark.parametrize("named", WRONG)
def test_wrong_arguments(named):
    with pytest.raises(ValueError, match=f"^turn_heads: {named}"):
        WRONG[named](torch.ones(3, 2, 8), torch.ones(6, 2))
