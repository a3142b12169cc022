"""Linear cross-entropy: both mirrors and all chunk sizes agree, bad input is refused. Gradients and devices: next files."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpubound import kernels
from gpubound.kernels.triton import cross_entropy as fast
from tests.messages import refusals

from .cases import definitions, draw, pairwise, same
from .test_cross_entropy import OPTIONS, labels_for

reference = definitions("cross_entropy")

FP32, BF16, CPU = torch.float32, torch.bfloat16, torch.device("cpu")
# fp32: two products of up to 70 terms. 16 bits: logits near 3 are rounded before the loss (2^-11, 2^-8 of themselves, and so is
# every p), their gradients once more, and the products' results; the reference keeps its logits in fp32.
TOLERANCE = {FP32: 1e-5, torch.float16: 3e-3, BF16: 2e-2}
BOTH = pytest.mark.parametrize("op", [fast.linear_cross_entropy, reference.linear_cross_entropy], ids=["triton", "reference"])
MAIN = pytest.mark.parametrize("main", [False, True], ids=["grad", "main_grad"])
NAMES = ("dx", "dweight", "dbias")


def problem(device, dtype=FP32, rows=(2, 7), features=24, words=70) -> tuple[Tensor, nn.Parameter, nn.Parameter, Tensor]:
    """x, weight, bias and labels; the logits are near unit normal, every third label is ignored."""
    x = draw(device, dtype, *rows, features).requires_grad_()
    weight = nn.Parameter(draw(device, dtype, words, features, seed=1) / features**0.5)
    return x, weight, nn.Parameter(draw(device, dtype, words, seed=2)), labels_for((*rows, words), device)


def near(name: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """As `same`, relative to the size of what is wanted: a mean's gradients are small everywhere."""
    size = want.double().square().mean().sqrt().clamp_min(1e-6).item()
    same(name, got / size, want / size, tolerance)


def truth(x, weight, bias, labels, factor: float = 1.0, reduction: str = "mean") -> list[Tensor]:
    """dx, dweight and dbias of factor · loss in fp64, by torch alone."""
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    logits = F.linear(*wide).flatten(0, -2)
    loss = factor * F.cross_entropy(logits, labels.flatten(), reduction=reduction)
    return [g.float() for g in torch.autograd.grad(loss, wide)]


def check(x, weight, bias, want: list[Tensor], tolerance: float = 1e-5) -> None:
    """The gradients that backward left on x, weight and bias, in main_grad where there is one."""
    for name, t, g in zip(NAMES, (x, weight, bias), want):
        main = getattr(t, "main_grad", None)
        assert main is None or t.grad is None, f"{name} went to .grad beside main_grad"
        near(name, t.grad if main is None else main, g, tolerance)


def accumulate(*parameters: nn.Parameter) -> None:
    for p in parameters:
        p.main_grad = torch.zeros_like(p, dtype=FP32)


@pairwise
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk", [None, 5])
def test_matches(chunk, options, dtype, device):
    x, weight, bias, labels = problem(device, dtype)
    results = []
    for op in (fast.linear_cross_entropy, reference.linear_cross_entropy):
        loss = op(x, weight, labels, bias, **OPTIONS[options], chunk=chunk)
        results.append((loss, *torch.autograd.grad(loss, (x, weight, bias))))
    for name, got, want in zip(("loss", *NAMES), *results):
        near(name, got, want, TOLERANCE[dtype])


@pytest.mark.parametrize("rows, words", [((1,), 1), ((3,), 4100), ((1, 2, 4), 63)], ids=str)
def test_shapes(rows, words, device):
    x, weight, bias, labels = problem(device, rows=rows, words=words)
    for reduction in ("mean", "sum"):
        loss = fast.linear_cross_entropy(x, weight, labels, bias, reduction=reduction)
        want = reference.linear_cross_entropy(x, weight, labels, bias, reduction=reduction)
        assert loss.shape == () and loss.dtype == FP32
        same("loss", loss, want, 1e-5)
        got, want = (torch.autograd.grad(t, (x, weight, bias)) for t in (loss, want))
        for name, a, b in zip(NAMES, got, want):
            same(name, a, b, 1e-5)


@BOTH
def test_is_torch(op, device):
    x, weight, bias, labels = problem(device)
    op(x, weight, labels, bias).backward()
    check(x, weight, bias, truth(x, weight, bias, labels))


def test_reference_gradients_in_fp64():
    x, weight, bias, labels = problem(CPU, torch.float64, (3,), 4, 6)
    for options in OPTIONS.values():
        assert torch.autograd.gradcheck(
            lambda *t, o=options: reference.linear_cross_entropy(t[0], t[1], labels, t[2], **o), (x, weight, bias)
        )


