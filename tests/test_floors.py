"""Every module imports only from floors below its own, and no modules import each other in a circle."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

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


@cache
def parsed(path: Path) -> ast.Module:
    """Each module is read once, and no test changes what it finds."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(path)))


def imported(path: Path):
    """Absolute names of everything `path` imports, also inside functions."""
    here = ("gpubound", *path.relative_to(ROOT).with_suffix("").parts)[:-1]
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            stem = ".".join((*base, node.module or "")).strip(".")
            yield stem
            if stem == "gpubound":
                yield from (f"gpubound.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_import_climbs():
    wrong = []
    for path in MODULES:
        mine = floor_of(name_of(path))
        if mine is None:
            wrong.append(f"{path.relative_to(ROOT)} stands on no floor: add it to the picture in CONTRIBUTING.md and to FLOORS")
            continue
        for name in imported(path):
            whose, _, rest = name.partition(".")
            theirs = floor_of(rest)
            if whose == "gpubound" and theirs and theirs[0] != mine[0] and theirs[1] >= mine[1]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}: not a lower floor")
    assert len(MODULES) > 300 and not wrong, "\n".join(wrong)


def test_triton_is_imported_only_where_kernels_are():
    """`import triton` costs 0.3 s and fixes TRITON_INTERPRET for the process: only kernel files may do it at their top."""
    for path in MODULES:
        tree = parsed(path)
        names = [a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names]
        names += [n.module or "" for n in tree.body if isinstance(n, ast.ImportFrom) and n.level == 0]
        if any(n.split(".")[0] == "triton" for n in names):
            assert path.relative_to(ROOT).parts[-3:-1] == ("kernels", "triton"), f"{path.relative_to(ROOT)} imports triton"


def name_of(path: Path) -> str:
    """What a module is called below gpubound: "watch.ledger"; a package's __init__ has the package's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def without_types(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    yield tree
    checked = isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test)
    for node in tree.orelse if checked else ast.iter_child_nodes(tree):
        yield from without_types(node)


def arrows() -> dict[str, set[str]]:
    """Which modules each module imports, also inside functions. A package's __init__ only gathers names: it has no arrows."""
    modules = {name_of(path): path for path in MODULES}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        here = ["gpubound", *path.relative_to(ROOT).parts[:-1]]
        targets: list[str] = []
        for node in without_types(parsed(path)):
            if isinstance(node, ast.ImportFrom):
                stem = here[: len(here) - node.level + 1] if node.level else []
                within = ".".join([*stem, node.module] if node.module else stem)
                targets += [within, *(f"{within}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                targets += [alias.name for alias in node.names]
        names = {target.removeprefix("gpubound.") for target in targets}
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
    assert [node.module for node in without_types(tree) if isinstance(node, ast.ImportFrom)] == ["c", "e"]


def test_no_two_public_classes_have_one_name():
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    twice = {name: where for name, where in homes.items() if len(where) > 1}
    assert not twice, f"classes of one name: {twice}; a name tells what is inside, so give one of them its own"
