"""Train a decoder: a config file, options, or both; resumes bit for bit, exports to Hugging Face's layout.

gpubound train --model 10m --data my_texts/ --steps 2000
gpubound train config.yaml --lr 1e-3               options override the file
gpubound train config.yaml --resume                go on from the newest whole checkpoint
gpubound train config.yaml --resume --steps 9000   extend a run, a finished one too
gpubound train config.yaml --gpus 8                on eight GPUs of this machine, a process each
gpubound train config.yaml --compare lr=1e-3,lr=3e-3 --seeds 3    variants on the same tokens, in one table
gpubound train --from axolotl.yaml --print         a config of axolotl, TRL or torchtune as one of ours
gpubound train --list                              the models that have a name
"""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
import yaml

from ..files import check_replaceable, explain_disk_full, exporting_run, read_text
from ..formatting import shown
from ..monitor.live import check_log
from ..train.aliases import normal
from ..train.convert import convert
from ..train.recipe import EITHER, Recipe, of_either
from . import arguments
from .config_file import MAX_BYTES, load_yaml, split_aliases
from .ranks import RankOptions, resume_command, save_when_launcher_ends, start_ranks

if TYPE_CHECKING:
    from ..train.loop import Run
    from .session import Outcome


@dataclass(frozen=True)
class Train(RankOptions, Recipe):
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
    """Train variants on the same tokens and print their held-out losses in one table: names, with commas between them.
    Each is a model, a part that --model may have, key=value, or a name under compare: in the config file, with its options."""
    variants: Annotated[dict[str, Any], tyro.conf.Suppress] = dataclasses.field(default_factory=dict)
    seeds: int = 1
    """With --compare: train each variant with this many seeds, --seed and those after it. Three show the random variation."""
    resume: bool = False
    """Go on from the newest whole checkpoint in --out. A larger --steps extends the run, a finished one too."""
    allow: tuple[str, ...] = ()
    """With --resume: what the recipe may change, which is refused otherwise: lr, schedule, clip, weight_decay, betas, seq,
    batch, data, validation. In a config file: resume: {allow: [lr]}."""
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
    """Log only warnings, fallbacks, and a training that failed or was stopped."""
    from_: Annotated[str | None, tyro.conf.arg(name="from", metavar="FILE")] = None
    """A config of axolotl, TRL, transformers or torchtune, translated; what could not be is listed. Options override it."""
    print: bool = False
    """With --from: print the translated config, and exit."""
    list: bool = False
    """List the models that --model knows by name, and exit."""
    json: bool = False
    """Print the last record, the verdict and the paths of the report and the export as JSON on stdout."""

    def __post_init__(self) -> None:
        """Leave checks to the Recipe made from it: its errors are one line, a parser's are a box."""

    def recipe(self) -> Recipe:
        return Recipe(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Recipe)})


def main(argv: Sequence[str]) -> int:
    command_line = argv = list(argv)
    file, argv = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (None, argv)
    argv, theirs = split_aliases(argv, OPTIONS)
    default = Train()
    options = arguments(Train, argv, "train", default)
    if file is not None:  # a mistyped option is refused before torch is imported to check the file
        default = from_file(file, complete=False)
    if options.from_ is not None:
        if file is not None:
            raise ValueError(f"from: got {options.from_} and the config {file}; give one of them.")
        default, text = translated(options.from_)
        if options.print:
            print(text)
            return 0
        print(text, file=sys.stderr)
    elif options.print:
        raise ValueError("print: it prints what --from translates; give both.")
    if file is not None or options.from_ or theirs:
        options = arguments(Train, argv, "train", with_aliases(default, theirs, argv))
    options = override_length(options, default)
    if options.list:
        print(presets())
        return 0
    from ..distributed import launched  # torch takes two seconds: options are read first
    from ..train.prepare import check_launch
    from .session import run_folder

    check_log(options.log)
    if options.resume and file is not None and options.out == default.out:
        check_folder(file, options.out)
    recipe, export = checked(options, default, file), export_folder(options)
    if options.merge and not (export and recipe.lora):
        raise ValueError("merge: it says what --export writes of a run with lora; give both, or leave it out.")
    starts = options.starts_ranks(recipe.device)
    if options.compare is not None:
        if starts or launched():
            raise ValueError(
                "gpus: got --compare, too, which trains one variant after another on one GPU; leave one of them out."
            )
        return compare_variants(options, recipe, command_line)
    if options.seeds != 1:
        raise ValueError(
            f"seeds: got {options.seeds}, and there is nothing to compare; give --compare, or --seed for a run's own."
        )
    if starts:
        with run_folder(recipe.out):  # no other run's logs are there
            check_launch(recipe, options.resume, options.gpus or 1)

        def resume_line() -> str | None:
            return resume_command("train", command_line) if _has_checkpoints(Path(recipe.out)) else None

        return start_ranks("train", command_line, options, Path(recipe.out, "ranks"), resume_line)
    trained = train_one(options, recipe, export, f"go on with: {resume_command('train', command_line)}")
    if options.json and trained.outcome is not None:
        run, outcome = trained.run, trained.outcome
        steps = outcome.tape.steps()
        about = {"out": recipe.out, "ranks": run.ranks.world, "finished": run.finished}
        about |= {"failed": outcome.failed, "verdict": outcome.verdict}
        about |= {"last": steps[-1] if steps else {}, "report": str(trained.report), "doctor": outcome.doctor.as_dict()}
        about |= {"best": {"step": run.best, "held_out": run.evaluations[run.best]} if run.best else None}
        print(json.dumps(about | {"export": str(trained.export) if trained.export else None}))
    return 1 if trained.failed else 0


