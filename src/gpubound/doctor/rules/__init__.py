"""The rules: what counts as a stall, from which number on, and what to write instead.

A rule is a function from measurements to candidates. A call of the profile belongs to the first rule that claims it, so the
more specific ones come first.
"""

from .base import StallRule
from .compute import HOST, LAUNCHES, OTHERS, PRODUCTS, WASTE
from .waits import CHECKPOINTS, COPIES, MEMORY, PAUSES, READS

RULES: tuple[StallRule, ...] = (
    CHECKPOINTS, *PAUSES, MEMORY, *WASTE, COPIES, READS, *HOST, *LAUNCHES, *PRODUCTS, *OTHERS,
)  # fmt: skip
