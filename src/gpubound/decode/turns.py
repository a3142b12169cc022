"""How long other Python threads may keep the interpreter while tokens are generated.

A thread that computes gives the interpreter up every 5 ms, if another asks. The generating thread asks several times a
launch, whenever a call of torch or a sleep had let go of it, and between two busy threads it then waits 5 to 10 ms each time:
on an H200 a 350m model fell to 0.47 of its speed. While a request runs the interval is 0.1 ms, for all threads of the process:
0.96.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_S = 1e-4

_lock = threading.Lock()
_requests = 0
_before = 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """Of several requests at once, the last to end sets the interval back; one that someone set meanwhile stays."""
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
