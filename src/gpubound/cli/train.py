"""Train a decoder: a config file, options, or both; resumes bit for bit, exports to Hugging Face's layout.

gpubound train --model 10m --data my_texts/ --steps 2000
gpubound train config.yaml --lr 1e-3               options override the file
gpubound train config.yaml --resume                go on from the newest whole checkpoint
gpubound train config.yaml --resume --steps 9000   extend a run, a finished one too
gpubound train config.yaml --gpus 8                on eight GPUs of this machine, a process each
gpubound train config.yaml --compare lr=1e-3,lr=3e-3 --seeds 3    variants on the same tokens, beside each other
gpubound train --list                              the models that have a name
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
import yaml

from ..files import check_replaceable, explain_disk_full, exporting_run, read_text
from ..monitor.live import check_log
from ..train.recipe import Recipe
from . import arguments
from .many import Many, again, save_when_launcher_ends, start
from .options import LARGEST, load_yaml, typed

if TYPE_CHECKING:
    from ..train.loop import Run


@dataclass(frozen=True)
class Train(Many, Recipe):
    """Train a decoder on text.

    The folder --out gets the corpus, the checkpoints, a line for each step (steps.jsonl) and the report. Ctrl-C ends the run
    after a checkpoint, with exit code 0. Exit code 1: the training was not sound (its last loss is not finite, or too many
    steps were skipped).

    Examples: gpubound train --model 10m --data my_texts/ --steps 2000 --out runs/first
              gpubound train config.yaml --resume
              gpubound train config.yaml --compare 10m,10m-tiny,lr=1e-3 --seeds 3
    """

    lora: Annotated[dict[str, Any], tyro.conf.Suppress] = dataclasses.field(default_factory=dict)
    phases: Annotated[tuple[dict[str, Any], ...], tyro.conf.Suppress] = ()
    objective_options: Annotated[dict[str, Any], tyro.conf.Suppress] = dataclasses.field(default_factory=dict)
    compare: str | None = None
    """Train variants on the same tokens and print their held-out losses beside each other: names, with commas between them.
    Each is a model, a part that --model may have, key=value, or a name under compare: in the config file, with its options."""
    variants: Annotated[dict[str, Any], tyro.conf.Suppress] = dataclasses.field(default_factory=dict)
    seeds: int = 1
    """With --compare: train each variant with so many seeds, --seed and those after it. Three show what chance does."""
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
    default = Train()
    options = arguments(Train, argv, "train", default)
    if file is not None:  # a mistyped option is refused before torch is imported to check the file
        default = from_file(file)
        options = arguments(Train, argv, "train", default)
    if options.list:
        print(presets())
        return 0
    from ..device import resolve  # torch takes two seconds: options are read first
    from ..distributed import join, launched
    from ..train.prepare import check_launch, prepare
    from .session import alone, finish, follow, quietly, say, train

    check_log(options.log)
    if options.resume and file is not None and options.out == default.out:
        check_folder(file, options.out)
    recipe, export = options.recipe(), export_folder(options)
    if options.merge and not (export and recipe.lora):
        raise ValueError("merge: it says what --export writes of a run with lora; give both, or leave it out.")
    starts = options.starts(recipe.device)
    if options.compare is not None:
        if starts or launched():
            raise ValueError(
                "gpus: got --compare, too, which trains one variant after another on one GPU; leave one of them out."
            )
        return beside_each_other(options, recipe, typed_in)
    if options.seeds != 1:
        raise ValueError(
            f"seeds: got {options.seeds}, and there is nothing to compare; give --compare, or --seed for a run's own."
        )
    if starts:
        with alone(recipe.out):  # nobody else's logs are there
            check_launch(recipe, options.resume, options.gpus or 1)
        return start("train", typed_in, options, Path(recipe.out, "ranks"), lambda: going_on(recipe, typed_in))
    kind = resolve(recipe.device).type
    with join(kind, options.longest_step) as ranks, quietly(options.quiet, ranks), alone(recipe.out, ranks):
        save_when_launcher_ends()
        resume = options.resume or options.begins_again
        run = prepare(recipe, resume, options.auto_batch, progress=ranks.first, ranks=ranks)
        if export is not None:
            check_replaceable(export, "export", run=run.id)
        if not ranks.first:
            failed = follow(run)
            if export and not failed:
                exported(run, export, options.merge)
            return 1 if failed else 0
        outcome = train(run, Path(recipe.out).resolve().name, log=options.log)
        if not (run.finished or run.diverged):
            say_how_to_go_on(typed_in)
        report = finish(outcome.tape)
        if export and outcome.failed:
            say(f"export: nothing was written to {export}, for the training is not sound", needed=True)
        elif export:
            say(f"export: {exported(run, export, options.merge)}, the weights of step {run.best or run.done:,}")
    if options.json:
        steps = outcome.tape.steps()
        about = {"out": recipe.out, "ranks": ranks.world, "finished": run.finished}
        about |= {"failed": outcome.failed, "verdict": outcome.verdict}
        about |= {"last": steps[-1] if steps else {}, "report": str(report), "doctor": outcome.doctor.as_dict()}
        about |= {"best": {"step": run.best, "held_out": run.evaluations[run.best]} if run.best else None}
        print(json.dumps(about | {"export": str(export) if export and not outcome.failed else None}))
    return 1 if outcome.failed else 0


def check_folder(file: str, out: str) -> None:
    """Refuse to resume where the run lies beside its config file and not in this folder: it would begin anew here."""
    here, beside = Path(out), Path(file).parent / out
    if not _saved(here) and _saved(beside):
        raise ValueError(
            f"resume: out: {here} holds no checkpoint here, and {beside} does, where {file} lies; start this in "
            f"{Path(file).parent}, or give --out {beside}."
        )


def _saved(out: Path) -> bool:
    return any((out / "checkpoints").glob("step-*"))


def exported(run: "Run", folder: Path, merge: bool) -> Path:
    advice = f"the run is saved in {run.folder}. Free space, or give another --export; then go on with --resume."
    with explain_disk_full(folder, advice):
        return run.export(folder, merge)


def say_how_to_go_on(typed_in: list[str]) -> None:
    from .session import say

    say(f"go on with: {again('train', typed_in)}", needed=True)


def going_on(recipe: Recipe, typed_in: list[str]) -> str | None:
    """The command that goes on with the run; None if it has saved nothing."""
    return again("train", typed_in) if _saved(Path(recipe.out)) else None


def beside_each_other(options: Train, recipe: Recipe, typed_in: list[str]) -> int:
    """--compare: the table goes to stdout, or the numbers as JSON."""
    from .compare import compare, keep, variants_of
    from .session import alone, quietly, say

    for name in ("export", "merge", "auto_batch"):
        if getattr(options, name):
            raise ValueError(f"{name}: it is for a single run, got --compare, too; leave one of them out.")
    variants = variants_of(recipe, options.compare or "", options.variants, options.seeds)
    with quietly(options.quiet), alone(recipe.out):
        comparison = compare(recipe, variants, options.seeds, options.resume, options.log)
        if comparison is None:
            say_how_to_go_on(typed_in)
            return 0
        report, numbers = keep(comparison, recipe)
    say(f"report: {report}")
    paths = {"out": recipe.out, "report": str(report), "numbers": str(numbers)}
    print(json.dumps(comparison.as_dict() | paths) if options.json else comparison)
    return 1 if comparison.failed else 0


def export_folder(options: Train) -> Path | None:
    if options.export is None:
        return None
    if not options.export.strip():
        raise ValueError("export: got an empty text; give hf or a folder.")
    folder = Path(options.out, "hf") if options.export == "hf" else Path(options.export)
    if os.path.realpath(folder) == os.path.realpath(options.out):
        raise ValueError(f"export: {folder} is --out itself, which holds the run's own files; give hf or another folder.")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"export: {there} is a file; give a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"export: {there} may not be written to; give another folder.")
    if folder.exists() and Path(options.model).exists() and folder.samefile(options.model):
        raise ValueError(f"export: {folder} holds the model that the run begins with; give another folder.")
    _check_contents(folder, options)
    return folder


def _check_contents(folder: Path, options: Train) -> None:
    """Refuse a folder of other files before the run is prepared. The run's id is compared once it is known."""
    from ..lora.files import CONFIG as ADAPTER

    if not folder.is_dir():
        return
    check_replaceable(folder, "export", run=exporting_run(folder) or "")
    bare = bool(options.lora) and not options.merge
    if (folder / ("config.json" if bare else ADAPTER)).exists():
        there, comes = ("a whole model", "an adapter") if bare else ("an adapter", "a whole model")
        raise ValueError(
            f"export: {folder} holds {there}, and {comes} is no update of it; give another folder, or remove that one."
        )


