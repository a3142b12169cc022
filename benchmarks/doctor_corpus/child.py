"""One call in a process of its own. Its server has imported torch already, and has never touched a GPU."""

import os
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from gpubound.errors import MeasureError

PRELOAD = ["torch", "gpubound.watch.ledger", "gpubound.cli", "benchmarks.doctor_corpus.by_ledger"]


def call(function: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0) -> Any:
    """`function(*arguments)` in a fresh process, whose output goes nowhere. MeasureError says why there is no result."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, function, arguments), daemon=False)
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout_s):
            raise MeasureError(f"{function.__name__}: no result after {timeout_s:g} s")
        done, result = receiver.recv()
    except EOFError:
        process.join()
        raise MeasureError(f"{function.__name__}: its process ended with code {process.exitcode}") from None
    finally:
        process.kill()  # it has nothing left to do; what its script leaves running must not disturb the next one
        process.join()
        receiver.close()
    if not done:
        raise MeasureError(result)
    return result


def _work(sender: Connection, function: Callable[..., Any], arguments: tuple) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        sender.send((True, function(*arguments)))
    except BaseException as error:  # whatever a script does, SystemExit too, is the caller's to report
        where = traceback.extract_tb(error.__traceback__)[-1]
        sender.send((False, f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"))
