"""Let gb.TrainStep make the whole step of a plain loop, which it captures in CUDA graphs.

    optimizer.zero_grad()                  loss = train_step([(x, y)]).loss
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()

The forward becomes a function before the loop, and the optimizer is made by TrainStep. Taken only where nothing else stands
between, and where nothing else uses the optimizer: a scheduler or a checkpoint of it would see another one.
"""

import ast
from dataclasses import dataclass

from .source import Edit, Patch, Refused, SourceText, imported, last_name, name_of

IMPORT = "import gpubound as gb"
NARROW = (b"autocast", b"bfloat16", b"float16", b".half(", b"GradScaler")
FUNCTION, STEP = "loss_of", "train_step"


@dataclass(frozen=True)
class PlainLoop:
    """The statements of a plain training loop."""

    loop: ast.For | ast.While
    creation: ast.Assign  # the optimizer
    model: str
    zero: ast.stmt
    forward: list[ast.Assign]
    backward: ast.stmt
    step: ast.stmt
    loss: str


def propose(source: SourceText, line: int) -> list[Edit]:
    if any(word in source.data for word in NARROW):
        raise Refused("the file uses 16-bit numbers; write gb.TrainStep(..., precision=...) by hand")
    if names := {FUNCTION, STEP} & _names(source.tree):
        raise Refused(f"the name {min(names)} is taken in this file")
    if "gb" in _names(source.tree) and IMPORT not in map(source.text, source.tree.body):
        raise Refused("the name gb is taken in this file")
    plain = _plain_loop(source, line)
    outermost = [n for n in (plain.loop, *source.above(plain.loop)) if isinstance(n, (ast.For, ast.While))][-1]
    batch = _batch(source, plain, outermost)
    argument = batch[0] if len(batch) == 1 else f"({', '.join(batch)})"
    text = [f"{plain.loss} = {STEP}([{argument}]).loss"]
    written = _edit_of(source, plain.forward[0], plain.step, text)
    within = [plain.zero] if not plain.forward[0].lineno <= plain.zero.lineno <= plain.step.lineno else []
    removed = [_edit_of(source, statement, statement, []) for statement in (plain.creation, *within)]
    above = source.line_start(outermost.lineno)
    return [*imported(source, IMPORT), Edit(above, above, _before(source, plain, batch, outermost)), written, *removed]


def _plain_loop(source: SourceText, line: int) -> PlainLoop:
    """Return the statements of a step whose `optimizer.step()` is in this line, or in the loop that begins there."""
    loops = [node for node in ast.walk(source.tree) if isinstance(node, (ast.For, ast.While)) and node.lineno == line]
    steps = [statement for loop in loops for statement in loop.body if _called_on(statement, "step")]
    step = source.statement_at(steps[0].lineno if len(steps) == 1 else line, "step")
    optimizer = _called_on(step, "step")
    if not optimizer:
        raise Refused("the line is no plain optimizer.step()")
    loop = source.parents[step]
    if not isinstance(loop, (ast.For, ast.While)) or step not in loop.body:
        raise Refused("optimizer.step() does not stand in the body of a loop by itself")
    body = loop.body
    at = body.index(step)
    backward = next((n for n in reversed(body[:at]) if _called_on(n, "backward")), None)
    zero = [n for n in body if _called_on(n, "zero_grad")]
    if backward is None or len(zero) != 1:
        raise Refused("the loop has no single zero_grad(), loss.backward(), optimizer.step()")
    creation, model = _optimizer_creation(source, step, optimizer)
    if _called_on(zero[0], "zero_grad") not in (optimizer, model):
        raise Refused(f"zero_grad() is called on neither {optimizer} nor {model}")
    if [n for n in body[body.index(backward) + 1 : at] if n is not zero[0]]:
        raise Refused("something stands between backward() and optimizer.step()")
    allowed = {id(zero[0]), id(step)}
    for node in ast.walk(source.tree):
        used = isinstance(node, ast.Name) and node.id == optimizer and isinstance(node.ctx, ast.Load)
        if used and id(statement := source.statement(node)) not in allowed:
            raise Refused(f"{optimizer} is used in another way in line {statement.lineno}")
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            raise Refused(f"line {node.lineno} uses gradients itself")
    loss = _called_on(backward, "backward")
    forward = [n for n in body[: body.index(backward)] if n is not zero[0]]
    first = next((n for n, statement in enumerate(forward) if model in _names(statement)), len(forward))
    assignments = [n for n in forward[first:] if isinstance(n, ast.Assign) and all(isinstance(t, ast.Name) for t in n.targets)]
    if not assignments or len(assignments) != len(forward) - first or loss not in (name_of(t) for t in assignments[-1].targets):
        raise Refused(f"between the model's call and {loss or 'the loss'}.backward() stands more than plain assignments")
    return PlainLoop(loop, creation, model, zero[0], assignments, backward, step, loss)


