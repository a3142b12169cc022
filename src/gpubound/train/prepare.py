"""From a recipe to a run that is ready: texts to a corpus, a name to a model, a folder to its newest checkpoint.

What is cheap to refuse is refused first: a missing file is named before the corpus is built, not after. Between a run and its
resumption may change what does not touch the steps that were done.
"""

import gc
import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data import Corpus, Tokenizer
from ..device import resolve
from ..distributed import ALONE, Ranks
from ..errors import DataError, DeviceError, GraphError
from ..models.registry import family_of, is_named
from ..place import Placement, as_it_is, place
from ..trace import notice
from .adapters import base_of, check_base
from .build_model import build_model, build_shards, choose_sharded, outline
from .checkpoint.checkpoints import WHERE, Checkpoint, Checkpoints
from .checkpoint.resume import seed_ranks
from .data import Stage, check_data, open_data, stage_of
from .recipe import PHASED, SOURCES, Recipe, check_model
from .run import Run

FREE = (
    "out", "keep", "keep_every", "save_every", "evaluate_every", "patience", "device", "graph", "recompute", "overlap",
    "parallel",
)  # fmt: skip
"""May differ in any part of a run: no weight of a step depends on it."""


def prepare(
    recipe: Recipe,
    resume: bool = False,
    auto_batch: bool = False,
    progress: bool = True,
    corpora: list[Corpus] | None = None,
    ranks: Ranks = ALONE,
) -> Run:
    """Build what the recipe names; with `resume`, go on from the newest whole checkpoint in its folder.

    `auto_batch` takes the largest micro-batch that fits, and so many fewer of them that a step has as many tokens as before.
    `corpora` are the phases' own, when `open_data` has opened them already. `ranks` share every step; all of them make this
    call.
    """
    check_shared(recipe, ranks)
    folder, device = Path(recipe.out), resolve(recipe.device)
    checkpoints = Checkpoints(folder / "checkpoints", keep=recipe.keep, keep_every=recipe.keep_every or None, ranks=ranks)
    found = _found(checkpoints, resume)
    if found is not None:
        old = _recipe(found)
    check_inputs(recipe)
    base = base_of(recipe.model) if recipe.adapters else {}
    if found is not None:
        if auto_batch:  # it was tried when the run began
            recipe = replace(recipe, micro_batch=old.micro_batch, accumulate=old.accumulate)
        check_same(found, old, recipe)
        if recipe.adapters is not None:
            check_base(recipe.model, base, found)
    stages = [
        stage_of(name, own, corpus)
        for (name, own), corpus in zip(recipe.stages(), corpora or open_data(recipe, folder, progress, ranks))
    ]
    tell_rates(stages)
    tokenizer = recipe.extended(stages[0].training.tokenizer())
    for stage in stages:
        stage.check_rows()
    if auto_batch and recipe.parallel == "fsdp":
        raise ValueError(
            "auto_batch: it tries whole models, got parallel: fsdp; give --micro-batch yourself (gpubound plan proposes one)."
        )
    if auto_batch and found is None:
        stages[0] = fit_micro_batch(stages, tokenizer, device, ranks)
        recipe = replace(recipe, micro_batch=stages[0].recipe.micro_batch, accumulate=stages[0].recipe.accumulate)
    torch.manual_seed(recipe.seed)
    model, placement = place_model(recipe, tokenizer, device, ranks)
    seed_ranks(ranks, recipe.seed)
    run = Run(recipe, folder, device, tokenizer, stages, model.train(), placement, checkpoints, base, ranks=ranks)
    run.enter(found.facts["phase"] if found else 0)
    if found is not None:
        run.restore(found)
        run.over = run.over and run.stage.recipe.steps <= old.stages()[run.phase][1].steps  # or it has more of them now
    return run


def tell_rates(stages: list[Stage]) -> None:
    """Print the learning rate and weight decay of each phase, which depend on the kind of the run where it does not say."""
    for stage in stages:
        recipe, (kind, *defaults) = stage.recipe, stage.recipe.kind
        source = f" (the defaults of {kind})" if [recipe.lr, recipe.weight_decay] == defaults else ""
        phase = f"phase {stage.name}: " if stage.name else ""
        notice(f"train: {phase}{kind}: lr {recipe.lr:g}, weight decay {recipe.weight_decay:g}{source}.")


