"""The update with 8-bit moments: the code itself, both mirrors alike, close to fp32 AdamW, skipped whole, exact errors."""

import pytest
import torch
from torch import Tensor

from gpubound import kernels
from gpubound.kernels.adamw import decode, encode
from gpubound.kernels.triton import adamw as fast
from tests.messages import refusals

from .cases import definitions, draw, module, pairwise, same

reference = definitions("adamw")

SIZES = [1, 255, 256, 2049]  # a block is 256, a program of the kernel 2048
BETAS = (0.9, 0.95)
MIRRORS = pytest.mark.parametrize("by", [fast, reference], ids=["triton", "reference"])
DTYPES = (torch.int8, torch.uint8)


def every_code(dtype: torch.dtype) -> Tensor:
    return torch.arange(-127, 128, dtype=torch.int8) if dtype == torch.int8 else torch.arange(256).to(torch.uint8)


def moments(n: int, device: torch.device) -> list[Tensor]:
    """m, v and their scales, as some updates have left them."""
    m, m_scale = encode(draw("cpu", torch.float32, n, seed=2) ** 3, torch.int8)
    v, v_scale = encode(draw("cpu", torch.float32, n, seed=3) ** 6, torch.uint8)
    return [t.to(device) for t in (m, v, m_scale, v_scale)]


def plan_of(device: torch.device, apply: float = 1.0) -> Tensor:
    return torch.tensor([apply, 0.5, 0.999, 1e-2, 2.0, 3.0], device=device)


class TestCode:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_code_is_its_own_numbers_nearest(self, dtype):
        codes = every_code(dtype)
        x = reference.number(codes)
        assert x.diff().gt(0).all() and x[-1] == 1 and x[codes == 0] == 0
        assert reference._code(x.abs(), dtype).equal(codes.to(torch.int32).abs())

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_nearest_is_taken(self, dtype):
        x = torch.cat([torch.rand(2000, generator=torch.Generator().manual_seed(0)) ** 5, torch.tensor([0.0, 1.0])])
        table = reference.number(every_code(dtype)).clamp(min=0).unique()
        want = (x[:, None] - table).abs().amin(1)
        got = (x - reference.number(reference._code(x, dtype).to(dtype))).abs()
        smallest = 8.0 ** -reference.ZEROS[dtype]
        assert (got - want)[x > smallest].abs().max() <= 1e-7
        assert (got - want).max() <= smallest / 8, "zero is taken below 9/16 of the smallest, not below a half"

    def test_blocks_far_apart_keep_their_own_precision(self):
        """Beside a block a million times larger, numbers keep 7 bits; the last block is not whole."""
        x = draw("cpu", torch.float32, 600)
        x[:256] *= 1e6
        codes, scales = encode(x, torch.int8)
        assert codes.dtype == torch.int8 and scales.equal(torch.stack([p.abs().max() for p in x.split(256)]))
        for part, back in zip(x.split(256), decode(codes, scales).split(256)):
            assert (part - back).abs().max() <= part.abs().max() * 7 / 8 / 64 / 2 * 1.0001
        assert encode(decode(codes, scales), torch.int8)[0].equal(codes)

    def test_a_second_moment_does_not_vanish_unless_it_is_zero(self):
        x = torch.tensor([1.0, 1e-30, 0.0])
        codes, scales = encode(x, torch.uint8)
        assert codes.tolist() == [255, 1, 0]
        assert decode(codes, scales).tolist() == [1.0, 8.0**-7, 0.0]

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_what_is_too_small_to_scale_is_zero(self, dtype):
        codes, scales = encode(torch.tensor([1e-40, 0.0, 2e-39]), dtype)
        assert not codes.any() and not scales.any()