PATHS = ("out", "model", "data", "tokenizer", "export")  # keys that may name a file or a folder


def at_home(value: Any) -> Any:
    """`~` as a shell reads it: in a file nobody else does, and a run would go into a folder of that name."""
    if isinstance(value, list):
        return [at_home(one) for one in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def from_file(path: str) -> Train:
    """The options in a YAML file. An unknown key is an error that names the near one."""
    try:
        found: Any = load_yaml(read_text(Path(path), "give a config file", LARGEST))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(
            f"config: {path} cannot be read as YAML: {' '.join(str(error).split())}; see gpubound train --help."
        ) from error
    if found is None:  # a slip, such as a file that was never saved: the run that nobody asked for would take hours
        raise ValueError(f"config: {path} holds no keys, wanted some such as 'steps: 2000'; leave it out to take the defaults.")
    if not isinstance(found, dict):
        raise ValueError(f"config: {path} holds a {type(found).__name__}, wanted keys and values such as 'steps: 2000'.")
    try:
        found = {key: at_home(value) if key in PATHS else value for key, value in found.items()}
        known = {f.name: f for f in dataclasses.fields(Train) if f.name != "variants"}
        named: Any = found.get("compare")
        variants = {str(name): own for name, own in named.items()} if isinstance(named, dict) else {}
        if isinstance(named, dict | list):
            found = found | {"compare": ",".join(map(str, named))}
        options = Train(**typed(found, known), variants=variants)
        options.recipe()
        return options
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def presets() -> str:
    from ..models.registry import trainable

    lines = [line for family in trainable() for line in family.table()]
    lines.append("10m-tiny and so on: what sets the preset apart, two layers deep and 16 wide a head, to try a recipe")
    return "\n".join(lines)
