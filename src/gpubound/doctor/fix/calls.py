"""Patches of one call or one line: waits, zeroed gradients, optimizers, averages, the precision of products, and what is shown,
collected and written later.

A line that only shows or collects what it reads runs when the values have arrived, a few steps later and in order:

    print(f"{step} {loss.item()}")     read_later(lambda loss, step=step: print(f"{step} {loss.item()}"), loss)

Files are written while the loop goes on:

    torch.save(net.state_dict(), path)             write_later(torch.save, net.state_dict(), path)
    save_image(x, path, normalize=True)            write_later(save_image, x, path, normalize=True)

What is written is a copy, made on the device when the line runs: later steps change the weights. One thread writes one file
after another, and what fails is raised at the next call, or when Python ends. Taken only where nothing in the script may read
what was written, and where no other stream and no graph is used: the thread launches on the default stream.
"""

import ast
import builtins
import copy

from .reads import AWAITED, in_every_step, own_names, scope_of, uses_of
from .source import (
    LOOPS,
    Edit,
    NotHere,
    Patch,
    Refused,
    SourceText,
    called_on,
    constant,
    helper,
    imported,
    imported_lines,
    iterated,
    keywords_of,
    last_name,
    name_of,
    stored,
    torch_name,
    with_call,
    with_keywords,
)

WAITING = ("synchronize", "empty_cache")
CLOCKS = ("time", "perf_counter", "perf_counter_ns", "monotonic", "time_ns", "elapsed_time")


def propose_waits(source: SourceText, line: int) -> list[Edit]:
    statement = source.statement_at(line, *WAITING)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or last_name(call) not in WAITING:
        raise NotHere(f"the line is no plain {' or '.join(f'{name}()' for name in WAITING)}")
    if not source.text(call.func).startswith(("torch.", "cuda.")):
        raise Refused("the line waits for one stream or event, which may order a read after a copy")
    if last_name(call) == "synchronize" and (other := _needs_order(source)):
        raise Refused(f"line {other} works on another stream or copies to the host without waiting, and may rely on it")
    block = source.block(statement)
    if _is_timed(source, statement):
        raise Refused("a clock is read next to it, which would then time launches instead of work")
    if len(block) == 1:
        return [Edit(source.start(statement), source.end(statement), "pass")]
    return [Edit(*source.line_range(statement, statement), "")]


def _needs_order(source: SourceText) -> int:
    """Return the first line of the file that might be wrong without a wait; 0 for none."""
    for call in source.calls():
        late = any(keyword.arg == "non_blocking" and constant(keyword.value) is not False for keyword in call.keywords)
        to_host = last_name(call) in ("copy_", "cpu") or any(constant(node) == "cpu" for node in ast.walk(call))
        if last_name(call) == "Stream" or (late and to_host):
            return call.lineno
    return 0


def _is_timed(source: SourceText, statement: ast.stmt) -> bool:
    """Return whether the statement right before or after reads a clock; of a block of one statement, that around the block."""
    block, around = source.block(statement), source.parents.get(statement)
    if len(block) == 1 and isinstance(around, ast.If) and _is_timed(source, around):
        return True
    at = block.index(statement)
    neighbours = [*block[max(0, at - 1) : at], *block[at + 1 : at + 2]]
    return any(isinstance(node, ast.Call) and last_name(node) in CLOCKS for near in neighbours for node in ast.walk(near))


WAITS = Patch("waits", frozenset({"sync", "free"}), "the host goes on at once", propose_waits)


def propose_zero_grad(source: SourceText, line: int) -> list[Edit]:
    calls = [call for call in source.calls(line) if last_name(call) == "zero_grad"]
    for call in calls:
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        if len(values) == 1 and constant(values[0]) is False:
            assert isinstance(call.func, ast.Attribute)
            return [Edit(source.end(call.func), source.end(call), "()")]
    raise NotHere("no zero_grad(set_to_none=False) is written in this line")


ZERO_GRAD = Patch("zero_grad", frozenset({"optimizer", "zero_grad"}), "gradients are made anew", propose_zero_grad)


FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


