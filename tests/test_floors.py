"""Every module imports only from floors below its own, so that each floor reads without the ones above it."""

import ast
from pathlib import Path

import pytest

import gpubound

ROOT = Path(gpubound.__file__).parent
FLOORS = [
    ["errors", "version"],  # the ground floor, in three steps
    ["trace", "files"],
    ["device"],
    ["kernels", "measure", "feed", "watch"],
    ["graph", "layers", "lora"],
    ["models", "place"],
    ["train", "decode"],
    ["doctor", "monitor"],
    ["cli"],
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
MODULES = sorted(p for p in ROOT.rglob("*.py") if p.name not in ("__main__.py",) and p != ROOT / "__init__.py")


def imported(path: Path):
    """Absolute names of everything `path` imports, also inside functions."""
    here = ("gpubound", *path.relative_to(ROOT).with_suffix("").parts)[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            stem = ".".join((*base, node.module or "")).strip(".")
            yield stem
            if stem == "gpubound":
                yield from (f"gpubound.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_import_climbs(path):
    mine = path.relative_to(ROOT).with_suffix("").parts[0]
    assert mine in FLOOR, f"{path.relative_to(ROOT)} stands on no floor: add it to the picture in CONTRIBUTING.md and to FLOORS"
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "gpubound" and len(parts) > 1 and parts[1] != mine and parts[1] in FLOOR:
            assert FLOOR[parts[1]] < FLOOR[mine], f"{path.relative_to(ROOT)} imports {name}: not a lower floor"


def test_triton_is_imported_only_where_kernels_are():
    """`import triton` costs 0.3 s and fixes TRITON_INTERPRET for the process: only kernel files may do it at their top."""
    for path in MODULES:
        tree = ast.parse(path.read_text())
        names = [a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names]
        names += [n.module or "" for n in tree.body if isinstance(n, ast.ImportFrom) and n.level == 0]
        if any(n.split(".")[0] == "triton" for n in names):
            assert path.relative_to(ROOT).parts[:2] == ("kernels", "triton"), f"{path.relative_to(ROOT)} imports triton"
