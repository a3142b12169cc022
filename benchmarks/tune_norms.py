"""Search for the norms' launch plans on this GPU: rows a tile, programs, warps, forward and backward, width by width.

    python -m benchmarks.tune_norms --ops rms_norm,add_rms_norm --widths 1024,4096

A plan is timed as a graph that calls the op once on each of several input sets of more than 200 MB together: no call finds its
input in the L2, no launch waits for the host. The backward's time holds the sum over the programs' partial gradients. GB/s
count what any implementation must move: each input read once, each output written once. A line a case: the best plan, the one
that `schedule` gives today, the worst. What it teaches goes into kernels/triton/_launch.py, the figures into LOG.md.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # kernels import triton, which reads TRITON_INTERPRET as it is imported: main() sets it first
    from gpubound.kernels.triton._launch import Plan

OPS = ("rms_norm", "add_rms_norm", "layer_norm")
COLD_BYTES = 200 << 20  # four times an H200's L2
TENSORS = {  # moved by op and direction, each of rows x cols
    ("rms_norm", False): "x y",
    ("rms_norm", True): "dy x dx",
    ("add_rms_norm", False): "x r s y",
    ("add_rms_norm", True): "dy ds s dx",
    ("layer_norm", False): "x y",
    ("layer_norm", True): "dy x dx",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=",".join(OPS), help="by comma (default: %(default)s)")
    parser.add_argument("--widths", default="576,1024,2048,4096,8192", help="by comma (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=16384, help="rows of the input (default: %(default)s)")
    parser.add_argument("--direction", choices=("forward", "backward", "both"), default="both")
    parser.add_argument(
        "--replays", type=int, default=10, help="timed replays a plan, the median counts (default: %(default)s)"
    )
    parser.add_argument("--dry", action="store_true", help="tiny sizes in Triton's interpreter: shows that the script runs")
    options = parser.parse_args()
    ops = options.ops.split(",")
    if unknown := set(ops) - set(OPS):
        parser.error(f"--ops: got {', '.join(sorted(unknown))}, wanted some of {', '.join(OPS)}")
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"
        options.widths, options.rows = "40", 3
    elif not torch.cuda.is_available():
        parser.error("no GPU is visible: tuning wants one; --dry runs tiny sizes in the interpreter")
    ways = [way for way in (False, True) if options.direction in ("both", "backward" if way else "forward")]
    for op in ops:
        for cols in map(int, options.widths.split(",")):
            for backward in ways:
                print(search(op, options.rows, cols, backward, options.replays, options.dry), flush=True)


def search(op: str, rows: int, cols: int, backward: bool, replays: int, dry: bool) -> str:
    """Time every plan of one case: its line."""
    from triton.runtime.errors import OutOfResources

    from gpubound.kernels.triton import _launch

    device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
    dtype = torch.float32 if dry else torch.bfloat16
    names = TENSORS[op, backward].split()
    moved = len(names) * rows * cols * dtype.itemsize
    calls = [call(op, rows, cols, backward, device, dtype, seed) for seed in range(sets(op, rows, cols, backward, dtype, dry))]
    today = _launch.schedule(cols, device, backward, sums=2 if op == "layer_norm" else 1)
    microseconds: dict[Plan, float] = {}
    too_large = 0
    for plan in dict.fromkeys([today, *candidates(cols, device, backward, dry)]):
        _launch.OVERRIDE[cols, backward] = plan
        try:
            microseconds[plan] = time_calls(calls, replays, dry)
        except OutOfResources:
            too_large += 1
        finally:
            del _launch.OVERRIDE[cols, backward]
    best, worst = (pick(microseconds, key=microseconds.__getitem__) for pick in (min, max))
    said = ", ".join(
        f"{name} {words(plan, device)} {microseconds[plan]:.1f} us"
        for name, plan in (("best", best), ("today", today), ("worst", worst))
        if plan in microseconds
    )
    return (
        f"{op} {'backward' if backward else 'forward'} {rows}x{cols}: {said}; best {moved / microseconds[best] / 1e3:.0f} GB/s "
        f"of {'+'.join(names)} = {moved / 1e6:.1f} MB; {len(microseconds)} plans" + f", {too_large} too large" * bool(too_large)
    )


def words(plan: "Plan", device: torch.device) -> str:
    from gpubound.kernels.triton._launch import multiprocessors

    crowd = f" x {plan.programs / multiprocessors(device):g}/SM" if plan.programs else ""
    return f"{plan.rows} rows{crowd} x {plan.warps} warps"


def candidates(cols: int, device: torch.device, backward: bool, dry: bool) -> Iterator["Plan"]:
    """Plans with 8 to 128 elements a thread and tensor: fewer leave threads without a whole 16-byte load, more spill."""
    from gpubound.kernels.triton._launch import Plan, multiprocessors, power_of_two

    block = power_of_two(cols)
    for rows in (1, 2, 4, 8, 16)[: 2 if dry else None]:
        for warps in (1, 2, 4, 8, 16)[: 2 if dry else None]:
            if dry or 8 <= rows * block / (32 * warps) <= 128:
                for each in (1, 2, 3, 4, 6, 8)[: 2 if dry else None] if backward else (0,):
                    yield Plan(block, rows, each * multiprocessors(device), warps)


def sets(op: str, rows: int, cols: int, backward: bool, dtype: torch.dtype, dry: bool) -> int:
    """How many input sets make each call's inputs cold."""
    inputs = {"rms_norm": 1, "add_rms_norm": 2, "layer_norm": 1}[op] + backward
    return 1 if dry else 2 + COLD_BYTES // (inputs * rows * cols * dtype.itemsize)


def call(
    op: str, rows: int, cols: int, backward: bool, device: torch.device, dtype: torch.dtype, seed: int
) -> Callable[[], tuple[Tensor | None, ...]]:
    """The op on inputs of its own, without autograd around it."""
    from gpubound.kernels.triton import layer_norm, rms_norm

    generator = torch.Generator(device).manual_seed(seed)
    x, r, dy = (torch.randn(rows, cols, device=device, generator=generator).to(dtype) for _ in range(3))
    weight = torch.randn(cols, device=device, generator=generator).to(dtype)
    if op == "layer_norm":
        if not backward:
            return lambda: layer_norm._forward(x, weight, weight, 1e-5)
        _, mean, rstd = layer_norm._forward(x, weight, weight, 1e-5)
        return lambda: layer_norm._backward(dy, x, weight, mean, rstd, True, True, True)
    residual = r if op == "add_rms_norm" else None
    if not backward:
        return lambda: rms_norm._forward(x, residual, weight, 1e-6)
    _, s, rstd = rms_norm._forward(x, residual, weight, 1e-6)

    def backward_and_sum() -> tuple[Tensor | None, ...]:
        dx, partial = rms_norm._backward(dy, residual, s, weight, rstd, True, True)
        assert partial is not None
        return dx, partial.sum(0)

    return backward_and_sum


def time_calls(calls: list[Callable[[], tuple[Tensor | None, ...]]], replays: int, dry: bool) -> float:
    """Microseconds a call: the median replay of a graph that makes each call once. Dry: one call in the interpreter."""
    started = time.perf_counter()
    results = [run() for run in calls]  # compiles
    if dry:
        return (time.perf_counter() - started) * 1e6 / len(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        results = [run() for run in calls]  # all kept, so that no call writes where the last one did
    graph.replay()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    del results
    return sorted(begin.elapsed_time(end) for begin, end in marks)[replays // 2] * 1e3 / len(calls)


if __name__ == "__main__":
    main()
