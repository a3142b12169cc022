"""What a patch is: which findings it mends, what it changes there, and what that may do to the losses."""

from collections.abc import Callable
from dataclasses import dataclass

from .source import Edit, SourceText


@dataclass(frozen=True)
class Patch:
    """`propose(source, line)` returns edits, or raises Refused.

    equal: the losses stay the same, bit for bit, because the same numbers are computed in the same order. Otherwise they are
    rounded elsewhere, and a proof wants a tolerance. asked: taken only when the user names it.
    """

    name: str
    kinds: frozenset[str]
    does: str
    propose: Callable[[SourceText, int], list[Edit]]
    equal: bool = True
    asked: bool = False
