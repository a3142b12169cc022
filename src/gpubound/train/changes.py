"""A resumed run: the checkpoint that it goes on from, and what its recipe may change."""

import json
import os
from collections.abc import Collection
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..models.registry import is_named
from ..trace import notice
from .checkpoint.checkpoints import WHERE, Checkpoint, Checkpoints
from .recipe import PHASED, SOURCES, Recipe
from .stages import Stage

FREE = (
    "out", "keep", "keep_every", "save_every", "saves_per_epoch", "eval_every", "evals_per_epoch", "patience", "device",
    "graph", "recompute", "overlap", "update_in_backward", "offload_optimizer",
    "parallel",
)  # fmt: skip
"""Keys that may change during a run: no weight of a step depends on them."""
ALLOWED = {
    "lr": ("lr",),
    "schedule": ("schedule", "warmup", "decay", "final"),
    "clip": ("clip",),
    "weight_decay": ("weight_decay",),
    "betas": ("betas", "eps"),
    "seq": ("seq",),
    "batch": ("micro_batch", "accumulate"),
    "data": (
        "data", "data_weights", "data_bytes", "text_key", "format", "chat_template", "train_on", "pack", "overlong", "buckets",
    ),
    "validation": ("validation", "eval_data", "eval_batches"),
}  # fmt: skip
"""Keys that may change by the name that `resume: {allow: [...]}` gives them."""
ROWS = {key for name in ("seq", "batch", "data", "validation") for key in ALLOWED[name]} - {"accumulate", "eval_batches"}
"""Keys that decide which rows there are."""


def changes_rows(changes: Collection[str], recipe: Recipe) -> bool:
    """Return whether these keys decide the rows of `recipe`, or their order."""
    return not ROWS.isdisjoint(changes) or bool(recipe.buckets and "accumulate" in changes)


def allowed_keys(names: Collection[str]) -> set[str]:
    """Return the keys that a resumed run may change."""
    for name in names:
        if name not in ALLOWED:
            raise ValueError(f"resume: allow: got {name!r}, wanted some of {', '.join(ALLOWED)}; the rest makes another run.")
    return {key for name in names for key in ALLOWED[name]}


def newest_checkpoint(checkpoints: Checkpoints, resume: bool) -> Checkpoint | None:
    """Return the checkpoint to resume from, None to begin anew; raise if the folder does not allow what was asked."""
    checkpoints.check_writable()
    checkpoints.clean()
    checkpoint = checkpoints.latest()
    if checkpoint is None and checkpoints.paths():  # a new run would remove them
        raise DataError(
            f"{checkpoints.folder} holds checkpoints, and none of them is whole; "
            f"restore one, or give another --out to begin anew."
        )
    if resume and checkpoint is None:
        notice(f"resume: {checkpoints.folder} holds no checkpoint; starting from the beginning.")
    if checkpoint is not None and not resume:
        raise ValueError(
            f"{checkpoints.folder} already holds step {checkpoint.step} of a run; "
            f"pass --resume to go on with it, or another --out to begin anew."
        )
    return checkpoint


def recipe_of(checkpoint: Checkpoint) -> Recipe:
    """Return the recipe of a checkpoint's run: JSON's lists become tuples."""
    known = {"name", *(field.name for field in fields(Recipe))}

    def read(values: dict[str, Any]) -> dict[str, Any]:
        return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key in known}

    saved = checkpoint.facts["recipe"]
    return Recipe(**read(saved) | {"phases": tuple(map(read, saved.get("phases", ())))})