@dataclass(frozen=True)
class Trained:
    """A run that gpubound.train has trained. `run` has the model; `run.export(folder)` writes the best weights.

    failed   the training was not sound: its last loss is not finite, or too many steps were skipped
    outcome  the records and the verdict, on the first rank
    """

    run: "Run"
    failed: bool
    outcome: "Outcome | None" = None
    report: Path | None = None
    export: Path | None = None


def train(config: str | Path | None = None, /, **keys: Any) -> Trained:
    """Train as `gpubound train` does: with a config file, keys, or both. The keys may have the names of other trainers.

    Several processes, started by torchrun, train together. `resume`, `allow`, `auto_batch`, `export`, `merge`, `log` and
    `quiet` are the command's options.
    """
    known = {name: field for name, field in OPTIONS.items() if name in CALLED or name in Recipe.__dataclass_fields__}
    default = Train() if config is None else from_file(str(config))
    options = override_length(dataclasses.replace(default, **convert(keys, known, "train")), default)
    check_log(options.log)
    advice = "go on with resume=True"
    return train_one(options, options.recipe(), export_folder(options), advice)


CALLED = ("resume", "allow", "auto_batch", "export", "merge", "log", "quiet", "timeout")  # options of `train`


def train_one(options: Train, recipe: Recipe, export: Path | None, advice: str) -> Trained:
    """Train one run in this process, or this rank's part of it. `advice` says how to go on with a run that was stopped."""
    from ..device import resolve
    from ..distributed import join
    from ..train.prepare import prepare
    from . import session
    from .session import say

    kind = resolve(recipe.device).type
    with (
        join(kind, options.longest_step) as ranks,
        session.log_level(options.quiet, ranks),
        session.run_folder(recipe.out, ranks),
    ):
        save_when_launcher_ends()
        resume = options.resume or options.is_restart
        run = prepare(recipe, resume, options.auto_batch, progress=ranks.first, ranks=ranks, allow=options.allow)
        if export is not None:
            check_replaceable(export, "export", run=run.id)
        if not ranks.first:
            failed = session.follow(run)
            if export and not failed:
                write_export(run, export, options.merge)
            return Trained(run, failed)
        outcome = session.train(run, Path(recipe.out).resolve().name, log=options.log)
        if not (run.finished or run.diverged):
            say(advice, needed=True)
        report = session.finish(outcome.tape)
        if export and outcome.failed:
            say(f"export: nothing was written to {export}, for the training is not sound", needed=True)
            export = None
        elif export:
            say(f"export: {write_export(run, export, options.merge)}, the weights of step {run.best or run.done:,}")
    return Trained(run, outcome.failed, outcome, report, export)


