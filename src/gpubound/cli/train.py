"""Train a decoder: a config file, options, or both; resumes bit for bit, exports to Hugging Face's layout.

gpubound train --model 10m --data my_texts/ --steps 2000
gpubound train config.yaml --lr 1e-3               options override the file
gpubound train config.yaml --resume                go on from the newest whole checkpoint
gpubound train config.yaml --resume --steps 9000   extend a run, a finished one too
gpubound train --out first --resume                with the config that the run has recorded
gpubound train config.yaml --gpus 8                on eight GPUs of this machine, a process each
gpubound train --from axolotl.yaml --print         a config of axolotl, TRL, LLaMA-Factory or torchtune as one of ours
gpubound train --list                              the models that have a name
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ..files import check_replaceable
from ..monitor.live import check_log
from ..train.aliases import convert
from ..train.recipe import Recipe
from . import arguments, split_config
from .ranks import resume_command, save_when_launcher_ends, start_ranks
from .train_options import (
    OPTIONS,
    Train,
    checked,
    export_folder,
    from_file,
    override_length,
    recorded,
    split_aliases,
    translated,
    with_aliases,
    write_export,
)  # fmt: skip

if TYPE_CHECKING:
    from ..train.loop import Run
    from .session import Outcome


def main(argv: Sequence[str]) -> int:
    command_line = list(argv)
    file, argv = split_config(argv)
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
    elif options.resume and file is None:
        default = Train(**convert(recorded(options.out), OPTIONS))
        if default == Train() and options == Train(resume=True, out=options.out):
            raise ValueError(f"resume: out: {options.out} holds no run; give the folder of one, or the options of a new one.")
    if file is not None or options.from_ or theirs or options.resume:
        options = arguments(Train, argv, "train", with_aliases(default, theirs, argv, OPTIONS))
    options = override_length(options, default)
    if options.list:
        print(presets())
        return 0
    from ..train.prepare import check_launch  # torch takes two seconds: options are read first
    from .session import run_folder

    check_log(options.log)
    if options.resume and file is not None and options.out == default.out:
        check_folder(file, options.out)
    recipe, export = checked(options, default, file), export_folder(options)
    if options.starts_ranks(recipe.device):
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

    Several processes, started by torchrun, train together. `resume`, `allow`, `auto_batch`, `memory`, `export`, `merge`, `log`
    and `quiet` are the command's options.
    """
    known = {name: field for name, field in OPTIONS.items() if name in CALLED or name in Recipe.__dataclass_fields__}
    default = Train() if config is None else from_file(str(config))
    options = override_length(dataclasses.replace(default, **convert(_as_in_yaml(keys), known, "train")), default)
    check_log(options.log)
    advice = "go on with resume=True"
    return train_one(options, options.recipe(), export_folder(options), advice)


def _as_in_yaml(value: Any) -> Any:
    """Return keys of Python with the texts of paths, as a config file has them."""
    if isinstance(value, dict):
        return {key: _as_in_yaml(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_in_yaml(each) for each in value]
    return str(value) if isinstance(value, PurePath) else value


CALLED = ("resume", "allow", "auto_batch", "memory", "export", "merge", "log", "quiet", "timeout")  # options of `train`


def train_one(options: Train, recipe: Recipe, export: Path | None, advice: str) -> Trained:
    """Train one run in this process, or this rank's part of it. `advice` says how to go on with a run that was stopped."""
    from ..device import limit, resolve
    from ..distributed import join
    from ..measure.memory_phases import MemoryPhases
    from ..train.prepare import prepare
    from . import session
    from .session import say

    heads = [own.objective for _, own in recipe.stages() if own.new_objective().trains_head]
    if heads and recipe.lora and export is not None and not options.merge:
        raise ValueError(
            f"export: the files of adapters do not hold the head that {heads[0]} trains; give --merge, for a whole model."
        )
    if options.memory is not None:
        limit(options.memory)
    device = resolve(recipe.device)
    with (
        join(device.type, timedelta(minutes=options.timeout)) as ranks,
        session.log_level(options.quiet, ranks),
        session.run_folder(recipe.out, ranks),
        session.explained(recipe, device, ranks.world),
    ):
        save_when_launcher_ends()
        resume = options.resume or options.is_restart
        memory = MemoryPhases(device)
        memory.predicted = {} if options.auto_batch else session.predict(recipe, device, ranks.world)
        run = prepare(recipe, resume, options.auto_batch, progress=ranks.first, ranks=ranks, allow=options.allow, memory=memory)
        if export is not None:
            check_replaceable(export, "export", run=run.id)
        if not ranks.first:
            failed = session.follow(run)
            if export and not failed:
                write_export(run, export, options.merge)
            return Trained(run, failed)
        outcome = session.train(run, Path(recipe.out).resolve().name, log=options.log)
        report = session.finish(outcome.tape)
        if export and outcome.failed:
            say(f"export: nothing was written to {export}, for the training is not sound", needed=True)
            export = None
        elif export:
            say(f"export: {write_export(run, export, options.merge)}, the weights of step {run.best or run.done:,}")
        if not (run.finished or run.diverged):
            say(advice, needed=True)
    return Trained(run, outcome.failed, outcome, report, export)


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
