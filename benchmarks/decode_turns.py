"""How contenders are judged and timed: each by its tokens first, then all in turn, in random order."""

import random
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .decode_peers import GAP, NEW, Contender, gap
from .harness import Bench


def judged(
    bench: Bench, case: str, who: str, make: Callable[[], Contender], model: Any, ids: Tensor, limit: float = GAP
) -> Contender | None:
    """The contender, warm, if its tokens are the model's own within rounding."""
    if (first := warmed(bench, case, who, make, ids)) is None:
        return None
    work, tokens = first
    far = gap(model, ids, tokens)
    if tuple(tokens.shape) != (len(ids), NEW) or not far <= limit:
        bench.wrong.append(
            f"{case}: {who}'s tokens {tuple(tokens.shape)} lie up to {far:.2f} deviations below the model's own (limit "
            f"{limit}); not timed"
        )
        return None
    return work


def warmed(bench: Bench, case: str, who: str, make: Callable[[], Contender], ids: Tensor) -> tuple[Contender, Tensor] | None:
    """The contender and its first tokens; None: it raised, which is reported, and the run goes on without it."""
    try:
        work = make()
        return work, work(ids)
    except Exception as error:  # a peer can raise anything
        reason = (str(error).strip().splitlines() or [""])[0]
        (bench.wrong if who == "ours" else bench.unmeasured).append(f"{case}: {who} raised {type(error).__name__}: {reason}")
        return None


def take_turns(works: dict[str, Contender], ids: Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of each, round by round. Tokens end on the host, so the host's clock sees all of it."""
    order, found, shuffle = list(works), {who: [] for who in works}, random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for who in order:
            begun = time.perf_counter()
            works[who](ids)
            found[who].append(time.perf_counter() - begun)
    return found
