"""A Python file that is edited in places: every byte outside them stays unchanged.

Positions are bytes, as `ast` counts them. An edit is taken only if the file still parses afterwards.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LOOPS = (ast.For, ast.AsyncFor, ast.While)


class Refused(Exception):
    """Raised with the reason why a patch is impossible here, as the end of a sentence."""


class NotHere(Refused):
    """Raised where a line is not of the form that a patch changes."""


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """Replacement of the bytes from `start` to `end` by `text`."""

    start: int
    end: int
    text: str

    def lines(self, source: SourceText) -> int:
        """Return the number of lines that the file gains."""
        return self.text.count("\n") - source.data[self.start : self.end].count(b"\n")

    def removes(self, source: SourceText, line: int) -> bool:
        """Return whether the edit removes a whole line."""
        return not self.text and self.start <= source.line_start(line) and source.line_start(line + 1) <= self.end


class SourceText:
    """A source file: its bytes, its syntax tree, and the positions of nodes."""

    def __init__(self, path: Path, data: bytes | None = None):
        self.path = path
        self.data = path.read_bytes() if data is None else data
        if self.data.startswith(b"\xef\xbb\xbf"):
            raise Refused("the file begins with a byte order mark; remove it first")
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(self.data).readline)
        except SyntaxError as error:
            raise Refused(f"the file does not parse ({error})") from None
        if encoding not in ("utf-8", "ascii"):
            raise Refused(f"the file is in {encoding}; only UTF-8 can be edited byte for byte")
        try:
            self.tree = ast.parse(self.data)
        except (SyntaxError, ValueError) as error:
            raise Refused(f"the file does not parse ({error})") from None
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._starts = [0]
        for line in self.data.splitlines(keepends=True) if b"\r" not in self.data else _lines(self.data):
            self._starts.append(self._starts[-1] + len(line))
        self.newline = "\r\n" if b"\r\n" in self.data else "\n"

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        return self.data[self.start(node) : self.end(node)].decode()

    def line(self, number: int) -> str:
        """Return the text of a line without surrounding white space."""
        return self.data[self.line_start(number) : self.line_start(number + 1)].decode().strip()

    def line_start(self, line: int) -> int:
        return self._starts[min(line, len(self._starts)) - 1]

    def inserted_line(self, line: int, text: str) -> Edit:
        """Return an edit for a new line that becomes number `line`."""
        at = self._starts[line - 1]
        bare = at == len(self.data) and not self.data.endswith((b"\n", b"\r")) and at > 0
        return Edit(at, at, f"{self.newline}{text}" if bare else f"{text}{self.newline}")

    def indent(self, statement: ast.stmt) -> str:
        """Return the white space before a statement in its line."""
        before = self.data[self.line_start(statement.lineno) : self.start(statement)].decode()
        if before.strip():
            raise Refused(f"line {statement.lineno} holds several statements")
        return before

    def line_range(self, first: ast.stmt, last: ast.stmt) -> tuple[int, int]:
        """Return the range of the lines of these statements. Refused if other statements share the lines."""
        self.indent(first)
        start, stop, end = self.line_start(first.lineno), self.end(last), self.line_start((last.end_lineno or 0) + 1)
        rest = self.data[stop:end].decode().strip().removeprefix(";").lstrip()
        if rest and not rest.startswith("#"):
            raise Refused(f"line {last.end_lineno} holds several statements")
        if self.data[:start].rstrip(b"\r\n").endswith(b"\\"):
            raise Refused(f"line {first.lineno} goes on with the line before")
        return start, end

    def check_imports_torch(self) -> None:
        """Raise Refused if the file does not import torch by that name."""
        names = (alias for node in self.tree.body if isinstance(node, ast.Import) for alias in node.names)
        if not any(alias.name.split(".")[0] == "torch" and alias.asname is None for alias in names):
            raise NotHere("the file does not import torch by that name")

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Return the nodes around this one, the nearest first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that a node is in, or is."""
        return next(n for n in (node, *self.above(node)) if isinstance(n, ast.stmt))

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of the same block."""
        fields = (value for _, value in ast.iter_fields(self.parents[statement]) if isinstance(value, list))
        return next(body for body in fields if statement in body)

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function that a node is in, or the module."""
        return next((n for n in self.above(node) if isinstance(n, FUNCTIONS)), self.tree)

    def assigned(self, node: ast.AST, name: str) -> list[ast.expr]:
        """Return the values that are assigned to `name` around a node, except by the statement that the node is."""
        values: list[ast.expr] = []
        for statement in ast.walk(self.tree if "." in name else self.scope(node)):
            pairs: list[tuple[ast.expr, ast.expr]] = []
            if isinstance(statement, ast.Assign) and statement is not node:
                pairs = [(target, statement.value) for target in statement.targets]
            if isinstance(statement, ast.AnnAssign) and statement.value is not None:
                pairs = [(statement.target, statement.value)]
            for target, value in pairs:
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
                    pairs += zip(target.elts, value.elts)  # which this loop then visits
                elif name_of(target) == name:
                    values.append(value)
        return values

    def loop(self, node: ast.AST) -> ast.stmt | None:
        """Return the innermost loop around a node in the same function."""
        for parent in self.above(node):
            if isinstance(parent, FUNCTIONS):
                return None
            if isinstance(parent, LOOPS):
                return parent
        return None

    def calls(self, line: int | None = None) -> list[ast.Call]:
        """Return all calls, or those of the statements (of a block: its header) at `line`, in the order of the file."""
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        if line is not None:
            here = self.statements_at(line)
            nodes = [call for call in nodes if self.statement(call) in here]
        return sorted(nodes, key=lambda call: (call.lineno, call.col_offset))

    def statements_at(self, line: int) -> list[ast.stmt]:
        """Return the innermost statements that cover a line."""
        covering = [n for n in ast.walk(self.tree) if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or 0)]
        if not covering:
            raise Refused(f"there is no statement in line {line}")
        around = {outer for statement in covering for outer in self.above(statement)}
        return [statement for statement in covering if statement not in around]

    def expressions_at(self, line: int) -> list[ast.AST]:
        """Return the nodes of the statements at a line; of a block those of its header alone."""
        nodes = (node for statement in self.statements_at(line) for node in ast.walk(statement))
        return [node for node in nodes if not isinstance(node, ast.stmt) and self.statement(node) in self.statements_at(line)]

    def statement_at(self, line: int, *calling: str) -> ast.stmt:
        """Return the one of `statements_at(line)`; of several, the one that calls any of these names."""
        statements = self.statements_at(line)
        if len(statements) > 1:
            statements = [self.statement(call) for call in self.calls(line) if last_name(call) in calling]
        if len(set(statements)) != 1:
            raise Refused(f"line {line} holds several statements")
        return statements[0]

    def edited(self, edits: Iterable[Edit]) -> bytes:
        """Return the bytes with all edits applied. Refused if they overlap, or if the result does not parse."""
        ordered, at, parts = sorted(set(edits)), 0, []
        for edit in ordered:
            if edit.start < at:
                raise Refused("another patch changes the same place; apply that one first, then look again")
            parts += [self.data[at : edit.start], edit.text.encode()]
            at = edit.end
        data = b"".join([*parts, self.data[at:]])
        try:
            ast.parse(data)
        except SyntaxError as error:
            raise Refused(f"the patched file would not parse ({error.msg}, line {error.lineno})") from None
        return data


