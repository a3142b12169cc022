"""Keep on the device what is read from it in every step, and read it where it is used.

    total += loss.item()       total += loss.detach().to(torch.float64, copy=True)
    print(total / 50)          print(float(total) / 50)

A Python number is a double, so sums in float64 on the device are the same numbers. Taken only where the value is used outside
the loop, under an `if` inside it, or in a line that waits for another value: any other use would wait all the same.

A second patch gives a meter the loss itself instead of a number that is read from the device in every step.

    losses.update(loss.item(), n)      losses.update(loss.detach().to(torch.float64, copy=True), n)
    print(losses.avg)                  print(float(losses.avg))

A meter is a class of this file whose method only computes sums, products and quotients with the value. What it keeps is then a
number on the device, in float64 as Python's, and is read where it is used outside.
"""

import ast
import builtins

from ..rules.remedies import AT_ONCE, STACKED
from .source import (
    Edit,
    NotHere,
    Patch,
    Refused,
    SourceText,
    constant,
    helper,
    iterated,
    last_name,
    name_of,
    stored,
)  # fmt: skip

AWAITED = "read_later"  # the function that calls.py writes
KEPT = "detach().to(torch.float64, copy=True)"
COUNTED = "detach().clone()"  # of a whole number or a truth value
FRESH = ("sum", "any", "all", "argmax", "argmin", "count_nonzero")  # these return a fresh tensor
WHOLE = ("argmax", "argmin", "count_nonzero", "long", "int")
TRUE = ("any", "all", "isnan", "isinf", "isfinite", "bool", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_not")
SAME = ("sum", "max", "min", "detach", "view", "flatten", "squeeze", "cpu", "cuda", "clone")
FLOATING = ("float", "bfloat", "double", "half")  # how names of dtypes begin


def propose(source: SourceText, line: int) -> list[Edit]:
    statement = source.statement_at(line, "item")
    loop = source.loop(statement)
    read = _item_call(statement)
    if loop is None:
        raise Refused("the loop around this line is in another function; keep the tensor, and read it there")
    source.check_imports_torch()
    extended = isinstance(statement, ast.AugAssign) and isinstance(statement.value, ast.List)
    if isinstance(statement, ast.Expr) or extended:
        number = _number(source, read)
        edits = _converted_list(source, statement, loop, number)
    else:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        if not (name := name_of(target) if target is not None else ""):
            raise Refused("the value is not kept under a name")
        augmented = isinstance(statement, ast.AugAssign)
        number = _summed(source, statement, read, name) if augmented else _number(source, read)
        edits = _converted(source, statement, loop, name, number)
    return [*_deferred(source, read, number), *edits]


def _read_of(read: ast.Call) -> ast.expr:
    """Return what is read by `value.item()`, or by `float(value)` and `int(value)`."""
    return read.func.value if isinstance(read.func, ast.Attribute) else read.args[0]


def _deferred(source: SourceText, read: ast.Call, number: str) -> list[Edit]:
    """Return edits that keep on the device what is read. A copy of a fresh integer or truth value would be the next finding."""
    inner = root = _read_of(read)
    while isinstance(root, ast.Subscript):
        root = root.value
    if root is not inner and number == "float" and name_of(root) and not source.assigned(read, name_of(root)):
        raise Refused(f"{name_of(root)} may hold whole numbers")
    fresh = isinstance(inner, ast.Call) and last_name(inner) in FRESH
    method = KEPT if number == "float" else "detach()" if fresh else COUNTED
    if isinstance(read.func, ast.Attribute):
        item = source.end(read.func) - len("item")  # also after brackets and line breaks
        return [Edit(item, source.end(read), method)]
    if name_of(read.func) == "int" and _number(source, inner) == "float":
        raise Refused("int() may cut a fraction off")
    bare = isinstance(inner, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    start, end = (source.start(inner), source.end(inner)) if bare else (source.end(read.func), source.end(read))
    return [Edit(source.start(read), start, ""), Edit(end, source.end(read), f".{method}")]


def _number(source: SourceText, read: ast.expr, met: frozenset[str] = frozenset()) -> str:
    """Return the type that `.item()` returns: "bool", "int", or by default "float"."""
    match read:
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return "bool"
        case ast.UnaryOp(operand=inner) | ast.Subscript(value=inner) | ast.BinOp(op=ast.BitAnd() | ast.BitOr(), left=inner):
            return _number(source, inner, met)
        case ast.Name(id=name) if name not in met:
            values = source.assigned(read, name)
            types = {_number(source, value, met | {name}) for value in values if not isinstance(value, ast.Constant)}
            return types.pop() if len(types) == 1 else "float"
        case ast.Call(func=ast.Name(id="int" | "bool" as name)):
            return name
        case ast.Call(func=ast.Attribute(value=owner, attr=name), args=arguments):
            inner = arguments[0] if name_of(owner) == "torch" and arguments else owner
            words = [name_of(node).rpartition(".")[2] for node in [*arguments, *(keyword.value for keyword in read.keywords)]]
            if name in TRUE or name in WHOLE:
                return "bool" if name in TRUE else "int"
            if name not in (*SAME, "item", "to") or any(word.startswith(FLOATING) for word in words):
                return "float"
            inner_number = _number(source, inner, met)
            return "int" if (name, inner_number) == ("sum", "bool") else inner_number
    return "float"


def _summed(source: SourceText, statement: ast.stmt, read: ast.Call, name: str) -> str:
    """Return the type of a sum: an integer only if it begins as one and only integers are added."""
    assert isinstance(statement, ast.AugAssign)
    begun, inner = {type(constant(value)) for value in source.assigned(statement, name)}, _read_of(read)
    if _number(source, read) == "float":
        if begun == {int} and isinstance(inner, ast.Call) and last_name(inner) == "sum" and last_name(read) == "item":
            raise Refused(f"what is added to {name} may be whole numbers; begin it as 0.0 if it is not")
        return "float"
    if begun == {float} or any(isinstance(node, ast.Div) for node in ast.walk(statement.value)):
        return "float"
    if begun == {int} and statement.value is read:
        return "int"
    raise Refused(f"{name} may be a whole number or not")


def _item_call(statement: ast.stmt) -> ast.Call:
    """Return the one `value.item()` or `float(value)` of a statement that adds it up, appends it or assigns it."""
    match statement:
        case ast.AugAssign(op=ast.Add(), value=ast.List(elts=[value])):
            pass
        case ast.AugAssign(op=ast.Add(), value=value) | ast.Assign(targets=[_], value=value):
            pass
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="append"), args=[value], keywords=[])):
            pass
        case _:
            raise NotHere("the line does not add the value up, append it or give it a name; keep it on the device by hand")
    calls = [node for node in _arithmetic(value) if isinstance(node, ast.Call) and not node.keywords]
    reads = [call for call in calls if isinstance(call.func, ast.Attribute) and last_name(call) == "item" and not call.args]
    reads = reads or [call for call in calls if name_of(call.func) in ("float", "int") and _may_be_tensor(call.args)]
    if len(reads) != 1:
        raise NotHere("wanted one .item(), float() or int() in sums and products alone")
    if isinstance(statement, ast.Assign):
        if reads[0] is not value:
            raise Refused("the line computes with the value right away")
        if name_of(statement.targets[0]) in {name_of(node) for node in ast.walk(value)}:
            raise Refused("the value is computed from the one before")
    return reads[0]


