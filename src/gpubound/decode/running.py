"""Parts of every running request: the interpreter's switch interval, streams closed at exit, the location of bad logits."""

import atexit
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING
from weakref import WeakSet

from ..errors import GenerateError
from .request import pad

if TYPE_CHECKING:
    from .generate import FastDecoder

HEAVY = 1 << 30  # bytes that a step reads, 0.25 ms on an H200: from here on the host is quick enough for launches of one step


def raise_not_finite(decoder: "FastDecoder", name: str, tokens: list[int], position: int) -> None:
    """Raise an error that names the module where the logits after `position` of a sequence first are not finite."""
    body = decoder.body
    if waited := [str(peer.device) for peer in body.peers if peer.gave_up()]:
        raise GenerateError(
            f"{name}: {' and '.join(waited)} timed out waiting for another GPU, so the logits at position {position} are none. "
            "See what the driver says of the GPUs (nvidia-smi, dmesg); the next request waits again."
        )
    with decoder.plainly():
        where = body.locate(pad([tokens], position + 1, body.device)[0])
    raise GenerateError(
        f"{name}: the logits at position {position} are not finite; first seen in {where}. Check the weights (a diverged "
        "training run?) and the dtype."
    )


@cache
def closed_at_exit() -> WeakSet[Generator]:
    """Return the generators to close at exit: torch 2.11 aborts where one with tensors in its frame is cleared after that."""
    playing: WeakSet[Generator] = WeakSet()

    def close() -> None:
        for generator in list(playing):
            with suppress(ValueError):  # another thread is inside
                generator.close()

    atexit.register(close)
    return playing


# A thread that computes yields the interpreter every 5 ms, if another asks. The generating thread asks several times a launch,
# after each call of torch or sleep that had released it, and between two busy threads it then waits 5 to 10 ms: on an H200 a
# 350m model fell to 0.47 of its speed. While a request runs the interval is 0.1 ms, for all threads: 0.96.
INTERVAL_S = 1e-4

_lock = threading.Lock()
_requests = 0
_before = 0.0


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Shorten the interval at which Python threads switch while tokens are generated.

    Of several requests at once, the last to end sets the interval back; one that someone set meanwhile stays.
    """
    global _requests, _before
    with _lock:
        _requests += 1
        if _requests == 1:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, INTERVAL_S))
    try:
        yield
    finally:
        with _lock:
            _requests -= 1
            if _requests == 0 and abs(sys.getswitchinterval() - min(_before, INTERVAL_S)) < 1e-6:
                sys.setswitchinterval(_before)