@pytest.mark.parametrize("chunk", [1, 2, 4, 13, 14, 100])
def test_the_loss_does_not_depend_on_the_chunk(chunk, device):
    x, weight, bias, labels = problem(device)
    want = truth(x, weight, bias, labels)
    loss = fast.linear_cross_entropy(x, weight, labels, bias, chunk=chunk)
    loss.backward()
    same("loss", loss, fast.linear_cross_entropy(x, weight, labels, bias), 2e-6)
    check(x, weight, bias, want)


def test_autocast_sets_the_products_dtype(device):
    x, weight, bias, labels = problem(device)
    with torch.autocast(device.type, BF16):
        got = kernels.linear_cross_entropy(x, weight, labels, bias)
    want = kernels.linear_cross_entropy(x.bfloat16(), weight, labels, bias)
    assert got.equal(want) and got.dtype == FP32
    got.backward()
    assert x.grad.dtype == FP32
    near("dx", x.grad, truth(x, weight, bias, labels)[0], TOLERANCE[BF16])


def test_strided_x(device):
    x, weight, bias, labels = problem(device)
    base = x.detach().transpose(0, 1).contiguous().requires_grad_()
    fast.linear_cross_entropy(base.transpose(0, 1), weight, labels, bias, chunk=5).backward()
    near("dx", base.grad.transpose(0, 1), truth(x, weight, bias, labels)[0], 1e-5)


@BOTH
def test_all_ignored(op, device):
    x, weight, bias, labels = problem(device)
    loss = op(x, weight, torch.full_like(labels, -100), bias, chunk=5)
    assert loss.isnan()
    loss = op(x, weight, torch.full_like(labels, -100), bias, reduction="sum", chunk=5)
    loss.backward()
    assert loss == 0 and all(t.grad.eq(0).all() for t in (x, weight, bias))


@BOTH
def test_label_out_of_range_poisons(op, device):
    """Its own dx, and dweight, which is what a trainer's finite guard looks at."""
    x, weight, bias, labels = problem(device, rows=(3,))
    labels[0] = weight.shape[0]
    loss = op(x, weight, labels, bias)
    loss.backward()
    assert loss.isnan() and x.grad[0].isnan().all() and x.grad[1:].isfinite().all() and weight.grad.isnan().any()


def test_empty(device):
    weight = torch.ones(5, 4, device=device, requires_grad=True)
    labels = torch.empty(0, device=device, dtype=torch.long)
    loss = kernels.linear_cross_entropy(torch.empty(0, 4, device=device), weight, labels, reduction="sum")
    loss.backward()
    assert loss == 0 and weight.grad.eq(0).all()


@pairwise
@BOTH
@MAIN
@pytest.mark.parametrize("scaled", [False, True], ids=["no scale", "grad_scale"])
def test_weights_multiply_each_labels_loss(scaled, main, op, device):
    """Of an ignored label the weight is not read: 1 / t may be infinite there."""
    x, weight, bias, labels = problem(device)
    if main:
        accumulate(weight, bias)
    weights = torch.linspace(0.25, 40, labels.numel(), device=device).view(labels.shape)
    weights = weights.masked_fill(labels == -100, float("inf")).t().contiguous().t()  # of any layout
    options = {"grad_scale": torch.tensor(0.25, device=device)} if scaled else {}
    loss = op(x, weight, labels, bias, reduction="sum", chunk=5, weights=weights, **options)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    each = F.cross_entropy(F.linear(*wide).flatten(0, -2), labels.flatten(), reduction="none")
    want = (0.25 if scaled else 1.0) * (
        each[labels.flatten() != -100] * weights.double().flatten()[labels.flatten() != -100]
    ).sum()
    near("loss", loss, want.float(), 1e-5)
    (loss if scaled else 3 * loss).backward()
    check(x, weight, bias, [(1 if scaled else 3) * g.float() for g in torch.autograd.grad(want, wide)])


def test_reference_weights_in_fp64():
    x, weight, bias, labels = problem(CPU, torch.float64, (3,), 4, 6)
    weights = torch.tensor([0.5, 2.0, 7.0])
    op = reference.linear_cross_entropy
    assert torch.autograd.gradcheck(
        lambda *t: op(t[0], t[1], labels, t[2], reduction="sum", weights=weights), (x, weight, bias)
    )


@pytest.mark.parametrize(
    "tokens, features, rows", [(16384, 1024, 1024), (16384, 2048, 2048), (1000, 2048, 1024), (5000, 4096, 2560), (7, 64, 128)]
)
def test_chunk_rows(tokens, features, rows):
    """As many as features, even chunks (5000 tokens as two of 2560, not 4096 and a rest), multiples of 128, 128 at least."""
    assert fast._chunk_rows(tokens, features) == rows