def _may_be_tensor(arguments: list[ast.expr]) -> bool:
    """Return whether a call's one argument is neither written as a number nor made by a function of Python, such as len()."""
    if len(arguments) != 1 or isinstance(arguments[0], ast.Constant):
        return False
    return not isinstance(arguments[0], ast.Call) or not hasattr(builtins, name_of(arguments[0].func) or " ")


def _arithmetic(node: ast.expr) -> list[ast.expr]:
    """Return the leaves of an expression of +, -, *, / and powers."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)):
        return _arithmetic(node.left) + _arithmetic(node.right)
    return [node]


def uses_of(source: SourceText, statement: ast.stmt, name: str) -> list[ast.expr]:
    """Return the reads of a name outside this statement. Refused if another function reads it."""
    scope = source.scope(statement)
    uses: list[ast.expr] = []
    for node in ast.walk(source.tree if "." in name else scope):
        if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            raise Refused(f"{name} belongs to another function")
        if isinstance(node, ast.Call) and name_of(node.func) in ("locals", "globals", "vars") and not node.args:
            raise Refused(f"{name} may be what {name_of(node.func)}() gives in line {node.lineno}")
        if "." in name and isinstance(node, ast.Attribute) and name_of(node) != name and name.endswith(f".{node.attr}"):
            raise Refused(f"{name} may be what is read in line {node.lineno}")
        if not isinstance(node, (ast.Name, ast.Attribute)) or name_of(node) != name or not isinstance(node.ctx, ast.Load):
            continue
        if statement in source.above(node) or _is_of_comprehension(source, node):
            continue
        if (inner := scope_of(source, node)) is not scope:
            if name in own_names(inner):
                continue
            raise Refused(f"{name} is read in another function, in line {node.lineno}")
        uses.append(node)
    return uses


def scope_of(source: SourceText, node: ast.AST) -> ast.AST:
    """Return the function that a node is in; of what read_later calls, that around it."""
    scope = source.scope(node)
    call = source.parents.get(scope)
    waits = isinstance(scope, ast.Lambda) and isinstance(call, ast.Call) and last_name(call) == AWAITED
    return source.scope(scope) if waits else scope


def own_names(scope: ast.AST) -> set[str]:
    """Return the names that a function assigns, and its parameters."""
    return stored(scope) | {each.arg for each in ast.walk(getattr(scope, "args", scope)) if isinstance(each, ast.arg)}


def _is_of_comprehension(source: SourceText, node: ast.expr) -> bool:
    """Return whether a name is that of a comprehension around it, which hides one outside."""
    loops = (loop for outer in source.above(node) for loop in getattr(outer, "generators", ()))
    return any(name_of(part) == name_of(node) for loop in loops for part in ast.walk(loop.target))


def _converted(source: SourceText, statement: ast.stmt, loop: ast.stmt, name: str, kind: str) -> list[Edit]:
    """Return edits that convert a kept scalar to a number wherever it is used."""
    edits = []
    for value in source.assigned(statement, name):
        if isinstance(value, ast.Constant) and not isinstance(value.value, (int, float)):
            raise Refused(f"{name} is no number at first, in line {value.lineno}")
    for use in uses_of(source, statement, name):
        if in_every_step(source, use, loop) and not _waits_anyway(source, use):
            edits += _passed_on(source, use, loop, name, kind)
            continue
        parent = source.parents[use]
        if isinstance(parent, ast.Subscript) or (isinstance(parent, ast.Call) and name_of(parent.func) == "range"):
            raise Refused(f"{name} is used as an index, in line {use.lineno}, which wants a whole number")
        if not _formatted(source, use, kind):
            edits += [Edit(source.start(use), source.start(use), f"{kind}("), Edit(source.end(use), source.end(use), ")")]
    return edits


def _passed_on(source: SourceText, use: ast.expr, loop: ast.stmt, name: str, kind: str) -> list[Edit]:
    """Return the edits for a number that is only added to another name, or appended: `value = loss.item(); total += value`."""
    statement = source.statement(use)
    if kind == "float":
        match statement:
            case ast.AugAssign(op=ast.Add(), value=value, target=target) if use in _arithmetic(value) and name_of(target):
                return _converted(source, statement, loop, name_of(target), kind)
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="append"), args=[value], keywords=[])) if value is use:
                return _converted_list(source, statement, loop, kind)
    raise Refused(f"{name} is used in every step, in line {use.lineno}")


def in_every_step(source: SourceText, node: ast.AST, loop: ast.stmt) -> bool:
    """Return whether a node runs whenever the loop's body does: it is in the body, and under no `if`."""
    inside = node
    for outer in source.above(node):
        if isinstance(outer, ast.If) and inside is not outer.test:
            return False
        if outer is loop:
            return inside not in getattr(loop, "orelse", ())
        inside = outer
    return False