def place_model(recipe: Recipe, tokenizer: Tokenizer, device: torch.device, ranks: Ranks) -> tuple[nn.Module, Placement]:
    """The model as these ranks hold it, on its device, with what trains in it."""
    if choose_sharded(recipe, lambda: outline(recipe, tokenizer), device, ranks):
        model = build_shards(recipe, tokenizer, device, ranks)
        return model, as_it_is(model, device, "no rank holds all of it; the first steps show whether it runs")
    model = build_model(recipe, tokenizer, device)
    placement = place(model, device)
    if recipe.adapters is not None:
        torch.manual_seed(recipe.seed)  # placing has drawn: adapters begin as they do over rows
        recipe.adapters.add(model)
    return model, placement


def check_inputs(recipe: Recipe) -> None:
    """Raise what is wrong with the model and the data that `recipe` names, before any is read."""
    check_model(recipe.model)
    check_data(recipe)
    if recipe.adapters is not None:
        recipe.adapters.check_model(family_of(recipe.model).outline(recipe.model))


def check_launch(recipe: Recipe, resume: bool, processes: int) -> None:
    """Raise in the launcher what `prepare` would raise on each of `processes` ranks, before any of them is started."""
    for _, own in recipe.stages():
        Ranks(world=processes).share(own.accumulate)
    if resume:  # the paths are those of the checkpoint, and reading one takes its time
        return
    checkpoints = Checkpoints(Path(recipe.out, "checkpoints"))
    if checkpoints.paths():
        _found(checkpoints, resume)
    check_inputs(recipe)


def check_shared(recipe: Recipe, ranks: Ranks) -> None:
    """ValueError for what ranks cannot share, or were not told alike."""
    for _, own in recipe.stages():
        ranks.share(own.accumulate)
    if not ranks.alone and ":" in recipe.device:
        raise ValueError(f"device: got {recipe.device!r}, one GPU, for {ranks.world} ranks; leave it out: each takes its own.")
    ranks.alike("recipe", asdict(recipe))


def _found(checkpoints: Checkpoints, resume: bool) -> Checkpoint | None:
    checkpoints.check_writable()
    checkpoints.clean()
    found = checkpoints.latest()
    if found is None and checkpoints.paths():  # a new run would remove them
        raise DataError(
            f"{checkpoints.folder} holds checkpoints, and none of them is whole; "
            f"restore one, or give another --out to begin anew."
        )
    if resume and found is None:
        notice(f"resume: {checkpoints.folder} holds no checkpoint; starting from the beginning.")
    if found is not None and not resume:
        raise ValueError(
            f"{checkpoints.folder} already holds step {found.step} of a run; "
            f"pass --resume to go on with it, or another --out to begin anew."
        )
    return found


def fit_micro_batch(stages: list[Stage], tokenizer: Tokenizer, device: torch.device, ranks: Ranks = ALONE) -> Stage:
    """The only stage, with the largest micro-batch that fits beside this model, on every rank."""
    if device.type != "cuda":
        raise ValueError("auto_batch: there is no GPU memory to try; on a CPU give --micro-batch yourself.")
    if len(stages) > 1:
        raise ValueError("auto_batch: got phases, wanted a single one; give each phase a micro_batch of its own.")
    stage = stages[0]

    def attempt(recipe: Recipe) -> None:
        try:
            train(replace(recipe, graph="require") if recipe.graph == "auto" else recipe)
        except GraphError as error:  # this step cannot be captured, whatever its size
            notice(f"auto_batch: trying without a graph: {error}")
            train(replace(recipe, graph="off"))

    def train(recipe: Recipe) -> None:
        model = build_model(recipe, tokenizer, device).train()
        if recipe.adapters is not None:
            recipe.adapters.add(model)
        step = recipe.make_step(model, recipe.new_objective(tokenizer), device)
        feed = replace(stage, recipe=recipe).feed(device)
        try:
            for _ in range(2):  # the first captures, the second runs what was captured
                step(feed)
            torch.cuda.synchronize(device)
        finally:
            step.close()

    return replace(stage, recipe=largest_micro_batch(stage.recipe, attempt, device, ranks))


