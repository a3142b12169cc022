"""The recurrence: both mirrors agree over chunks and with states, the definition is the formula, no token reads a later one."""

import pytest
import torch
from torch import Tensor

from gpubound.kernels import plans
from gpubound.kernels.plans.types import MatrixPlan, job_of
from gpubound.models.richards import kernels
from gpubound.models.richards.kernels.triton import rg_lru as fast
from tests.kernels.cases import TOLERANCE, definitions, draw, parity, same

reference = definitions("rg_lru")

FP32, FP64 = torch.float32, torch.float64
# Backward reads h as it was stored, rounded once more than the reference's.
TOLERANCES = TOLERANCE | {FP32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def chunks_of(length: int, packed: Tensor):
    """Both ways in chunks of so many tokens: the rule's are too long to walk here."""
    from contextlib import ExitStack

    tokens = plans.power_of_two(packed.shape[1])
    stack = ExitStack()
    for way in ("forward", "backward"):
        job = job_of("rg_lru", way, (tokens, packed.shape[2] // 3), packed)
        stack.enter_context(plans.trying(job, MatrixPlan(length, 16, 1)))
    return stack


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("batch, tokens, channels, length", [(1, 1, 1, 4), (2, 11, 5, 4), (1, 8, 20, 4)], ids=str)
@pytest.mark.parametrize("with_state", [False, True], ids=["from nothing", "from a state"])
def test_matches(batch, tokens, channels, length, with_state, dtype, device):
    packed, decay = draw(device, dtype, batch, tokens, 3 * channels), draw(device, dtype, channels, seed=1)
    state = draw(device, FP32, batch, channels, seed=2) if with_state else None
    with chunks_of(length, packed):
        parity(fast.rg_lru, reference.rg_lru, (packed, decay, state), TOLERANCES[dtype])


def test_the_definition_is_the_formula():
    """Token by token and channel by channel, in Python's own numbers."""
    import math

    packed, decay = draw(torch.device("cpu"), FP64, 2, 5, 9), draw(torch.device("cpu"), FP64, 3, seed=1)
    sigmoid = lambda z: 1 / (1 + math.exp(-z))  # noqa: E731
    got, last = reference.rg_lru(packed, decay)
    for b in range(2):
        for c in range(3):
            h = 0.0
            for t in range(5):
                x, r, i = (packed[b, t, c + 3 * part].item() for part in range(3))
                a = sigmoid(decay[c].item()) ** (8 * sigmoid(r))
                h = a * h + math.sqrt(1 - a * a) * sigmoid(i) * x
                assert got[b, t, c].item() == pytest.approx(h, rel=1e-12)
            assert last[b, c].item() == pytest.approx(h, rel=1e-12)


def test_reference_gradients_in_fp64():
    packed, decay = (draw(torch.device("cpu"), FP64, *shape, seed=i) for i, shape in enumerate([(2, 4, 6), (2,)]))
    state = draw(torch.device("cpu"), FP64, 2, 2, seed=3)
    inputs = tuple(t.requires_grad_() for t in (packed, decay, state))
    assert torch.autograd.gradcheck(reference.rg_lru, inputs)


def test_no_token_reads_a_later_one(device):
    packed, decay = draw(device, FP32, 1, 12, 6), draw(device, FP32, 2, seed=1)
    other = packed.clone()
    other[:, 7] += 1
    with chunks_of(4, packed):
        before, after = fast.rg_lru(packed, decay)[0], fast.rg_lru(other, decay)[0]
        assert torch.equal(before[:, :7], after[:, :7]) and not torch.equal(before[:, 7:], after[:, 7:])
        packed.requires_grad_()
        (gradient,) = torch.autograd.grad(fast.rg_lru(packed, decay)[0][:, 5].sum(), packed)
    assert not gradient[:, 6:].any() and gradient[:, 0].any()


def test_steps_are_the_whole_text(device):
    packed, decay = draw(device, FP32, 2, 6, 9), draw(device, FP32, 3, seed=1)
    whole, end = reference.rg_lru(packed, decay)
    state, steps = None, []
    for t in range(6):
        y, state = kernels.rg_lru(packed[:, t : t + 1], decay, state)
        steps.append(y)
    same("outputs", torch.cat(steps, 1), whole, 2e-6)
    same("last state", state, end, 2e-6)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_channels_that_keep_all_or_nothing(device):
    """a is 1 to the last digit, or 0: the root's slope is infinite at 1, and no gradient may be."""
    packed = draw(device, FP32, 1, 6, 15)
    packed[..., 5:10] = torch.tensor([200.0, -200.0, 0.0, 50.0, -30.0], device=device)
    for decay in (torch.full((5,), 40.0), torch.full((5,), 120.0), torch.full((5,), -60.0), torch.full((5,), 9.0)):
        arguments = (packed, decay.to(device), draw(device, FP32, 1, 5, seed=2))
        parity(fast.rg_lru, reference.rg_lru, arguments, 1e-5)
        fresh = [a.clone().requires_grad_() for a in arguments]
        for gradient in torch.autograd.grad(fast.rg_lru(*fresh)[0].sum(), fresh):
            assert gradient.isfinite().all()


def test_long_memories_are_exact(device):
    """λ = 12 forgets 5e-5 a token: 1 + e^-12 holds that to three digits in fp32, and 1 − a² would be as wrong."""
    packed, decay = draw(device, FP32, 1, 4, 6), torch.tensor([12.0, 14.0], device=device)
    got, _ = fast.rg_lru(packed, decay)
    want, _ = reference.rg_lru(packed.double().cpu(), decay.double().cpu())
    same("h", got.cpu().double(), want, 2e-6)


WRONG = {
    r"packed must be .* \(B, T, 3 C\), T and C from 1, got \(2, 3, 7\)": (torch.ones(2, 3, 7), torch.ones(2)),
    r"decay must be 2 floating-point numbers, .* got torch.float32 \(3,\)": (torch.ones(2, 3, 6), torch.ones(3)),
    r"state must be torch.float32 \(2, 2\), got torch.float16": (torch.ones(2, 3, 6), torch.ones(2), torch.ones(2, 2).half()),
}


@pytest.mark.parametrize("named", WRONG)
def test_wrong_arguments(named):
    with pytest.raises(ValueError, match=f"^rg_lru: {named}"):
        kernels.rg_lru(*WRONG[named])
