"""Search for the losses' settings on this GPU: the cross-entropy kernel's tile and warps, linear_cross_entropy's chunk.

    python -m benchmarks.tune_losses --heads 1024x32768,2048x128256

First the kernel that turns a chunk of logits into losses and gradients, in place, tile by tile and warp by warp; GB/s count one
read and one write of the logits, the least there is (the second read finds a row in the L2 or not). Then the whole op, forward
and backward of `--tokens` tokens, chunk by chunk, in its two forms: `grad` returns dweight, `main_grad` adds it to an fp32
accumulator inside the products (grad_scale). TFLOP/s count the three products. Memory is the peak beside the arguments. Liger's
fused form stands beside them when it is installed. The settings go into `losses` (kernels/plans/defaults.py) and `_chunk_rows`,
the figures into LOG.md.
"""

import argparse
import os
from collections.abc import Callable

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="1024x32768,2048x128256", help="features x words, by comma (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16384, help="(default: %(default)s)")
    parser.add_argument("--chunks", default="512,1024,2048,4096,8192", help="tokens a chunk, by comma (default: %(default)s)")
    parser.add_argument(
        "--tiles", default="1024,2048,4096,8192,16384", help="logits at a time, by comma (default: %(default)s)"
    )
    parser.add_argument("--warps", default="4,8,16,32", help="by comma (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=10, help="timed runs, the median counts (default: %(default)s)")
    parser.add_argument("--dry", action="store_true", help="tiny sizes in Triton's interpreter: shows that the script runs")
    options = parser.parse_args()
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
        options.heads, options.tokens, options.chunks, options.tiles, options.warps, options.runs = "8x40", 6, "4", "32", "4", 1
    elif not torch.cuda.is_available():
        parser.error("no GPU is visible: tuning wants one; --dry runs tiny sizes in the interpreter")
    device, dtype = (torch.device("cpu"), torch.float32) if options.dry else (torch.device("cuda"), torch.bfloat16)
    chunks, tiles, warps = ([int(n) for n in text.split(",")] for text in (options.chunks, options.tiles, options.warps))
    for head in options.heads.split(","):
        features, words = map(int, head.split("x"))
        for line in kernel_lines(features, words, options.tokens, tiles, warps, options.runs, device, dtype):
            print(line, flush=True)
        for line in op_lines(features, words, options.tokens, chunks, options.runs, device, dtype):
            print(line, flush=True)


def kernel_lines(
    features: int, words: int, tokens: int, tiles, warps, runs: int, device: torch.device, dtype: torch.dtype
) -> list[str]:
    """One line a tile, its warps side by side; today's plan first."""
    from gpubound.kernels import plans
    from gpubound.kernels.plans.types import TilePlan
    from gpubound.kernels.triton import cross_entropy as loss

    rows = min(tokens, loss._chunk_rows(tokens, features))
    logits = torch.randn(rows, words, device=device, dtype=dtype)
    labels = torch.randint(words, (rows,), device=device)
    options, job = loss.Options(-100, 0.0, None, 0.0), plans.job_of("losses", "forward", (words,), logits)
    moved = 2 * logits.numel() * logits.element_size()

    def timed(tile: int, count: int) -> str:
        with plans.trying(job, TilePlan(tile, count)):
            seconds = median(lambda: loss._row_losses(logits, labels, options, write=True), runs, device, ahead=True)
        return f"{count} warps {seconds * 1e6:.0f} us {moved / seconds / 1e9:.0f} GB/s"

    tile, count, _ = plans.plan_for(job)
    lines = [f"kernel {rows}x{words}: today tile {tile}, {timed(tile, count)}"]
    for tile in tiles:
        fitting = [n for n in warps if 4 <= tile / (32 * n) <= 128] or warps[:1]  # else idle threads, or spilled registers
        lines.append(f"kernel {rows}x{words}: tile {tile}: " + ", ".join(timed(tile, n) for n in fitting))
    return lines


def op_lines(features: int, words: int, tokens: int, chunks, runs: int, device: torch.device, dtype: torch.dtype) -> list[str]:
    """One line a form and chunk, then Liger's."""
    from gpubound.kernels import linear_cross_entropy

    x = torch.randn(tokens, features, device=device, dtype=dtype, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(words, features, device=device, dtype=dtype) / features**0.5)
    labels, one = torch.randint(words, (tokens,), device=device), torch.ones((), device=device)
    case = f"{tokens} tokens, head {features}x{words}"
    lines = []
    for form, scale in (("grad", None), ("main_grad", one)):
        if scale is not None:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        for chunk in (None, *chunks):

            def step(chunk=chunk, scale=scale) -> None:
                x.grad = weight.grad = None
                linear_cross_entropy(x, weight, labels, chunk=chunk, grad_scale=scale).backward()

            lines.append(f"{case}: {form}, chunk {chunk or 'default'}: {cost(step, x, weight, runs, device)}")
    del weight.main_grad
    for name, loss in peers():

        def step(loss=loss) -> None:
            x.grad = weight.grad = None
            loss(weight, x, labels).backward()

        lines.append(f"{case}: {name}: {cost(step, x, weight, runs, device)}")
    return lines


def peers() -> list[tuple[str, Callable]]:
    """Liger's fused form as it comes, and with the fp32 sum of weight gradients that ours always has."""
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        print("liger-kernel is not installed: no peer beside")
        return []
    return [
        ("liger", LigerFusedLinearCrossEntropyLoss()),
        ("liger, fp32 sum", LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)),
    ]


def cost(step: Callable[[], None], x: torch.Tensor, weight: torch.Tensor, runs: int, device: torch.device) -> str:
    seconds = median(step, runs, device)
    flops = 6 * x.shape[0] * weight.numel()
    said = f"{seconds * 1e3:.2f} ms, {flops / seconds / 1e12:.0f} TFLOP/s"
    if device.type != "cuda":
        return said
    x.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return f"{said}, {(torch.cuda.max_memory_allocated() - before) / 1e6:.0f} MB"


def median(fn: Callable, runs: int, device: torch.device, ahead: bool = False) -> float:
    """Seconds of one call on the device's clock; `ahead` hides its launches. The inputs are several times an L2."""
    from gpubound.measure import time

    on_gpu = device.type == "cuda"
    return time(fn, warmup=3 if on_gpu else 1, runs=runs, host_ahead=ahead and on_gpu, device=device).median_s


if __name__ == "__main__":
    main()