def compare_variants(options: Train, recipe: Recipe, command_line: list[str]) -> int:
    """Run --compare: the table goes to stdout, or the figures as JSON."""
    from .compare import compare, make_variants, write
    from .session import log_level, run_folder, say

    for name in ("export", "merge", "auto_batch"):
        if getattr(options, name):
            raise ValueError(f"{name}: it is for a single run, got --compare, too; leave one of them out.")
    variants = make_variants(recipe, options.compare or "", options.variants, options.seeds)
    with log_level(options.quiet), run_folder(recipe.out):
        comparison = compare(recipe, variants, options.seeds, options.resume, options.log)
        if comparison is None:
            say(f"go on with: {resume_command('train', command_line)}", needed=True)
            return 0
        report, figures = write(comparison, recipe)
    say(f"report: {report}")
    paths = {"out": recipe.out, "report": str(report), "numbers": str(figures)}
    print(json.dumps(comparison.as_dict() | paths) if options.json else comparison)
    return 1 if comparison.failed else 0


def check_folder(file: str, out: str) -> None:
    """Raise ValueError when the run to resume is in the folder of its config file, and not in this one."""
    here, there = Path(out), Path(file).parent / out
    if not _has_checkpoints(here) and _has_checkpoints(there):
        raise ValueError(
            f"resume: out: {here} holds no checkpoint here, and {there} does, next to {file}; start this in "
            f"{Path(file).parent}, or give --out {there}."
        )


def _has_checkpoints(out: Path) -> bool:
    return any((out / "checkpoints").glob("step-*"))


def export_folder(options: Train) -> Path | None:
    """Return the folder of --export; raise ValueError before the run is prepared if it cannot be written."""
    if options.export is None:
        return None
    if not options.export.strip():
        raise ValueError("export: got an empty text; give hf or a folder.")
    folder = Path(options.out, "hf") if options.export == "hf" else Path(options.export)
    if os.path.realpath(folder) == os.path.realpath(options.out):
        raise ValueError(f"export: {folder} is --out itself, which holds the run's own files; give hf or another folder.")
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"export: {existing} is a file; give a folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"export: {existing} cannot be written to; give another folder.")
    if folder.exists() and Path(options.model).exists() and folder.samefile(options.model):
        raise ValueError(f"export: {folder} holds the model that the run begins with; give another folder.")
    if folder.is_dir():
        from ..lora.files import CONFIG as ADAPTER

        check_replaceable(folder, "export", run=exporting_run(folder) or "")  # main compares the run's id
        adapter = bool(options.lora) and not options.merge
        if (folder / ("config.json" if adapter else ADAPTER)).exists():
            old, new = ("a whole model", "an adapter") if adapter else ("an adapter", "a whole model")
            raise ValueError(
                f"export: {folder} holds {old}, and {new} is no update of it; give another folder, or remove that one."
            )
    return folder


def write_export(run: "Run", folder: Path, merge: bool) -> Path:
    advice = f"the run is saved in {run.folder}. Free space, or give another --export; then go on with --resume."
    with explain_disk_full(folder, advice):
        return run.export(folder, merge)


def translated(path: str) -> tuple[Train, str]:
    """Return the options in a config of another tool, and the config as text, with what could not be translated."""
    from ..train.translate import translate

    found = translate(read_config(path), OPTIONS)
    given = {key: found.values[key] for key in OPTIONS if key in found.values}  # in the order of --help
    values = {key: _expand_home(value) if key in PATHS else value for key, value in given.items()}
    lines = [f"# {path}, a config of {found.tool}", yaml.safe_dump(values, sort_keys=False, width=120).rstrip()]
    accumulated = isinstance(values.get("accumulate"), int) and values["accumulate"] > 1
    lines += ["# accumulate counts the micro-batches of all GPUs together: multiply it by their number"] if accumulated else []
    padded = values.get("pack") == "none"
    lines += ["# pack: none pads each row to seq: pack: examples, or buckets: 4 on one GPU, computes less"] if padded else []
    lines += [f"# without effect here: {text}" for text in found.left_out]
    lines += [f"# not translated: {text}" for text in found.missing] or ["# everything was translated"]
    try:
        return Train(**convert(values, OPTIONS)), "\n".join(lines)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


OPTIONS = {field.name: field for field in dataclasses.fields(Train) if field.name not in ("variants", "from_", "print")}


