"""Polynomial attention: the definition is the formula, kernels agree with it in every form, walk where they must and nowhere
else, hold nothing of size T × T; and decoding, token by token, gives what the whole sequence gives."""

import math
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpubound.device import chip
from gpubound.kernels import plans
from gpubound.kernels.plans.types import Job
from gpubound.models.richards import kernels
from gpubound.models.richards.kernels.plans import WalkPlan
from gpubound.models.richards.kernels.triton import poly_attention as fast
from tests.kernels.cases import definitions, draw, parity, same
from tests.messages import message

reference = definitions("poly_attention")
FP32, FP64 = torch.float32, torch.float64

# Kernels add up in another order than the definition, and (1 − e) / (1 + e) has an error of 6e-8 near 0, which a clip of 8
# makes 5e-7 and a third power 1.5e-6. In 16 bits the weights are rounded once more.
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

WIDTH = 16


def inputs(device, dtype=FP32, heads=2, kv=1, tokens=40, gated=False, rows_of=1) -> tuple:
    q = draw(device, dtype, rows_of, tokens, heads, WIDTH)
    k, v = (draw(device, dtype, rows_of, tokens, kv, WIDTH, seed=i) for i in (1, 2))
    gates = draw(device, dtype, rows_of, tokens, heads, seed=5) if gated else None
    return q, k, v, draw(device, FP32, 3, seed=3), gates


@contextmanager
def small_tiles(device, dtype=FP32, side=16):
    """So that 40 tokens are several tiles each way."""
    size = torch.empty(0, dtype=dtype).element_size()
    keys = [plans._like(Job("poly_attention", way, (WIDTH,), size, chip(device))) for way in ("forward", "queries", "keys")]
    plans.TRIED.update(dict.fromkeys(keys, WalkPlan(side, side, 1, 4)))
    try:
        yield
    finally:
        for key in keys:
            del plans.TRIED[key]


