"""Every script of the corpus by its name, and the writing of it."""

from itertools import cycle
from pathlib import Path

from .controls import CONTROLS
from .decoys import DECOYS
from .hosts import HOSTS, MODELS, write
from .kinds import PLANTS
from .plant import Calm, Case, Script


def cases() -> list[Case]:
    """Every plant in every host with every model."""
    return [Case(kind, host, model) for kind in PLANTS for host in HOSTS for model in MODELS]


def fits(word: str, name: str) -> bool:
    """Whether these are parts of a script's name, in any order.

    >>> fits("gpu-bound/item", "item/plain/gpu-bound"), fits("items", "item/plain/gpu-bound")
    (True, False)
    """
    return set(word.split("/")) <= set(name.split("/"))


def sample() -> list[Case]:
    """Every kind once, the hosts and models in turn: six neighbours see each pair of them."""
    pairs = cycle([(host, model) for model in MODELS for host in HOSTS])
    return [Case(kind, *next(pairs)) for kind in PLANTS]


def write_planted(case: Case, folder: Path) -> Script:
    plant = PLANTS[case.name]
    return write(folder, plant.planted, host=case.host, model=case.model, kinds=plant.kinds, loop=plant.loop)


def write_clean(case: Case, folder: Path) -> Script:
    """The same script without its stall."""
    plant = PLANTS[case.name]
    unmarked = {name: code.replace("  # stall", "") for name, code in plant.clean.items()}
    return write(folder, unmarked, host=case.host, model=case.model)


def write_calm(calm: Calm, folder: Path) -> Script:
    return write(folder, calm.slots, host=calm.host, model=calm.model)


CALM: dict[str, dict[str, Calm]] = {"control": CONTROLS, "decoy": DECOYS}
