"""Norms: both mirrors agree, the definitions are right in fp64, gradients go where they should, errors read as written."""

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpubound import kernels, trace
from gpubound.kernels import plans
from gpubound.kernels.plans.types import RowPlan
from gpubound.kernels.registry import load
from gpubound.kernels.triton import norms as fast
from tests.messages import refusals

from .cases import ROW_SHAPES, SOURCES, TOLERANCE, definitions, draw, parity, same

reference = definitions("norms")

FP32 = torch.float32
NORMS = pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "layer_norm"])


CENTRED = pytest.mark.parametrize("op", ["layer_norm", "group_norm"])


def both(op: str, arguments: tuple, tolerance: float) -> None:
    parity(load("triton", op), load("reference", op), arguments, tolerance)


def three_groups(source: str, op: str) -> Callable:
    """LayerNorm, or GroupNorm of three groups, of (x, weight, bias, eps)."""
    norm = load(source, op)
    return norm if op == "layer_norm" else lambda x, *rest: norm(x, 3, *rest)


def arguments_of(op: str, device, dtype, *shape: int, weight_dtype=None) -> tuple:
    x, residual = (draw(device, dtype, *shape, seed=seed) for seed in range(2))
    weight, bias = (draw(device, weight_dtype or dtype, shape[-1], seed=seed) for seed in (2, 3))
    if op in ("layer_norm", "group_norm"):
        return (x, weight, bias, 1e-5) if op == "layer_norm" else (x, 2, weight, bias, 1e-5)
    return (x, weight, 1e-6) if op == "rms_norm" else (x, residual, weight, 1e-6)


@NORMS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_matches(shape, dtype, op, device):
    # A row of one value has variance 0: its rstd of 1 / sqrt(1e-5) = 316 multiplies the roundings of a gradient that is 0.
    tolerance = TOLERANCE[dtype] * (316 if op == "layer_norm" and shape[-1] == 1 else 1)
    both(op, arguments_of(op, device, dtype, *shape), tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_norm_is_of_the_rounded_sum(dtype, device):
    """y is the norm of the s that is handed on, not of the sum before rounding: backward differentiates what was done."""
    x, residual, weight = draw(device, dtype, 4, 100), draw(device, dtype, 4, 100, seed=1), draw(device, dtype, 100, seed=2)
    y, s = fast.add_rms_norm(x, residual, weight)
    assert torch.equal(y, fast.rms_norm(s, weight))


def test_without_weight(device):
    x, residual, _, eps = arguments_of("add_rms_norm", device, FP32, 5, 63)
    both("rms_norm", (x, None, eps), TOLERANCE[FP32])
    both("add_rms_norm", (x, residual, None, eps), TOLERANCE[FP32])


@CENTRED
@pytest.mark.parametrize("weight, bias", [(False, False), (True, False), (False, True)])
def test_optional_arguments(weight, bias, op, device):
    x, w, b, eps = arguments_of("layer_norm", device, FP32, 5, 63)
    arguments = x, w if weight else None, b if bias else None, eps
    parity(three_groups("triton", op), three_groups("reference", op), arguments, TOLERANCE[FP32])


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "group_norm"])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, FP32), (FP32, torch.bfloat16), (FP32, torch.float16)], ids=str)
def test_weight_of_another_dtype(dtypes, op, device):
    arguments = arguments_of(op, device, dtypes[0], 4, 100, weight_dtype=dtypes[1])
    assert load("triton", op)(*arguments).dtype == dtypes[0]
    both(op, arguments, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16], ids=str)
def test_a_gain_of_weight_and_offset(dtype, device):
    x, residual, weight = draw(device, dtype, 5, 63), draw(device, dtype, 5, 63, seed=1), draw(device, dtype, 63, seed=2)
    both("rms_norm", (x, weight, 1e-6, 1.0), TOLERANCE[dtype])
    both("add_rms_norm", (x, residual, weight, 1e-6, 1.0), TOLERANCE[dtype])