def _lines(data: bytes) -> list[bytes]:
    """Split into lines as Python does: at \\r\\n, \\n and \\r."""
    return io.StringIO(data.decode(), newline="").read().encode().splitlines(keepends=True)


def stored(node: ast.AST) -> set[str]:
    """Return the names that are assigned in a node."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def iterated(loop: ast.For) -> tuple[str, list[ast.expr]]:
    """Return "enumerate" and its arguments of `for i, x in tqdm(enumerate(data))`; an empty name for no call."""
    inner: ast.expr = loop.iter
    while isinstance(inner, ast.Call) and last_name(inner) in ("tqdm", "track") and inner.args:
        inner = inner.args[0]
    return (last_name(inner), inner.args) if isinstance(inner, ast.Call) else ("", [])


def called_on(statement: ast.stmt, method: str) -> str:
    """Return "optimizer" of the statement `optimizer.step()`; empty for any other. zero_grad may have arguments."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or last_name(call) != method:
        return ""
    return name_of(call.func.value) if method == "zero_grad" or not (call.args or call.keywords) else ""


def name_of(node: ast.AST) -> str:
    """Return "torch.optim.AdamW" of such a node; empty for anything but names and dots."""
    if isinstance(node, ast.Attribute):
        return f"{base}.{node.attr}" if (base := name_of(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def last_name(call: ast.Call) -> str:
    """Return the name that is called: "item" of `loss.item()`."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else name_of(call.func)


def makers(node: ast.AST) -> Iterator[str]:
    """Yield the names that are called from the outside in: "to", "float", "tensor" of `torch.tensor(x).float().to(device)`."""
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Call):
            yield last_name(node)
            node = node.func
        else:
            node = node.value


def check_moves_tensors(source: SourceText, call: ast.Call) -> None:
    """Raise Refused if `value.to(device)` moves a module, as `Net().cuda()` does: its methods do not wait for pinned memory."""
    assert isinstance(call.func, ast.Attribute)
    name, values = name_of(call.func.value), [call.func.value]
    assignments = [node for node in ast.walk(source.tree) if isinstance(node, ast.Assign)]
    values += [node.value for node in assignments if name and name in map(name_of, node.targets)]
    for maker in (maker for value in values for maker in makers(value)):
        if maker[:1].isupper() and not maker.endswith("Tensor") and maker != "Variable":
            raise Refused(f"it moves what {maker}() makes; move a module once, before the loop")


def constant(node: ast.AST | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def keywords_of(source: SourceText, call: ast.Call) -> dict[str, ast.expr]:
    """Return the values of a call's keywords by name, also of those in the dictionaries that it is given as `**options`."""
    options = {str(constant(key)): value for each in _dictionaries(source, call) for key, value in zip(each.keys, each.values)}
    return options | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}


def with_keywords(source: SourceText, call: ast.Call, needed: str = "", **wanted: str) -> list[Edit]:
    """Return edits after which `call` has these keywords. Existing ones are replaced.

    New ones go into its brackets, or into the dictionary with the keyword `needed`, without which they are refused by the call.
    """
    have = keywords_of(source, call)
    edits = [Edit(source.start(have[name]), source.end(have[name]), text) for name, text in wanted.items() if name in have]
    new = {name: text for name, text in wanted.items() if name not in have}
    shared = [each for each in _dictionaries(source, call) if needed in map(constant, each.keys)]
    if new and shared:
        if not hasattr(shared[-1], "lineno"):  # options["num_workers"] = 1
            raise Refused(f"{needed} is set outside of a dictionary's brackets, perhaps on a condition")
        end, called = source.end(shared[-1].values[-1]), hasattr(shared[-1], "called")
        edits.append(Edit(end, end, "".join(f", {n}={t}" if called else f', "{n}": {t}' for n, t in new.items())))
    elif new:
        edits.append(_appended(source, call, ", ".join(f"{name}={text}" for name, text in new.items())))
    return edits


def with_call(source: SourceText, call: ast.Call, text: str) -> list[Edit]:
    """Return edits that write `text` in place of a call; around it, if the text holds the call unchanged."""
    before, separator, after = text.partition(source.text(call))
    if not separator:
        return [Edit(source.start(call), source.end(call), text)]
    return [Edit(source.start(call), source.start(call), before), Edit(source.end(call), source.end(call), after)]


def _dictionaries(source: SourceText, call: ast.Call) -> list[ast.Dict]:
    """Return the literals that the `**options` of a call are made of. Refused if they may hold anything else."""
    dictionaries: list[ast.Dict] = []
    for keyword in call.keywords:
        if keyword.arg is None:
            literals = _literals(source, name_of(keyword.value), frozenset())
            if literals is None:
                raise Refused(f"line {call.lineno} passes **{source.text(keyword.value)}, which may hold the same names")
            dictionaries += literals
    return dictionaries


def _literals(source: SourceText, name: str, met: frozenset[str]) -> list[ast.Dict] | None:
    """Return the literals that a dictionary of this name is made of: by assignments, and by `update` with others."""
    if not name or name in met:
        return None
    literals: list[ast.Dict] = []
    for value in _values(source, name):
        if isinstance(value, ast.Call) and name_of(value.func) == "dict" and not value.args and value.keywords:
            words = [ast.Constant(keyword.arg) for keyword in value.keywords]
            value, call = ast.Dict(list(words), [keyword.value for keyword in value.keywords]), value
            value.called, value.lineno = True, call.lineno  # type: ignore[attr-defined]
            if None in (word.value for word in words):
                return None  # dict(a=1, **others)
        if isinstance(value, ast.Dict) and all(isinstance(key, ast.Constant) for key in value.keys):
            literals.append(value)
            continue
        other = _literals(source, name_of(value), met | {name})
        if other is None:
            return None
        literals += other
    return literals or None


def _values(source: SourceText, name: str) -> Iterator[ast.expr]:
    """Yield what a name is assigned or updated with; the name itself where it is used in a way that is not understood."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and any(name_of(target) == name for target in node.targets):
            yield from (node.value.body, node.value.orelse) if isinstance(node.value, ast.IfExp) else (node.value,)
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and name_of(node.value) == name:
            call, key = source.parents[node], node.slice if isinstance(node, ast.Subscript) else None
            if isinstance(call, ast.Assign) and isinstance(constant(key), str):  # options["pin_memory"] = True
                yield ast.Dict([key], [call.value])
            else:
                updated = isinstance(node, ast.Attribute) and node.attr == "update" and isinstance(call, ast.Call)
                yield call.args[0] if updated and isinstance(call, ast.Call) and len(call.args) == 1 else node.value


def _appended(source: SourceText, call: ast.Call, text: str) -> Edit:
    """Append an argument after the last token before the closing bracket, past comments and brackets."""
    start = source.start(call)
    segment = source.data[start : source.end(call)]
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.ENDMARKER, tokenize.INDENT, tokenize.DEDENT)
    tokens = [t for t in tokenize.tokenize(io.BytesIO(b"(" + segment + b")").readline) if t.type not in skipped]
    before = tokens[-3]  # then the call's bracket, and the one that is added around it
    lines = (b"(" + segment + b")").splitlines(keepends=True)
    column = len(lines[before.end[0] - 1].decode()[: before.end[1]].encode())
    at = start - 1 + sum(map(len, lines[: before.end[0] - 1])) + column
    first, follows = before.string == "(" and not (call.args or call.keywords), before.string == ","
    return Edit(at, at, text if first else f" {text}," if follows else f", {text}")


def imported(source: SourceText, statement: str) -> list[Edit]:
    """Return an edit that adds an import after the last one at the top of the file; None if it exists."""
    if statement in (source.text(node) for node in source.tree.body):
        return []
    return [_after_imports(source, statement)]


def imported_lines(source: SourceText, *lines: str) -> list[Edit]:
    """Return an edit that adds lines after the last import at the top of the file, with blank ones around them."""
    return [_after_imports(source, source.newline.join(["", *lines, ""]))]


def helper(source: SourceText, name: str, *lines: str) -> list[Edit]:
    """Return an edit that adds a function of this name after the imports; none if the file has it already."""
    names = (n for n in ast.walk(source.tree) if isinstance(n, (ast.Name, ast.FunctionDef)))
    if all((n.id if isinstance(n, ast.Name) else n.name) != name for n in names):
        return imported_lines(source, *lines)
    if not all(line.strip().encode() in source.data for line in lines):
        raise Refused(f"the name {name} is taken in this file")
    return []


def _after_imports(source: SourceText, text: str) -> Edit:
    last = None
    for node in source.tree.body:
        docstring = isinstance(node, ast.Expr) and isinstance(constant(node.value), str)
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (docstring and last is None):
            last = node
    return source.inserted_line(1 if last is None else (last.end_lineno or 0) + 1, text)


def torch_name(source: SourceText) -> str:
    """Return the name by which the file imports torch."""
    for node in source.tree.body:
        for alias in node.names if isinstance(node, ast.Import) else ():
            if alias.name == "torch":
                return alias.asname or "torch"
    raise NotHere("the file does not import torch")


@dataclass(frozen=True)
class Patch:
    """A patch: `propose(source, line)` returns edits, or raises Refused.

    equal: the losses stay equal bit for bit, because the same numbers are computed in the same order; otherwise the rounding
    differs, and a proof needs a tolerance. asked: applied only if the user names it.
    """

    name: str
    kinds: frozenset[str]
    does: str
    propose: Callable[..., list[Edit]]
    equal: bool = True
    asked: bool = False
    pinned: bool = False  # only for a line that was seen to copy pinned memory
    lines: bool = False  # `propose` takes all lines of the finding as well
    via: str = ""  # only for a finding through a file of this folder
    remedy: str = ""  # only for a finding with this remedy
    unless: str = ""  # not for one with this remedy
