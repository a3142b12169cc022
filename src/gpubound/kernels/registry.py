"""The ops by name: what defines each, an example to test its kernel with, and the file that its kernel is in.

kernels/<file>.py says what an op is: a public function that checks its arguments and chooses an implementation, and its
definition in plain torch. kernels/triton/<file>.py has a function of the op's name and the definition's signature: its kernel.
An op of a single family is in that family's package instead, models/<family>/kernels, with the same two files. It is
registered when that package is imported.
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
    # Draws positional arguments for the self-test: example(generator), or with the shape that the door passes on. Of that shape
    # they take the very kernels that the caller's own arguments will.
    example: Callable[..., tuple]

    @property
    def package(self) -> str:
        return self.kernels.__name__.removesuffix(".triton")


OPS: dict[str, Op] = {}


def definition(example: Callable[..., tuple], op: str | None = None) -> Callable[[Callable], Callable]:
    """Mark `<op>_reference` as the definition of <op>, or of `op`: its CPU path, and what the kernel is tested against."""

    def register(function: Callable) -> Callable:
        package, _, file = function.__module__.rpartition(".")
        kernels = import_module(f"{package}.triton")
        OPS[op or function.__name__.removesuffix("_reference")] = Op(kernels, file, function, example)
        return function

    return register


# What examples are made of. The kernel gets `draw`n tensors in the dtype of the call, and their gradients are compared; all
# others are passed as they are (`draw(g, 4, 8).detach()` stays fp32 and has no gradient).


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32, requires_grad=True)


def frozen(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor as one that gets the dtype of the call and no gradient."""
    return torch.nn.Parameter(t.detach(), requires_grad=False)


def zeros(*shape: int) -> torch.Tensor:
    """fp32, whatever the dtype of the call: what an op writes its results into."""
    return torch.zeros(shape, device="cpu", dtype=torch.float32)


def ints(*values: int) -> torch.Tensor:
    """int32"""
    return torch.tensor(values, device="cpu", dtype=torch.int32)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, device="cpu", dtype=torch.float64)


def reference(op: str) -> Callable:
    """The definition of the op named `op`: plain torch, at least fp32 inside, differentiable any number of times."""
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
    """The function that computes `op`: its kernel for the source "triton", its definition for "reference"."""
    kernels, file, function, _ = OPS[op]
    if source == "reference":
        return function
    _import(kernels.__name__, file)
    return getattr(getattr(kernels, file), op)  # torch.compile takes no module as a constant


@constant
def _import(package: str, file: str) -> None:
    # A module is in sys.modules from the beginning of its import, which another thread's self-test may be in the middle of; its
    # package has it at the end.
    if not hasattr(import_module(package), file):
        import_module(f"{package}.{file}")
