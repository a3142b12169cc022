"""How a kernel is launched: with its plan, or with the next smaller one where the GPU has less than the compiler asks for."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from triton.runtime.errors import OutOfResources

from ..plans import Job, plan_for, plan_traced, step_down

Result = TypeVar("Result")


def launch(job: Job, run: Callable[[Any], Result]) -> Result:
    """`run(plan)`, which launches what `job` is of. A launch that asks for too much runs nothing, so it may be repeated."""
    if torch.compiler.is_compiling():
        return run(plan_traced(*job[:4]))
    plan = plan_for(job)
    while True:
        try:
            return run(plan)
        except OutOfResources as error:
            smaller = step_down(job, plan, str(error))
            if smaller is None:
                raise
            plan = smaller


def first_order_only(op: str) -> None:
    """Called by every backward: under create_graph its result would silently count as a constant."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{op}: its kernel has no second derivative (create_graph=True); "
            f"call gpubound.kernels.reference({op!r}) where one is needed."
        )