def check_same(checkpoint: Checkpoint, old: Recipe, new: Recipe, allow: Collection[str] = ()) -> dict[str, str]:
    """Raise ValueError if `new` would have made other steps than those of `checkpoint`, from a run of `old`.

    FREE may change, as may the length of the present phase, and phases that have not begun. Return the other changes of the
    present phase by key: those that `allow`, names of ALLOWED, permits.
    """
    permitted = allowed_keys(allow)
    phase, before, after = checkpoint.facts["phase"], old.stages(), new.stages()
    where = checkpoint.facts.get(WHERE, "")
    known = set(
        checkpoint.facts["recipe"]
    )  # an earlier version had fewer keys; its rows are compared when the feed is restored
    of_the_run = known & {field.name for field in fields(Recipe)} - {*FREE, *PHASED, "phases"}
    changed = list(_differences(old, new, where, of_the_run).values())
    taken, refused = dict[str, str](), set[str]()
    for number, (name, own) in enumerate(before[: phase + 1]):
        new_name = after[number][0] if number < len(after) else None
        if new_name != name:
            now = "missing" if new_name is None else new_name or "without a name"
            changed.append(f"phase {number + 1} was {name or 'without a name'}, is {now}")
            break
        differences = _differences(own, after[number][1], where, known & set(PHASED) - set(FREE))
        if number == phase:
            differences = {key: text for key, text in differences.items() if key not in ("steps", "epochs")}
            taken = {key: text for key, text in differences.items() if key in permitted}
        refused |= differences.keys() - taken.keys()
        changed += [f"phase {name}: {text}" if name else text for key, text in differences.items() if key not in taken]
    if changed:
        advice = "Give the old values, or begin anew in another --out."
        if names := [name for name, keys in ALLOWED.items() if refused & set(keys)]:
            advice = f"Give the old values, allow it (resume: {{allow: [{', '.join(names)}]}}), or begin anew in another --out."
        raise ValueError(f"resume: the recipe has changed: {'; '.join(changed)}. {advice}")
    return taken


def check_steps(checkpoint: Checkpoint, old: Recipe, stages: list[Stage], changes: dict[str, str]) -> int:
    """Return the steps that the present phase had when `checkpoint` was written; raise ValueError if fewer are left than done.

    Print how the rate goes on if the number of steps, or what `changes` name of the rate, is another.
    """
    phase = checkpoint.facts["phase"]
    was, stage = old.stages()[phase][1], stages[phase]
    steps = int(checkpoint.facts["steps"][phase] if "steps" in checkpoint.facts else was.steps or 0)
    was = replace(was, steps=steps, epochs=None)
    done = checkpoint.step - checkpoint.facts["began"]
    if stage.steps < done:
        raise ValueError(f"resume: steps: {done:,} are done, got {stage.steps:,}; give at least so many.")
    old_lr, new_lr = (own.numbers.lr * own.rates.factor(at) for own, at in ((was, max(done, 1)), (stage.recipe, done + 1)))
    if stage.steps != steps:
        notice(
            f"resume: steps was {steps:,}, is {stage.steps:,}: from here on the {stage.recipe.schedule} schedule is that of "
            f"{stage.steps:,} steps, and the learning rate goes from {old_lr:.2e} to {new_lr:.2e}."
        )
    elif changes.keys() & {"lr", *ALLOWED["schedule"]}:
        notice(f"resume: the learning rate goes from {old_lr:.2e} to {new_lr:.2e}.")
    return steps


def _differences(old: Recipe, new: Recipe, where: str, keys: set[str]) -> dict[str, str]:
    """Return a text for each key that differs, both as written and in its meaning.

    where  the folder that relative paths of the old recipe start from. A run's folder may have been moved with all of its
           content, so a path that is written as before is the same
    """
    was, will, before, after = (
        json.loads(json.dumps(values))
        for values in (asdict(old), asdict(new), _normalised(old, where), _normalised(new, where=""))
    )
    changed = (key for key in will if key in keys and was[key] != will[key] and before[key] != after[key])
    return {key: f"{key} was {was[key]!r}, is {will[key]!r}" for key in changed}


def _normalised(recipe: Recipe, where: str) -> dict[str, Any]:
    """Return the recipe with real paths, and with the defaults of its sections filled in."""

    def real(name: str) -> str:
        return os.path.realpath(Path(where, name))

    adapters, objective = recipe.adapters, recipe.new_objective()
    options = fields(objective)  # type: ignore[arg-type]
    return asdict(recipe) | {
        "data": [name if name in SOURCES else real(name) for name in recipe.data],
        "model": recipe.model if is_named(recipe.model) else real(recipe.model),
        "eval_data": [real(name) for name in recipe.eval_data],
        "tokenizer": recipe.tokenizer and real(recipe.tokenizer),
        "lora": adapters and asdict(adapters) | {"alpha": adapters.rank if adapters.alpha is None else adapters.alpha},
        "objective": type(objective).__name__,  # which may have two names
        "objective_options": {field.name: getattr(objective, field.name) for field in options if field.init},
    }
