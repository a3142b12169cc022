"""Where a run's paths lead: a relative one begins in the folder where the run was begun, which each checkpoint notes."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..models.registry import is_named
from ..trace import notice
from .checkpoint import Checkpoint
from .recipe import SOURCES, Recipe

WHERE = "where"  # in a checkpoint's facts; those of earlier versions lack it


def there(found: Checkpoint, name: str) -> str:
    """The path `name` of this checkpoint's recipe as it is reached from here."""
    begun = os.path.join(found.facts.get(WHERE, ""), name)
    return begun if not os.path.exists(name) and os.path.exists(begun) else name


def from_here(recipe: Recipe, found: Checkpoint) -> tuple[Recipe, str]:
    """The recipe of a run that goes on from `found`, and the folder to note. A path that leads nowhere from here is taken from
    the folder where the run was begun."""
    moved = list[str]()

    def reached(name: str) -> str:
        if name in SOURCES or (path := there(found, name)) == name:
            return name
        moved.append(name)
        return path

    def paths(values: dict[str, Any]) -> dict[str, Any]:
        data = values.get("data")
        if isinstance(data, str):
            return values | {"data": reached(data)}
        return values if data is None else values | {"data": tuple(map(reached, data))}

    own = paths({"data": recipe.data}) | {"phases": tuple(map(paths, recipe.phases))}
    if not is_named(recipe.model):
        own["model"] = reached(recipe.model)
    if recipe.tokenizer:
        own["tokenizer"] = reached(recipe.tokenizer)
    if not moved:
        return recipe, os.getcwd()
    names, where = ", ".join(dict.fromkeys(moved)), found.facts[WHERE]
    notice(f"resume: {names}: taken from {where}, where the run was begun, for there is none here.")
    return replace(recipe, **own), where


def leads(recipe: Recipe, where: str = "") -> dict[str, Any]:
    """The files that its paths name: another way to write the same path is no change."""

    def path(name: str) -> str:
        return os.path.realpath(Path(where, name))

    return {
        "data": [name if name in SOURCES else path(name) for name in recipe.data],
        "model": recipe.model if is_named(recipe.model) else path(recipe.model),
        "tokenizer": recipe.tokenizer and path(recipe.tokenizer),
    }