@pytest.mark.parametrize("op", [fast.rms_norm, reference.rms_norm], ids=["triton", "reference"])
def test_the_offset_is_added_in_fp32(op, device):
    """1 + 3/512 is no bf16 number; a row of ones is its own norm."""
    x, weight = torch.ones(1, 16, device=device), torch.full((16,), 3 * 2.0**-9, device=device, dtype=torch.bfloat16)
    assert op(x, weight, 1e-6, 1.0)[0, 0].item() == pytest.approx(1 + 3 * 2.0**-9, abs=1e-5)
    assert torch.equal(op(x, None, 1e-6, 1.0), op(x)), "no weight, no gain"


@NORMS
def test_non_contiguous_input(op, device):
    both(op, tuple(t.t().contiguous().t() if isinstance(t, torch.Tensor) and t.dim() == 2 else t
                   for t in arguments_of(op, device, FP32, 6, 64)), TOLERANCE[FP32])  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 3])
def test_heads_of_a_product_are_normed_where_they_are(tokens, device, monkeypatch):
    """Without a gradient; with one, backward reads the copy."""
    read, walk = [], fast.walk
    monkeypatch.setattr(fast, "walk", lambda *a, **named: (read.append(a[5][0].data_ptr()), walk(*a, **named))[1])
    product, weight = draw(device, FP32, 2, tokens, 7 * 24), draw(device, FP32, 24, seed=1).requires_grad_()
    heads = product[..., 48:120].unflatten(-1, (3, 24))
    with torch.no_grad():
        y = fast.rms_norm(heads, weight)
    assert (
        y.is_contiguous()
        and torch.equal(y, fast.rms_norm(heads, weight))
        and torch.equal(y, fast.rms_norm(heads.clone(), weight))
    )
    assert [at == heads.data_ptr() for at in read] == [True, False, False]


def test_non_contiguous_weight(device):
    x, weight = draw(device, FP32, 6, 64), draw(device, FP32, 64, 2, seed=1)[:, 0].requires_grad_()
    got, want = (op(x, weight, 1e-5) for op in (fast.rms_norm, reference.rms_norm))
    same("y", got, want, TOLERANCE[FP32])
    (dw,), (want_dw,) = (torch.autograd.grad(y.square().sum(), weight) for y in (got, want))
    same("dw", dw, want_dw, TOLERANCE[FP32])


def test_wide_rows(device):
    both("rms_norm", arguments_of("rms_norm", device, FP32, 3, 16500), TOLERANCE[FP32])


def test_rows_without_elements_take_the_reference(device):
    x, weight = torch.empty(3, 0, device=device, requires_grad=True), torch.empty(0, device=device, requires_grad=True)
    y = kernels.rms_norm(x, weight)
    y.sum().backward()
    assert y.shape == x.grad.shape == (3, 0) and weight.grad.shape == (0,)


@pytest.mark.parametrize("op", ["add_rms_norm", "layer_norm"])
def test_programs_stride_over_the_rows(op, device, monkeypatch):
    """Two programs share 11 rows, two at a time: each sums three tiles' weight gradients, the last tile half empty."""
    monkeypatch.setitem(plans.TRIED, (op, "backward", (64,)), RowPlan(rows=2, each=1, warps=1))
    both(op, arguments_of(op, device, FP32, 11, 40), TOLERANCE[FP32])


def test_reference_gradients_in_fp64():
    cpu = torch.device("cpu")
    shapes = ((3, 7), (3, 7), (7,), (7,))
    x, r, w, b = (draw(cpu, torch.float64, *s, seed=i).requires_grad_() for i, s in enumerate(shapes))
    assert torch.autograd.gradcheck(reference.rms_norm, (x, w))
    assert torch.autograd.gradcheck(reference.rms_norm, (x,))
    assert torch.autograd.gradcheck(lambda x, w: reference.rms_norm(x, w, 1e-6, 1.0), (x, w))
    assert torch.autograd.gradcheck(reference.add_rms_norm, (x, r, w))
    assert torch.autograd.gradcheck(reference.layer_norm, (x, w, b))
    assert torch.autograd.gradcheck(reference.layer_norm, (x,))
    torch.testing.assert_close(reference.layer_norm(x, w, b, 1e-3), torch.nn.functional.layer_norm(x, (7,), w, b, 1e-3))


