"""The rules: what counts as a stall, from which number on, and what to write instead.

A rule is a function from evidence to claims. A call of the tape belongs to the first rule that claims it, so the more telling
ones stand first.
"""

from ..claim import StallRule
from . import copies, host, launches, memory, others, pauses, products, reads, saving, waste

RULES: tuple[StallRule, ...] = (
    saving.RULE,
    *pauses.RULES,
    memory.RULE,
    *waste.RULES,
    copies.RULE,
    reads.RULE,
    *host.RULES,
    *launches.RULES,
    *products.RULES,
    *others.RULES,
)
