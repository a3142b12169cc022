"""Give a meter the loss itself instead of a number that is read from the device in every step.

    losses.update(loss.item(), n)      losses.update(loss.detach().to(torch.float64, copy=True), n)
    print(losses.avg)                  print(float(losses.avg))

A meter is a class of this file whose method only computes sums, products and quotients with the value. What it keeps is then a
number on the device, in float64 as Python's, and is read where it is used outside.
"""

import ast

from .reads import KEPT, in_every_step
from .source import Edit, Patch, Refused, SourceText, last_name, name_of

ARITHMETIC = (ast.BinOp, ast.Name, ast.Attribute, ast.Constant, ast.operator, ast.expr_context)


def propose(source: SourceText, line: int) -> list[Edit]:
    source.check_imports_torch()
    statement = source.statement_at(line, "update", "item")
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
        raise Refused("the line does not give a value to a meter")
    loop, read = source.loop(statement), call.args[0]
    plain = isinstance(read, ast.Call) and last_name(read) == "item" and not read.args and isinstance(read.func, ast.Attribute)
    if loop is None or not plain:
        raise Refused("wanted meter.update(value.item(), ...) in a loop")
    assert isinstance(read, ast.Call) and isinstance(read.func, ast.Attribute)
    meter = _class_of(source, name_of(call.func.value), statement)
    stored = _stored(meter, call.func.attr)
    edits = [Edit(source.end(read.func) - len("item"), source.end(read), KEPT)]
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute) or node.attr not in stored or not isinstance(node.ctx, ast.Load):
            continue
        if meter in source.above(node):
            continue
        if in_every_step(source, node, loop):
            raise Refused(f"{node.attr} is used in every step, in line {node.lineno}")
        if not _is_number(source, node):
            edits += [Edit(source.start(node), source.start(node), "float("), Edit(source.end(node), source.end(node), ")")]
    return edits


def _class_of(source: SourceText, name: str, statement: ast.stmt) -> ast.ClassDef:
    """Return the class of this file of which the object of this name is made."""
    values = source.assigned(statement, name) if name else []
    callees = {name_of(value.func) for value in values if isinstance(value, ast.Call)}
    classes = [node for node in source.tree.body if isinstance(node, ast.ClassDef) and node.name in callees]
    if len(callees) != 1 or len(classes) != 1:
        raise Refused(f"{name or 'the object'} is not made here of a class of this file")
    return classes[0]


def _stored(meter: ast.ClassDef, method: str) -> set[str]:
    """Return the attributes and properties that hold the value or what is computed from it. Refused if it is used otherwise."""
    functions = {node.name: node for node in meter.body if isinstance(node, ast.FunctionDef)}
    if method not in functions or len(functions[method].args.args) < 2:
        raise Refused(f"class {meter.name} has no method {method} of this file")
    value, stored, before = functions[method].args.args[1].arg, set[str](), -1
    while before != len(stored):
        before = len(stored)
        for node in ast.walk(functions[method]):
            if not isinstance(node, ast.stmt) or not _uses(node, value, stored):
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            attribute = name_of(target) if target is not None else ""
            expression = getattr(node, "value", None)
            plain = expression is not None and all(isinstance(part, ARITHMETIC) for part in ast.walk(expression))
            if not plain or not attribute.startswith("self."):
                raise Refused(f"line {node.lineno} does more than compute with the value")
            stored.add(attribute.removeprefix("self."))
    for name, function in functions.items():
        if name != method and any(_uses(node, "", stored) for node in ast.walk(function)):
            is_property = any(name_of(each) == "property" for each in function.decorator_list)
            if is_property:
                stored.add(name)
            elif name not in ("__str__", "__repr__", "reset", "__init__"):
                raise Refused(f"{meter.name}.{name}() uses what is stored, in line {function.lineno}")
    return stored


def _uses(node: ast.AST, value: str, stored: set[str]) -> bool:
    """Return whether a statement reads the value, or an attribute that holds it."""
    if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef):
        return False
    names = {name_of(n) for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Load)}
    added = isinstance(node, ast.AugAssign) and name_of(node.target) in {f"self.{each}" for each in stored}
    return bool(names & ({value} - {""} | {f"self.{each}" for each in stored})) or added


def _is_number(source: SourceText, node: ast.Attribute) -> bool:
    """Return whether the place makes a number of it already: float(...), or a format with a precision."""
    parent = source.parents[node]
    if isinstance(parent, ast.FormattedValue):
        return parent.format_spec is not None and parent.conversion == -1
    return isinstance(parent, ast.Call) and name_of(parent.func) == "float"


METERS = Patch("meters", frozenset({"sync"}), "the meter keeps the value on the device until it is shown", propose)