def by_hand(q, k, v, coefficients, gates, degree, clip, window, causal) -> list:
    """The formula, number by number."""
    B, T, H, D = q.shape
    group, (a, b, scale) = H // k.shape[2], coefficients.tolist()
    q, k, v = q.tolist(), k.tolist(), v.tolist()
    y = [[[[0.0] * D for _ in range(H)] for _ in range(T)] for _ in range(B)]
    for n, i, h, j in product(range(B), range(T), range(H), range(T)):
        if (causal and j > i) or (window and abs(i - j) >= window):
            continue
        s = sum(x * z for x, z in zip(q[n][i][h], k[n][j][h // group])) / math.sqrt(D)
        if clip:
            s = clip * math.tanh(s / clip)
        weight = scale * (a * s**degree + b) * (1.0 if gates is None else gates[n, i, h].item())
        for d in range(D):
            y[n][i][h][d] += weight * v[n][j][h // group][d]
    return y


# degree, clip, window, causal, gated, heads, kv heads
FORMS = {
    "plain": (3, 0.0, 0, True, False, 2, 2),
    "linear, all see all": (1, 0.0, 0, False, True, 2, 1),
    "gates and a clip": (3, 2.0, 0, True, True, 2, 1),
    "a window": (7, 3.0, 13, True, False, 1, 1),
    "a short window": (5, 0.0, 9, True, False, 2, 2),
    "a window, both ways": (3, 2.0, 20, False, True, 2, 1),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_definition_is_the_formula(form):
    degree, clip, window, causal, gated, heads, kv = form
    arguments = inputs(torch.device("cpu"), FP64, heads, kv, tokens=15, gated=gated)
    got = reference.poly_attention(*arguments, degree, clip, window, causal)
    want = torch.tensor(by_hand(*arguments, degree, clip, window, causal), dtype=FP64)
    same("y", got, want, 1e-12)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_definitions_gradients_in_fp64(form):
    degree, clip, window, causal, gated, heads, kv = form
    tensors = inputs(torch.device("cpu"), FP64, heads, kv, tokens=5, gated=gated)
    leaves = [None if t is None else t.double().narrow(-1, 0, 3).requires_grad_() for t in tensors[:4]]
    gates = None if tensors[4] is None else tensors[4].double().requires_grad_()
    call = lambda *t: reference.poly_attention(*t, degree, clip, min(window, 3), causal)  # noqa: E731
    assert torch.autograd.gradcheck(call, (*leaves, gates))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_kernels_match(form, device):
    degree, clip, window, causal, gated, heads, kv = form
    arguments = inputs(device, FP32, heads, kv, tokens=56, gated=gated)
    with small_tiles(device):
        parity(fast.poly_attention, reference.poly_attention, (*arguments, degree, clip, window, causal), CLOSE[FP32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_kernels_match_in_16_bits(dtype, device):
    arguments = inputs(device, dtype, gated=True, rows_of=2)
    with small_tiles(device, dtype):
        parity(fast.poly_attention, reference.poly_attention, (*arguments, 3, 2.0, 30, True), CLOSE[dtype])


def test_the_rules_own_tiles_and_an_odd_width(device):
    q, k, v, c, *_ = inputs(device, tokens=3, kv=2)
    arguments = *(t[..., :11].contiguous() for t in (q, k, v)), c, None
    parity(fast.poly_attention, reference.poly_attention, (*arguments, 3, 0.0, 0, True), CLOSE[FP32])


@pytest.mark.gpu
@pytest.mark.parametrize("width, dtype", [*product((64, 128), (torch.bfloat16, torch.float16)), (64, FP32)], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_kernels_match_at_full_size(form, width, dtype, device):
    degree, clip, window, causal, gated, *_ = form
    q = draw(device, dtype, 2, 700, 8, width)
    k, v = (draw(device, dtype, 2, 700, 2, width, seed=i) for i in (1, 2))
    gates = draw(device, dtype, 2, 700, 8, seed=5) if gated else None
    # A hundredth of the result, so that gradients lie within fp16 where a seventh power of a score does not. A power multiplies
    # the relative error of a score by its degree; the limit is that of degree 3.
    arguments = q, k, v, draw(device, FP32, 3, seed=3) * 0.01, gates, degree, clip, 20 * window, causal
    parity(fast.poly_attention, reference.poly_attention, arguments, max(1, (degree - 1) // 2) * CLOSE[dtype])


@pytest.mark.gpu
def test_more_heads_than_a_grid_is_high(device):
    """65,535 programs are all that a launch's second dimension takes."""
    q, k, v = (draw(device, torch.bfloat16, 5000, 3, 16, WIDTH, seed=i) for i in range(3))
    parity(fast.poly_attention, reference.poly_attention, (q, k, v, draw(device, FP32, 3)), CLOSE[torch.bfloat16])


def test_autocast_leaves_it_alone(device):
    leaves = [t.requires_grad_() for t in inputs(device, tokens=5)[:4]]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = fast.poly_attention(*leaves)
    same("y", y, reference.poly_attention(*leaves), CLOSE[FP32])
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), leaves))


def test_heads_of_one_product_are_read_where_they_lie(device, monkeypatch):
    packed = draw(device, FP32, 2, 20, 4 * WIDTH).requires_grad_()
    q, k, v = (t.unflatten(-1, (-1, WIDTH)) for t in packed.split([2 * WIDTH, WIDTH, WIDTH], -1))
    c = draw(device, FP32, 3)
    want = torch.autograd.grad(reference.poly_attention(q, k, v, c).sum(), packed)[0]

    def copied(x):
        raise AssertionError("a view was copied")

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "contiguous", copied)
        y = fast.poly_attention(q, k, v, c)
    same("dpacked", torch.autograd.grad(y.sum(), packed)[0], want, CLOSE[FP32])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("op", [fast.poly_attention, reference.poly_attention], ids=["kernel", "definition"])
def test_who_sees_whom(op, window, causal, device):
    """A token's change reaches those that see it, and the bits of no other."""
    q, k, v, c, _ = inputs(device, tokens=48)
    changed = [t.clone() for t in (k, v)]
    for t in changed:
        t[:, 25] += 1
    with small_tiles(device):
        before, after = (op(q, *kv, c, None, 3, 0.0, window, causal) for kv in ((k, v), changed))
    moved = (before != after).flatten(2).any(2)[0].tolist()
    sees = [(not causal or i >= 25) and (not window or abs(i - 25) < window) for i in range(48)]
    assert moved == sees


@pytest.mark.parametrize("window", [0, 17])
def test_tiles_that_nobody_sees_are_skipped(window, device):
    """NaN there would reach every sum, for 0 times NaN is NaN: forward of keys, backward of queries too."""
    q, k, v, c, *_ = inputs(device, tokens=64)
    lost = slice(48, None) if window == 0 else slice(0, 16)  # and the tokens that see none of it, in whole tiles
    free = slice(0, 48) if window == 0 else slice(32, None)
    for t in (k, v):
        t[:, lost] = math.nan
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with small_tiles(device):
        y = fast.poly_attention(*leaves, c, None, 3, 0.0, window)
        upstream = torch.zeros_like(y)
        upstream[:, free] = 1
        dq = torch.autograd.grad(y, q, upstream)[0]
    assert y[:, free].isfinite().all() and dq[:, free].isfinite().all()


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that anything gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.numel())
        return result


def test_nothing_of_size_t_by_t_is_held(device):
    """The largest tensor is (T, heads, width)."""
    leaves = [t.requires_grad_() for t in inputs(device, tokens=400, gated=True)]
    with small_tiles(device, side=128), Largest() as largest:
        fast.poly_attention(*leaves, 3, 2.0).sum().backward()
    assert largest.elements <= 4 * 400 * 2 * WIDTH < 400 * 400  # 4: the interpreter copies bytes


def test_the_same_bits_every_time(device):
    leaves = [t.requires_grad_() for t in inputs(device, gated=True, rows_of=2)]
    with small_tiles(device):
        y = fast.poly_attention(*leaves, 3, 2.0)
        first, second = (torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_a_coefficients_gradient_goes_to_its_accumulator(device):
    *_, leaf = leaves = [t.requires_grad_() for t in inputs(device)[:4]]
    (gradient,) = torch.autograd.grad(fast.poly_attention(*leaves).sum(), leaf)
    leaf.main_grad = torch.ones_like(leaf)
    fast.poly_attention(*leaves).sum().backward()
    assert leaf.grad is None
    same("main_grad", leaf.main_grad, gradient + 1, 1e-6)


STEPS = {
    "plain": (3, 0.0, 0, False, 2, 2),
    "gates and a clip": (3, 2.0, 0, True, 4, 2),
    "a window": (5, 0.0, 6, False, 2, 1),
    "gates and a window": (1, 0.0, 4, True, 2, 2),
}


@pytest.mark.parametrize("form", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("op", [fast, reference], ids=["kernel", "definition"])
def test_steps_give_what_the_sequence_gives(op, form, device):
    """And the cache then holds its keys and values; what lies behind a row's place is not read."""
    degree, clip, window, gated, heads, kv = form
    q, k, v, c, gates = inputs(device, FP32, heads, kv, tokens=11, gated=gated, rows_of=2)
    want = reference.poly_attention(q, k, v, c, gates, degree, clip, window)
    caches = [torch.full((2, 12, kv, WIDTH), math.nan, device=device) for _ in range(2)]
    for i in range(11):
        at = torch.full((2,), i, dtype=torch.int32, device=device)
        g = None if gates is None else gates[:, i]
        y, *_ = op.poly_attention_step(q[:, i], k[:, i], v[:, i], *caches, at, c, g, degree, clip, window)
        same(f"token {i}", y, want[:, i], CLOSE[FP32])
    for cache, new in zip(caches, (k, v)):
        assert torch.equal(cache[:, :11], new) and cache[:, 11:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_step_in_16_bits_over_keys_of_several_programs(dtype, device):
    q, k, v = (draw(device, dtype, 2, n, WIDTH, seed=i) for i, n in enumerate((4, 2, 2)))
    caches = [draw(device, dtype, 2, 200, 2, WIDTH, seed=i) for i in (5, 6)]
    at = torch.tensor([199, 70], dtype=torch.int32, device=device)
    rest = at, draw(device, FP32, 3, seed=3), draw(device, dtype, 2, 4), 3, 2.0, 150
    got = fast.poly_attention_step(q, k, v, *(t.clone() for t in caches), *rest)
    want = reference.poly_attention_step(q, k, v, *caches, *rest)
    for name, a, b in zip(("y", "cache_k", "cache_v"), got, want):
        same(name, a, b, CLOSE[dtype])


@pytest.mark.parametrize("op", [fast, reference], ids=["kernel", "definition"])
def test_a_place_that_the_cache_does_not_have(op, device):
    q, k, v = (draw(device, FP32, 4, 2, WIDTH, seed=i) for i in range(3))
    caches = [torch.zeros(4, 6, 2, WIDTH, device=device) for _ in range(2)]
    at = torch.tensor([-1, 6, 2**31 - 1, 5], dtype=torch.int32, device=device)
    y, *_ = op.poly_attention_step(q, k, v, *caches, at, draw(device, FP32, 3))
    assert y[:3].isnan().all() and y[3].isfinite().all()
    assert not any(cache[:3].any() for cache in caches)


def some(**changed) -> dict:
    q, k, v, c, *_ = inputs(torch.device("cpu"), tokens=3)
    return {"q": q, "k": k, "v": v, "coefficients": c} | changed


WRONG = {
    r"q must be .* \(rows, tokens, heads, head size\), got torch.float32 \(2, 3\)": {"q": torch.ones(2, 3)},
    r"k must be \(1, 3, kv heads, 16\) .* a divisor of q's 2, got \(1, 4, 1, 16\)": {"k": torch.ones(1, 4, 1, 16)},
    "degree must be one of 1, 3, 5 and 7, got 2": {"degree": 2},
    "soft_clip must be at least 0 and finite, got -1.0": {"soft_clip": -1.0},
    "window must be at least 0, got -1": {"window": -1},
    r"gates must be .* \(1, 3, 2\) on cpu, got torch.float32 \(3, 2\)": {"gates": torch.ones(3, 2)},
}


@pytest.mark.parametrize("named", WRONG)
def test_wrong_arguments(named):
    with pytest.raises(ValueError, match=f"^poly_attention: {named}"):
        kernels.poly_attention(**some(**WRONG[named]))


def test_heads_wider_than_the_kernel_holds_fall_back(device, said):
    q, k, v = (draw(device, FP32, 1, 3, 1, 136, seed=i) for i in range(3))
    y = kernels.poly_attention(q, k, v, draw(device, FP32, 3))
    assert message("kernels/poly_attention:heads_wider_than_the_ker").within(said())
    same("y", y, reference.poly_attention(q, k, v, draw(device, FP32, 3)), 1e-6)
