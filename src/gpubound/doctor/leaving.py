"""A script that is stopped may leave threads and processes that wait for it for ever, and Python waits for them."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Collection

PATIENCE = 30.0  # seconds: one that saves a file may end by itself


def end_anyway(code: int, before: Collection[threading.Thread], patience: float = PATIENCE) -> None:
    """End this process with `code` if, so long after Python began to end, something runs that was not there `before`."""
    if not (left := _left(before)):
        return
    ending = threading.Event()
    threading._register_atexit(ending.set)  # type: ignore[attr-defined]  # atexit's own comes after threads were waited for
    threading.Thread(target=_watch, args=(ending, code, before, patience), daemon=True).start()
    _say(f"the script was stopped, and left {left}; waiting for up to {patience:g} s.")


def _watch(ending: threading.Event, code: int, before: Collection[threading.Thread], patience: float) -> None:
    ending.wait()
    end = time.monotonic() + patience
    while time.monotonic() < end and _left(before):
        time.sleep(min(patience, 0.1))
    if left := _left(before):
        _say(f"ended {left}, which waited for the script.")
        for child in multiprocessing.active_children():
            child.kill()
        sys.stdout.flush()
        os._exit(code)


def _left(before: Collection[threading.Thread]) -> str:
    threads = [thread.name for thread in threading.enumerate() if not thread.daemon and thread not in before]
    children = [child.name for child in multiprocessing.active_children() if not child.daemon]
    return ", ".join(threads + children)


def _say(text: str) -> None:
    print(f"gpubound doctor: {text}", file=sys.stderr, flush=True)