def _waits_anyway(source: SourceText, use: ast.expr) -> bool:
    """Return whether the statement of a use reads another value by `.item()`, as a print of several: one wait is enough."""
    return any(last_name(node) == "item" for node in ast.walk(source.statement(use)) if isinstance(node, ast.Call))


def _formatted(source: SourceText, use: ast.expr, kind: str) -> bool:
    """Return whether an f-string formats the value, with equal results for a scalar tensor and a number.

    It may compute with a float, which is fp64 on the device, too. An integer tensor is divided in fp32.
    """
    for outer in source.above(use):
        if isinstance(outer, ast.FormattedValue):
            if outer.conversion != -1:
                raise Refused(f"line {use.lineno} formats it with !r or !s")
            return True
        if not isinstance(outer, ast.BinOp) or kind != "float":
            break
    if any(isinstance(outer, ast.JoinedStr) for outer in source.above(use)) and source.text(use) != name_of(use):
        raise Refused(f"line {use.lineno} computes with it inside an f-string, whose parts Python 3.11 places elsewhere")
    return False


def _converted_list(source: SourceText, statement: ast.stmt, loop: ast.stmt, kind: str) -> list[Edit]:
    """Return one more line after the loop, which converts the appended values in place, for all holders of the list, and before
    each statement under an `if` in the loop that uses it."""
    if isinstance(statement, ast.AugAssign):  # values += [loss.item()]
        name = name_of(statement.target)
    else:
        assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        assert isinstance(statement.value.func, ast.Attribute)
        name = name_of(statement.value.func.value)
    if not name:
        raise NotHere("the list has no name")
    if any(
        isinstance(outer, (ast.Try, ast.TryStar)) for outer in source.above(loop) if source.scope(outer) is source.scope(loop)
    ):
        raise Refused(f"the loop is inside a try: an exception would leave tensors in {name}")
    before = set[ast.stmt]()
    for use in uses_of(source, statement, name):
        parent = source.parents[use]
        counted = isinstance(parent, ast.Call) and name_of(parent.func) == "len"
        appended = isinstance(parent, ast.Attribute) and parent.attr == "append"
        if loop in source.above(use) and not counted and not appended:
            if in_every_step(source, use, loop):
                raise Refused(f"{name} is used in every step, in line {use.lineno}")
            before.add(source.statement(use))
    values = source.assigned(statement, name)
    lists = [v for v in values if isinstance(v, (ast.List, ast.ListComp)) or name_of(getattr(v, "func", v)) == "list"]
    if not values or len(lists) < len(values):
        raise Refused(f"{name} is not made as a list in this function")
    line = f"{name}[:] = [{kind}(value) for value in {name}]"
    insertions = [(source.indent(loop), (loop.end_lineno or 0) + 1), *((source.indent(each), each.lineno) for each in before)]
    return [source.inserted_line(number, indent + line) for indent, number in insertions]