def _gradients(function, x, residual, weight, use):
    """Gradients of `use` (of y and s) with respect to those arguments that require one."""
    x, residual, weight = (t.detach().clone().requires_grad_(t.requires_grad) for t in (x, residual, weight))
    use(*function(x, residual, weight)).backward()
    return x.grad, residual.grad, weight.grad


USES = {"y": lambda y, s: y.square().sum(), "s": lambda y, s: s.square().sum(), "both": lambda y, s: (y * s).sum()}
NEEDS = {"all": (1, 1, 1), "frozen weight": (1, 1, 0), "weight alone": (0, 0, 1), "residual alone": (0, 1, 0)}


@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_only_what_is_used_and_needed(use, needs, device):
    """Outputs nobody used (their gradient is None) and arguments that want no gradient change nothing for the others."""
    if use is USES["s"] and needs is NEEDS["weight alone"]:
        pytest.skip("s does not depend on the weight")
    tensors = [
        draw(device, FP32, *s, seed=i).requires_grad_(bool(n)) for i, (s, n) in enumerate(zip([(3, 40), (3, 40), (40,)], needs))
    ]
    got, want = _gradients(fast.add_rms_norm, *tensors, use), _gradients(reference.add_rms_norm, *tensors, use)
    for name, a, b in zip(("x", "residual", "weight"), got, want):
        assert (a is None) == (b is None), name
        if b is not None:
            same(name, a, b, 1e-5)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_the_weight_gradient_is_added_to_main_grad(checkpointed, device):
    x, weight = (
        draw(device, torch.bfloat16, 3, 40).requires_grad_(),
        torch.nn.Parameter(draw(device, torch.bfloat16, 40, seed=1)),
    )
    weight.main_grad = torch.full((40,), 256.0, device=device)
    run = (
        (lambda: checkpoint(fast.rms_norm, x, weight, use_reentrant=False))
        if checkpointed
        else (lambda: fast.rms_norm(x, weight))
    )
    run().sum().backward()
    assert weight.grad is None
    wide = weight.detach().float().requires_grad_()
    reference.rms_norm(x.detach().float(), wide).sum().backward()
    same("main_grad - 256", weight.main_grad - 256, wide.grad, 1e-4)  # 256 in fp32 has 3e-5 between neighbours


def test_wrong_arguments():
    x, weight = torch.ones(2, 4), torch.ones(4)
    refusals(
        "kernels/norms:wrong_arguments",
        lambda: kernels.rms_norm(x, torch.ones(3)),
        lambda: kernels.add_rms_norm(x, torch.ones(2, 5), weight),
        lambda: kernels.rms_norm(x.long(), weight),
        lambda: kernels.rms_norm(torch.tensor(1.0)),
        lambda: kernels.rms_norm(x, weight.to("meta")),
        lambda: kernels.layer_norm(x, weight, weight[None]),
    )


def test_rows_too_wide_for_a_kernel_take_the_reference(device, monkeypatch):
    monkeypatch.setattr(trace, "fallbacks", trace.fallbacks.copy())
    x = draw(device, FP32, 1, 65537)
    same("y", kernels.rms_norm(x), reference.rms_norm(x), 0.0)
    assert trace.fallbacks["rms_norm", "its kernel holds rows of up to 65536 elements"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["add_rms_norm", "layer_norm"])
@pytest.mark.parametrize("cols", [8192, 16384, 65536])
def test_wide_rows_on_the_gpu(cols, op, device):
    for dtype in TOLERANCE:
        both(op, arguments_of(op, device, dtype, 300, cols), 3 * TOLERANCE[dtype])


