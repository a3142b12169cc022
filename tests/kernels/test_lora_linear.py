"""A whole layer with a low-rank adapter: layouts, gradients, accumulators, and what is refused."""

import pytest
import torch
from torch import Tensor

from gpubound import kernels
from gpubound.kernels.adapters import adapter_gradients
from gpubound.kernels.dropping import Drop
from gpubound.kernels.record import made_record
from gpubound.kernels.rows import OwnRanks
from gpubound.kernels.triton import lora as fast

from .cases import TOLERANCE, draw, parity, same
from .lora_cases import BF16, FP32, ROUNDED, SHAPES, arguments, dropout, reference, routed

# The whole layer


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_matches(shape, dtype, device):
    parity(fast.lora_linear, reference.lora_linear, (*arguments(shape, dtype, device), 1.7, None), ROUNDED[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_layer_with_dropout_matches(shape, dtype, device):
    parity(fast.lora_linear, reference.lora_linear, (*arguments(shape, dtype, device), 0.3, dropout(device)), ROUNDED[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_fp32_adapters_under_16_bits(dtype, device):
    given = arguments((20, 48, 24, 4), dtype, device, FP32)
    parity(fast.lora_linear, reference.lora_linear, (*given, 2.0, None), ROUNDED[dtype])


def layouts(x: Tensor) -> dict[str, Tensor]:
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], device=x.device, dtype=x.dtype)
    wide[..., ::2] = x
    return {"3-D": x.view(2, -1, x.shape[-1]), "strided": wide[..., ::2], "transposed": x.t().contiguous().t()}


@pytest.mark.parametrize("layout", ["3-D", "strided", "transposed"])
def test_layouts_of_x_and_g(layout, device):
    x, weight, bias, a, b = arguments((10, 48, 24, 5), FP32, device)
    x = layouts(x)[layout].requires_grad_()
    g = layouts(draw(device, FP32, 10, 24, seed=9))[layout]
    leaves = [x, a.requires_grad_(), b.requires_grad_()]
    got, want = (
        [y, *torch.autograd.grad(y, leaves, g)]
        for y in (op(x, weight, bias, a, b, 1.7, None) for op in (fast.lora_linear, reference.lora_linear))
    )
    for i, (one, other) in enumerate(zip(got, want)):
        same(f"tensor {i}", one, other, ROUNDED[FP32])


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)], ids=str)
def test_only_what_is_needed(needs, device):
    x, weight, bias, a, b = arguments((10, 48, 24, 5), FP32, device)
    leaves = [t.requires_grad_() for t, need in zip((x, a, b), needs) if need]
    got, want = (
        torch.autograd.grad(op(x, weight, bias, a, b, 1.7).square().sum(), leaves)
        for op in (fast.lora_linear, reference.lora_linear)
    )
    for i, (one, other) in enumerate(zip(got, want)):
        same(f"gradient {i}", one, other, 1e-5)


@pytest.mark.parametrize("dropping", [False, True], ids=["", "dropout"])
def test_reference_by_numbers_in_fp64(dropping):
    cpu = torch.device("cpu")
    given = [t.requires_grad_() for t in arguments((6, 5, 7, 3), torch.float64, cpu)]
    drop = dropout(cpu) if dropping else None
    assert torch.autograd.gradcheck(lambda *t: reference.lora_linear(*t, 1.7, drop), given)


def test_the_parts_are_the_gradients_of_the_whole():
    """The definitions of the parts in fp64, put together as the backward does, beside autograd through the whole."""
    x, weight, bias, a, b = (t.requires_grad_() for t in arguments((6, 5, 7, 3), torch.float64, torch.device("cpu")))
    drop, g = dropout(x.device), draw(x.device, torch.float64, 6, 7, seed=9)
    y = reference.lora_linear(x, weight, bias, a, b, 1.7, drop)
    dx, da, db = torch.autograd.grad(y, (x, a, b), g)
    x, weight, bias, a, b = (t.detach() for t in (x, weight, bias, a, b))
    h, gh = reference.lora_down(x, a, 1.7, drop), reference.lora_down(g, b.t(), 1.7)
    torch.testing.assert_close(reference.lora_product(x, weight, bias, h, b), y)
    torch.testing.assert_close(reference.lora_up(torch.nn.functional.linear(x, weight, bias), h, b), y)
    torch.testing.assert_close(reference.lora_product(g, weight.t(), None, gh, a.t(), drop), dx)
    got = adapter_gradients([a], [b], x, gh, g, h, drop)
    torch.testing.assert_close(got, [da, db])