def test_wrong_arguments():
    x, w, y = torch.ones(2, 3), torch.ones(5, 3), torch.zeros(2, dtype=torch.long)
    call = kernels.linear_cross_entropy
    refusals(
        "kernels/linear_cross_entropy:wrong_arguments",
        lambda: call(x.long(), w, y),
        lambda: call(x, w.t(), y),
        lambda: call(x, w, y, bias=torch.ones(3)),
        lambda: call(x, w, y[:1]),
        lambda: call(x, w.to("meta"), y),
        lambda: call(x, w, y, chunk=0),
        lambda: call(x, w, y, reduction="none"),
        lambda: call(x, w, y, grad_scale=torch.ones(1)),
        lambda: call(x, w, y, weights=torch.ones(3), reduction="sum"),
        lambda: call(x, w, y, weights=torch.ones(2)),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("words", [4096, 5003])
@pytest.mark.parametrize("chunk", [None, 384])
def test_bf16_on_the_gpu(chunk, words):
    """Products of bf16 summed in fp32, also for a vocabulary that no power of two divides: its rows of logits are padded."""
    device = torch.device("cuda")
    x, weight, bias, labels = problem(device, BF16, (2, 500), 256, words)
    want = truth(x, weight, bias, labels)
    fast.linear_cross_entropy(x, weight, labels, bias, chunk=chunk).backward()
    check(x, weight, bias, [t.bfloat16() for t in want], TOLERANCE[BF16])
    x.grad = bias.grad = weight.grad = None
    accumulate(weight)
    fast.linear_cross_entropy(x, weight, labels, bias, chunk=chunk, grad_scale=torch.ones((), device=device)).backward()
    check(x, weight, bias, [want[0].bfloat16(), want[1], want[2].bfloat16()], TOLERANCE[BF16])


@pytest.mark.gpu
@MAIN
def test_no_sync_and_capture(main):
    """Forward and backward under sync debugging, then captured and replayed with other inputs: the same bits as eager."""
    device = torch.device("cuda")
    x, weight, bias, labels = problem(device, BF16, (600,), 128, 4096)
    other_x, other_labels = draw(device, BF16, 600, 128, seed=9), labels.flip(0)
    scale = torch.full((), 0.5, device=device) if main else None

    def step() -> list[Tensor]:
        for p in (weight, bias):
            p.grad = None
        x.grad = None
        if main:
            weight.main_grad.zero_()
        loss = fast.linear_cross_entropy(x, weight, labels, bias, chunk=256, grad_scale=scale)
        loss.backward()
        return [loss.detach(), x.grad, weight.main_grad if main else weight.grad, bias.grad]

    if main:
        accumulate(weight)
    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        x.copy_(other_x)
        labels.copy_(other_labels)
    graph.replay()
    got = [t.clone() for t in captured]
    for name, a, b in zip(("loss", *NAMES), got, step()):
        assert a.equal(b), f"{name}: the replay differs from eager by {(a.float() - b.float()).abs().max().item():.3g}"


BROKEN_PROMISE = """
import torch
from gpubound.kernels.triton.cross_entropy import linear_cross_entropy
x = torch.randn(8, 16, device="cuda", requires_grad=True)
w = torch.randn(64, 16, device="cuda", requires_grad=True)
y = torch.zeros(8, device="cuda", dtype=torch.long)
(FACTOR * linear_cross_entropy(x, w, y, grad_scale=torch.ones((), device="cuda"))).backward()
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [1, 3])
def test_broken_promise_on_the_gpu(factor):
    """The device's assertion ends the process, so it runs in one of its own."""
    code = BROKEN_PROMISE.replace("FACTOR", str(factor))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) == (factor == 1), done.stderr
    assert factor == 1 or "assert" in done.stderr


@pytest.mark.gpu
def test_memory_is_what_the_docstring_says():
    """Beside its arguments: one chunk of logits, dx, and (without grad_scale) dweight in fp32 with its cast."""
    device, megabyte = torch.device("cuda"), 1 << 20
    x, weight, _, labels = problem(device, BF16, (4096,), 512, 16384)
    logits, dx, dweight = 1024 * 16384 * 2, 4096 * 512 * 2, 16384 * 512 * 4

    def peak(**options) -> int:
        x.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = fast.linear_cross_entropy(x, weight, labels, chunk=1024, **options)
        used = torch.cuda.max_memory_allocated() - before
        loss.backward()
        return used

    peak()  # cuBLAS keeps a workspace
    assert peak() <= logits + dx + dweight + 4 * megabyte
    accumulate(weight)
    assert peak(grad_scale=torch.ones((), device=device)) <= logits + dx + 4 * megabyte