def with_aliases(default: Train, theirs: dict[str, Any], argv: list[str]) -> Train:
    """Return `default` with options under other trainers' names. An option that `argv` gives under our name is refused."""
    values = convert(theirs, OPTIONS, "options")
    given = {normal(word.partition("=")[0].removeprefix("--")) for word in argv if word.startswith("--")}
    if both := sorted(given & values.keys()):
        raise ValueError(f"options: --{both[0].replace('_', '-')} is given under two names; give one of them.")
    if "lora" in values:
        values["lora"] = default.lora | values["lora"]
    return dataclasses.replace(default, **values)


def override_length(options: Train, default: Train) -> Train:
    """Return the options in which --steps overrides the epochs of the config file, --eval-every its evals_per_epoch, ..."""
    keys = [key for pair in EITHER.items() for key in pair]
    given = {key: getattr(options, key) for key in keys if getattr(options, key) != getattr(default, key)}
    return dataclasses.replace(options, **of_either(given))


PATHS = ("out", "model", "data", "eval_data", "tokenizer", "chat_template", "export")  # keys that may name a file or a folder


def read_config(path: str) -> dict[Any, Any]:
    """Return the keys and values in a YAML file."""
    try:
        values: Any = load_yaml(read_text(Path(path), "give a config file", MAX_BYTES))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(
            f"config: {path} cannot be read as YAML: {' '.join(str(error).split())}; see gpubound train --help."
        ) from error
    if values is None:  # perhaps a file that was never saved; the default run would take hours
        raise ValueError(f"config: {path} holds no keys, wanted some such as 'steps: 2000'; leave it out to take the defaults.")
    if not isinstance(values, dict):
        raise ValueError(f"config: {path} holds a {type(values).__name__}, wanted keys and values such as 'steps: 2000'.")
    return values


def from_file(path: str, complete: bool = True) -> Train:
    """Return the options in a YAML file. An unknown key is an error that names the most similar one.

    complete  False: options of the command line follow, and what they make together is checked
    """
    values: Any = read_config(path)
    try:
        values = {key: _expand_home(value) if key in PATHS else value for key, value in values.items()}
        compare: Any = values.get("compare")
        variants = {str(name): changes for name, changes in compare.items()} if isinstance(compare, dict) else {}
        if isinstance(compare, dict | list):
            values = values | {"compare": ",".join(map(str, compare))}
        if isinstance(resume := values.get("resume"), dict):
            if list(resume) != ["allow"]:
                raise ValueError(f"config: resume: got {shown(resume)}, wanted true, or allow: with a list such as [lr].")
            values = values | {"resume": True, "allow": resume["allow"]}
        options = Train(**convert(values, OPTIONS), variants=variants)
        if complete:
            options.recipe()
        return options
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def checked(options: Train, default: Train, file: str | None) -> Recipe:
    """Return the recipe of the options. An error that the config `file` has by itself, as `default`, names it."""
    try:
        return options.recipe()
    except ValueError as error:
        try:
            default.recipe()
        except ValueError as alone:
            if file is not None and str(alone) == str(error):
                raise ValueError(f"{file}: {error}") from error
        raise


def _expand_home(value: Any) -> Any:
    """Expand `~` in paths, as a shell does."""
    if isinstance(value, list):
        return [_expand_home(one) for one in value]
    if isinstance(value, dict):
        return {_expand_home(key): _expand_home(one) for key, one in value.items()}
    return os.path.expanduser(value) if isinstance(value, str) else value


def presets() -> str:
    """Return the table of --list."""
    from ..models.registry import trainable

    columns = {"hidden": "", "intermediate": "", "layers": "", "heads": "", "kv_heads": "", "vocabulary": "", "tied": False}
    columns |= {"causal": True, "attention": "softmax", "mlp": "swiglu", "norm": "rms"}  # of a family without this choice
    rows = [["preset", *(column.replace("_", " ") for column in columns)]]
    for family in trainable():
        for name, config in family.PRESETS.items():
            values = [getattr(config, column, default) for column, default in columns.items()]
            rows.append([name, *(("no", "yes")[v] if isinstance(v, bool) else str(v) for v in values)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join(cell.rjust(w) if cell.isdigit() else cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows
    ]
    notes = [family.NOTE for family in trainable() if hasattr(family, "NOTE")]
    small = "10m-tiny and so on: what sets the preset apart, two layers deep and 16 wide a head, to try a recipe"
    return "\n".join([*lines, *notes, small])