@pytest.mark.gpu
def test_more_elements_than_32_bits_count(device):
    """The last rows of a tensor of 2^31 + 1024 elements, where 32-bit offsets would have wrapped."""
    rows, cols = (1 << 21) + 1, 1024
    x = torch.ones(rows, cols, device=device, dtype=torch.bfloat16)
    x[-2:] = draw(device, torch.bfloat16, 2, cols)
    x.requires_grad_()
    y = fast.rms_norm(x)
    tail = x.detach()[-2:].clone().requires_grad_()
    want = reference.rms_norm(tail)
    dy = draw(device, torch.bfloat16, 2, cols, seed=1)
    (want_dx,) = torch.autograd.grad(want, tail, dy)
    upstream = torch.zeros_like(y)
    upstream[-2:] = dy
    (dx,) = torch.autograd.grad(y, x, upstream)
    same("y", y[-2:], want, TOLERANCE[torch.bfloat16])
    same("dx", dx[-2:], want_dx, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("rounded", [torch.float16, torch.bfloat16], ids=str)
def test_a_rounded_residual_beside_casts(rounded, device):
    """Under autocast: the stream in fp32, the residual and the norm in 16 bits."""
    x, weight = draw(device, FP32, 11, 40), draw(device, FP32, 40, seed=2)
    residual = draw(device, FP32, 11, 40, seed=1).detach().to(rounded)
    upstream = draw(device, FP32, 11, 40, seed=3).detach(), draw(device, FP32, 11, 40, seed=4).detach()

    def run(function, cast):
        leaves = [t.detach().clone().requires_grad_() for t in (x, residual, weight)]
        y, s = function(leaves[0], leaves[1].float() if cast else leaves[1], leaves[2])
        y = y.to(rounded)
        torch.autograd.backward([y, s], [upstream[0].to(rounded), upstream[1]])
        return [y.detach(), s.detach(), *(leaf.grad for leaf in leaves)]

    for mirror in (fast, reference):
        for got, want in zip(run(mirror.add_rms_norm, cast=False), run(mirror.add_rms_norm, cast=True)):
            slack = 2 * torch.finfo(got.dtype).eps
            torch.testing.assert_close(got, want, rtol=slack, atol=slack)  # dtypes, too


@pytest.mark.parametrize(("x", "residual"), [(torch.bfloat16, torch.float16), (torch.float16, FP32), (torch.float64, FP32)])
def test_a_residual_of_other_bits_is_refused(x, residual):
    with pytest.raises(ValueError, match="add_rms_norm: residual must match x"):
        kernels.add_rms_norm(torch.ones(2, 4, dtype=x), torch.ones(2, 4, dtype=residual), torch.ones(4))


@CENTRED
@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)], ids=str)
def test_only_what_is_needed(needs, op, device, monkeypatch):
    monkeypatch.setitem(plans.TRIED, ("layer_norm", "backward", (64,)), RowPlan(rows=2, each=1, warps=1))
    shapes = ((5, 42), (42,), (42,))
    tensors = [draw(device, FP32, *shapes[i], seed=i).requires_grad_(bool(need)) for i, need in enumerate(needs)]
    leaves = [t for t in tensors if t.requires_grad]
    got, want = (torch.autograd.grad(three_groups(source, op)(*tensors).square().sum(), leaves) for source in SOURCES)
    for i, (a, b) in enumerate(zip(got, want)):
        same(f"gradient {i}", a, b, 1e-5)


def test_a_mean_far_above_the_spread(device):
    """Values near 1000 ± 1, where fp32 has 6e-5 between neighbours. E[x²] is near a million, where it has 0.06."""
    x = draw(device, FP32, 4, 1000) + 1000
    want = torch.nn.functional.layer_norm(x.double(), (1000,)).float()
    same("y", fast.layer_norm(x), want, 2e-4)
    same("reference", reference.layer_norm(x), want, 2e-4)


@CENTRED
def test_gradients_are_added_to_main_grad(op, device):
    x = draw(device, torch.bfloat16, 3, 42)
    weight, bias = (torch.nn.Parameter(draw(device, torch.bfloat16, 42, seed=s)) for s in (1, 2))
    weight.main_grad, bias.main_grad = torch.ones(42, device=device), torch.ones(42, device=device)
    three_groups("triton", op)(x, weight, bias).sum().backward()
    assert weight.grad is None and bias.grad is None
    wide = [t.detach().float().requires_grad_() for t in (weight, bias)]
    three_groups("reference", op)(x.float(), *wide).sum().backward()
    same("weight.main_grad", weight.main_grad - 1, wide[0].grad, 5e-6)
    same("bias.main_grad", bias.main_grad - 1, wide[1].grad, 5e-6)
