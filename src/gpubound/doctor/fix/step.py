"""Let gb.TrainStep make the whole step of a plain loop, which it captures in CUDA graphs.

    optimizer.zero_grad()                  loss = train_step([(x, y)]).loss
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()

The forward becomes a function, autocast included, and TrainStep makes the optimizer: where it was made, if the loop is in a
function that reads it or is given it, and before the loop otherwise. Taken only where nothing else stands between, and where
nothing else uses the optimizer: a scheduler or a checkpoint of it would see another one.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .calls import WRITE_LATER
from .source import (
    Edit,
    Patch,
    Refused,
    SourceText,
    called_on,
    constant,
    imported,
    iterated,
    last_name,
    name_of,
    stored,
)

STEP = "train_step"  # the name that an optimizer given to a function gets


@dataclass(frozen=True)
class Creation:
    """Place where the optimizer is created, and its name in the loop."""

    statement: ast.Assign
    model: str  # its name there
    outside: bool  # of the function with the loop
    given: dict[str, str]  # parameters of that function -> the names that its one call gives
    renamed: list[Edit]  # of the parameter, and in the call


@dataclass(frozen=True)
class PlainLoop:
    """The statements of a plain training loop."""

    loop: ast.For | ast.While
    creation: Creation
    model: str
    zero: ast.stmt
    forward: list[ast.stmt]
    backward: ast.stmt
    clip: str  # the largest norm, as source text; empty: not clipped
    kept: list[ast.stmt]  # between backward and the step, which read the loss alone
    step: ast.stmt
    loss: str


def plain_loop(source: SourceText, line: int) -> PlainLoop:
    """Return the statements of a step whose `optimizer.step()` is in this line, or in the loop that begins there."""
    loops = [node for node in ast.walk(source.tree) if isinstance(node, (ast.For, ast.While)) and node.lineno == line]
    steps = [statement for loop in loops for statement in loop.body if called_on(statement, "step")]
    within = [n for loop in loops for n in ast.walk(loop) if isinstance(n, ast.stmt) and called_on(n, "step")]
    if within and len(steps) != 1:
        lines = " and ".join(str(number) for number in sorted({n.lineno for n in within}))
        alone = "line {} makes the step under a condition or in a nested loop"
        raise Refused(alone.format(lines) if len(within) == 1 else f"the loop makes several steps, in lines {lines}")
    step = source.statement_at(steps[0].lineno if len(steps) == 1 else line, "step")
    optimizer = called_on(step, "step")
    if not optimizer:
        raise Refused("the line is no plain optimizer.step()")
    loop = source.parents[step]
    if not isinstance(loop, (ast.For, ast.While)) or step not in loop.body:
        raise Refused("optimizer.step() does not stand in the body of a loop by itself")
    body = loop.body
    at = body.index(step)
    backward = next((n for n in reversed(body[:at]) if called_on(n, "backward")), None)
    zero = [n for n in body if called_on(n, "zero_grad")]
    if backward is None or len(zero) != 1:
        raise Refused("the loop has no single zero_grad(), loss.backward(), optimizer.step()")
    loss = called_on(backward, "backward")
    creation, model = _creation(source, step, zero[0], optimizer)
    if called_on(zero[0], "zero_grad") not in (optimizer, model):
        raise Refused(f"zero_grad() is called on neither {optimizer} nor {model}")
    between = [n for n in body[body.index(backward) + 1 : at] if n is not zero[0]]
    clips = [n for n in between if _norm(n, model)]
    remaining = [n for n in between if n not in clips]
    if len(clips) > 1 or not all(_reads_only(statement, loss) for statement in remaining):
        raise Refused("something stands between backward() and optimizer.step()")
    clip = _norm(clips[0], model) if clips else None
    if clip is not None and (changing := names_in(clip) & stored(source.scope(step))):
        raise Refused(f"the norm to clip to is {min(changing)}, which the function assigns")
    if any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in ast.walk(source.tree)):
        used = next(node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute) and node.attr == "grad")
        raise Refused(f"line {used.lineno} uses gradients itself")
    forward = [n for n in body[: body.index(backward)] if n is not zero[0]]
    first = next((n for n, statement in enumerate(forward) if model in names_in(statement)), len(forward))
    parts = [list(assignments(source, statement)) for statement in forward[first:]]
    assigned = [n for part in parts for n in part]
    if not all(parts) or not assigned or loss not in stored(assigned[-1]):
        raise Refused(f"between the model's call and {loss or 'the loss'}.backward() stands more than plain assignments")
    norm = source.text(clip) if clip is not None else ""
    return PlainLoop(loop, creation, model, zero[0], forward[first:], backward, norm, remaining, step, loss)


def assignments(source: SourceText, statement: ast.stmt) -> Iterator[ast.Assign]:
    """Yield a plain assignment to names, or those in a block of autocast; nothing for any other statement."""
    if isinstance(statement, ast.With):
        if all(_is_autocast(source, item) for item in statement.items):
            parts = [list(assignments(source, inner)) for inner in statement.body]
            yield from (n for part in parts for n in part) if all(parts) else ()
    elif isinstance(statement, ast.Assign):
        targets = [part for t in statement.targets for part in (t.elts if isinstance(t, ast.Tuple) else [t])]
        if all(isinstance(target, ast.Name) for target in targets):
            yield statement


def _is_autocast(source: SourceText, item: ast.withitem) -> bool:
    """Return whether a block is one of autocast: a call of it, or a name that is only assigned such calls."""
    values = [item.context_expr]
    if name := name_of(item.context_expr):
        assignments = [n for n in ast.walk(source.tree) if isinstance(n, ast.Assign)]
        values = [n.value for n in assignments if any(name_of(target) == name for target in n.targets)]
        values = [
            part for value in values for part in ((value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,))
        ]
    calls = [last_name(value) for value in values if isinstance(value, ast.Call)]
    return item.optional_vars is None and len(calls) == len(values) > 0 and set(calls) <= {"autocast", "nullcontext"}


def _norm(statement: ast.stmt, model: str) -> ast.expr | None:
    """Return the largest norm of `clip_grad_norm_(model.parameters(), norm)`; None for any other statement."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and last_name(call) in ("clip_grad_norm_", "clip_grad_norm"):
        arguments = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "max_norm")]
        if len(arguments) == len(call.args) + len(call.keywords) == 2 and parameters_of(arguments[0]) == model:
            return arguments[1]
    return None