@pairwise
@pytest.mark.parametrize("master", [True, False], ids=["master", "alone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_adamw8_matches(n, dtype, master, device):
    results = []
    for by in (fast, reference):
        m, v, m_scale, v_scale = moments(n, device)
        weight, whole = draw(device, dtype, n, seed=1), draw(device, torch.float32, n, seed=4) if master else None
        gradient = draw(device, torch.float32, n)
        by.adamw8(weight, gradient, m, v, m_scale, v_scale, plan_of(device), whole, BETAS, 1e-8, n // 2, None)
        results.append((weight, m, v, m_scale, v_scale, whole))
    for name, a, b in zip(("weight", "m", "v", "m_scale", "v_scale", "master"), *results):
        if name in "mv":  # at a tie, or beside an fp32 rounding, the other of two neighbouring codes may be taken
            apart = (a.to(torch.int32) - b.to(torch.int32)).abs()
            assert apart.max() <= 1 and (apart > 0).sum() <= 1 + n // 500, name
        elif a is not None:
            same(name, a, b, {torch.bfloat16: 8e-3, torch.float16: 1e-3}.get(a.dtype, 1e-6))


@MIRRORS
def test_one_update_is_adamws_with_the_moments_coded_behind_it(by, device):
    """From moments that 8 bits hold exactly: the weights are fp32 AdamW's, the moments theirs to the nearest code."""
    n = 700
    m, v, m_scale, v_scale = moments(n, device)
    m_wide, v_wide = decode(m, m_scale), decode(v, v_scale)
    weight, gradient = draw(device, torch.float32, n, seed=1), draw(device, torch.float32, n)
    want = weight.clone()
    reference.adamw(want, gradient, m_wide, v_wide, plan_of(device), None, BETAS, 1e-8, 300, None)
    by.adamw8(weight, gradient, m, v, m_scale, v_scale, plan_of(device), None, BETAS, 1e-8, 300, None)
    same("weight", weight, want, 1e-6)
    for coded, scale, moment, step in ((m, m_scale, m_wide, 7 / 8 / 64), (v, v_scale, v_wide, 7 / 8 / 128)):
        for part, back in zip(moment.split(256), decode(coded, scale).split(256)):
            assert (part - back).abs().max() <= part.abs().max() * step / 2 * 1.001


@MIRRORS
def test_a_small_gradient_beside_a_giant_takes_a_small_step(by, device):
    """Its second moment is below every step of the code: rounded to zero, the next update would divide by eps alone."""
    n = 256
    gradient = torch.full((n,), 1e-3, device=device)
    gradient[7] = 1e3
    codes = [torch.zeros(n, dtype=dtype, device=device) for dtype in DTYPES]
    weight, scales = torch.zeros(n, device=device), [torch.zeros(1, device=device) for _ in range(2)]
    plan = torch.tensor([1, 1, 1, 1e-2, 1, 1], device=device)
    for _ in range(3):
        by.adamw8(weight, gradient, *codes, *scales, plan, None, BETAS, 1e-12, 0, None)
    assert codes[1].min() == 1 and weight.abs().max() < 0.1


@MIRRORS
def test_a_skipped_step_changes_nothing(by, device):
    n = 300
    tensors = [draw(device, torch.bfloat16, n), torch.full((n,), float("nan"), device=device), *moments(n, device)]
    tensors.append(draw(device, torch.float32, n, seed=5))
    before = [t.clone() for t in tensors]
    by.adamw8(*tensors[:-1], plan_of(device, apply=0.0), tensors[-1], BETAS, 1e-8, n, None)
    assert all(a.equal(b) for a, b in zip(tensors[2:] + tensors[:1], before[2:] + before[:1]))


@pytest.mark.parametrize("by", [reference, fast], ids=["reference", "triton"])
def test_it_follows_fp32_adamw_downhill(by, device):
    """A quadratic bowl, a hundred times steeper one way than another within a block: near AdamW's way, and down as far."""
    n, steps = 256, 60
    steep = torch.logspace(-1, 1, n, device=device)[torch.randperm(n, generator=torch.Generator().manual_seed(1)).to(device)]
    ends = []
    for coded in (False, True):
        weight = draw(device, torch.float32, n)
        state = [torch.zeros(n, device=device) for _ in range(2)]
        if coded:
            state = [torch.zeros(n, device=device, dtype=dtype) for dtype in DTYPES] + [torch.zeros(1, device=device)] * 2
            state[3] = state[3].clone()
        for t in range(1, steps + 1):
            plan = torch.tensor([1, 1, 1, 0.05 / (1 - 0.9**t), (1 - 0.95**t) ** -0.5, t], device=device)
            update = by.adamw8 if coded else reference.adamw
            update(weight, steep * weight, *state, plan, None, BETAS, 1e-8, 0, None)
        ends.append(weight)
    exact, coarse = ((steep * w.square()).sum().item() for w in ends)
    start = (steep * draw(device, torch.float32, n).square()).sum().item()
    assert exact < 0.02 * start and coarse < 0.02 * start
    assert (ends[0] - ends[1]).abs().max() < 0.1 * 60 * 0.05, "a tenth of the longest way"


def test_random_rounding_is_the_same_in_both_mirrors(device):
    n, results = 3000, []
    for by in (fast, reference):
        weight = torch.ones(n, device=device, dtype=torch.bfloat16)
        m, v, m_scale, v_scale = moments(n, device)
        by.adamw8(weight, draw(device, torch.float32, n), m, v, m_scale, v_scale, plan_of(device), None, BETAS, 1e-2, 0, 7)
        results.append(weight)
    assert (results[0] != results[1]).sum() <= 3, "an fp32 rounding may tip a weight over"


def test_reference_part_by_part_is_the_whole(monkeypatch):
    results = []
    for part in (256, 10240):
        monkeypatch.setattr(module("adamw"), "PART", part)
        weight, state = draw("cpu", torch.bfloat16, 700), moments(700, "cpu")
        reference.adamw8(weight, draw("cpu", torch.float32, 700, seed=1), *state, plan_of("cpu"), None, BETAS, 1e-8, 300, 5)
        results.append((weight, *state))
    assert all(a.equal(b) for a, b in zip(*results))


def test_nothing_at_all(device):
    empty = torch.empty(0, device=device)
    kernels.adamw8(empty, empty, empty.to(torch.int8), empty.to(torch.uint8), empty, empty, plan_of(device))


def test_errors():
    flat, (m, v, scale, _) = torch.ones(300), moments(300, "cpu")
    refusals(
        "kernels/adamw8:errors",
        lambda: kernels.adamw8(flat, flat, flat, v, scale, scale, plan_of("cpu")),
        lambda: kernels.adamw8(flat, flat, m, v, scale, scale[:1], plan_of("cpu")),
        lambda: kernels.adamw8(flat, flat.double(), m, v, scale, scale, plan_of("cpu")),
        lambda: kernels.adamw8(flat, flat, m, v.to("meta"), scale, scale, plan_of("cpu")),
        lambda: kernels.adamw8(flat, flat, m, v, scale, scale, plan_of("cpu"), seed=1),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [None, 3])
def test_many_elements_on_the_gpu(seed):
    """Millions, a length that no block divides: decoded moments, masters and 16-bit weights as the reference's."""
    device, n = torch.device("cuda"), 10_000_019
    results = []
    for by in (fast, reference):
        weight = draw(device, torch.bfloat16, n, seed=1)
        master = draw(device, torch.float32, n, seed=4) if seed is None else None
        state = moments(n, device)
        by.adamw8(weight, draw(device, torch.float32, n), *state, plan_of(device), master, BETAS, 1e-8, n // 3, seed)
        results.append((weight, decode(state[0], state[2]), decode(state[1], state[3]), state[2], state[3], master))
    for name, a, b in zip(("weight", "m", "v", "m_scale", "v_scale", "master"), *results):
        if a is not None:
            same(name, a, b, 8e-3 if a.dtype == torch.bfloat16 else 1e-4 if name in "mv" else 1e-6)
