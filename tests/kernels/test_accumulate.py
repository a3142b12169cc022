"""Weight gradients: to autograd in the weight's dtype, or added in fp32 to main_grad, alone or several in one product."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpubound.kernels import accumulate
from gpubound.kernels.accumulate import deliver, join_rows, open_sums, opens, weight_gradient, weight_gradients, widened
from gpubound.kernels.triton._math import deliver_parts
from tests.messages import refusals

from .cases import draw, same

# One product of 40 terms, rounded once to the dtype.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def weight_with(main: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> nn.Parameter:
    weight = nn.Parameter(torch.zeros(shape, dtype=dtype, device="cpu" if main is None else main.device))
    if main is not None:
        weight.main_grad = main
    return weight


@pytest.fixture
def products(monkeypatch) -> list[tuple[int, ...]]:
    """The shape of every accumulator that a product was added to."""
    shapes, add = [], accumulate.add_product

    def counted(main, g, x, parts=None):
        shapes.append(tuple(main.shape))
        add(main, g, x, parts)

    monkeypatch.setattr(accumulate, "add_product", counted)
    return shapes


@DTYPES
def test_without_accumulator_returns_the_weights_dtype(dtype):
    g, x = draw(torch.device("cpu"), dtype, 40, 3), draw(torch.device("cpu"), dtype, 40, 5, seed=1)
    got = weight_gradient(weight_with(None, dtype, (3, 5)), g, x)
    same("gradient", got, (g.double().t() @ x.double()).to(dtype), TOLERANCE[dtype])


def test_fp32_weight_under_16_bit_activations_is_not_rounded():
    g, x = draw(torch.device("cpu"), torch.bfloat16, 40, 3), draw(torch.device("cpu"), torch.bfloat16, 40, 5, seed=1)
    got = weight_gradient(weight_with(None, torch.float32, (3, 5)), g, x)
    same("gradient", got, (g.double().t() @ x.double()).float(), TOLERANCE[torch.float32])


@DTYPES
def test_accumulator_is_added_to(dtype):
    g, x = draw(torch.device("cpu"), dtype, 40, 3), draw(torch.device("cpu"), dtype, 40, 5, seed=1)
    main = draw(torch.device("cpu"), torch.float32, 3, 5, seed=2)
    want = main.double() + 2 * (g.double().t() @ x.double())
    weight = weight_with(main, dtype, (3, 5))
    assert weight_gradient(weight, g, x) is None
    assert weight_gradient(weight, g, x) is None
    same("main_grad", weight.main_grad, want.float(), TOLERANCE[torch.float32])


def test_no_tokens_leave_the_accumulator_alone():
    weight = weight_with(torch.ones(3, 5), torch.bfloat16, (3, 5))
    assert weight_gradient(weight, torch.empty(0, 3).bfloat16(), torch.empty(0, 5).bfloat16()) is None
    assert weight.main_grad.eq(1).all()
    assert weight_gradient(weight_with(None, torch.float32, (3, 5)), torch.empty(0, 3), torch.empty(0, 5)).eq(0).all()


@DTYPES
def test_deliver(dtype):
    gradient = draw(torch.device("cpu"), torch.float32, 7)
    same("gradient", deliver(weight_with(None, dtype, (7,)), gradient), gradient.to(dtype), 0)
    weight = weight_with(torch.ones(7), dtype, (7,))
    assert deliver(weight, gradient.to(dtype)) is None
    same("main_grad", weight.main_grad, 1 + gradient.to(dtype).float(), 0)


@pytest.mark.parametrize("opened", [True, False])
def test_deliver_times_a_factor(opened):
    """A number on the device: into the result, a sum that begins, and one that goes on."""
    gradient, half = draw(torch.device("cpu"), torch.float32, 7), torch.tensor(0.5)
    same("gradient", deliver(weight_with(None, torch.float32, (7,)), gradient, half), gradient / 2, 0)
    weight = weight_with(torch.ones(7), torch.bfloat16, (7,))
    if opened:
        open_sums([weight])
    assert deliver(weight, gradient, half) is None
    same("main_grad", weight.main_grad, gradient / 2 + (0 if opened else 1), 0)


def test_fp32_accumulator_keeps_what_bf16_loses():
    """256 ones are 256 either way; the 257th is lost in bf16, whose next number after 256 is 258."""
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    weight = weight_with(torch.full((1, 1), 256.0), torch.bfloat16, (1, 1))
    weight_gradient(weight, one, one)
    assert weight.main_grad.item() == 257
    assert (torch.full((1, 1), 256.0, dtype=torch.bfloat16) + one).item() == 256


@DTYPES
@pytest.mark.parametrize("mains", ["adjacent", "apart", "none", "one missing"])
def test_several_weights(mains, dtype, products):
    rows, cpu = [4, 2, 2], torch.device("cpu")
    g, x = draw(cpu, dtype, 40, 8), draw(cpu, dtype, 40, 5, seed=1)
    buffer = draw(cpu, torch.float32, 10, 5, seed=2)
    slices = list(buffer[1:9].split(rows))  # a slice of a larger buffer: the storage offset matters
    before, want = buffer.clone(), g.double().t() @ x.double()
    if mains == "apart":
        slices = [part.clone() for part in slices]
    elif mains == "none":
        slices = [None] * 3
    elif mains == "one missing":
        slices[1] = None
    weights = [weight_with(main, dtype, (count, 5)) for count, main in zip(rows, slices)]
    got = weight_gradients(weights, g, x)
    for weight, gradient, part, old in zip(weights, got, want.split(rows), before[1:9].split(rows)):
        if hasattr(weight, "main_grad"):
            assert gradient is None
            same("main_grad", weight.main_grad, (old.double() + part).float(), TOLERANCE[torch.float32])
        else:
            same("gradient", gradient, part.to(dtype), TOLERANCE[dtype])
    assert buffer[0].equal(before[0]) and buffer[9].equal(before[9]), "a row outside the slices changed"
    assert products == {"adjacent": [(8, 5)], "apart": [(4, 5), (2, 5), (2, 5)], "none": []}.get(mains, [(4, 5), (2, 5)])


def test_join_rows_refuses_what_does_not_join():
    whole = torch.arange(24.0).view(6, 4)
    assert join_rows([whole[:2], whole[2:6]]).equal(whole)
    assert join_rows([whole[:2], whole[3:6]]) is None, "a gap"
    assert join_rows([whole[2:4], whole[:2]]) is None, "the wrong order"
    assert join_rows([whole[:, :2], whole[:, 2:]]) is None, "columns, not rows"
    assert join_rows([whole[:2], whole[2:4].clone()]) is None, "another storage"
    assert join_rows([whole[:2], whole[2:4].view(4, 2)]) is None, "another width"


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g @ weight, weight_gradient(ctx.weight, g, x)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_function_delivers(checkpointed):
    """As every Function of the library does it: the Parameter on ctx, as checkpointing saves a copy without main_grad."""
    weight = weight_with(torch.zeros(3, 5), torch.float32, (3, 5))
    x = draw(torch.device("cpu"), torch.float32, 4, 5)
    for _ in range(2):
        y = checkpoint(_Product.apply, x, weight, use_reentrant=False) if checkpointed else _Product.apply(x, weight)
        y.sum().backward()
    assert weight.grad is None
    same("main_grad", weight.main_grad, 2 * x.sum(0).expand(3, 5), 1e-6)


@DTYPES
def test_widened_delivers(dtype):
    """Plain differentiable code on a 16-bit weight: with an accumulator the gradient arrives there before it is rounded."""
    gradient = draw(torch.device("cpu"), torch.float32, 3, 5)
    plain, accumulating = weight_with(None, dtype, (3, 5)), weight_with(torch.ones(3, 5), dtype, (3, 5))
    for weight in (plain, accumulating):
        wide = widened(weight, torch.float32)
        assert wide.dtype == torch.float32
        wide.backward(gradient)
    same("grad", plain.grad, gradient.to(dtype), 0)
    assert accumulating.grad is None
    same("main_grad", accumulating.main_grad, 1 + gradient, 0)


def test_wrong_accumulator():
    refusals(
        "kernels/accumulate:wrong_accumulator",
        lambda: deliver(weight_with(torch.zeros(3, 4, dtype=torch.bfloat16), torch.bfloat16, (4, 3)), torch.zeros(4, 3)),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_product_adds_in_fp32_on_the_gpu(dtype):
    """256 products of one, then one more, through addmm(out_dtype=float32): 257, where bf16 would stay at 256."""
    device = torch.device("cuda")
    weight = weight_with(torch.zeros(64, 32, device=device), dtype, (64, 32))
    g, x = torch.ones(256, 64, device=device, dtype=dtype), torch.ones(256, 32, device=device, dtype=dtype)
    assert weight_gradient(weight, g, x) is None
    assert weight_gradient(weight, g[:1], x[:1]) is None
    assert weight.main_grad.eq(257).all()
    assert weight_gradient(weight, g[:0], x[:0]) is None
    assert weight.main_grad.eq(257).all()


@pytest.mark.gpu
def test_products_on_the_gpu_match_fp64():
    device = torch.device("cuda")
    g, x = draw(device, torch.bfloat16, 300, 96), draw(device, torch.bfloat16, 300, 72, seed=1)
    want, buffer, rows = (g.double().t() @ x.double()).float(), torch.ones(96, 72, device=device), [64, 16, 16]
    weights = [weight_with(part, torch.bfloat16, tuple(part.shape)) for part in buffer.split(rows)]
    assert weight_gradients(weights, g, x) == (None,) * 3
    same("joined main_grad", buffer, 1 + want, 1e-6)
    part = torch.ones(64, 72, device=device)
    weight_gradient(weight_with(part, torch.bfloat16, (64, 72)), g.split(rows, 1)[0], x)  # a column slice: strided, not copied
    same("main_grad from a slice", part, 1 + want[:64], 1e-6)
    plain = nn.Parameter(torch.zeros(96, 72, device=device))
    same("fp32 weight, bf16 activations", weight_gradient(plain, g, x), want, 1e-6)


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("programs, cols", [(1, 1), (3, 40), (64, 63), (130, 100)])
@pytest.mark.parametrize("sums", [1, 2])
def test_gradients_in_the_weights_dtypes(sums, programs, cols, device):
    parts = draw(device, FP32, programs, sums, cols)
    weights = [draw(device, dtype, cols) for dtype in (BF16, FP32)][:sums]
    for got, weight, want in zip(deliver_parts(parts, weights), weights, parts.sum(0)):
        same("gradient", got.float(), want, 4e-3 if weight.dtype == BF16 else 1e-6)
        assert got.dtype == weight.dtype


def test_a_number_beside_the_sums(device):
    parts, numbers = draw(device, FP32, 70, 2, 40), draw(device, FP32, 70, seed=1)
    weight, number = torch.ones(40, device=device), torch.ones((), device=device, dtype=BF16)
    first, second, total = deliver_parts(parts, [weight, weight], numbers, number)
    same("first", first, parts[:, 0].sum(0), 1e-6)
    same("second", second, parts[:, 1].sum(0), 1e-6)
    same("number", total, numbers.sum().to(BF16), 4e-3)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "strided"])
def test_accumulators(dense, fresh, device):
    """A fresh accumulator is written over, NaN and all; another is added to; autograd gets nothing. Strided: torch sums."""
    parts, weights = draw(device, FP32, 5, 2, 40), [torch.ones(40, device=device, dtype=BF16) for _ in range(2)]
    mains = [torch.full((40, 1 if dense else 2), float("nan") if fresh else 3.0, device=device)[:, 0] for _ in weights]
    for weight, main in zip(weights, mains):
        weight.main_grad = main
    if fresh:
        open_sums(weights)
    assert deliver_parts(parts, weights) == (None, None)
    for main, want in zip(mains, parts.sum(0)):
        same("main_grad", main, want if fresh else want + 3.0, 1e-6)
    assert not opens(weights)