def _reads_only(statement: ast.stmt, loss: str) -> bool:
    """Return whether a statement reads the loss, and calls nothing but its methods: it may stand after the step as well."""
    plain = isinstance(statement, ast.AugAssign) or (isinstance(statement, ast.Assign) and loss not in stored(statement))
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return plain and all(_root(call) == loss for call in calls)


def _root(node: ast.expr) -> str:
    """Return "loss" of `loss.detach().item()`."""
    while not isinstance(node, ast.Name):
        inner = node.func if isinstance(node, ast.Call) else getattr(node, "value", None)
        if inner is None:
            return ""
        node = inner
    return node.id


def _creation(source: SourceText, step: ast.stmt, zero: ast.stmt, optimizer: str) -> tuple[Creation, str]:
    """Return where the optimizer of one model's parameters is made, and the model's name in the loop."""
    scope = source.scope(step)
    name, keywords, renamed, allowed = optimizer, {}, [], {id(zero), id(step)}
    home: ast.AST = scope
    if isinstance(scope, ast.FunctionDef) and optimizer in (parameter.arg for parameter in scope.args.args):
        call = _only_call(source, scope)
        keywords = _given(call, scope)
        home, name = source.scope(call), keywords.get(optimizer, "")
        parameter = next(each for each in scope.args.args if each.arg == optimizer)
        argument = next((each for each in (*call.args, *(k.value for k in call.keywords)) if name_of(each) == name), None)
        if argument is None or not name:
            raise Refused(f"the call in line {call.lineno} does not give {optimizer} by a name")
        keyword = next((each for each in call.keywords if each.arg == optimizer), None)
        edits = [_renaming(source, parameter, optimizer), Edit(source.start(argument), source.end(argument), STEP)]
        renamed = edits + ([_renaming(source, keyword, optimizer)] if keyword else [])
        allowed.add(id(source.statement(call)))
    assignments = [n for n in ast.walk(source.tree) if isinstance(n, ast.Assign)]
    created = [n for n in assignments if any(name_of(target) == name for target in n.targets)]
    if len(created) == 1 and home is not source.tree and _is_top_level(source, created[0]):
        home = source.tree  # the function reads a global
    if len(created) != 1 or (
        source.parents[created[0]] is not home and not (home is source.tree and _is_top_level(source, created[0]))
    ):
        raise Refused(f"{name} is not made once, in this function or its caller, and outside of any block")
    for node in ast.walk(source.tree):
        used = isinstance(node, ast.Name) and node.id in (optimizer, name) and isinstance(node.ctx, ast.Load)
        if used and id(statement := source.statement(node)) not in allowed:
            original_call = statement.value if isinstance(statement, ast.Assign) else None
            scheduled = isinstance(original_call, ast.Call) and last_name(original_call).endswith(("LR", "Scheduler"))
            hint = "; give the step schedule=gb.Schedule(...) instead, by hand" if scheduled else ""
            raise Refused(f"{name_of(node)} is used in another way in line {statement.lineno}{hint}")
    created_call = created[0].value
    model = parameters_of(created_call.args[0]) if isinstance(created_call, ast.Call) and created_call.args else ""
    if not model or len(created[0].targets) != 1:
        raise Refused(f"{name} is not made of model.parameters(), of a model with a plain name")
    inside = next((parameter for parameter, outer in keywords.items() if outer == model), model)
    return Creation(created[0], model, home is not scope, keywords, renamed), inside


