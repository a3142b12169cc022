"""Keywords of a call that come through dictionaries: `DataLoader(data, **options)`."""

import ast
from collections.abc import Iterator

from .source import Edit, Refused, SourceText, constant, name_of, with_keywords

LOADING = ("num_workers", "pin_memory")  # names by which the dictionary for new ones is chosen


def dictionaries(source: SourceText, call: ast.Call) -> list[ast.Dict]:
    """Return the literals that the `**options` of a call are made of. Refused if they may hold anything else."""
    found: list[ast.Dict] = []
    for keyword in call.keywords:
        if keyword.arg is None:
            literals = _literals(source, name_of(keyword.value), frozenset())
            if literals is None:
                raise Refused(f"line {call.lineno} passes **{source.text(keyword.value)}, which may hold the same names")
            found += literals
    return found


def _literals(source: SourceText, name: str, met: frozenset[str]) -> list[ast.Dict] | None:
    """Return the literals that a dictionary of this name is made of: by assignments, and by `update` with others."""
    if not name or name in met:
        return None
    found: list[ast.Dict] = []
    for value in _values(source, name):
        if isinstance(value, ast.Dict) and all(isinstance(key, ast.Constant) for key in value.keys):
            found.append(value)
            continue
        other = _literals(source, name_of(value), met | {name})
        if other is None:
            return None
        found += other
    return found or None


def _values(source: SourceText, name: str) -> Iterator[ast.expr]:
    """Yield what a name is assigned or updated with; the name itself where it is used in a way that is not understood."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and any(name_of(target) == name for target in node.targets):
            yield from (node.value.body, node.value.orelse) if isinstance(node.value, ast.IfExp) else (node.value,)
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and name_of(node.value) == name:
            call = source.parents[node]
            updated = isinstance(node, ast.Attribute) and node.attr == "update" and isinstance(call, ast.Call)
            yield call.args[0] if updated and isinstance(call, ast.Call) and len(call.args) == 1 else node.value


def options_of(source: SourceText, call: ast.Call) -> dict[str, ast.expr]:
    """Return the values of a call's keywords by name, also of those in its dictionaries."""
    held = {str(constant(key)): value for each in dictionaries(source, call) for key, value in zip(each.keys, each.values)}
    return held | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}


def with_options(source: SourceText, call: ast.Call, **wanted: str) -> list[Edit]:
    """Return edits after which `call` has these keywords, in its brackets or in the dictionaries that it is given."""
    if all(keyword.arg is not None for keyword in call.keywords):
        return with_keywords(source, call, **wanted)
    have = options_of(source, call)
    edits = [Edit(source.start(have[name]), source.end(have[name]), text) for name, text in wanted.items() if name in have]
    filled = [each for each in dictionaries(source, call) if each.keys]
    if added := "".join(f', "{name}": {text}' for name, text in wanted.items() if name not in have):
        if not filled:
            raise Refused(f"line {call.lineno} passes dictionaries that are empty")
        chosen = max(filled, key=lambda each: sum(constant(key) in LOADING for key in each.keys))
        end = source.end(chosen.values[-1])
        edits.append(Edit(end, end, added))
    return edits