def propose_optimizer(source: SourceText, line: int) -> list[Edit]:
    optimizers = [call for call in source.calls() if last_name(call) in FUSED]
    here = [call for call in source.calls(line) if call in optimizers]
    candidates = here or optimizers
    if len(candidates) != 1:
        raise Refused(f"{len(candidates) or 'none'} of {', '.join(FUSED)} is made in this file, wanted one")
    (call,) = candidates
    have = keywords_of(source, call)
    if (old := have.get("foreach")) is None:
        return with_keywords(source, call, fused="True")
    if "fused" in have:
        raise Refused(f"line {call.lineno} passes both foreach and fused; leave foreach out and set fused=True")
    at = source.start(old) - len("foreach=")
    if source.data[at : source.start(old)] != b"foreach=":
        raise Refused(f"line {call.lineno} writes foreach in an unusual way; set fused=True there")
    return [Edit(at, source.end(old), "fused=True")]


OPTIMIZER = Patch("optimizer", frozenset({"optimizer"}), "one kernel updates all parameters", propose_optimizer, equal=False)


LINE = 'torch.set_float32_matmul_precision("high")'


def propose_precision(source: SourceText, line: int) -> list[Edit]:
    if b"set_float32_matmul_precision" in source.data or b"allow_tf32" in source.data or b"fp32_precision" in source.data:
        raise Refused("the file sets the precision of fp32 products itself")
    source.check_imports_torch()
    return imported(source, LINE)


TF32 = Patch("tf32", frozenset({"precision"}), "fp32 products run in TF32", propose_precision, equal=False, asked=True)


BLOCK = 'with torch.autocast("cuda", dtype=torch.bfloat16):'
UNSAFE = ("binary_cross_entropy", "BCELoss")  # torch refuses them under autocast


def propose_autocast(source: SourceText, line: int) -> list[Edit]:
    """Propose to run the forward and the loss of a loop in bf16 where torch's autocast does so: it changes the numbers."""
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


BF16 = Patch(
    "bf16", frozenset({"precision"}), "forward and loss run under autocast to bf16", propose_autocast, equal=False, asked=True
)


def propose_foreach(source: SourceText, line: int) -> list[Edit]:
    """Propose one call for all parameters of a moving average: `p.data.copy_(p.data * d + q.data * (1 - d))` for each pair.

    The products and sums are the same, so their bits are. A sum with `alpha=` may be rounded once or twice, so it is left.
    """
    torch, statement = torch_name(source), source.statement_at(line, "copy_")
    loop, over, lists = source.parents[statement], dict[str, str](), dict[str, str]()
    match loop:
        case ast.For(target=ast.Tuple(elts=names), iter=ast.Call(func=ast.Name(id="zip"), args=models), body=[_], orelse=[]):
            over = {name_of(name): source.text(model) for name, model in zip(names, models) if name_of(name)}
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=target, attr="copy_"), args=[value], keywords=[])):
            pass
        case ast.Assign(targets=[ast.Attribute(attr="data") as target], value=value):
            pass
        case _:
            over = {}
    if len(over) != 2 or not all(text.endswith(".parameters()") for text in over.values()):
        raise NotHere("wanted a loop over zip(a.parameters(), b.parameters()) that writes each parameter of one")

    def together(node: ast.expr) -> str:
        if (name := name_of(node).removesuffix(".data")) in over:
            lists.setdefault(name, f"[{source.text(node)} for {name} in {over[name]}]")
            return name
        match node:
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return f"{torch}._foreach_add({together(left)}, {together(right)})"
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                tensor, factor = (left, right) if name_of(left).removesuffix(".data") in over else (right, left)
                if not over.keys() & {n.id for n in ast.walk(factor) if isinstance(n, ast.Name)}:
                    return f"{torch}._foreach_mul({together(tensor)}, {source.text(factor)})"
        raise Refused(f"{source.text(node)} is no sum of parameters times numbers")

    assert isinstance(loop, ast.stmt)
    call = f"{torch}._foreach_copy_({together(target)}, {together(value)})"
    lines = [f"{', '.join(lists)} = {', '.join(lists.values())}", call]
    text = "".join(f"{source.indent(loop)}{each}{source.newline}" for each in lines)
    return [Edit(*source.line_range(loop, loop), text)]


UNCHECKED = "torch.distributions.Distribution.set_default_validate_args(False)"


def propose_unchecked(source: SourceText, line: int) -> list[Edit]:
    """Propose not to validate the parameters of distributions, which reads the device for each."""
    if UNCHECKED.encode() in source.data:
        return []
    source.check_imports_torch()
    if b"validate_args" in source.data:
        raise Refused("the file chooses itself what is validated")
    return imported_lines(source, UNCHECKED)