def _is_top_level(source: SourceText, statement: ast.stmt) -> bool:
    """Return whether a statement is the module's own, or under `if __name__ == "__main__":`."""
    parent = source.parents[statement]
    main = isinstance(parent, ast.If) and source.parents[parent] is source.tree and "__name__" in names_in(parent.test)
    return parent is source.tree or (main and isinstance(parent, ast.If) and statement in parent.body)


def _only_call(source: SourceText, function: ast.FunctionDef) -> ast.Call:
    """Return the one call of a function of this file, by its name."""
    calls = [call for call in source.calls() if name_of(call.func) == function.name]
    named = [n for n in ast.walk(source.tree) if isinstance(n, ast.Name) and n.id == function.name]
    if len(calls) != 1 or len(named) != 1:
        raise Refused(f"{function.name}() is given the optimizer, and is not called in one place alone")
    return calls[0]


def _given(call: ast.Call, function: ast.FunctionDef) -> dict[str, str]:
    """Return the names that a call gives to a function's parameters."""
    pairs = list(zip((parameter.arg for parameter in function.args.args), call.args))
    pairs += [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None]
    return {parameter: name for parameter, value in pairs if (name := name_of(value)) and "." not in name}


def _renaming(source: SourceText, node: ast.arg | ast.keyword, name: str) -> Edit:
    start = source.line_start(node.lineno) + node.col_offset
    return Edit(start, start + len(name.encode()), STEP)


def parameters_of(call: ast.expr) -> str:
    """Return "model" of `model.parameters()`; empty for anything else."""
    if not isinstance(call, ast.Call) or last_name(call) != "parameters" or call.args or call.keywords:
        return ""
    model = name_of(call.func).removesuffix(".parameters")
    return "" if "." in model else model


