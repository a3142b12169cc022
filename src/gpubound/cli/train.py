"""Train a decoder: a config file, options, or both; resumes bit for bit, exports to Hugging Face's layout.

gpubound train --model 10m --data my_texts/ --steps 2000
gpubound train config.yaml --lr 1e-3          options override the file
gpubound train config.yaml --resume           go on from the newest whole checkpoint
gpubound train --list                         the presets
"""

import dataclasses
import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
import yaml

from ..models import PRESETS
from ..train.run import Recipe, prepare
from .session import finish, say, train


@dataclass(frozen=True)
class Train(Recipe):
    """Train a decoder on text.

    The folder --out gets the corpus, checkpoints, a line a step (steps.jsonl) and the report. Ctrl-C saves, exit code 0.

    Examples:
      gpubound train --model 10m --data my_texts/ --steps 2000 --out runs/first
      gpubound train config.yaml --resume
    """

    resume: bool = False
    """Go on from the newest whole checkpoint in --out."""
    export: str | None = None
    """Write the trained model to this folder as transformers loads it."""
    list: bool = False
    """List the presets and end."""
    json: bool = False
    """Print the run's last record and where everything is as JSON on stdout."""


def main(argv: Sequence[str]) -> int:
    argv = list(argv)
    file = argv.pop(0) if argv and not argv[0].startswith("-") else None
    default = from_file(file) if file else Train()
    options = tyro.cli(Train, args=argv, prog="gpubound train", default=default, config=(tyro.conf.FlagCreatePairsOff,))
    if options.list:
        print(presets())
        return 0
    recipe = Recipe(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Recipe)})
    run = prepare(recipe, resume=options.resume)
    tape, _ = train(run, Path(recipe.out).name)
    finish(tape)
    if options.export:
        say(f"export: {run.export(options.export)}")
    if options.json:
        last = tape.steps()[-1] if tape.steps() else {}
        print(json.dumps({"out": recipe.out, "last": last, "verdict": tape.about["verdict"], "export": options.export}))
    return 0


def from_file(path: str) -> Train:
    """The options in a YAML file. An unknown key is an error that names the near one."""
    try:
        found: Any = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(
            f"config: {path} cannot be read as YAML: {' '.join(str(error).split())}; see gpubound train --help."
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"config: {path} holds a {type(found).__name__}, wanted keys and values such as 'steps: 2000'.")
    known = {f.name: f for f in dataclasses.fields(Train)}
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(known)}."
            raise ValueError(f"config: {path} has an unknown key {key!r}; {hint}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    if isinstance(values.get("data"), str):
        values["data"] = (values["data"],)
    return Train(**{key: _as(known[key], value, path) for key, value in values.items()})


def _as(field: dataclasses.Field, value: Any, path: str) -> Any:
    """YAML reads 3e-4 as text; a number field takes it, and anything else of the wrong kind is refused by name."""
    wanted = type(field.default) if field.default is not None else None
    if wanted is float and isinstance(value, str | int) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    if wanted is not None and not isinstance(value, wanted):
        raise ValueError(f"config: {path}: {field.name} must be a {wanted.__name__}, got {value!r}.")
    return value


def presets() -> str:
    lines = ["preset  hidden  intermediate  layers  heads  kv heads  vocabulary  tied"]
    for name, c in PRESETS.items():
        tied = "yes" if c.tied else "no"
        lines.append(
            f"{name:6}  {c.hidden:6}  {c.intermediate:12}  {c.layers:6}  {c.heads:5}  {c.kv_heads:8}  {c.vocabulary:10}  {tied}"
        )
    return "\n".join(lines)