FOREACH = Patch("foreach", frozenset({"launch"}), "one call averages all parameters", propose_foreach)
UNVALIDATED = Patch(
    "unvalidated", frozenset({"sync"}), "distributions do not validate their parameters", propose_unchecked,
    via="torch/distributions/",
)  # fmt: skip


EVERY = 50  # steps from one print to the next
SHOWING = (
    "print", "write", "info", "debug", "log", "add_scalar", "add_scalars", "set_postfix", "set_postfix_str", "set_description",
)  # fmt: skip


def propose_rarely(source: SourceText, line: int) -> list[Edit]:
    """Propose to show what is shown in every step in every fiftieth one alone, by the counter of the loop."""
    statement = source.statement_at(line, *SHOWING)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or last_name(call) not in SHOWING:
        raise NotHere("the line does not print or log by itself")
    loop = source.loop(statement)
    if not isinstance(loop, ast.For) or not in_every_step(source, statement, loop):
        raise NotHere("the line is in no for loop, or not in every step of it")
    over, _ = iterated(loop)
    target = loop.target.elts[0] if over == "enumerate" and isinstance(loop.target, ast.Tuple) else loop.target
    if over not in ("range", "trange", "enumerate") or not isinstance(target, ast.Name):
        raise Refused("the loop has no counter; write for step, batch in enumerate(...)")
    if (
        any(isinstance(node, ast.Constant) and "\n" in str(node.value) for node in ast.walk(call))
        and call.end_lineno != call.lineno
    ):
        raise Refused("the line holds a text of several lines")
    indent, (start, end) = source.indent(statement), source.line_range(statement, statement)
    lines = source.data[start:end].decode().splitlines(keepends=True)
    return [
        Edit(start, end, f"{indent}if {target.id} % {EVERY} == 0:{source.newline}" + "".join(f"    {each}" for each in lines))
    ]


RARELY = Patch("rarely", frozenset({"sync", "d2h"}), f"it is shown every {EVERY} steps", propose_rarely, asked=True)


AWAITED_HELPER = f"""\
def {AWAITED}(use=None, *values):  # calls use(*values) when they have arrived; without arguments: with all that are left
    queue = {AWAITED}.queue
    if use is not None:
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        sent = [v.detach().to("cpu", copy=True, non_blocking=v.is_cuda) for v in tensors]
        copies = [sent.pop(0) if isinstance(v, torch.Tensor) else v for v in values]
        devices = dict.fromkeys(v.device for v in tensors if v.is_cuda)
        queue.append((use, copies, [torch.cuda.current_stream(each).record_event() for each in devices]))
    while queue and (use is None or len(queue) > 32 or all(event.query() for event in queue[0][2])):
        then, copies, events = queue.pop(0)
        for event in events:
            if not event.query():
                event.synchronize()
        then(*(v.clone() if isinstance(v, torch.Tensor) else v for v in copies))  # their pinned memory is used again


{AWAITED}.queue = []
__import__("atexit").register({AWAITED})
"""
COLLECTING = ("append", "extend", "update")  # update of a Counter, a set or a dictionary
PURE = frozenset(("round", "abs", "min", "max", "str", "len", "float", "int", "bool", "list", "sum"))
INNER = frozenset(("items", "values", "parameters", "named_parameters", "zip"))  # loops over these are parts of a step


