"""Linear cross-entropy in graphs and on the GPU: products in 16 bits, no sync, the promised memory."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from gpubound.kernels.triton import cross_entropy as fast

from .cases import draw
from .test_linear_cross_entropy import BF16, MAIN, NAMES, TOLERANCE, accumulate, check, problem, truth


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
