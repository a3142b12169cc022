"""Leave out a statement that only waits, or only makes the driver wait."""

import ast

from .patch import Patch
from .source import Edit, Refused, SourceText, last_name

WAITING = ("synchronize", "empty_cache")


def propose(source: SourceText, line: int) -> list[Edit]:
    statement = source.statement_at(line)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or last_name(call) not in WAITING:
        raise Refused(f"the line is no plain {' or '.join(f'{name}()' for name in WAITING)}")
    block = source.block(statement)
    if _is_timed(block, statement):
        raise Refused("a clock is read beside it, which would then time launches instead of work")
    if len(block) == 1:
        return [Edit(source.start(statement), source.end(statement), "pass")]
    source.indent(statement)  # refused where it is not alone in its line
    return [Edit(source.line_start(statement.lineno), source.line_start((statement.end_lineno or 0) + 1), "")]


def _is_timed(block: list[ast.stmt], statement: ast.stmt) -> bool:
    """Whether the statement right before or after reads a clock."""
    at = block.index(statement)
    beside = [*block[max(0, at - 1) : at], *block[at + 1 : at + 2]]
    clocks = ("time", "perf_counter", "perf_counter_ns", "monotonic", "time_ns", "elapsed_time")
    return any(isinstance(node, ast.Call) and last_name(node) in clocks for near in beside for node in ast.walk(near))


PATCH = Patch("waits", frozenset({"sync", "free"}), "the host goes on at once", propose)
