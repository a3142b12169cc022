"""Launch of a kernel with its plan, or with the next smaller one if the GPU has less memory than the compiler asks for."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from triton.runtime.errors import OutOfResources

from ...device import interpreted
from ..decode_product import EARLY, LATE, chain_mode
from ..plans import Job, plan_for, plan_traced, step_down
from ..plans.types import MatrixPlan

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


def launch_product(
    kernel: Any, job: Job, length: int, across: int, dependent: int, *arguments: Any, height: int | None = None,
    **constants: Any,
) -> None:  # fmt: skip
    """Launch a kernel whose programs each own some rows of a weight, and loop over all of their `length` elements or words.

    An argument that is None is a tensor that this variant of the kernel does not read: the first one is passed instead.

    across   number of programs for each range of rows. Kernels of packed weights (KIND) have them as the first grid dimension
    height   rows of a program, where the plan does not choose them
    ahead    in `constants`: number of programs in front of all others, with another task
    """
    rows, args = job.shape[0], [arguments[0] if argument is None else argument for argument in arguments]

    def run(plan: MatrixPlan) -> None:
        plan = plan if height is None else plan._replace(rows=height)
        along = plan.along(rows)
        kernel[(across, along) if "KIND" in constants else (along + constants.get("ahead", 0), across)](
            *args, **constants, K=job.shape[1], R=plan.rows, C=plan.columns, WHOLE=plan.divides(rows, length),
            **options(plan.warps, dependent),
        )  # fmt: skip

    launch(job, run)


def options(warps: int, dependent: int = 0) -> dict[str, Any]:
    """Return launch options: warps, and programmatic dependent launch (decode_product.py) if caller or step ask for it."""
    dependent = dependent or chain_mode()
    if interpreted() or not dependent:
        return {"num_warps": warps, "DEPENDENT": 0}
    return {"num_warps": warps, "DEPENDENT": dependent, "launch_pdl": True}


def at_once(dependent: int) -> int:
    """Return the mode of a kernel without weights. In a LATE chain too, its successor asks for weights while it runs: there is
    room, for it begins when all programs of the product before it have theirs."""
    return EARLY if dependent == LATE else dependent


def bump_versions(*tensors: torch.Tensor | None) -> None:
    """Count a kernel's write to each of these as torch counts its own in-place ops, so that autograd, and code that compares
    versions, notices it. A kernel writes through an address, of which torch knows nothing. It takes 0.7 µs for a call."""
    if not torch.compiler.is_compiling():  # there a launch is an op, whose writes torch knows
        torch.autograd.graph.increment_version([t for t in tensors if t is not None])


def first_order_only(op: str) -> None:
    """Called by every backward: under create_graph its result would silently count as a constant."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{op}: its kernel has no second derivative (create_graph=True); "
            f"call gpubound.kernels.reference({op!r}) where one is needed."
        )