def propose_tensor(source: SourceText, line: int) -> list[Edit]:
    """Propose to compute with a tensor instead of a number that is read in every step: `alpha = log_alpha.exp().item()`."""
    statement = source.statement_at(line, "item")
    name = name_of(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
    read = statement.value if isinstance(statement, ast.Assign) else None
    if not name or not isinstance(read, ast.Call) or last_name(read) != "item" or not isinstance(read.func, ast.Attribute):
        raise NotHere("the line does not give what it reads a name")
    if (loop := source.loop(statement)) is None:
        raise NotHere("the line is in no loop of this function")
    edits, computes = [Edit(source.end(read.func) - len("item"), source.end(read), TO_TENSOR)], False
    for use in uses_of(source, statement, name):
        parent = source.parents[use]
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
            other = parent.right if use is parent.left else parent.left
            if isinstance(other, (ast.Name, ast.Attribute, ast.Call, ast.BinOp)):
                computes = True
                continue
        if in_every_step(source, use, loop) or isinstance(parent, (ast.Subscript, ast.Compare)):
            raise Refused(f"{name} is used in line {use.lineno} for more than sums and products")
        if not _formatted(source, use, "float"):
            edits += [Edit(source.start(use), source.start(use), "float("), Edit(source.end(use), source.end(use), ")")]
    if not computes:
        raise NotHere(f"nothing is computed with {name}")
    return edits


TO_TENSOR = "detach().clone().reshape(())"
TENSOR = Patch("tensor", frozenset({"sync"}), "a tensor is computed with instead of a number", propose_tensor, equal=False)


def _in_loop(source: SourceText, line: int) -> list[Edit]:
    """Return edits of a loop whose counter selects the elements that this line reads: `token = tokens[i].item()`."""
    edits: list[Edit] = []
    for node in source.expressions_at(line):
        read = source.parents[source.parents[node]] if isinstance(node, ast.Subscript) else node
        loop = source.loop(node)
        if isinstance(loop, ast.For) and any(node is each for each in ast.walk(loop.iter)):
            loop = source.loop(loop)  # for word in words[: ends[i].item()]
        if not isinstance(node, ast.Subscript) or not isinstance(loop, ast.For) or not name_of(node.value):
            continue
        over, _ = iterated(loop)
        first = loop.target.elts[0] if over == "enumerate" and isinstance(loop.target, ast.Tuple) else loop.target
        item = isinstance(read, ast.Call) and last_name(read) == "item" and not read.args
        counts = over in ("range", "enumerate") and isinstance(first, ast.Name) and name_of(node.slice) == first.id
        if not item or not counts:
            continue
        name = name_of(node.value)
        writes = (n for n in ast.walk(loop) if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store))
        if name in stored(loop) or any(name_of(n.value) == name for n in writes):
            raise Refused(f"{name} changes in the loop")
        new = f"{name.replace('.', '_')}_read"
        if new.encode() in source.data:
            raise Refused(f"the name {new} is taken in this file")
        text = f"{source.indent(loop)}{new} = {name}.flatten().tolist()"
        edits += [
            source.inserted_line(loop.lineno, text),
            Edit(source.start(node.value), source.end(node.value), new),
            Edit(source.end(node), source.end(read), ""),  # type: ignore[arg-type]
        ]
    return edits


