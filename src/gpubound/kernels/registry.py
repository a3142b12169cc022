"""Registry of the ops: the definition of each, an example for the self-test, and the file that has its kernel.

kernels/<file>.py has an op's public function, which checks the arguments and dispatches, and its definition in plain torch.
kernels/triton/<file>.py has its kernel, a function of the op's name and the definition's signature. An op of a single family is
in models/<family>/kernels instead, with the same two files, and is registered when that package is imported.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch

from ..device import constant
from ..formatting import nearest

# Packages of ops that only one family needs.
FAMILIES = ("gpubound.models.deepseek_v4.kernels", "gpubound.models.richards.kernels")


class Op(NamedTuple):
    kernels: ModuleType  # the package of its kernel's file
    file: str
    reference: Callable
    # Draws positional arguments for the self-test: example(generator, *shape). With the shape that the op passes to
    # `implementation`, they launch the same compiled kernels as the caller's arguments.
    example: Callable[..., tuple]
    # Whether its kernel multiplies fp32 in tf32, which has fp16's fraction of 10 bits, for a call of that shape.
    tf32: Callable[..., bool]
    function: str  # the name of its public function

    @property
    def package(self) -> str:
        return self.kernels.__name__.removesuffix(".triton")


OPS: dict[str, Op] = {}


def definition(
    example: Callable[..., tuple],
    op: str | None = None,
    gradient: bool = False,
    tf32: Callable[..., bool] = lambda *_: False,
    variant_of: str | None = None,
) -> Callable[[Callable], Callable]:
    """Register `<op>_reference` as the definition of <op>, or of `op`: its CPU path, and the reference of its self-test.

    gradient: autograd differentiates it; others run without. variant_of: the op whose public function calls this one, too, for
    weights or a cache of another format, or for rows that are multiplied together
    """

    def register(function: Callable) -> Callable:
        package, _, file = function.__module__.rpartition(".")
        kernels = import_module(f"{package}.triton")
        function = function if gradient else torch.no_grad()(function)
        name = op or function.__name__.removesuffix("_reference")
        OPS[name] = Op(kernels, file, function, example, tf32, variant_of or name)
        return function

    return register


# Tensors of examples. Those that require a gradient, and Parameters, are cast to the dtype of the call, and their gradients are
# compared; all others are passed unchanged (`draw(g, 4, 8).detach()` stays fp32 and has no gradient).


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Return standard normal values that require a gradient."""
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32, requires_grad=True)


def frozen(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor as one that gets the dtype of the call and no gradient."""
    return torch.nn.Parameter(t.detach(), requires_grad=False)


def zeros(*shape: int) -> torch.Tensor:
    """Return an fp32 output buffer, which keeps its dtype in any call."""
    return torch.zeros(shape, device="cpu", dtype=torch.float32)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cpu", dtype=torch.int32)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, device="cpu", dtype=torch.float64)


def reference(op: str) -> Callable:
    """Return the definition of the op named `op`: plain torch, at least fp32 inside, differentiable any number of times."""
    if op not in OPS and op not in every():
        raise ValueError(f"reference: got {op!r}, wanted the name of an op{nearest(str(op), OPS)}")
    return load("reference", op)


def every() -> dict[str, Op]:
    """Return all ops, those of single families included."""
    import_module("gpubound.kernels")
    for package in FAMILIES:
        import_module(package)
    return OPS


def load(source: str, op: str) -> Callable:
    """Return the function that computes `op`: its kernel for the source "triton", its definition for "reference"."""
    kernels, file, function, *_ = OPS[op]
    if source == "reference":
        return function
    _import(kernels.__name__, file)
    return getattr(getattr(kernels, file), op)  # torch.compile takes no module as a constant


@constant
def _import(package: str, file: str) -> None:
    # A module is in sys.modules from the beginning of its import, which another thread may still run. Its package has it as an
    # attribute only at the end.
    if not hasattr(import_module(package), file):
        import_module(f"{package}.{file}")
