"""Let the products of one statement run in bf16, by autocast: eight bits of a factor's fraction, and half the bytes."""

import ast

from .patch import Patch
from .source import Edit, Refused, SourceText

WITH = 'with torch.autocast("cuda", dtype=torch.bfloat16):'
SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)


def propose(source: SourceText, line: int) -> list[Edit]:
    statement = source.statement_at(line)
    if not isinstance(statement, SIMPLE):
        raise Refused("the line is no assignment, call or return that could stand in a block of its own")
    if b"autocast" in source.data:
        raise Refused("the file uses autocast itself")
    if not source.imports_torch:
        raise Refused("the file does not import torch by that name")
    texts = (node for node in ast.walk(statement) if isinstance(node, (ast.Constant, ast.JoinedStr)))
    if any(text.lineno != text.end_lineno for text in texts):
        raise Refused("the statement holds a string of several lines, which would be indented, too")
    if any(other is not statement and other.lineno == statement.end_lineno for other in source.block(statement)):
        raise Refused(f"line {statement.end_lineno} holds several statements")
    indent = source.indent(statement)
    deeper = "\t" if indent.startswith("\t") else "    "
    lines = range(statement.lineno, (statement.end_lineno or 0) + 1)
    opened = source.inserted_line(statement.lineno, indent + WITH)
    # the first line's indent is part of the inserted line, because two edits at one place have no order
    inserted = Edit(opened.start, opened.end, f"{opened.text}{deeper}")
    return [inserted, *(Edit(at, at, deeper) for at in map(source.line_start, lines[1:]))]


PATCH = Patch("bf16", frozenset({"precision"}), "the line's products run in bf16 (autocast)", propose, equal=False, asked=True)