def largest_micro_batch(
    recipe: Recipe, attempt: Callable[[Recipe], None], device: torch.device, ranks: Ranks = ALONE
) -> Recipe:
    """`recipe` with the largest micro-batch for which `attempt` does not run out of memory, and as many tokens a step.

    Only divisors of a rank's rows of a step are tried, largest first: accumulation makes up for the rest exactly.
    """
    rows = recipe.micro_batch * recipe.accumulate
    for size in (n for n in range(rows // ranks.world, 0, -1) if rows % (n * ranks.world) == 0):
        tried = replace(recipe, micro_batch=size, accumulate=rows // size)
        fits = True
        try:
            attempt(replace(tried, accumulate=ranks.share(tried.accumulate)))
        except torch.OutOfMemoryError:
            fits = False
        finally:
            gc.collect()  # a step and its model refer to each other
            torch.cuda.empty_cache()
        if not ranks.all(fits):
            continue
        notice(f"auto_batch: {size} rows fit; {rows // size} micro-batches make the {rows} rows of a step.")
        return tried
    raise DeviceError(
        f"auto_batch: not even one row of {recipe.seq} tokens fits on {device}; "
        f"take shorter rows, a smaller model, or recompute=blocks."
    )


def check_same(found: Checkpoint, old: Recipe, new: Recipe) -> None:
    """ValueError when `new` would have made other steps than those that `found`, of a run by `old`, has behind it.

    FREE may change, the number of steps of the phase under way, and everything about phases that have not begun.
    """
    phase, before, after = found.facts["phase"], old.stages(), new.stages()
    where = found.facts.get(WHERE, "")
    changed = _differences(old, new, where, {field.name for field in fields(Recipe)} - {*FREE, *PHASED, "phases"})
    for number, (name, own) in enumerate(before[: phase + 1]):
        there = after[number][0] if number < len(after) else None
        if there != name:
            now = "missing" if there is None else there or "without a name"
            changed.append(f"phase {number + 1} was {name or 'without a name'}, is {now}")
            break
        keys = set(PHASED) - {*FREE, *(["steps"] if number == phase else [])}
        changed += [f"phase {name}: {text}" if name else text for text in _differences(own, after[number][1], where, keys)]
    if changed:
        raise ValueError(
            f"resume: the recipe has changed: {'; '.join(changed)}. Give the old values, or begin anew in another --out."
        )
    _check_steps(found, before[phase][1], after[phase][1])


def _check_steps(found: Checkpoint, old: Recipe, new: Recipe) -> None:
    """Say what another number of steps does to the learning rate."""
    done = found.step - found.facts["began"]
    if new.steps == old.steps:
        return
    if new.steps < done:
        raise ValueError(f"resume: steps: {done:,} are done, got {new.steps:,}; give at least so many.")
    was, will = (own.numbers.lr * own.rates.factor(at) for own, at in ((old, max(done, 1)), (new, done + 1)))
    notice(
        f"resume: steps was {old.steps:,}, is {new.steps:,}: from here on the {new.schedule} schedule is that of {new.steps:,} "
        f"steps, and the learning rate goes from {was:.2e} to {will:.2e}."
    )


def _recipe(found: Checkpoint) -> Recipe:
    """The recipe of a checkpoint's run: a tuple again where JSON made a list."""

    def read(values: dict[str, Any]) -> dict[str, Any]:
        return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key in known}

    known = {"name", *(field.name for field in fields(Recipe))}
    facts = found.facts["recipe"]
    return Recipe(**read(facts) | {"phases": tuple(map(read, facts.get("phases", ())))})


def _differences(old: Recipe, new: Recipe, where: str, keys: set[str]) -> list[str]:
    """`where`: the folder that the old one's relative paths begin in. A run's folder may have moved with all that is in it, so
    a path that is written as before is the same."""
    was, will = (json.loads(json.dumps(asdict(recipe))) for recipe in (old, new))
    spelled = (asdict(old) | _spelled_out(old) | _paths(old, where), asdict(new) | _spelled_out(new) | _paths(new))
    before, after = (json.loads(json.dumps(values)) for values in spelled)
    changed = (key for key in will if key in keys and was[key] != will[key] and before[key] != after[key])
    return [f"{key} was {was[key]!r}, is {will[key]!r}" for key in changed]


def _paths(recipe: Recipe, where: str = "") -> dict[str, Any]:
    """Return the files that its paths name: another way to write the same path is no change."""

    def real(name: str) -> str:
        return os.path.realpath(Path(where, name))

    return {
        "data": [name if name in SOURCES else real(name) for name in recipe.data],
        "model": recipe.model if is_named(recipe.model) else real(recipe.model),
        "tokenizer": recipe.tokenizer and real(recipe.tokenizer),
    }


def _spelled_out(recipe: Recipe) -> dict[str, Any]:
    """The recipe's sections with their defaults filled in: who writes these down has changed nothing."""
    adapters, objective = recipe.adapters, recipe.new_objective()
    given = fields(objective)  # type: ignore[arg-type]
    return {
        "lora": adapters and asdict(adapters) | {"alpha": adapters.rank if adapters.alpha is None else adapters.alpha},
        "objective": type(objective).__name__,  # which may have two names
        "objective_options": {field.name: getattr(objective, field.name) for field in given if field.init},
    }
