"""The kinds of stall: one file each, found by its name."""

from importlib import import_module
from pathlib import Path

from ..plant import Plant

PLANTS: dict[str, Plant] = {
    path.stem: import_module(f".{path.stem}", __name__).PLANT
    for path in sorted(Path(__file__).parent.glob("*.py"))
    if path.stem != "__init__"
}
