"""Each kernel's own test: a small forward and backward against the reference, when a device, dtype and shape first call it.

The suite in tests/ is wider. This one runs on the user's machine, with the user's driver and compiler, where it counts.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from ..device import entered
from ..trace import timed
from .registry import OPS, load

# Relative error allowed between a kernel and the reference, by the dtype of the call: summation order, tf32 where the op holds
# a product, and rounding on the way (2^-11, 2^-8 a time). A wrong kernel is off by far more. Bytes are moved, and stay equal.
LIMITS = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.uint8: 0.0}
PART = 1 << 22  # elements compared at a time


def check(op: str, device: torch.device, dtype: torch.dtype, shape: tuple = (), forward: bool = False) -> str | None:
    """None when Triton and the reference agree on outputs and every gradient, else one sentence with the worst of them.

    forward: compare outputs alone, of calls without gradients

    Arguments of the caller's own shape make it test the kernels that the caller will run, and compile no others.
    """
    test = f"its self-test in {dtype} on {device}"
    try:
        # on a new thread the current device is the first, whatever the caller's is
        with timed(f"self-test of {op} {shape}"), entered(device):
            got = run("triton", op, device, dtype, shape, forward)
    except Exception as error:  # compiling a kernel can raise anything; the reason is reported, never dropped
        return f"{test} raised {type(error).__name__}: {(str(error).strip().splitlines() or ['(no message)'])[0]}"
    want = run("reference", op, torch.device("cpu"), dtype, shape, forward)
    if missing := want.keys() ^ got.keys():
        return f"{test} failed: only one of kernel and reference gives {', '.join(sorted(missing))}"
    # Products of products in tf32 of 128 x 128: a gradient was off by 2.2e-3.
    limit = LIMITS[torch.float16 if dtype == torch.float32 and OPS[op].tf32(*shape) else dtype]
    errors = {name: _relative(got[name], want[name]) for name in want}
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    if errors[worst] <= limit:
        return None
    return f"{test} failed: {worst} is off by {errors[worst]:.2e} relative to the reference (limit {limit:.0e})"


def run(
    source: str, op: str, device: torch.device, dtype: torch.dtype, shape: tuple, forward: bool = False
) -> dict[str, torch.Tensor]:
    """Run the op's example forward and, unless `forward`, backward; return outputs and gradients by name."""
    with torch.set_grad_enabled(not forward):
        return _run(load(source, op), OPS[op].example(torch.Generator().manual_seed(0), *shape), device, dtype)


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖ without infinities that both have; infinite for another shape or dtype, NaN where one holds it."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    # Large ones on the device, by parts: 2^24 elements of a product with adapters took a core 1.1 s.
    device, parts = got.device if got.numel() >= PART else torch.device("cpu"), (t.reshape(-1).split(PART) for t in (got, want))
    norms = []
    for a, b in ((one.double().to(device), other.to(device).double()) for one, other in zip(*parts)):
        same = (a == b) & b.isinf()
        norms.append(torch.stack([x.masked_fill(same, 0.0).norm() for x in (a - b, b)]))
    off, size = torch.stack(norms).norm(dim=0)
    return (off / size.clamp_min(1e-12)).item()


def _run(function: Callable, arguments: tuple, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Outputs and gradients by name, with fixed upstream gradients."""

    def own(argument: torch.Tensor) -> torch.Tensor:
        # Copied: an op may write into its arguments, and the other mirror gets them too.
        if argument.requires_grad or isinstance(argument, torch.nn.Parameter):
            return argument.detach().to(device, dtype, copy=True).requires_grad_(argument.requires_grad)
        return argument.detach().to(device, copy=True)

    moved = tree_map_only(torch.Tensor, own, arguments)
    result = function(*moved)
    outputs = [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]
    wired = [t for t in outputs if t.requires_grad]  # an optimizer's update has no backward
    # 1 for a loss. Else numbers without a pattern: of those that rise evenly nothing comes through the backward of a matrix
    # whose rows and columns must sum to 1.
    random = partial(torch.randn, generator=torch.Generator().manual_seed(1), device="cpu", dtype=torch.float32)
    upstream = [random(t.shape).to(t) if t.dim() else torch.ones_like(t) for t in wired]
    wanted = {
        f"the gradient of argument {i}{keystr(path)}": t
        for i, argument in enumerate(moved)
        for path, t in tree_flatten_with_path(argument)[0]
        if isinstance(t, torch.Tensor) and t.requires_grad
    }
    # On this thread: an op's first call may come in backward (what is computed again there), and then the device's own thread
    # is the one that waits for this verdict. Left to it, both would wait for ever.
    with torch.autograd.set_multithreading_enabled(False):
        gradients = torch.autograd.grad(wired, list(wanted.values()), upstream, allow_unused=True) if wired else ()
    named = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    return named | {name: g for name, g in zip(wanted, gradients) if g is not None}