# Where gradients go


def parameters(device, dtype=FP32) -> tuple[Tensor, ...]:
    x, weight, _, a, b = arguments((24, 48, 40, 6), dtype, device)
    return x, weight, torch.nn.Parameter(a), torch.nn.Parameter(b)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_micro_batches_are_one_batch(dtype, device):
    """Of unequal sizes, in fp32 accumulators, the first of which begins the sum over what was there."""
    x, weight, a, b = parameters(device, dtype)
    g = draw(device, dtype, 24, 40, seed=9)
    whole = torch.autograd.grad(reference.lora_linear(x.float(), weight.float(), None, a, b, 1.7), (a, b), g.float())
    for p in (a, b):
        p.main_grad = torch.full(p.shape, 1e9, device=device)
        made_record(p).opening = False
    for start, stop in ((0, 9), (9, 10), (10, 24)):
        kernels.lora_linear(x[start:stop], weight, None, a, b, 1.7).backward(g[start:stop])
    assert a.grad is None and b.grad is None
    for name, p, want in zip("ab", (a, b), whole):
        same(name, p.main_grad.to(dtype), want, ROUNDED[dtype])


def test_one_accumulator_alone(device):
    """A gradient that is delivered beside one that autograd gets."""
    x, weight, a, b = parameters(device)
    a.main_grad = torch.ones_like(a)
    kernels.lora_linear(x, weight, None, a, b).square().sum().backward()
    want = torch.autograd.grad(reference.lora_linear(x, weight, None, a, b).square().sum(), (a, b))
    assert a.grad is None
    same("a", a.main_grad - 1, want[0], 1e-5)
    same("b", b.grad, want[1], 1e-5)


def test_a_weight_that_trains_too(device):
    x, weight, a, b = parameters(device)
    weight = torch.nn.Parameter(weight)
    weight.main_grad = torch.zeros_like(weight)
    kernels.lora_linear(x, weight, None, a, b).square().sum().backward()
    (want,) = torch.autograd.grad(reference.lora_linear(x, weight, None, a, b).square().sum(), weight)
    same("weight", weight.main_grad, want, 1e-5)


def test_a_parameter_changed_before_backward_is_seen(device):
    x, weight, a, b = parameters(device)
    y = kernels.lora_linear(x, weight, None, a, b)
    with torch.no_grad():
        b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_under_activation_checkpointing(device):
    """The second forward draws the first one's seed."""
    x, weight, a, b = parameters(device)

    def run(x: Tensor) -> Tensor:
        return kernels.lora_linear(x, weight, None, a, b, 1.0, 0.5)

    found = []
    for wrapped in (run, lambda x: torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)):
        torch.manual_seed(3)
        found.append(torch.autograd.grad(wrapped(x).square().sum(), (a, b)))
    for one, other in zip(*found):
        same("gradient", one, other, 1e-6)


def test_autocast(device):
    x, weight, a, b = parameters(device)
    with torch.autocast(device.type, BF16):
        y = kernels.lora_linear(x, weight, None, a, b)
    assert y.dtype == BF16
    same("y", y, reference.lora_linear(x, weight, None, a, b).to(BF16), ROUNDED[BF16])


def test_no_rows(device):
    x, weight, a, b = parameters(device)
    y = kernels.lora_linear(x[:0], weight, None, a, b)
    y.sum().backward()
    assert y.shape == (0, 40) and not a.grad.any() and not b.grad.any()


