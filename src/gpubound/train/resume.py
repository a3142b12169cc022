"""What may change between a run and its resumption: what does not touch the steps that were done."""

import json
from dataclasses import asdict, fields
from typing import Any

from .checkpoint import Checkpoint
from .recipe import PHASED, Recipe

FREE = (
    "out", "keep", "keep_every", "save_every", "evaluate_every", "patience", "device", "graph", "recompute", "overlap",
)  # fmt: skip
"""May differ in any part of a run: no weight of a step depends on it."""


def check_same(found: Checkpoint, recipe: Recipe) -> list[str]:
    """ValueError when `recipe` would have made other steps than those that `found` has behind it; else what changes, in words.

    FREE may change, the number of steps of the phase under way, and everything about phases that have not begun.
    """
    old, phase = _recipe(found.facts["recipe"]), found.facts["phase"]
    before, after = old.stages(), recipe.stages()
    changed = _differences(asdict(old), asdict(recipe), set(asdict(old)) - {*FREE, *PHASED, "phases"})
    for number in range(phase + 1):
        name = before[number][0]
        if number >= len(after) or after[number][0] != name:
            there = after[number][0] if number < len(after) else "missing"
            changed.append(f"phase {number + 1} was {name or 'without a name'}, is {there or 'without a name'}")
            break
        free = {*FREE, "steps"} if number == phase else {*FREE}
        found_here = _differences(asdict(before[number][1]), asdict(after[number][1]), set(PHASED) - free)
        changed += [f"phase {name}: {text}" if name else text for text in found_here]
    if changed:
        raise ValueError(
            f"resume: the recipe has changed: {'; '.join(changed)}. Give the old values, or begin anew in another --out."
        )
    return _more_steps(found, before[phase][1], after[phase][1])


def reopened(found: Checkpoint, recipe: Recipe) -> bool:
    """Whether the phase of `found` has more steps now, which may have been over."""
    phase = found.facts["phase"]
    return recipe.stages()[phase][1].steps > _recipe(found.facts["recipe"]).stages()[phase][1].steps


def _more_steps(found: Checkpoint, old: Recipe, new: Recipe) -> list[str]:
    """What another number of steps does to the learning rate."""
    done = found.step - found.facts["began"]
    if new.steps == old.steps:
        return []
    if new.steps < done:
        raise ValueError(f"resume: steps: {done:,} are done, got {new.steps:,}; give at least so many.")
    was, will = (own.lr * own.rates.factor(at) for own, at in ((old, max(done, 1)), (new, done + 1)))
    return [
        f"resume: steps was {old.steps:,}, is {new.steps:,}: from here on the {new.schedule} schedule is that of {new.steps:,} "
        f"steps, and the learning rate goes from {was:.2e} to {will:.2e}."
    ]


def _recipe(facts: dict[str, Any]) -> Recipe:
    known = {field.name for field in fields(Recipe)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items() if name in known}
    return Recipe(**values | {"phases": tuple(_phase(phase) for phase in values.get("phases", ()))})


def _phase(phase: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in phase.items()}


def _differences(old: dict[str, Any], new: dict[str, Any], keys: set[str]) -> list[str]:
    old, new = (json.loads(json.dumps(recipe)) for recipe in (old, new))
    return [f"{key} was {old[key]!r}, is {new[key]!r}" for key in new if key in keys and old[key] != new[key]]
