"""Leave out a statement that only makes the host wait for the whole device, or the driver for its memory.

The wait of a stream or an event is not touched: it may order a read of pinned memory behind the copy that fills it.
"""

import ast

from .patch import Patch
from .source import Edit, Refused, SourceText, constant, last_name

WAITING = ("synchronize", "empty_cache")
CLOCKS = ("time", "perf_counter", "perf_counter_ns", "monotonic", "time_ns", "elapsed_time")


def propose(source: SourceText, line: int) -> list[Edit]:
    statement = source.statement_at(line, *WAITING)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or last_name(call) not in WAITING:
        raise Refused(f"the line is no plain {' or '.join(f'{name}()' for name in WAITING)}")
    if not source.text(call.func).startswith(("torch.", "cuda.")):
        raise Refused("the line waits for one stream or event, which may order a read behind a copy")
    if last_name(call) == "synchronize" and (other := _needs_order(source)):
        raise Refused(f"line {other} works on a stream of its own or copies to the host without waiting, and may rely on it")
    block = source.block(statement)
    if _is_timed(block, statement):
        raise Refused("a clock is read beside it, which would then time launches instead of work")
    if len(block) == 1:
        return [Edit(source.start(statement), source.end(statement), "pass")]
    return [Edit(*source.whole_lines(statement, statement), "")]


def _needs_order(source: SourceText) -> int:
    """The first line of the file that might be wrong without a wait; 0 for none."""
    for call in source.calls():
        late = any(keyword.arg == "non_blocking" and constant(keyword.value) is not False for keyword in call.keywords)
        to_host = last_name(call) in ("copy_", "cpu") or any(constant(node) == "cpu" for node in ast.walk(call))
        if last_name(call) == "Stream" or (late and to_host):
            return call.lineno
    return 0


def _is_timed(block: list[ast.stmt], statement: ast.stmt) -> bool:
    """Whether the statement right before or after reads a clock."""
    at = block.index(statement)
    beside = [*block[max(0, at - 1) : at], *block[at + 1 : at + 2]]
    return any(isinstance(node, ast.Call) and last_name(node) in CLOCKS for near in beside for node in ast.walk(near))


PATCH = Patch("waits", frozenset({"sync", "free"}), "the host goes on at once", propose)