def propose_read_later(source: SourceText, line: int) -> list[Edit]:
    """Propose to show or collect what a line reads when it has arrived: the same text and values, a few steps later."""
    statement = source.statement_at(line, *SHOWING, *COLLECTING)
    shows, value = [statement], {}
    if isinstance(statement, ast.Assign) and name_of(statement.targets[0]) and _reads(statement.value, {}):
        value = {name_of(statement.targets[0]): statement.value}
        shows = _shows_of(source, statement, *value)
    calls = [each.value for each in shows if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)]
    names = {last_name(call) for call in calls}
    if not calls or len(calls) != len(shows) or not names <= {*SHOWING, *COLLECTING}:
        raise NotHere("the line does more than show or collect what it reads")
    if any(name_of(call.func) == "self.log" for call in calls):
        raise Refused("Lightning and Trainer take what is logged at once")
    if any(each not in (statement, *shows) and _reads(each, {}) for each in source.statements_at(line)):
        raise Refused(f"line {line} holds several statements")  # one of the others would wait all the same
    source.check_imports_torch()
    loop = source.loop(statement)
    if loop is None:
        raise Refused("the loop around this line is in another function, in which it would be shown too late")
    over = iterated(loop)[0] if isinstance(loop, ast.For) else ""
    if over in INNER and source.loop(loop) is not None:
        raise Refused("the loop around this line is a part of a step; read all of its values at once")
    owners = {n.id for call in calls for n in ast.walk(call.func) if isinstance(n, ast.Name)}
    if changed := owners & stored(loop):
        raise Refused(f"{min(changed)} is another object in each step")
    for call in calls if names & {*COLLECTING} else ():
        _check_collected(source, statement, call, loop)
    edits = [] if not value else [Edit(*source.line_range(statement, statement), "")]
    for call in calls:
        edits += with_call(source, call, _awaited(source, call, value, loop))
    after = f"{source.indent(loop)}{AWAITED}()"
    end = (loop.end_lineno or 0) + 1
    if source.line(end) != after.strip():
        edits.append(source.inserted_line(end, after))
    return [*edits, *helper(source, AWAITED, *AWAITED_HELPER.splitlines())]


def _shows_of(source: SourceText, statement: ast.Assign, name: str) -> list[ast.stmt]:
    """Return the statements right after one that make all use of the name that it assigns."""
    block, uses = source.block(statement), {id(source.statement(use)) for use in uses_of(source, statement, name)}
    shows = block[block.index(statement) + 1 :][: len(uses)]
    if not uses or {id(each) for each in shows} != uses:
        raise Refused(f"{name} is used for more than to be shown right after")
    return shows


def _check_collected(source: SourceText, statement: ast.stmt, call: ast.Call, loop: ast.stmt) -> None:
    """Raise Refused unless what is collected is first used after the loop."""
    assert isinstance(call.func, ast.Attribute)
    values, scope = call.func.value, source.scope(statement)
    root = values.value if isinstance(values, ast.Subscript) and constant(values.slice) is not None else values
    if not isinstance(root, ast.Name):
        raise Refused(f"{source.text(values)} is no name of a list or of a dictionary of lists")
    types = [last_name(each) if isinstance(each, ast.Call) else type(each).__name__ for each in source.assigned(call, root.id)]
    if call.func.attr == "update" and not (types and {*types} <= {"Counter", "set", "dict", "Dict"}):
        raise NotHere(f"{root.id} may be more than a Counter, a set or a dictionary")
    for outer in source.above(loop):
        if isinstance(outer, (ast.Try, ast.TryStar)) and source.scope(outer) is scope:
            raise Refused(f"the loop is inside a try: after an exception {root.id} would lack the last values")
    for node in ast.walk(loop):
        if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)) and source.scope(node) is scope:
            raise Refused(f"line {node.lineno} leaves the loop, in which {root.id} would lack the last values")
    for node in ast.walk(source.tree) if root.id not in own_names(scope) else ():
        other = scope_of(source, node) if isinstance(node, ast.Name) and node.id == root.id else scope
        if other not in (scope, source.tree) and root.id not in own_names(other):
            raise Refused(f"{root.id} is used in another function, in line {node.lineno}")  # type: ignore[attr-defined]
    for use in uses_of(source, statement, root.id):
        holder = source.parents[use] if root is not values else use
        within, appended = loop in source.above(use), source.parents[holder]
        collecting = isinstance(appended, ast.Attribute) and appended.attr in COLLECTING and root is not values
        if within and (not collecting or source.text(holder) == source.text(values)):  # type: ignore[arg-type]
            raise Refused(f"{root.id} is used inside the loop, in line {use.lineno}")


