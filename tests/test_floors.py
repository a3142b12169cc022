"""Every module imports only from floors below its own, and no modules import each other in a circle."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import gpubound

ROOT = Path(gpubound.__file__).parent
FLOORS = [
    ["errors", "version"],  # the ground floor, in five steps
    ["trace", "formatting"],
    ["files"],
    ["pages"],
    ["device"],
    ["kernels", "data", "measure", "watch"],
    ["graph", "layers"],
    ["lora"],
    ["models"],  # a family knows nothing of how it is placed, decoded or trained
    ["place"],
    ["distributed"],
    ["train", "decode"],
    ["models.deepseek_v4.decode", "models.diffusion", "models.richards.module_runner"],  # families on top of decode
    ["doctor", "monitor", "plan"],
    ["generate", "rl", "serve"],
    ["cli"],
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def floor_of(module: str) -> tuple[str, int] | None:
    """Return the name in FLOORS that holds a module of gpubound, the longest one, and its floor."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next(((name, FLOOR[name]) for name in names if name in FLOOR), None)


MODULES = sorted(p for p in ROOT.rglob("*.py") if p.name not in ("__main__.py",) and p != ROOT / "__init__.py")


class Facts(NamedTuple):
    """What a module imports and defines. Names of imports are absolute, and of everything, also inside functions."""

    imports: set[str]
    imports_at_run_time: set[str]  # without those that only a type checker sees
    imports_at_the_top: set[str]
    classes: list[str]


@cache
def facts(path: Path) -> Facts:
    """Read a module once. Its syntax tree is not kept: all of them are a million objects for the garbage collector."""
    tree = ast.parse(path.read_text())
    here = ("gpubound", *path.relative_to(ROOT).parts[:-1])
    found = Facts(set(), set(), set(), [])
    for node, typed in walk(tree):
        if isinstance(node, ast.ClassDef):
            found.classes.append(node.name)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = imported(node, here)
            found.imports.update(names)
            if not typed:
                found.imports_at_run_time.update(names)
            if node in tree.body:
                found.imports_at_the_top.update(names)
    return found


def walk(node: ast.AST, typed: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes of statements, each with whether only a type checker sees it."""
    yield node, typed
    checked = isinstance(node, ast.If) and "TYPE_CHECKING" in (getattr(node.test, "id", ""), getattr(node.test, "attr", ""))
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield from walk(child, typed or (checked and child not in node.orelse))


def imported(node: ast.Import | ast.ImportFrom, here: tuple[str, ...]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    stem = here[: len(here) - node.level + 1] if node.level else ()
    within = ".".join([*stem, node.module] if node.module else stem)
    return [within, *(f"{within}.{alias.name}" for alias in node.names)]


def test_no_import_climbs():
    wrong = []
    for path in MODULES:
        mine = floor_of(name_of(path))
        if mine is None:
            wrong.append(f"{path.relative_to(ROOT)} stands on no floor: add it to the picture in CONTRIBUTING.md and to FLOORS")
            continue
        for name in sorted(facts(path).imports):
            whose, _, rest = name.partition(".")
            theirs = floor_of(rest)
            if whose == "gpubound" and theirs and theirs[0] != mine[0] and theirs[1] >= mine[1]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}: not a lower floor")
    assert len(MODULES) > 300 and not wrong, "\n".join(wrong)


def test_triton_is_imported_only_where_kernels_are():
    """`import triton` costs 0.3 s and fixes TRITON_INTERPRET for the process: only kernel files may do it at their top."""
    for path in MODULES:
        if any(name.split(".")[0] == "triton" for name in facts(path).imports_at_the_top):
            assert path.relative_to(ROOT).parts[-3:-1] == ("kernels", "triton"), f"{path.relative_to(ROOT)} imports triton"


def name_of(path: Path) -> str:
    """What a module is called below gpubound: "watch.ledger"; a package's __init__ has the package's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def arrows() -> dict[str, set[str]]:
    """Which modules each module imports, also inside functions. A package's __init__ only gathers names: it has no arrows."""
    modules = {name_of(path): path for path in MODULES}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        names = {target.removeprefix("gpubound.") for target in facts(path).imports_at_run_time}
        found[name] = set() if path.name == "__init__.py" else names & modules.keys() - {name}
    return found


def circle(graph: dict[str, set[str]]) -> list[str] | None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_no_modules_import_each_other_in_a_circle():
    found = circle(arrows())
    assert not found, f"a circle of imports: {' <- '.join(found)}; let one of them take what it needs as an argument"


def test_a_circle_is_found_where_one_is():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    assert not circle({"a": {"b", "c"}, "b": {"c"}})
    tree = ast.parse("if TYPE_CHECKING:\n    from .a import b\nelse:\n    from .c import d\ndef f():\n    from .e import g")
    found = [(node.module, typed) for node, typed in walk(tree) if isinstance(node, ast.ImportFrom)]
    assert found == [("a", True), ("c", False), ("e", False)]


def test_no_two_public_classes_have_one_name():
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for name in facts(path).classes:
            if not name.startswith("_"):
                homes.setdefault(name, []).append(str(path.relative_to(ROOT)))
    twice = {name: where for name, where in homes.items() if len(where) > 1}
    assert not twice, f"classes of one name: {twice}; a name tells what is inside, so give one of them its own"
