"""Capture CUDA graphs with collectives on all ranks or on none.

A capture calls the function several times, and each call waits for the other ranks. A rank that gives up, out of memory or with
another result, would leave them waiting. So all ranks agree before each call; if one has given up, it sends its reason, and all
ranks raise it.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from ..errors import GraphError
from .ranks import Ranks

GOES, DONE = "goes", "done"

T = TypeVar("T")


def capture_on_all_ranks(ranks: Ranks, attempt: Callable[[Callable[[], None]], T]) -> T:
    """Return attempt(go), or raise an error on every rank. `attempt` calls `go` before each call that waits for other ranks."""
    over = False

    def go() -> None:
        nonlocal over
        said = ranks.gather((GOES, ""))
        if any(word != GOES for word, _ in said):
            over = True
            raise GraphError(_why(said))

    try:
        result = attempt(go)
    except Exception as error:
        if not over:
            said = ranks.gather(("", str(error)))
            if isinstance(error, GraphError | torch.OutOfMemoryError) and len(said) > 1:
                raise GraphError(_why(said)) from error
        raise
    said = ranks.gather((DONE, ""))
    if any(word != DONE for word, _ in said):
        raise GraphError(_why(said))
    return result


def refusal(ranks: Ranks, mine: str | None) -> str | None:
    """Return the first refusal of any rank, on every rank; None if no rank refuses."""
    said = ranks.gather(("", mine) if mine is not None else (DONE, ""))
    return None if all(word == DONE for word, _ in said) else _why(said)


def _why(said: list[tuple[str, str]]) -> str:
    for rank, (word, reason) in enumerate(said):
        if word not in (GOES, DONE):
            return reason if len(said) == 1 else f"rank {rank}: {reason}"
    going = ", ".join(str(rank) for rank, (word, _) in enumerate(said) if word == GOES)
    return f"rank {going} wants to call the function once more, and the others are done; their captures took different ways."
