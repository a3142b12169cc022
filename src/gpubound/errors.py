"""Every exception that gpubound raises on purpose.

Wrong arguments are plain ValueErrors whose sentence says what, got, wanted, and what to do.
"""

import re


class GpuboundError(RuntimeError):
    """The base class: `except gpubound.GpuboundError` catches every error that this library defines."""


class DeviceError(GpuboundError):
    """A GPU is visible but does not work, or a GPU is required and there is none."""


class FallbackError(GpuboundError):
    """Strict mode is on, and a slower path would have been taken."""


class KernelError(GpuboundError):
    """A kernel disagrees with its reference."""


class PlaceError(GpuboundError):
    """A swapped module computes something else than the original did."""


class GraphError(GpuboundError):
    """A graph cannot be captured, or may no longer be replayed."""

    hazards: tuple = ()
    """The lines that no graph can hold, each with its cause, where such lines are the reason (graph/discover.py)."""


class GenerateError(GpuboundError):
    """A decoder computes something else than its model, the model's logits are not finite, or prompts were left unanswered."""


class RewardError(GpuboundError):
    """A reward function raised, hung, or returned no number for each answer."""


class StallError(GpuboundError):
    """The host waited for the device where that is forbidden."""


class BudgetError(GpuboundError, AssertionError):  # so that pytest shows it as a failure
    """A ledger counted more than was allowed."""


class DataError(GpuboundError):
    """Data on disk is not what it says it is."""


class MeasureError(GpuboundError):
    """A requested figure could not be measured."""


class RankError(GpuboundError):
    """The processes of one run do not agree where they must."""


def host_bytes_wanted(error: BaseException) -> int | None:
    """Return the bytes of host memory that torch could not allocate, None for another error: torch has no class for it."""
    match = re.search(r"DefaultCPUAllocator: .*tried to allocate (\d+) bytes", str(error))
    return int(match[1]) if match else None
