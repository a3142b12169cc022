"""Each kernel's own test: a tiny forward and backward beside the reference, run at the kernel's first use on a device.

The suite in tests/ is wider. This one runs on the user's machine, with the user's driver and compiler, where it counts.
"""

from collections.abc import Callable

import torch

from .choose import load

# Relative error allowed between fp32 kernels and the fp32 reference: summation order, and tf32 where the op holds a product.
LIMIT = 2e-3

EXAMPLES: dict[str, Callable[[torch.Generator], tuple]] = {
    # op -> a function that draws its positional arguments on the CPU; floating tensors get gradients checked
    "rms_norm": lambda g: (_draw(g, 3, 40), _draw(g, 40), 1e-6),
    "rms_norm.add_rms_norm": lambda g: (_draw(g, 3, 40), _draw(g, 3, 40), _draw(g, 40), 1e-6),
}


def _draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def check(op: str, device: torch.device) -> str | None:
    """None when Triton and the reference agree on outputs and every gradient, else one sentence with the worst of them."""
    arguments = EXAMPLES[op](torch.Generator().manual_seed(0))
    try:
        got = _run(load("triton", op), arguments, device)
    except Exception as error:  # compiling a kernel can raise anything; the reason is reported, never dropped
        return f"its self-test on {device} raised {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    want = _run(load("reference", op), arguments, torch.device("cpu"))
    for (name, a), (_, b) in zip(got, want):
        error = ((a.double().cpu() - b.double()).norm() / b.double().norm().clamp_min(1e-12)).item()
        if not error <= LIMIT:
            return (
                f"its self-test on {device} failed: {name} is off by {error:.2e} relative to the reference (limit {LIMIT:.0e})"
            )
    return None


def _run(function: Callable, arguments: tuple, device: torch.device) -> list[tuple[str, torch.Tensor]]:
    """Outputs and gradients by name, with fixed upstream gradients."""
    moved = [
        a.detach().to(device).requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) else a for a in arguments
    ]
    with torch.enable_grad():
        result = function(*moved)
        outputs = [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]
        upstream = [torch.linspace(-1, 1, t.numel()).reshape(t.shape).to(t) for t in outputs]
        wanted = [(i, t) for i, t in enumerate(moved) if isinstance(t, torch.Tensor) and t.requires_grad]
        gradients = torch.autograd.grad(outputs, [t for _, t in wanted], upstream, allow_unused=True)
    named = [(f"output {i}", t.detach()) for i, t in enumerate(outputs)]
    return named + [(f"gradient of argument {i}", g) for (i, _), g in zip(wanted, gradients) if g is not None]
