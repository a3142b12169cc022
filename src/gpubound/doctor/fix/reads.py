"""Keep on the device what is read from it in every step, and read it where it is used.

    total += loss.item()       total += loss.detach().to(torch.float64, copy=True)
    print(total / 50)          print(float(total) / 50)

A Python number is a double, so sums in float64 on the device are the same numbers. Taken only where the value is used outside
the loop, or under an `if` inside it: a value that every step needs would be waited for all the same.
"""

import ast

from .patch import Patch
from .source import Edit, Refused, SourceText, last_name, name_of

KEPT = ".detach().to(torch.float64, copy=True)"
COUNTED = ".detach().clone()"  # of a sum of comparisons, which is an integer


def propose(source: SourceText, line: int) -> list[Edit]:
    statement = source.statement_at(line)
    loop = source.loop(statement)
    if loop is None:
        raise Refused("the loop around this line is in another function; keep the tensor, and read it there")
    if not source.imports_torch:
        raise Refused("the file does not import torch by that name")
    read, value = _read(source, statement)
    counts = any(isinstance(node, ast.Compare) for node in ast.walk(read))
    kept = Edit(source.end(value), source.end(read), COUNTED if counts else KEPT)
    if isinstance(statement, ast.Expr):
        return [kept, *_converted_list(source, statement, loop)]
    target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
    name = name_of(target) if target is not None else ""
    if not name:
        raise Refused("the value is not kept under a name")
    return [kept, *_converted(source, statement, loop, name, "int" if counts else "float")]


def _read(source: SourceText, statement: ast.stmt) -> tuple[ast.Call, ast.expr]:
    """The one `value.item()` of a statement that adds it up, appends it or gives it a name, and what is read."""
    match statement:
        case ast.AugAssign(op=ast.Add(), value=kept) | ast.Assign(targets=[_], value=kept):
            pass
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="append"), args=[kept], keywords=[])):
            pass
        case _:
            raise Refused("the line does not add the value up, append it or give it a name; keep it on the device by hand")
    reads = [node for node in _arithmetic(kept) if isinstance(node, ast.Call) and last_name(node) == "item" and not node.args]
    if len(reads) != 1 or not isinstance(reads[0].func, ast.Attribute):
        raise Refused("wanted one .item() in sums and products alone")
    if isinstance(statement, ast.Assign) and reads[0] is not kept:
        raise Refused("the line computes with the value right away")
    return reads[0], reads[0].func.value


def _arithmetic(node: ast.expr) -> list[ast.expr]:
    """The leaves of an expression of +, -, * and /."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
        return _arithmetic(node.left) + _arithmetic(node.right)
    return [node]


def _uses(source: SourceText, statement: ast.stmt, name: str) -> list[ast.expr]:
    """Where the file reads a name, other than in this statement. Refused if another function does."""
    scope = source.scope(statement)
    found: list[ast.expr] = []
    for node in ast.walk(source.tree if "." in name else scope):
        if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            raise Refused(f"{name} belongs to another function")
        if not isinstance(node, (ast.Name, ast.Attribute)) or name_of(node) != name or not isinstance(node.ctx, ast.Load):
            continue
        if statement in source.above(node):
            continue
        if source.scope(node) is not scope:
            raise Refused(f"{name} is read in another function, in line {node.lineno}")
        found.append(node)
    return found


def _converted(source: SourceText, statement: ast.stmt, loop: ast.stmt, name: str, kind: str) -> list[Edit]:
    """Edits that make a number of a kept scalar, wherever it is used."""
    edits = []
    for use in _uses(source, statement, name):
        if _in_every_step(source, use, loop):
            raise Refused(f"{name} is used in every step, in line {use.lineno}")
        if not _formatted(source, use):
            edits += [Edit(source.start(use), source.start(use), f"{kind}("), Edit(source.end(use), source.end(use), ")")]
    return edits


def _in_every_step(source: SourceText, node: ast.AST, loop: ast.stmt) -> bool:
    """Whether a node runs whenever the loop's body does: it is in the body, and under no `if`."""
    inside = node
    for outer in source.above(node):
        if isinstance(outer, ast.If) and inside is not outer.test:
            return False
        if outer is loop:
            return inside not in getattr(loop, "orelse", ())
        inside = outer
    return False


def _formatted(source: SourceText, use: ast.expr) -> bool:
    """Whether an f-string formats the value, which does with a scalar what it does with a number."""
    for outer in source.above(use):
        if isinstance(outer, ast.FormattedValue):
            if outer.conversion != -1:
                raise Refused(f"line {use.lineno} formats it with !r or !s")
            return True
        if not isinstance(outer, ast.BinOp):
            break
    if any(isinstance(outer, ast.JoinedStr) for outer in source.above(use)):
        raise Refused(f"line {use.lineno} computes with it inside an f-string")
    return False


def _converted_list(source: SourceText, statement: ast.Expr, loop: ast.stmt) -> list[Edit]:
    """One more line after the loop, which makes numbers of what was appended."""
    call = statement.value
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    name = name_of(call.func.value)
    if not name:
        raise Refused("the list has no name")
    for use in _uses(source, statement, name):
        parent = source.parents[use]
        counted = isinstance(parent, ast.Call) and name_of(parent.func) == "len"
        appended = isinstance(parent, ast.Attribute) and parent.attr == "append"
        if loop in source.above(use) and not counted and not appended:
            raise Refused(f"{name} is used inside the loop, in line {use.lineno}")
    line = f"{source.indent(loop)}{name} = [float(value) for value in {name}]"
    return [source.inserted_line((loop.end_lineno or 0) + 1, line)]


PATCH = Patch("reads", frozenset({"sync"}), "the value stays on the device until it is used", propose)