def _pairs(target: ast.expr, over: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return (name, what it goes over) of a loop, several for zip."""
    if isinstance(target, ast.Tuple) and isinstance(over, ast.Call) and name_of(over.func) == "zip" and not over.keywords:
        return list(zip(target.elts, over.args))
    return [(target, over)]


def _over_rows(source: SourceText, line: int) -> list[Edit]:
    """Return edits of a loop that reads each row as a list: `for row, n in zip(ids, lengths): words = row[:n].tolist()`."""
    loop = source.loop(source.statements_at(line)[0])
    if not isinstance(loop, ast.For):
        return []
    edits: list[Edit] = []
    for target, over in _pairs(loop.target, loop.iter):
        uses = [n for n in ast.walk(loop) if isinstance(n, ast.Name) and n is not target and n.id == name_of(target)]
        if not name_of(over) or not name_of(target) or name_of(over).split(".")[0] in stored(loop):
            continue
        limits, lists = [], []
        for use in uses:
            parent = source.parents[use]
            row = parent if isinstance(parent, ast.Subscript) and parent.value is use else use
            called = source.parents[source.parents[row]]
            if isinstance(parent, ast.Slice):
                limits.append(use)
            elif isinstance(called, ast.Call) and last_name(called) == "tolist" and not called.args:
                lists.append(Edit(source.end(row), source.end(called), ""))  # type: ignore[arg-type]
        if uses and len(limits) + len(lists) == len(uses):
            edits += [Edit(source.end(over), source.end(over), ".tolist()"), *lists]
    read = any(source.line_start(line) <= edit.start < source.line_start(line + 1) and not edit.text for edit in edits)
    return edits if read else []


def propose_elements(source: SourceText, line: int) -> list[Edit]:
    """Propose to read a tensor once, where a comprehension or a loop reads its elements individually:
    `[words[int(i)] for i in ids]`."""
    source.check_imports_torch()
    edits = [*_in_loop(source, line), *_over_rows(source, line)]
    for node in source.expressions_at(line):
        if not isinstance(node, (ast.ListComp, ast.GeneratorExp)) or len(node.generators) != 1:
            continue
        for target, over in _pairs(node.generators[0].target, node.generators[0].iter):
            if not isinstance(target, ast.Name) or not name_of(over):
                continue
            uses = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == target.id and n is not target]
            if not uses or not all(_reads_element(source.parents[use]) for use in uses):
                continue
            edits += [Edit(source.start(over), source.end(over), f"torch.as_tensor({source.text(over)}).tolist()")]
            edits += [
                Edit(source.end(use), source.end(use) + len(".item()"), "") for use in uses if _is_item(source.parents[use])
            ]
    if not edits:
        raise NotHere(
            "no comprehension or loop of the line reads the elements of one tensor by int(), float() or .item() alone"
        )
    return edits


NUMBERS = "numbers"


def propose_stacked(source: SourceText, line: int) -> list[Edit]:
    """Propose to read tensors at once: `[p.norm().item() for p in ps]`, `{name: v.item() for name, v in stats.items()}`,
    `sum(p.norm().item() ** 2 for p in ps)`."""
    source.check_imports_torch()
    edits = []
    for node in source.expressions_at(line):
        if isinstance(node, ast.GeneratorExp):
            edits += _stacked_sum(source, node)
        if not isinstance(node, (ast.ListComp, ast.DictComp)):
            continue
        read = node.elt if isinstance(node, ast.ListComp) else node.value
        if not isinstance(read, ast.Call) or last_name(read) != "item" or read.args or not isinstance(read.func, ast.Attribute):
            continue
        loops = source.data[source.end(read) : source.end(node) - 1].decode()
        text = f"{NUMBERS}([{source.text(read.func.value)}{loops}])"
        if isinstance(node, ast.DictComp):
            over = [each.iter for each in node.generators]
            if not all(isinstance(each, ast.Call) and last_name(each) == "items" and not each.args for each in over):
                continue  # it would be gone over twice
            text = f"dict(zip([{source.text(node.key)}{loops}], {text}))"
        edits.append(Edit(source.start(node), source.end(node), text))
    if not edits:
        raise NotHere("no list or dictionary of the line is made of .item() alone")
    return [
        *edits,
        *helper(
            source,
            NUMBERS,
            f"def {NUMBERS}(tensors):",
            "    if len({(each.dtype, each.device) for each in tensors}) != 1:",
            "        return [each.item() for each in tensors]",
            "    return torch.stack([each.detach().reshape(()) for each in tensors]).tolist()",
        ),
    ]


def _stacked_sum(source: SourceText, node: ast.GeneratorExp) -> list[Edit]:
    """Return the edit of `sum(p.norm().item() ** 2 for p in ps)`, if what else is in each term does not change."""
    reads = [n for n in ast.walk(node.elt) if isinstance(n, ast.Call) and last_name(n) == "item" and not n.args]
    own = {n.id for each in node.generators for n in ast.walk(each.target) if isinstance(n, ast.Name)}
    within = [n for read in reads for n in ast.walk(read)]
    others = {n.id for n in ast.walk(node.elt) if isinstance(n, ast.Name) and n not in within}
    if len(reads) != 1 or not isinstance(reads[0].func, ast.Attribute) or others & {*own, "number"}:
        return []
    data, read, elt = source.data, reads[0], node.elt
    before, after = data[source.start(elt) : source.start(read)], data[source.end(read) : source.end(elt)]
    loops = data[source.end(elt) : source.end(node) - 1].decode()
    values = f"{NUMBERS}([{source.text(reads[0].func.value)}{loops}])"
    text = f"({before.decode()}number{after.decode()} for number in {values})"
    return [Edit(source.start(node), source.end(node), text)]


def _reads_element(parent: ast.AST) -> bool:
    return _is_item(parent) or (isinstance(parent, ast.Call) and name_of(parent.func) in ("int", "float", "bool"))


def _is_item(parent: ast.AST) -> bool:
    return isinstance(parent, ast.Attribute) and parent.attr == "item"


ELEMENTS = Patch("elements", frozenset({"sync", "d2h"}), "all elements are read at once", propose_elements, remedy=AT_ONCE)
STACKED_READS = Patch("stacked", frozenset({"sync"}), "all values are read at once", propose_stacked, remedy=STACKED)
READS = Patch("reads", frozenset({"sync"}), "the value stays on the device until it is used", propose)


ARITHMETIC = (ast.BinOp, ast.Name, ast.Attribute, ast.Constant, ast.operator, ast.expr_context)


def propose_meter(source: SourceText, line: int) -> list[Edit]:
    source.check_imports_torch()
    statement = source.statement_at(line, "update", "item")
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
        raise NotHere("the line does not give a value to a meter")
    loop, read = source.loop(statement), call.args[0]
    plain = isinstance(read, ast.Call) and last_name(read) == "item" and not read.args and isinstance(read.func, ast.Attribute)
    if loop is None or not plain:
        raise NotHere("wanted meter.update(value.item(), ...) in a loop")
    assert isinstance(read, ast.Call) and isinstance(read.func, ast.Attribute)
    meter = _class_of(source, name_of(call.func.value), statement)
    stored = _stored(meter, call.func.attr)
    edits = [Edit(source.end(read.func) - len("item"), source.end(read), KEPT)]
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute) or node.attr not in stored or not isinstance(node.ctx, ast.Load):
            continue
        called = source.parents[node]
        if meter in source.above(node) or (isinstance(called, ast.Call) and called.func is node):  # x.sum()
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
            if not isinstance(node, ast.stmt) or not _meter_uses(node, value, stored):
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            attribute = name_of(target) if target is not None else ""
            expression = getattr(node, "value", None)
            plain = expression is not None and all(isinstance(part, ARITHMETIC) for part in ast.walk(expression))
            if not plain or not attribute.startswith("self."):
                raise Refused(f"line {node.lineno} does more than compute with the value")
            stored.add(attribute.removeprefix("self."))
    for name, function in functions.items():
        if name != method and any(_meter_uses(node, "", stored) for node in ast.walk(function)):
            is_property = any(name_of(each) == "property" for each in function.decorator_list)
            if is_property:
                stored.add(name)
            elif name not in ("__str__", "__repr__", "reset", "__init__"):
                raise Refused(f"{meter.name}.{name}() uses what is stored, in line {function.lineno}")
    return stored


def _meter_uses(node: ast.AST, value: str, stored: set[str]) -> bool:
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


METERS = Patch("meters", frozenset({"sync"}), "the meter keeps the value on the device until it is shown", propose_meter)
