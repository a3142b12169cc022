"""`gpubound train --compare`: train several variants of a recipe on the same tokens, with several seeds, and compare them."""

import gc
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from ..data import Corpus
from ..files import write_atomic
from ..formatting import hint
from ..layers.quantized_base import numbers_of
from ..models.registry import family_of, is_named, presets
from ..monitor import RunTape
from ..monitor.tape import ABOUT
from ..monitor.variants import MOST_SEEDS, RESULT, Variants
from ..trace import fallbacks
from ..train.convert import RECIPE, convert
from ..train.data import check_data, known_tokenizer, open_data
from ..train.prepare import prepare
from ..train.recipe import Recipe, check_model
from .session import say, train
from .train_options import load_yaml

SAME = (
    "out", "data", "data_weights", "data_bytes", "text_key", "format", "chat_template", "train_on", "pack", "overlong",
    "buckets", "tokenizer",
    "vocabulary", "objective", "objective_options", "seq", "micro_batch", "accumulate", "steps", "epochs", "validation",
    "eval_data", "eval_batches", "seed", "phases", "patience",
)  # fmt: skip
"""Fields that no variant may change: the tokens of a step, their number, and the data of the held-out loss."""


def make_variants(recipe: Recipe, names: str, named: dict[str, Any], seeds: int) -> dict[str, Recipe]:
    """Return the recipe of each variant. `named` has those of the config file, with their options."""
    if not 1 <= seeds <= MOST_SEEDS:
        raise ValueError(f"seeds: got {seeds:,}, wanted 1 to {MOST_SEEDS}.")
    variants = [name.strip() for name in names.split(",")]
    if len(variants) < 2 or len(set(variants)) < len(variants) or "" in variants:
        raise ValueError(f"compare: got {names!r}, wanted two names or more, each once, as in 10m,lr=1e-3.")
    if any(stage.patience for _, stage in recipe.stages()):
        raise ValueError("compare: patience ends a run early, and every variant trains on the same tokens; leave patience out.")
    if any(not (stage.validation or stage.eval_data) for _, stage in recipe.stages()):
        raise ValueError("compare: it compares held-out losses, got validation 0 and no eval_data; give one of them.")
    recipes = {name: _variant(recipe, name, named) for name in variants}
    for variant in recipes.values():
        check_model(variant.model)
        if is_named(variant.model):
            family_of(variant.model).MODELS[variant.model]  # refuses parts that do not go together
        check_data(variant)
    folders = [folder_of(recipe, name, 0) for name in variants]
    if len(set(folders)) < len(folders):
        raise ValueError(
            f"compare: two of {', '.join(variants)} would share a folder; name them under compare: in a config file."
        )
    return recipes


def _variant(recipe: Recipe, name: str, named: dict[str, Any]) -> Recipe:
    """Return the recipe of a variant: a name in the config file, a model, a part of the recipe's model, or key=value."""
    if name in named:
        options = {} if named[name] is None else named[name]
        if not isinstance(options, dict):
            raise ValueError(f"compare: {name}: got {options!r}, wanted keys and values such as 'lr: 1e-3'.")
    elif "=" in name:
        key, _, text = name.partition("=")
        try:
            options = {key.strip().replace("-", "_"): load_yaml(text)}
        except ValueError as error:
            raise ValueError(f"compare: {name}: {error}.") from error
        except yaml.YAMLError:
            raise ValueError(f"compare: {name}: {text!r} cannot be read as a value; give one such as lr=1e-3.") from None
    elif is_named(f"{recipe.model}+{name}"):
        options = {"model": f"{recipe.model}+{name}"}
    elif is_named(name) or Path(name).is_dir():
        options = {"model": name}
    else:
        known = hint(name, [*named, *presets()], "known are")
        raise ValueError(
            f"compare: got {name!r}, wanted a model, a part that {recipe.model} may have, key=value, or a name under compare: "
            f"in the config file; {known}"
        )
    options = convert(options, RECIPE, f"compare: {name}")
    for key in options:
        if key in SAME:
            raise ValueError(f"compare: {name}: {key} is the same for every variant, or their losses could not be compared.")
    try:
        return replace(recipe, **options)
    except ValueError as error:
        raise ValueError(f"compare: {name}: {error}") from error


def folder_of(recipe: Recipe, name: str, seed: int) -> Path:
    return Path(recipe.out, re.sub(r"[^\w.=+-]+", "-", name).strip(".-"), f"seed-{seed}")


def compare(recipe: Recipe, variants: dict[str, Recipe], seeds: int, resume: bool, log: str | None) -> Variants | None:
    """Train every variant with every seed. None when it was stopped before the end."""
    runs = [  # seed by seed: a comparison that is stopped has whole rounds
        (name, replace(variant, seed=seed, out=str(folder_of(recipe, name, seed))))
        for seed in range(recipe.seed, recipe.seed + seeds)
        for name, variant in variants.items()
    ]
    if not resume and (existing := next((run.out for _, run in runs if Path(run.out, ABOUT).exists()), None)):
        raise ValueError(f"{existing} already holds a run; pass --resume to go on with it, or another --out to begin anew.")
    done = {run.out: tape for _, run in runs if (tape := _finished(run))}
    corpora = open_data(recipe, Path(recipe.out), progress=True) if len(done) < len(runs) else []
    if corpora:
        for variant in variants.values():
            known_tokenizer(variant, corpora)  # refuses a model with another tokenizer
    for number, (name, run) in enumerate(runs, 1):
        if run.out in done:
            say(f"{name} seed {run.seed}: trained before, {run.out}")
            continue
        say(f"run {number} of {len(runs)}: {name}, seed {run.seed}")
        tape = _train(name, run, corpora, resume, log)
        if tape is None:
            return None
        done[run.out] = tape
    tapes: dict[str, list[RunTape]] = {name: [] for name in variants}
    for name, run in runs:
        tapes[name].append(done[run.out])
    return Variants(tapes)


def _finished(recipe: Recipe) -> RunTape | None:
    """Return the tape of a finished run of this recipe. A run of another recipe is resumed or refused when it is prepared."""
    if not Path(recipe.out, ABOUT).exists():
        return None
    tape = RunTape.open(recipe.out)
    same = tape.about.get("config") == json.loads(json.dumps(asdict(recipe)))
    return tape if same and tape.about.get(RESULT) else None


def _train(name: str, recipe: Recipe, corpora: Sequence[Corpus], resume: bool, log: str | None) -> RunTape | None:
    """Train one variant with one seed; return None when it was stopped."""
    fallbacks.clear()  # reported for each run
    run = prepare(recipe, resume=resume and any(Path(recipe.out).glob("checkpoints/step-*")), corpora=list(corpora))
    try:
        outcome = train(run, f"{name} seed {recipe.seed}", log=log)
        if not (run.finished or run.diverged):
            return None
        facts = {"variant": name, "seed": recipe.seed, "failed": outcome.failed}
        facts |= {"held_out": run.evaluations.get(run.done), "parameters": numbers_of(run.model), "steps": run.done}
        outcome.tape.tell(**{RESULT: facts})
        return outcome.tape
    finally:
        run.step.close()
        del run  # before the next one is built: the GPU may have no room for both
        gc.collect()
        torch.cuda.empty_cache()


def write(comparison: Variants, recipe: Recipe) -> tuple[Path, Path]:
    """Write the page and the figures into the run's folder."""
    figures = Path(recipe.out, "comparison.json")
    write_atomic(figures, json.dumps(comparison.as_dict(), indent=1))
    return comparison.report(Path(recipe.out, "report.html")), figures
