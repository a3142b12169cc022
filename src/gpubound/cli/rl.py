"""Reinforcement learning of a model from rewards: sampled and learnt on one copy of the weights; resumes exactly.

gpubound rl config.yaml                 gpubound init rl prints a commented config
gpubound rl config.yaml --lr 2e-6       options override the file
gpubound rl config.yaml --resume        go on from the newest whole checkpoint
gpubound rl --out runs/sums --resume    with the config that the run has recorded
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import tyro

from ..formatting import hint, listed, shown
from ..monitor.live import check_log
from ..rl.recipe import RLRecipe
from ..trace import notice
from ..train.aliases import read
from . import arguments, split_config
from .ranks import resume_command
from .train_options import OPTIONS as TRAIN, RunOptions, export_folder, read_config, write_export

# TRL's names of a run's keys. Those of training are read as by gpubound train.
NAMES = {
    "num_generations": "samples", "max_completion_length": "max_new_tokens", "beta": "kl", "epsilon": "ratio_clip",
    "epsilon_high": "ratio_clip_high", "loss_type": "variant", "num_iterations": "passes", "entropy_coef": "entropy",
    "vllm_importance_sampling_cap": "truncate", "max_steps": "steps", "max_grad_norm": "clip",
}  # fmt: skip
PATHS = ("out", "model", "prompts", "eval_prompts", "tokenizer", "chat_template", "export")


@dataclass(frozen=True)
class RLOptions(RunOptions, RLRecipe):
    """Train a model by reinforcement learning, from rewards of the answers that it samples.

    Each step samples several answers to each of some prompts, scores them, and makes those likelier that are better than the
    others. The folder --out gets a line for each step (steps.jsonl), answers to read (samples.jsonl), checkpoints and the
    report. Ctrl-C ends the run after a checkpoint, with exit code 0.

    Examples: gpubound init rl > config.yaml
              gpubound rl config.yaml --steps 200 --out runs/arithmetic
              gpubound rl config.yaml --resume
    """

    lora: Annotated[dict[str, Any], tyro.conf.Suppress] = dataclasses.field(default_factory=dict)
    rewards: Annotated[dict[str, Any], tyro.conf.Suppress] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Leave checks to the RLRecipe made from it: its errors are one line, a parser's are a box."""

    def recipe(self) -> RLRecipe:
        return RLRecipe(**{field.name: getattr(self, field.name) for field in dataclasses.fields(RLRecipe)})


OPTIONS = {field.name: field for field in dataclasses.fields(RLOptions)}


def main(argv: Sequence[str]) -> int:
    command_line = list(argv)
    file, argv = split_config(argv)
    if any(each.partition("=")[0] == "--gpus" for each in argv):
        raise ValueError(
            "rl: --gpus: a run samples and learns on one GPU; leave it out, or choose one by --device cuda:<index>."
        )
    options = arguments(RLOptions, argv, "rl", RLOptions())
    if file is not None:
        options = arguments(RLOptions, argv, "rl", from_file(file))
    elif options.resume:
        options = arguments(RLOptions, argv, "rl", from_run(options.out))
    check_log(options.log)
    recipe = options.recipe()
    if not (recipe.model and recipe.prompts and recipe.rewards):
        missing = next(name for name in ("model", "prompts", "rewards") if not getattr(recipe, name))
        raise ValueError(f"rl: {missing}: got nothing; give a config file with it. gpubound init rl prints one.")
    export = export_folder(options)

    from ..rl.loop import train
    from .session import log_level, say

    keys = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe) if field.name != "model"}
    with log_level(options.quiet):
        run = train(recipe.model, resume=options.resume, log=options.log, **keys)
        say(f"report: {run.folder / 'report.html'}")
        if not run.finished:
            say(f"go on with: {resume_command('rl', command_line)}", needed=True)
        elif export is not None:
            say(f"export: {write_export(run, export, options.merge)}, the weights of step {run.best or run.done:,}")
    if options.json:
        steps = run.tape.steps()
        about = {"out": recipe.out, "finished": run.finished, "verdict": run.tape.about["verdict"]}
        about |= {"last": steps[-1] if steps else {}, "report": str(run.folder / "report.html")}
        print(json.dumps(about | {"export": str(export) if export and run.finished else None}))
    return 0


def from_file(path: str) -> RLOptions:
    """Return the options in a YAML file. An unknown key is an error that names the most similar one."""
    values: dict[Any, Any] = read_config(path)
    try:
        if named := [key for key in values if key in NAMES and NAMES[key] not in values]:
            notice(f"config: read {', '.join(f'{key} as {NAMES[key]}' for key in named)}.")
        values = read({NAMES[key] if key in named else key: value for key, value in values.items()}, OPTIONS)
        for key in values:
            if key not in OPTIONS:
                near = (
                    "it is a key of gpubound train."
                    if key in TRAIN
                    else hint(key, OPTIONS, "gpubound rl --help lists the keys.")
                )
                raise ValueError(f"config: {shown(key)} is unknown; {near}")
        options = RLOptions(**{key: _converted(key, value) for key, value in values.items()})
        options.recipe()
        return options
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def from_run(out: str) -> RLOptions:
    """Return the options that the run in the folder `out` has recorded."""
    from ..monitor.tape import ABOUT, RunTape

    if not Path(out, ABOUT).exists():
        raise ValueError(f"resume: out: {out} holds no run; give the folder of one, or the config of a new one.")
    config = RunTape.open(out).about.get("config") or {}
    if "rewards" not in config:
        raise ValueError(f"resume: out: {out} is a run of gpubound train; go on with that, or give the folder of another run.")
    if python := [key for key in ("model", "prompts", "rewards") if not config.get(key)]:
        raise ValueError(
            f"resume: {python[0]}: the run in {out} has what Python gave it; go on with gb.rl.train(..., resume=True)."
        )
    lists = {key: tuple(config[key]) for key in ("stop", "betas") if key in config}
    return RLOptions(**{key: value for key, value in (config | lists).items() if key in OPTIONS} | {"out": out})


def _converted(key: str, value: Any) -> Any:
    """Return a value of YAML's with the type of its option: YAML reads 3e-4 as a text."""
    wanted = (get_args(OPTIONS[key].type) or (OPTIONS[key].type,))[0]
    if key == "rewards" and not isinstance(value, Mapping):
        if any(isinstance(one, list | Mapping) for one in listed(value)):
            raise ValueError(f"rewards: got {shown(value)}, wanted a name, a list of them, or weights by name.")
        return dict.fromkeys(listed(value), 1.0)
    if key in ("stop", "betas"):
        return tuple(value) if isinstance(value, list) else (value,)
    if value in ("none", "off") and key in ("clip", "truncate"):
        return None
    if wanted is float and isinstance(value, str | int) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):  # the recipe's error names the key
            return float(value)
    return os.path.expanduser(value) if key in PATHS and isinstance(value, str) else value