def batch_of(source: SourceText, plain: PlainLoop, outermost: ast.stmt) -> list[str]:
    """Return the names of a step's data that the forward reads: assigned by the loop or its body before, in that order.

    A value computed from a counter is a number, which a graph would repeat. A value selected by a counter, `batches[step]`, is
    data.
    """
    body, first = plain.loop.body, plain.loop.body.index(plain.forward[0])
    assigned, counters = _loop_names(plain.loop)
    for statement in body[:first]:
        assigned |= _ordered(statement)
        picked = isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Subscript)
        counters |= stored(statement) if counters & names_in(statement) and not picked else set()
    own: set[str] = set()
    read: list[str] = []
    for statement in [n for part in plain.forward for n in assignments(source, part)]:
        loads = [n.id for n in ast.walk(statement.value) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        read += [name for name in loads if name not in own]
        own |= stored(statement)
    if wrong := set(read) & ((stored(outermost) - assigned.keys()) | counters):
        raise Refused(f"the forward reads {min(wrong)}, which changes and is no part of the batch")
    if plain.creation.outside and (wrong := _only_inside(source, plain, set(read) - assigned.keys() - {plain.model})):
        raise Refused(f"the forward reads {min(wrong)}, which only the function with the loop has")
    outputs = own - {plain.loss}
    for node in ast.walk(source.scope(plain.loop)):
        inside = any(statement is node or statement in source.above(node) for statement in plain.forward)
        if isinstance(node, ast.Name) and node.id in outputs and isinstance(node.ctx, ast.Load) and not inside:
            raise Refused(f"{node.id} is used outside the forward, in line {node.lineno}")
    batch = [name for name in assigned if name in read]
    if not batch:
        raise Refused("the forward reads nothing that changes from step to step")
    return batch


def _only_inside(source: SourceText, plain: PlainLoop, read: set[str]) -> set[str]:
    """Return names that the function with the loop has, and the place where the optimizer is made has not by these names."""
    function = source.scope(plain.loop)
    own = stored(function)
    if isinstance(function, ast.FunctionDef):
        own |= {parameter.arg for parameter in function.args.args}
    return {name for name in read & own if plain.creation.given.get(name) != name}


def _loop_names(loop: ast.For | ast.While) -> tuple[dict[str, None], set[str]]:
    """Return the names that a loop assigns, in their order, and those of them that count."""
    if not isinstance(loop, ast.For):
        return {}, set()
    over, arguments = iterated(loop)
    counters: set[str] = set()
    if over in ("range", "trange"):
        counters = stored(loop.target)
    elif over == "enumerate" and isinstance(loop.target, ast.Tuple):
        counters = stored(loop.target.elts[0])
    elif over == "zip" and isinstance(loop.target, ast.Tuple):
        pairs = zip(loop.target.elts, arguments)
        ranges = [target for target, call in pairs if isinstance(call, ast.Call) and name_of(call.func) == "range"]
        counters = set().union(*map(stored, ranges))
    return _ordered(loop.target), counters


def names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _ordered(node: ast.AST) -> dict[str, None]:
    """Return the names that are assigned here, in the order of the source."""
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return dict.fromkeys(n.id for n in sorted(names, key=lambda n: (n.lineno, n.col_offset)))


IMPORT = "import gpubound as gb"
NARROW = ("bfloat16", "float16", "half")  # names of 16-bit numbers, which a cast of the model has
FUNCTION = "loss_of"
OURS = {"AdamW": 0.01, "Adam": 0.0}  # optimizers that gb.AdamW computes within a graph, with their default weight decay
OPTIONS = ("lr", "betas", "eps", "weight_decay")  # in their order
KERNELS = ("foreach", "fused")  # options that choose kernels, not numbers


def propose(source: SourceText, line: int) -> list[Edit]:
    if b"GradScaler" in source.data:
        raise Refused('the file uses a GradScaler; write gb.TrainStep(..., precision="fp16"), which has its own, by hand')
    if WRITE_LATER in names_in(source.tree):
        raise Refused("another thread launches work while it writes, which would end a capture")
    if _casts(source):
        raise Refused("the file uses 16-bit numbers outside of autocast; write gb.TrainStep(..., precision=...) by hand")
    if names := {FUNCTION, STEP} & names_in(source.tree):
        raise Refused(f"the name {min(names)} is taken in this file")
    if "gb" in names_in(source.tree) and IMPORT not in map(source.text, source.tree.body):
        raise Refused("the name gb is taken in this file")
    plain = plain_loop(source, line)
    outermost = [n for n in (plain.loop, *source.above(plain.loop)) if isinstance(n, (ast.For, ast.While))][-1]
    batch = batch_of(source, plain, outermost)
    argument = batch[0] if len(batch) == 1 else f"({', '.join(batch)})"
    text = [f"{plain.loss} = {STEP}([{argument}]).loss", *map(source.text, plain.kept)]
    written = _edit_of(source, plain.forward[0], plain.step, text)
    within = [plain.zero] if not plain.forward[0].lineno <= plain.zero.lineno <= plain.step.lineno else []
    removed = [_edit_of(source, statement, statement, []) for statement in within]
    creation = plain.creation.statement
    if plain.creation.outside:
        start, end = source.line_range(creation, creation)
        edits = [Edit(start, end, _definitions(source, plain, batch, source.indent(creation)))]
    else:
        above = source.line_start(outermost.lineno)
        definitions = _definitions(source, plain, batch, source.indent(outermost))
        edits = [Edit(above, above, definitions), _edit_of(source, creation, creation, [])]
    return [*imported(source, IMPORT), *edits, written, *removed, *plain.creation.renamed]


def _casts(source: SourceText) -> bool:
    """Return whether the file names 16-bit numbers other than in a call of autocast."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in NARROW:
            calls = [outer for outer in source.above(node) if isinstance(outer, ast.Call)]
            if not any(last_name(call) == "autocast" for call in calls):
                return True
    return False


def _definitions(source: SourceText, plain: PlainLoop, batch: Sequence[str], indent: str) -> str:
    """Return the lines that define the function of the forward, and the step."""
    one = len(batch) == 1
    lines = [
        "",
        f"def {FUNCTION}({plain.model}, {batch[0] if one else 'batch'}):",
        *([] if one else [f"    {', '.join(batch)} = batch"]),
        *(f"    {text}" for statement in plain.forward for text in _dedented(source, statement)),
        f"    return {plain.loss}, {plain.loss}.new_ones(())",
        "",
        f"{STEP} = gb.TrainStep({plain.creation.model}, {FUNCTION}, {_optimizer(source, plain)}, {_options(source, plain)})",
    ]
    return "".join(f"{indent}{text}".rstrip() + source.newline for text in lines)


def _dedented(source: SourceText, statement: ast.stmt) -> list[str]:
    """Return a statement's lines; those of a block without its own indentation."""
    indent, lines = source.indent(statement), source.text(statement).splitlines()
    return [lines[0], *(line.removeprefix(indent) if isinstance(statement, ast.With) else line for line in lines[1:])]


def _optimizer(source: SourceText, plain: PlainLoop) -> str:
    """Return the optimizer as TrainStep takes it: gb.AdamW, which a graph holds, where that computes the same."""
    call = plain.creation.statement.value
    assert isinstance(call, ast.Call)
    kind = last_name(call)
    options = dict(zip(OPTIONS, call.args[1:])) | {k.arg: k.value for k in call.keywords if k.arg not in (None, *KERNELS)}
    decay = constant(options["weight_decay"]) if "weight_decay" in options else OURS.get(kind)
    known = set(options) <= set(OPTIONS) and len(call.args) <= 1 + len(OPTIONS) and all(k.arg for k in call.keywords)
    if kind in OURS and known and _is_torch(source, call) and (kind == "AdamW" or decay == 0):
        texts = {name: source.text(value) for name, value in options.items()}
        texts |= {} if "weight_decay" in options else {"weight_decay": str(OURS[kind])}
        decays = [] if decay == 0 else ["decays=lambda name, parameter: True"]  # torch's decays biases, too
        return f"gb.AdamW({', '.join([*(f'{name}={text}' for name, text in texts.items()), *decays])})"
    start, argument = source.start(call), call.args[0]
    text = source.data[start : source.start(argument)] + b"parameters" + source.data[source.end(argument) : source.end(call)]
    return f"lambda parameters: {text.decode()}"


def _is_torch(source: SourceText, call: ast.Call) -> bool:
    """Return whether an optimizer is torch's own, and not another library's of that name."""
    name = name_of(call.func)
    imports = [node for node in source.tree.body if isinstance(node, ast.ImportFrom) and node.module == "torch.optim"]
    return name.startswith(("torch.optim.", "optim.")) or any(alias.name == name for n in imports for alias in n.names)


def _options(source: SourceText, plain: PlainLoop) -> str:
    clip = [f"clip={plain.clip}"] if plain.clip else []
    fast = any(word in source.data for word in (b"allow_tf32 = True", b'set_float32_matmul_precision("high")'))
    return ", ".join([*clip, f'precision="{"tf32" if fast else "fp32"}"'])


def _edit_of(source: SourceText, first: ast.stmt, last: ast.stmt, texts: list[str]) -> Edit:
    """Replace whole lines, from those of `first` to those of `last`, by these."""
    indent = source.indent(first)
    return Edit(*source.line_range(first, last), "".join(f"{indent}{text}{source.newline}" for text in texts))


TRAIN_STEP = Patch("step", frozenset({"launch_bound"}), "gb.TrainStep makes the step, as CUDA graphs", propose, equal=False)