def _awaited(source: SourceText, call: ast.Call, value: dict[str, ast.expr], loop: ast.stmt) -> str:
    """Return the call of read_later for one that shows or collects: what it reads are arguments, all else is known now."""
    reads, known = dict[str, str](), dict[str, str]()

    def named(node: ast.expr, kind: dict[str, str]) -> ast.expr:
        text = ast.unparse(node)
        first = next((n.id for n in ast.walk(node) if isinstance(n, ast.Name)), "value")
        name = first if isinstance(node, ast.Name) or (kind is reads and not hasattr(builtins, first)) else "value"
        while text != {**reads, **known}.get(name, text) or name in (known if kind is reads else reads):
            name = f"{name.rstrip('0123456789')}{len(reads) + len(known)}"
        kind[name] = text
        return ast.Name(name, ast.Load())

    def split(node: ast.expr, formatted: bool = False) -> ast.expr:
        if isinstance(node, ast.Name) and node.id in value:
            return split(copy.deepcopy(value[node.id]))
        if isinstance(node, ast.Constant):
            return node
        if isinstance(node, ast.Call) and last_name(node) in READERS and not node.keywords:
            if isinstance(node.func, ast.Attribute) and not node.args and not _reads(node.func.value, value):
                node.func.value = named(node.func.value, reads)
                return node
            if isinstance(node.func, ast.Name) and len(node.args) == 1 and not _reads(node.args[0], value):
                node.args = [named(node.args[0], reads)]
                return node
        if not _reads(node, value) and not isinstance(node, (ast.JoinedStr, ast.Tuple, ast.BinOp)):
            _check_same(source, node, loop)
            return named(node, reads if formatted and isinstance(node, ast.Name) else known)
        match node:
            case ast.JoinedStr(values=parts):
                for part in parts:
                    if isinstance(part, ast.FormattedValue):
                        part.value = split(part.value, True)
            case ast.BinOp(left=left, right=right):
                text = isinstance(node.op, ast.Mod) and isinstance(constant(left), str)
                node.left, node.right = split(left, formatted), split(right, formatted or text)
            case ast.UnaryOp(operand=operand):
                node.operand = split(operand)
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                node.elts = [split(each, formatted) for each in elts]
            case ast.Dict(values=values):
                node.values = [split(each) for each in values]
            case ast.Subscript(value=inner):
                node.value = split(inner)
            case ast.Call(func=ast.Attribute(value=inner)) if _reads(inner, value) or isinstance(constant(inner), str):
                node.func.value = split(inner)  # type: ignore[attr-defined]
                arguments(node, isinstance(constant(inner), str))
            case ast.Call(func=called) if name_of(called) in PURE or name_of(called).split(".")[0] in ("math", "np", "numpy"):
                arguments(node)
            case _:
                raise Refused(f"line {call.lineno} reads a value inside {ast.unparse(node)}")
        return node

    def arguments(node: ast.Call, formatted: bool = False) -> None:
        node.args = [split(each, formatted) for each in node.args]
        for keyword in node.keywords:
            keyword.value = split(keyword.value, formatted)

    shown = copy.deepcopy(call)
    arguments(shown)
    if not reads:
        raise NotHere("no .item() or .cpu() is written in this line")
    text = ast.unparse(shown)
    text = source.text(call) if text == ast.unparse(call) else text
    parameters = ", ".join([*reads, *(f"{name}={known[name]}" for name in known)])
    return f"{AWAITED}(lambda {parameters}: {text}, {', '.join(reads.values())})"


READERS = frozenset(("item", "cpu", "tolist", "float", "int"))


def _reads(node: ast.AST, value: dict[str, ast.expr]) -> bool:
    """Return whether an expression reads a value of the device, or holds a name whose value does."""
    return any(
        (isinstance(each, ast.Call) and last_name(each) in READERS) or (isinstance(each, ast.Name) and each.id in value)
        for each in ast.walk(node)
    )


CHANGING = ("append", "extend", "update", "add_", "mul_", "copy_", "pop", "clear", "step")


def _check_same(source: SourceText, node: ast.expr, loop: ast.stmt) -> None:
    """Raise Refused if an object that is shown is changed in the loop, so that it would be shown with later values."""
    if not isinstance(node, ast.Name):
        return  # an expression has its value now
    for each in ast.walk(loop):
        if isinstance(each, ast.withitem) and each.optional_vars is not None and node.id in stored(each.optional_vars):
            raise Refused(f"{node.id} ends with its block, before it would be used")
        method = isinstance(each, ast.Attribute) and each.attr in CHANGING
        written = isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store)
        if (method or written) and node.id == next((n.id for n in ast.walk(each) if isinstance(n, ast.Name)), ""):
            raise Refused(f"{node.id} is changed in line {each.lineno} before it would be shown")  # type: ignore[attr-defined]


READ_LATER = Patch(
    "read_later", frozenset({"sync", "d2h"}), "it is shown or collected when it has arrived, a few steps later",
    propose_read_later,
)  # fmt: skip


