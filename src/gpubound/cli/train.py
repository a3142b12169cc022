"""Train a decoder: a config file, options, or both; resumes bit for bit, exports to Hugging Face's layout.

gpubound train --model 10m --data my_texts/ --steps 2000
gpubound train config.yaml --lr 1e-3               options override the file
gpubound train config.yaml --resume                go on from the newest whole checkpoint
gpubound train config.yaml --resume --steps 9000   extend a run, a finished one too
gpubound train --list                              the models that have a name
"""

import dataclasses
import json
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import tyro
import yaml

from ..models.registry import trainable
from ..monitor.live import check_log
from ..train.adapters import Lora
from ..train.kinds import check_kind
from ..train.prepare import prepare
from ..train.recipe import Recipe
from ..words import hint, shown
from . import arguments
from .session import alone, finish, quietly, say, train


@dataclass(frozen=True)
class Train(Recipe):
    """Train a decoder on text.

    The folder --out gets the corpus, the checkpoints, a line for each step (steps.jsonl) and the report. Ctrl-C ends the run
    after a checkpoint, with exit code 0. Exit code 1: the training was not sound (its last loss is not finite, or too many
    steps were skipped).

    Example: gpubound train --model 10m --data my_texts/ --steps 2000 --out runs/first

    Example: gpubound train config.yaml --resume
    """

    lora: Annotated[dict[str, Any], tyro.conf.Suppress] = dataclasses.field(default_factory=dict)
    phases: Annotated[tuple[dict[str, Any], ...], tyro.conf.Suppress] = ()
    objective_options: Annotated[dict[str, Any], tyro.conf.Suppress] = dataclasses.field(default_factory=dict)
    resume: bool = False
    """Go on from the newest whole checkpoint in --out. A larger --steps extends the run, a finished one too."""
    auto_batch: bool = False
    """Try micro-batches and use the largest that fits on the GPU. A step keeps its number of tokens."""
    export: str | None = None
    """Write the best weights to this folder, in the layout that transformers loads; hf is the folder hf in --out. Of a run
    with lora these are the adapters, in PEFT's layout."""
    merge: bool = False
    """With --export of a run with lora: write the whole model, the adapters merged into its weights."""
    log: str | None = None
    """Also write the records to tensorboard, wandb or trackio."""
    quiet: bool = False
    """Write to stderr only what needs attention: warnings, fallbacks, and a training that failed or was stopped."""
    list: bool = False
    """List the models that --model knows by name, and exit."""
    json: bool = False
    """Print the last record, the verdict and the paths of the report and the export as JSON on stdout."""

    def __post_init__(self) -> None:
        """Nothing is checked here: the Recipe made from it checks, and its errors are one line instead of the parser's box."""

    def recipe(self) -> Recipe:
        return Recipe(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Recipe)})


def main(argv: Sequence[str]) -> int:
    typed_in = argv = list(argv)
    file, argv = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (None, argv)
    default = from_file(file) if file is not None else Train()
    options = arguments(Train, argv, "train", default)
    if options.list:
        print(presets())
        return 0
    check_log(options.log)
    recipe, export = options.recipe(), export_folder(options)
    if options.merge and not (export and recipe.lora):
        raise ValueError("merge: it says what --export writes of a run with lora; give both, or leave it out.")
    if options.auto_batch and recipe.budget is not None:
        raise ValueError(
            f"auto_batch: got recompute={recipe.recompute!r}, too, and each would take what the other leaves; "
            f"give --recompute cheap, none, blocks or a number, or --micro-batch yourself."
        )
    with quietly(options.quiet), alone(recipe.out):
        run = prepare(recipe, resume=options.resume, auto_batch=options.auto_batch)
        outcome = train(run, Path(recipe.out).resolve().name, log=options.log)
        if not (run.finished or run.diverged):
            command = ["gpubound", "train", *typed_in]
            say(f"go on with: {shlex.join(command if '--resume' in command else [*command, '--resume'])}", needed=True)
        report = finish(outcome.tape)
        if export and outcome.failed:
            say(f"export: nothing was written to {export}, for the training is not sound", needed=True)
        elif export:
            say(f"export: {run.export(export, options.merge)}, the weights of step {run.best or run.done:,}")
    if options.json:
        steps = outcome.tape.steps()
        about = {"out": recipe.out, "finished": run.finished, "failed": outcome.failed, "verdict": outcome.verdict}
        about |= {"last": steps[-1] if steps else {}, "report": str(report)}
        about |= {"best": {"step": run.best, "held_out": run.evaluations[run.best]} if run.best else None}
        print(json.dumps(about | {"export": str(export) if export and not outcome.failed else None}))
    return 1 if outcome.failed else 0


def export_folder(options: Train) -> Path | None:
    if options.export is None:
        return None
    if not options.export.strip():
        raise ValueError("export: got an empty text; give hf or a folder.")
    folder = Path(options.out, "hf") if options.export == "hf" else Path(options.export)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"export: {there} is a file; give a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"export: {there} may not be written to; give another folder.")
    return folder


def from_file(path: str) -> Train:
    """The options in a YAML file. An unknown key is an error that names the near one."""
    try:
        found: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(
            f"config: {path} cannot be read as YAML: {' '.join(str(error).split())}; see gpubound train --help."
        ) from error
    found = {} if found is None else found
    if not isinstance(found, dict):
        raise ValueError(f"config: {path} holds a {type(found).__name__}, wanted keys and values such as 'steps: 2000'.")
    try:
        options = Train(**typed(found))
        options.recipe()
        return options
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def typed(found: dict[Any, Any]) -> dict[str, Any]:
    """Values as the options' fields want them. An unknown key is refused; a value of another kind, by the recipe."""
    known = {f.name: f for f in dataclasses.fields(Train)}
    own = known.keys() - {f.name for f in dataclasses.fields(Recipe)}
    for key, value in found.items():
        if key not in known:
            raise ValueError(f"config: {shown(key)} is unknown; {hint(key, known, 'the keys are')}")
        if key in own:
            check_kind(known[key], value)
    return {key: _as(known[key], value) for key, value in found.items()}


def _phase(phase: Any) -> Any:
    """A phase's own values; which of them a phase may have is the recipe's to say."""
    if not isinstance(phase, dict):
        return phase
    known = {f.name: f for f in dataclasses.fields(Recipe) if f.name != "phases"}
    return {key: _as(known[key], value) if key in known else value for key, value in phase.items()}


def _as(field: dataclasses.Field, value: Any) -> Any:
    """What YAML read, as the field wants it: it reads 3e-4 as a text, and 12 blocks as a number."""
    wanted = (get_args(field.type) or (field.type,))[0]
    if field.name == "lora" and isinstance(value, dict):
        known = {f.name: f for f in dataclasses.fields(Lora)}
        return {key: _as(known[key], own) if key in known else own for key, own in value.items()}
    if field.name == "data":
        return tuple(value) if isinstance(value, list) else (value,)
    if field.name == "phases":
        return tuple(map(_phase, value)) if isinstance(value, list) else value
    if wanted is float and isinstance(value, str | int) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):  # the recipe's sentence names the field
            return float(value)
    return str(value) if wanted is str and type(value) is int else value


def presets() -> str:
    lines = [line for family in trainable() for line in family.table()]
    lines.append("10m-tiny and so on: what sets the preset apart, two layers deep and 16 wide a head, to try a recipe")
    return "\n".join(lines)
