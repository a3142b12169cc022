"""Let the forward and the loss of a loop run in bf16 where torch's autocast does so, on request: it changes the numbers."""

import ast

from .source import Edit, Patch, Refused, SourceText, last_name

BLOCK = 'with torch.autocast("cuda", dtype=torch.bfloat16):'
UNSAFE = ("binary_cross_entropy", "BCELoss")  # torch refuses them under autocast
LOOPS = (ast.For, ast.AsyncFor, ast.While)


def propose(source: SourceText, line: int) -> list[Edit]:
    source.check_imports_torch()
    names = {node.attr for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}
    if names & {"autocast", "bfloat16", "float16", "half", "GradScaler"}:
        raise Refused("the file uses 16-bit numbers already")
    if unsafe := names.intersection(UNSAFE):
        raise Refused(f"{min(unsafe)} is refused under autocast; take the form with logits first")
    first, last = _forward(source)
    start, end = source.line_range(first, last)
    lines = source.data[start:end].decode().splitlines(keepends=True)
    texts = (n for s in _between(source, first, last) for n in ast.walk(s) if isinstance(n, ast.Constant))
    if any("\n" in str(text.value) for text in texts):
        raise Refused("the forward holds a text of several lines")
    indent = source.indent(first)
    inside = "".join(f"    {each}" if each.strip() else each for each in lines)
    return [Edit(start, end, f"{indent}{BLOCK}{source.newline}{inside}")]


def _forward(source: SourceText) -> tuple[ast.stmt, ast.stmt]:
    """Return the first and the last of the plain assignments before the only backward() that stands in a loop of this file."""
    backwards = [
        call
        for call in source.calls()
        if last_name(call) == "backward" and isinstance(source.parents[source.statement(call)], LOOPS)
    ]
    if len(backwards) != 1:
        raise Refused(f"{len(backwards) or 'no'} backward() stands in the body of a loop of this file, wanted one")
    statement = source.statement(backwards[0])
    block = source.block(statement)
    before = block[: block.index(statement)]
    begin = len(before)
    while begin and (isinstance(before[begin - 1], ast.Assign) or _zeroes(before[begin - 1])):
        begin -= 1
    run = [n for n in before[begin:] if isinstance(n, ast.Assign)]
    if not run or before[-1] is not run[-1]:
        raise Refused("backward() does not follow plain assignments, the forward and the loss")
    return run[0], run[-1]


def _between(source: SourceText, first: ast.stmt, last: ast.stmt) -> list[ast.stmt]:
    block = source.block(first)
    return block[block.index(first) : block.index(last) + 1]


def _zeroes(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and last_name(statement.value) == "zero_grad"
    )


BF16 = Patch("bf16", frozenset({"precision"}), "forward and loss run under autocast to bf16", propose, equal=False, asked=True)
