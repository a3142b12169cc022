"""Write files in another thread, while the loop goes on.

    torch.save(net.state_dict(), path)             write_later(torch.save, net.state_dict(), path)
    save_image(x, path, normalize=True)            write_later(save_image, x, path, normalize=True)

What is written is a copy, made on the device when the line runs: later steps change the weights. One thread writes one file
after another, and what fails is raised at the next call, or when Python ends. Taken only where nothing in the script may read
what was written, and where no other stream and no graph is used: the thread launches on the default stream.
"""

import ast

from .source import LOOPS, Edit, Patch, Refused, SourceText, imported_lines, last_name, name_of

NAME = "write_later"
HELPER = f"""\
import atexit
import copy
from concurrent.futures import ThreadPoolExecutor

_writer, _written = ThreadPoolExecutor(1), []
atexit.register(lambda: [each.result() for each in _written])


def {NAME}(write, value, *arguments, **options):
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


def propose(source: SourceText, line: int) -> list[Edit]:
    statement = source.statement_at(line, "save", "save_image", NAME)
    if (call := _called(statement)) is not None and last_name(call) == NAME:
        return []  # together with another finding of the line
    loops = [outer for outer in source.above(statement) if isinstance(outer, LOOPS)]
    if not _writes(statement) or not loops or source.scope(statement) is not source.scope(loops[-1]):
        raise Refused("wanted torch.save(value, path) or save_image(value, path) in a loop")
    source.check_imports_torch()
    if any(word in source.data for word in STREAMS):
        raise Refused("the file uses streams or graphs, which work of another thread may disturb")
    for other in source.calls():
        within = source.scope(other) is not source.tree or other.lineno >= loops[-1].lineno
        if within and last_name(other) in READING:
            raise Refused(f"line {other.lineno} may read what is written: {last_name(other)}()")
    has_helper = f"def {NAME}(".encode() in source.data
    used = {NAME, "_writer", "_written", "atexit", "copy", "ThreadPoolExecutor"} & {
        n.id for n in ast.walk(source.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    if used and not has_helper:
        raise Refused(f"the name {min(used)} is taken in this file")
    edits = [] if has_helper else imported_lines(source, *HELPER.splitlines())
    for each in source.block(statement):
        if (writing := _called(each)) is not None and _writes(each):
            start, function = source.start(writing), source.end(writing.func)
            bracket = source.data.index(b"(", function)
            edits.append(Edit(start, bracket + 1, f"{NAME}({source.text(writing.func)}, "))
    return edits


def _called(statement: ast.stmt) -> ast.Call | None:
    return statement.value if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else None


def _writes(statement: ast.stmt) -> bool:
    """Return whether a statement writes its first argument into a file, whose path is written here."""
    call = _called(statement)
    if call is None or len(call.args) < 2 or any(isinstance(each, ast.Starred) for each in call.args):
        return False
    path = call.args[1]
    joined = isinstance(path, ast.Call) and name_of(path.func) == "os.path.join"
    text = isinstance(path, (ast.JoinedStr, ast.BinOp)) or (isinstance(path, ast.Constant) and isinstance(path.value, str))
    return (name_of(call.func) == "torch.save" or last_name(call) == "save_image") and (joined or text)


LATER = Patch(
    "later", frozenset({"checkpoint", "host_work", "d2h", "sync"}), "a copy is written in another thread", propose
)  # fmt: skip