WRITE_LATER = "write_later"
HELPER = f"""\
import atexit
import copy
from concurrent.futures import ThreadPoolExecutor

_writer, _written = ThreadPoolExecutor(1), []
atexit.register(lambda: [each.result() for each in _written])


def {WRITE_LATER}(write, value, *arguments, **options):
    while _written and (len(_written) > 3 or _written[0].done()):  # few copies at a time
        _written.pop(0).result()  # raises what went wrong
    value = value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
    _written.append(_writer.submit(write, value, *arguments, **options))
"""
READING = (
    "load", "open", "exists", "isfile", "getsize", "listdir", "glob", "iterdir", "remove", "unlink", "rmtree", "copy", "copy2",
    "copyfile", "copytree", "move", "rename", "replace", "run", "call", "system", "Popen", "upload_file",
)  # fmt: skip
STREAMS = (
    b"cuda.Stream", b"cuda.stream(", b"CUDAGraph", b"cuda.graph", b"make_graphed_callables", b"gpubound", b"torch.compile",
)  # fmt: skip


def propose_later(source: SourceText, line: int) -> list[Edit]:
    statement = source.statement_at(line, "save", "save_image", WRITE_LATER)
    if (call := _called(statement)) is not None and last_name(call) == WRITE_LATER:
        return []  # together with another finding of the line
    scope = source.scope(statement)
    loops = [outer for outer in source.above(statement) if isinstance(outer, LOOPS) and source.scope(outer) is scope]
    if not _writes(statement) or not (loops or scope is not source.tree):
        raise NotHere("wanted torch.save(value, path) or save_image(value, path) in a loop or a function")
    first = loops[-1].lineno if loops else 0
    reading = {*READING} - {n.name for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef)}  # whose bodies are here
    source.check_imports_torch()
    if any(word in source.data for word in STREAMS):
        raise Refused("the file uses streams or graphs, which work of another thread may disturb")
    for other in source.calls():
        within = source.scope(other) is not source.tree or other.lineno >= first
        mode = constant(other.args[1]) if len(other.args) > 1 else None
        writes = last_name(other) == "open" and str(mode).startswith(("w", "a"))
        if within and last_name(other) in reading and not writes:
            raise Refused(f"line {other.lineno} may read what is written: {last_name(other)}()")
    has_helper = f"def {WRITE_LATER}(".encode() in source.data
    used = {WRITE_LATER, "_writer", "_written", "atexit", "copy", "ThreadPoolExecutor"} & {
        n.id
        for n in ast.walk(source.tree)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and _is_global(source, n)
    }
    if used and not has_helper:
        raise Refused(f"the name {min(used)} is taken in this file")
    edits = [] if has_helper else imported_lines(source, *HELPER.splitlines())
    for each in source.block(statement):
        if (writing := _called(each)) is not None and _writes(each):
            start, function = source.start(writing), source.end(writing.func)
            bracket = source.data.index(b"(", function)
            edits.append(Edit(start, bracket + 1, f"{WRITE_LATER}({source.text(writing.func)}, "))
    return edits


def _is_global(source: SourceText, name: ast.Name) -> bool:
    """Return whether a name is the module's, so that all functions read what it gets."""
    scope = source.scope(name)
    return scope is source.tree or any(isinstance(n, ast.Global) and name.id in n.names for n in ast.walk(scope))


def _called(statement: ast.stmt) -> ast.Call | None:
    return statement.value if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else None


def _writes(statement: ast.stmt) -> bool:
    """Return whether a statement writes its first argument into a file, whose path is written here."""
    call = _called(statement)
    if call is None or len(call.args) < 2 or any(isinstance(each, ast.Starred) for each in call.args):
        return False
    path = call.args[1]
    joined = isinstance(path, ast.Call) and name_of(path.func) in ("os.path.join", "str")
    text = isinstance(path, (ast.JoinedStr, ast.BinOp)) or (isinstance(path, ast.Constant) and isinstance(path.value, str))
    named = name_of(path).endswith(("path", "filename", "file_name"))
    return (name_of(call.func) == "torch.save" or last_name(call) == "save_image") and (joined or text or named)


LATER = Patch(
    "later", frozenset({"checkpoint", "host_work", "d2h", "sync"}), "a copy is written in another thread", propose_later
)  # fmt: skip
