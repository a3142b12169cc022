"""Let gb.feed have the batches on the device before the loop asks for them."""

import ast

from .patch import Patch
from .source import Edit, Refused, SourceText, constant, imported, last_name, name_of

IMPORT = "import gpubound as gb"


def propose(source: SourceText, line: int) -> list[Edit]:
    loop = _loop(source, line)
    name = _fed(loop)
    scope = source.scope(loop)
    _check_made(source, scope, name)
    _check_uses(source, scope, name)
    _check_batches(source, loop)
    device = _device(source, loop)
    outermost = [node for node in (loop, *source.above(loop)) if isinstance(node, (ast.For, ast.While))][-1]
    if not _is_known(source, scope, device, outermost.lineno):
        raise Refused(f"the device `{device}` is not known before line {outermost.lineno}")
    if "gb" in {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name)} and not imports_gb(source):
        raise Refused("the name gb is taken in this file")
    made = f"{source.indent(outermost)}{name} = gb.feed({name}, {device})"
    return [*imported(source, IMPORT), source.inserted_line(outermost.lineno, made)]


def imports_gb(source: SourceText) -> bool:
    return IMPORT in (source.text(node) for node in source.tree.body)


def _loop(source: SourceText, line: int) -> ast.For:
    statement = source.statements_at(line)[0]  # those beside it are in the same loops
    scope = source.scope(statement)
    for node in (statement, *source.above(statement)):
        if node is scope:
            break
        if isinstance(node, ast.For):
            return node
    raise Refused("the loop over the batches is in another function; put gb.feed(batches, device) there")


def _fed(loop: ast.For) -> str:
    """The name that a loop goes over: `for ... in name`, or `in enumerate(name)`."""
    over = loop.iter
    if isinstance(over, ast.Call) and name_of(over.func) == "enumerate" and over.args:
        over = over.args[0]
    if not isinstance(over, ast.Name):
        raise Refused("the loop does not go over a name; put gb.feed around what it goes over")
    return over.id


def _check_made(source: SourceText, scope: ast.AST, name: str) -> None:
    """Only what surely yields the same batches in the same order when it is fed: a list, or a loader that does not shuffle."""
    made = [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign) and any(name_of(target) == name for target in node.targets)
    ]
    if len(made) != 1:
        raise Refused(f"{name} is assigned {len(made)} times in this function, wanted once")
    value = made[0].value
    if isinstance(value, (ast.List, ast.ListComp)):
        return
    if not isinstance(value, ast.Call) or last_name(value) != "DataLoader":
        raise Refused(f"{name} is neither a list nor a DataLoader")
    options = {keyword.arg: keyword.value for keyword in value.keywords}
    if set(options) & {"sampler", "batch_sampler", None} or constant(options.get("shuffle", ast.Constant(False))) is not False:
        raise Refused("the loader shuffles: gb.feed orders its batches by a seed of its own, so losses could not be compared")


def _check_uses(source: SourceText, scope: ast.AST, name: str) -> None:
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            parent = source.parents[node]
            counted = isinstance(parent, ast.Call) and name_of(parent.func) in ("len", "enumerate")
            if not counted and not isinstance(parent, ast.For):
                raise Refused(f"{name} is used in another way in line {node.lineno}")


def _check_batches(source: SourceText, loop: ast.For) -> None:
    """All of a fed batch lies on the device. Before a name in it is given something else, the loop may only copy it there."""
    numbered = isinstance(loop.iter, ast.Call) and isinstance(loop.target, ast.Tuple)  # for number, batch in enumerate(...)
    batch = loop.target.elts[1:] if numbered and isinstance(loop.target, ast.Tuple) else [loop.target]
    names = {node.id for part in batch for node in ast.walk(part) if isinstance(node, ast.Name)}
    found = [node for part in loop.body for node in ast.walk(part) if isinstance(node, ast.Name) and node.id in names]
    for node in found:
        statement, parent = source.statement(node), source.parents[node]
        given = any(other.id == node.id and isinstance(other.ctx, ast.Store) and other.lineno < node.lineno for other in found)
        copied = any(isinstance(call, ast.Call) and last_name(call) == "to" for call in ast.walk(statement))
        asked = isinstance(parent, ast.Attribute) and parent.attr in ("shape", "size", "numel")
        counted = isinstance(parent, ast.Call) and name_of(parent.func) == "len"
        if isinstance(node.ctx, ast.Load) and not (given or copied or asked or counted):
            raise Refused(f"{node.id} may be wanted on the host, in line {node.lineno}")


def _device(source: SourceText, loop: ast.For) -> str:
    """What the loop's body copies to, as it is written there."""
    copies = [n for n in ast.walk(loop) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.args]
    found = {source.text(copy.args[0]) for copy in copies if last_name(copy) == "to"}
    if len(found) != 1:
        raise Refused("the loop does not copy to one device by .to(device)")
    return found.pop()


def _is_known(source: SourceText, scope: ast.AST, device: str, line: int) -> bool:
    if device[:1] in "'\"":
        return True
    places = [scope, source.tree]
    stored = {
        node.id
        for place in places
        for node in ast.walk(place)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.lineno < line
    }
    taken = {node.arg for node in ast.walk(scope) if isinstance(node, ast.arg)}
    return device in stored | taken


PATCH = Patch(
    "feed", frozenset({"h2d", "pageable", "repeat", "data"}), "batches are on the device before the loop asks", propose
)