def _called_on(statement: ast.stmt, method: str) -> str:
    """Return "optimizer" of the statement `optimizer.step()`; empty for any other. zero_grad may have arguments."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or last_name(call) != method:
        return ""
    return name_of(call.func.value) if method == "zero_grad" or not (call.args or call.keywords) else ""


def _optimizer_creation(source: SourceText, step: ast.stmt, optimizer: str) -> tuple[ast.Assign, str]:
    """Return the assignment that creates the optimizer of one model's parameters, and the model's name."""
    scope = source.scope(step)
    assignments = [n for n in ast.walk(source.tree) if isinstance(n, ast.Assign)]
    creation = [n for n in assignments if any(name_of(target) == optimizer for target in n.targets)]
    if len(creation) != 1 or source.parents[creation[0]] is not scope:
        raise Refused(f"{optimizer} is not made once, in this function and outside of any block")
    call = creation[0].value
    first = call.args[0] if isinstance(call, ast.Call) and call.args else None
    if not isinstance(first, ast.Call) or last_name(first) != "parameters" or first.args or first.keywords:
        raise Refused(f"{optimizer} is not made of model.parameters()")
    model = name_of(first.func).removesuffix(".parameters")
    if not model or "." in model or len(creation[0].targets) != 1:
        raise Refused(f"{optimizer} is not made of the parameters of a model with a plain name")
    return creation[0], model


def _batch(source: SourceText, plain: PlainLoop, outermost: ast.stmt) -> list[str]:
    """Return the names of a step's data that the forward reads: assigned by the loop or its body before, in that order.

    A value computed from a counter is a number, which a graph would repeat. A value selected by a counter, `batches[step]`, is
    data.
    """
    body, first = plain.loop.body, plain.loop.body.index(plain.forward[0])
    assigned, counters = _loop_names(plain.loop)
    for statement in body[:first]:
        assigned |= _ordered(statement)
        picked = isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Subscript)
        counters |= _stored(statement) if counters & _names(statement) and not picked else set()
    own: set[str] = set()
    read: list[str] = []
    for statement in plain.forward:
        loads = [n.id for n in ast.walk(statement.value) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        read += [name for name in loads if name not in own]
        own |= _stored(statement)
    if wrong := set(read) & ((_stored(outermost) - assigned.keys()) | counters):
        raise Refused(f"the forward reads {min(wrong)}, which changes and is no part of the batch")
    outputs = own - {plain.loss}
    for node in ast.walk(source.scope(plain.loop)):
        inside = any(statement is node or statement in source.above(node) for statement in plain.forward)
        if isinstance(node, ast.Name) and node.id in outputs and isinstance(node.ctx, ast.Load) and not inside:
            raise Refused(f"{node.id} is used outside the forward, in line {node.lineno}")
    batch = [name for name in assigned if name in read]
    if not batch:
        raise Refused("the forward reads nothing that changes from step to step")
    return batch


def _loop_names(loop: ast.For | ast.While) -> tuple[dict[str, None], set[str]]:
    """Return the names that a loop assigns, in their order, and those of them that count."""
    if not isinstance(loop, ast.For):
        return {}, set()
    over = name_of(loop.iter.func) if isinstance(loop.iter, ast.Call) else ""
    counters: set[str] = set()
    if over == "range":
        counters = _stored(loop.target)
    elif over == "enumerate" and isinstance(loop.target, ast.Tuple):
        counters = _stored(loop.target.elts[0])
    elif over == "zip" and isinstance(loop.target, ast.Tuple) and isinstance(loop.iter, ast.Call):
        pairs = zip(loop.target.elts, loop.iter.args)
        ranges = [target for target, call in pairs if isinstance(call, ast.Call) and name_of(call.func) == "range"]
        counters = set().union(*map(_stored, ranges))
    return _ordered(loop.target), counters


def _before(source: SourceText, plain: PlainLoop, batch: list[str], outermost: ast.stmt) -> str:
    """Return the lines before the loops: the function of the forward, and the step."""
    call = plain.creation.value
    assert isinstance(call, ast.Call)
    start, data = source.start(call), source.data
    argument = call.args[0]
    making = (data[start : source.start(argument)] + b"parameters" + data[source.end(argument) : source.end(call)]).decode()
    one = len(batch) == 1
    lines = [
        "",
        f"def {FUNCTION}({plain.model}, {batch[0] if one else 'batch'}):",
        *([] if one else [f"    {', '.join(batch)} = batch"]),
        *(f"    {source.text(statement)}" for statement in plain.forward),
        f"    return {plain.loss}, {plain.loss}.new_ones(())",
        "",
        f'{STEP} = gb.TrainStep({plain.model}, {FUNCTION}, lambda parameters: {making}, precision="fp32")',
    ]
    indent = source.indent(outermost)
    return "".join(f"{indent}{text}".rstrip() + source.newline for text in lines)


def _edit_of(source: SourceText, first: ast.stmt, last: ast.stmt, texts: list[str]) -> Edit:
    """Replace whole lines, from those of `first` to those of `last`, by these."""
    indent = source.indent(first)
    return Edit(*source.line_range(first, last), "".join(f"{indent}{text}{source.newline}" for text in texts))


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _stored(node: ast.AST) -> set[str]:
    return set(_ordered(node))


def _ordered(node: ast.AST) -> dict[str, None]:
    """Return the names that are assigned here, in the order of the source."""
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return dict.fromkeys(n.id for n in sorted(names, key=lambda n: (n.lineno, n.col_offset)))


TRAIN_STEP = Patch("step", frozenset({"launch_bound"}), "gb.TrainStep makes the step, as CUDA graphs", propose, equal=False)
