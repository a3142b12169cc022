"""`gpubound train --compare`: several variants of a recipe on the same tokens, with several seeds, beside each other."""

import gc
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from ..data import Corpus
from ..files import write_whole
from ..formatting import hint
from ..layers.quantized_base import numbers_of
from ..models.registry import family_of, is_named, presets
from ..monitor import RunTape
from ..monitor.tape import ABOUT
from ..monitor.variants import MOST_SEEDS, RESULT, Variants
from ..trace import fallbacks
from ..train.data import check_data, known_tokenizer, open_data
from ..train.loop import Run
from ..train.prepare import prepare
from ..train.recipe import Recipe, check_model
from .options import RECIPE, load_yaml, typed
from .session import say, train

SAME = (
    "out", "data", "data_bytes", "text_key", "tokenizer", "vocabulary", "objective", "objective_options", "seq", "micro_batch",
    "accumulate", "steps", "validation", "seed", "phases", "patience",
)  # fmt: skip
"""The same for every variant: which tokens a step sees, how many there are, and what the held-out loss is a loss of."""


def variants_of(recipe: Recipe, names: str, given: dict[str, Any], seeds: int) -> dict[str, Recipe]:
    """The recipe of each variant. `given` holds those that the config file names, with their options."""
    if not 1 <= seeds <= MOST_SEEDS:
        raise ValueError(f"seeds: got {seeds:,}, wanted 1 to {MOST_SEEDS}.")
    wanted = [name.strip() for name in names.split(",")]
    if len(wanted) < 2 or len(set(wanted)) < len(wanted) or "" in wanted:
        raise ValueError(f"compare: got {names!r}, wanted two names or more, each once, as in 10m,lr=1e-3.")
    if any(own.patience for _, own in recipe.stages()):
        raise ValueError("compare: patience ends a run early, and every variant trains on the same tokens; leave patience out.")
    found = {name: _variant(recipe, name, given) for name in wanted}
    for own in found.values():
        check_model(own.model)
        if is_named(own.model):
            family_of(own.model).MODELS[own.model]  # refuses parts that do not go together
        check_data(own)
    folders = [folder_of(recipe, name, 0) for name in wanted]
    if len(set(folders)) < len(folders):
        raise ValueError(
            f"compare: two of {', '.join(wanted)} would share a folder; name them under compare: in a config file."
        )
    return found


def _variant(recipe: Recipe, name: str, given: dict[str, Any]) -> Recipe:
    """A name of the config file's, a model, a part of the recipe's model, or key=value."""
    if name in given:
        options = {} if given[name] is None else given[name]
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
        known = hint(name, [*given, *presets()], "known are")
        raise ValueError(
            f"compare: got {name!r}, wanted a model, a part that {recipe.model} may have, key=value, or a name under compare: "
            f"in the config file; {known}"
        )
    options = typed(options, RECIPE, f"compare: {name}")
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
    runs = list(_runs(recipe, variants, seeds))
    if not resume and (begun := next((own.out for _, own in runs if Path(own.out, ABOUT).exists()), None)):
        raise ValueError(f"{begun} already holds a run; pass --resume to go on with it, or another --out to begin anew.")
    done = {own.out: tape for _, own in runs if (tape := _done(own))}
    corpora = open_data(recipe, Path(recipe.out), progress=True) if len(done) < len(runs) else []
    if corpora:
        for own in variants.values():
            known_tokenizer(own, corpora)  # refuses a model that has another one
    for number, (name, own) in enumerate(runs, 1):
        if own.out in done:
            say(f"{name} seed {own.seed}: trained before, {own.out}")
            continue
        say(f"run {number} of {len(runs)}: {name}, seed {own.seed}")
        tape = _trained(name, own, corpora, resume, log)
        if tape is None:
            return None
        done[own.out] = tape
    tapes: dict[str, list[RunTape]] = {name: [] for name in variants}
    for name, own in runs:
        tapes[name].append(done[own.out])
    return Variants(tapes)


def _runs(recipe: Recipe, variants: dict[str, Recipe], seeds: int) -> Iterator[tuple[str, Recipe]]:
    """Seed after seed: a comparison that is stopped has whole rounds."""
    for seed in range(recipe.seed, recipe.seed + seeds):
        for name, own in variants.items():
            yield name, replace(own, seed=seed, out=str(folder_of(recipe, name, seed)))


def _done(recipe: Recipe) -> RunTape | None:
    """The tape of a run that has ended, of this very recipe. Any other goes on, or is refused, as a run of its own would."""
    if not Path(recipe.out, ABOUT).exists():
        return None
    tape = RunTape.open(recipe.out)
    same = tape.about.get("config") == json.loads(json.dumps(asdict(recipe)))
    return tape if same and tape.about.get(RESULT) else None


def _trained(name: str, recipe: Recipe, corpora: Sequence[Corpus], resume: bool, log: str | None) -> RunTape | None:
    """None when it was stopped before its end."""
    fallbacks.clear()  # each run's report has its own
    run = prepare(recipe, resume=resume and any(Path(recipe.out).glob("checkpoints/step-*")), corpora=list(corpora))
    try:
        outcome = train(run, f"{name} seed {recipe.seed}", log=log)
        if not (run.finished or run.diverged):
            return None
        outcome.tape.tell(**{RESULT: _result(name, run, outcome.failed)})
        return outcome.tape
    finally:
        run.step.close()
        del run  # before the next one is built: both would lie in the GPU's memory
        gc.collect()
        torch.cuda.empty_cache()


def _result(name: str, run: Run, failed: bool) -> dict[str, Any]:
    facts = {"variant": name, "seed": run.recipe.seed, "failed": failed, "held_out": run.evaluations.get(run.done)}
    return facts | {"parameters": numbers_of(run.model), "steps": run.done}


def keep(comparison: Variants, recipe: Recipe) -> tuple[Path, Path]:
    """Write the page and the numbers into the run's folder."""
    numbers = Path(recipe.out, "comparison.json")
    write_whole(numbers, json.dumps(comparison.as_dict(), indent=1))
    return comparison.report(Path(recipe.out, "report.html")), numbers
