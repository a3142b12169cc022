"""Let the forward and the loss of a loop run in bf16 where torch's autocast does so, on request: it changes the numbers."""

import ast

from .source import LOOPS, Edit, Patch, Refused, SourceText, called_on, last_name

BLOCK = 'with torch.autocast("cuda", dtype=torch.bfloat16):'
UNSAFE = ("binary_cross_entropy", "BCELoss")  # torch refuses them under autocast


def propose(source: SourceText, line: int) -> list[Edit]:
    source.check_imports_torch()
    names = {node.attr for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}
    if names & {"autocast", "bfloat16", "float16", "half", "GradScaler"}:
        raise Refused("the file uses 16-bit numbers already")
    if unsafe := names.intersection(UNSAFE):
        raise Refused(f"{min(unsafe)} is refused under autocast; take the form with logits first")
    forward = _forward(source)
    start, end = source.line_range(forward[0], forward[-1])
    lines = source.data[start:end].decode().splitlines(keepends=True)
    texts = (n for statement in forward for n in ast.walk(statement) if isinstance(n, ast.Constant))
    if any("\n" in str(text.value) for text in texts):
        raise Refused("the forward holds a text of several lines")
    indent = source.indent(forward[0])
    inside = "".join(f"    {each}" if each.strip() else each for each in lines)
    return [Edit(start, end, f"{indent}{BLOCK}{source.newline}{inside}")]


def _forward(source: SourceText) -> list[ast.stmt]:
    """Return the statements from the first to the last of the plain assignments before the file's only backward() in a loop."""
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
    while begin and (isinstance(before[begin - 1], ast.Assign) or called_on(before[begin - 1], "zero_grad")):
        begin -= 1
    while begin < len(before) and not isinstance(before[begin], ast.Assign):
        begin += 1
    if begin == len(before) or not isinstance(before[-1], ast.Assign):
        raise Refused("backward() does not follow plain assignments, the forward and the loss")
    return before[begin:]


BF16 = Patch("bf16", frozenset({"precision"}), "forward and loss run under autocast to bf16", propose, equal=False, asked=True)