def test_wrong_arguments():
    x, weight, a, b = torch.ones(4, 6), torch.ones(5, 6), torch.ones(2, 6), torch.ones(5, 2)
    cases = {
        "lora: dropout must be a probability from 0 up to, not including, 1, got 1.5; 0 drops nothing.": lambda: (
            kernels.lora_linear(x, weight, None, a, b, 1.0, 1.5)
        ),
        "lora_linear: b must be a floating-point tensor (5, 2), got torch.float32 (5, 3); its sizes follow from the first "
        "argument and the rank.": lambda: kernels.lora_linear(x, weight, None, a, torch.ones(5, 3)),
        "lora_down: its first argument must be a floating-point matrix, got torch.float32 (2, 2, 6); reshape it.": lambda: (
            kernels.lora_down(torch.ones(2, 2, 6), a)
        ),
        "lora_up: y is written, so its rows must be dense and apart, got strides (0, 1); pass a contiguous one.": lambda: (
            kernels.lora_up(torch.ones(5).expand(4, 5), torch.ones(4, 2), b)
        ),
        "lora_down: rows.ids must be int32 or int64 (B,), one for each row of a batch of 4 tokens, got torch.int32 (3,); all "
        "rows have the same number of tokens.": lambda: kernels.lora_down(x, a, rows=routed(x.device, (0, 0, 0), (2,))),
        "lora_product: rows are of 2 adapters of 3 ranks, wanted a divisor of the 2 ranks of b; leave rows out where adapters "
        "have different ranks.": lambda: kernels.lora_product(
            torch.ones(4, 6),
            torch.ones(5, 6),
            None,
            torch.ones(4, 2),
            b,
            rows=OwnRanks(torch.zeros(2, dtype=torch.int32), 3, 2),
        ),
        "lora_down: drop.seed must be a contiguous torch.int64 (1,), got torch.int64 (2,); make it once, and write each "
        "step's seed into it.": lambda: kernels.lora_down(x, a, 1.0, Drop(0.5, torch.tensor([1, 2]))),
    }
    for sentence, call in cases.items():
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == sentence


# On the GPU

LARGE = [(2048, 768, 768, 16), (2048, 1024, 1024, 32), (4096, 4096, 4096, 16), (1000, 2048, 520, 64), (777, 333, 1001, 5)]


@pytest.mark.gpu
@pytest.mark.parametrize("dropping", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_real_sizes_on_the_gpu(shape, dropping, device):
    drop = dropout(device) if dropping else None
    for dtype in (torch.float16, BF16):
        parity(fast.lora_linear, reference.lora_linear, (*arguments(shape, dtype, device), 1.7, drop), ROUNDED[dtype])


@pytest.mark.gpu
def test_the_same_bits_in_every_run(device):
    given = [t.requires_grad_() for t in arguments((4096, 2048, 2048, 16), BF16, device)]

    def run() -> list[Tensor]:
        y = kernels.lora_linear(*given, 1.7)
        return [y.detach(), *torch.autograd.grad(y, given, y.detach())]

    want = run()
    for _ in range(5):
        assert all(one.equal(other) for one, other in zip(run(), want))


@pytest.mark.gpu
def test_each_replay_has_another_mask(device):
    x, weight, _, a, b = arguments((64, 256, 256, 8), BF16, device)

    def run() -> Tensor:
        return kernels.lora_linear(x, weight, None, a, b, 1.0, 0.5)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not first.equal(y)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2048, 768, 768, 16), (4096, 4096, 4096, 16)], ids=str)
def test_a_captured_step_has_the_bits_of_an_eager_one(shape, device):
    """Kernels overlap there by programmatic edges; each replay finds the h of its own x."""
    x, weight, _, a, b = (t.requires_grad_(i != 1) for i, t in enumerate(arguments(shape, BF16, device)))

    def run() -> list[Tensor]:
        y = kernels.lora_linear(x, weight, None, a, b, 1.7)
        return [y.detach(), *torch.autograd.grad(y, (x, a, b), y.detach())]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for factor in (1.0, -0.5, 3.0):
        with torch.no_grad():
            x.mul_(factor)
        graph.replay()
        assert all(one.equal(other) for one, other in zip(captured, run()))
