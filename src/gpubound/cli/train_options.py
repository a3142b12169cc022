"""The options of gpubound train: from the command line, a config file, or a config of another tool."""

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
import yaml

from ..files import check_creatable, check_replaceable, explain_disk_full, exporting_run, read_text
from ..formatting import shown
from ..rl.recipe import RLRecipe
from ..train.aliases import advice, convert, is_alias, normal
from ..train.recipe import EITHER, Recipe, of_either
from .ranks import RankOptions

MAX_BYTES = 1 << 20  # of a config file
MAX_DEPTH, MAX_VALUES = 32, 100_000  # levels, and values with every alias expanded


class StrictLoader(yaml.SafeLoader):
    """Load YAML, and refuse values that PyYAML silently reads differently: the last of two equal keys, 1:30 as 90, 010 as 8."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        lines = dict[tuple[str, str], int]()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and (first := lines.setdefault((key.tag, key.value), line)) != line:
                raise ValueError(f"{shown(key.value)} is there twice, in lines {first} and {line}; leave one of them out")
        return super().construct_mapping(node, deep)

    def construct_number(self, node: Any) -> int | float:
        integer = node.tag == "tag:yaml.org,2002:int"
        value = self.construct_yaml_int(node) if integer else self.construct_yaml_float(node)
        digits = node.value.replace("_", "").lstrip("+-")
        if ":" in digits or (integer and digits.isdecimal() and int(digits) != abs(value)):
            base = "sixties" if ":" in digits else "eights"
            raise ValueError(
                f"{shown(node.value)} in line {node.start_mark.line + 1} is {value} in YAML, counted in {base}; write the "
                f"number in tens, or a text in quotes"
            )
        return value


for _tag in ("int", "float"):
    StrictLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", StrictLoader.construct_number)


def load_yaml(text: str) -> Any:
    """Return the value that `text` holds. ValueError if it contains itself, is too deep, or grows too large by its aliases."""
    loader = StrictLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}, 0) > MAX_VALUES:
            raise ValueError(f"with every alias (*name) expanded it holds more than {MAX_VALUES:,} values; leave aliases out")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _size(node: yaml.Node, sizes: dict[int, int | None], depth: int) -> int:
    """Return the number of values in `node`, with every alias expanded."""
    if id(node) in sizes:
        if (size := sizes[id(node)]) is None:
            raise ValueError(f"line {node.start_mark.line + 1} holds a value that contains itself; write it without the alias")
        return size
    if depth > MAX_DEPTH:
        raise ValueError(f"line {node.start_mark.line + 1} is nested more than {MAX_DEPTH} deep; write fewer levels")
    sizes[id(node)], size = None, 1
    if isinstance(node, yaml.SequenceNode):
        size += sum(_size(item, sizes, depth + 1) for item in node.value)
    elif isinstance(node, yaml.MappingNode):
        size += sum(_size(item, sizes, depth + 1) for pair in node.value for item in pair)
    sizes[id(node)] = size
    return size


@dataclass(frozen=True)
class RecipeOptions(Recipe):
    """A recipe as options. What they make together is checked by `recipe`, whose errors are one line."""

    lora: Annotated[dict[str, Any], tyro.conf.Suppress] = dataclasses.field(default_factory=dict)
    phases: Annotated[tuple[dict[str, Any], ...], tyro.conf.Suppress] = ()
    objective_options: Annotated[dict[str, Any], tyro.conf.Suppress] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Leave checks to `recipe`: the file's and the command line's options are not all here yet."""

    def recipe(self) -> Recipe:
        return Recipe(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Recipe)})


@dataclass(frozen=True)
class RunOptions:
    """Options of a command that trains."""

    resume: bool = False
    """Go on from the newest whole checkpoint in --out. A larger --steps extends the run, a finished one too."""
    export: str | None = None
    """Write the best weights to this folder, in the layout that transformers loads; hf is the folder hf in --out. Of a run
    with lora these are the adapters, in PEFT's layout."""
    merge: bool = False
    """With --export of a run with lora: write the whole model, the adapters merged into its weights."""
    log: str | None = None
    """Also write the records to tensorboard, wandb or trackio."""
    quiet: bool = False
    """Log only warnings, fallbacks, and a training that failed or was stopped."""
    json: bool = False
    """Print the last record, the verdict and the paths of the report and the export as JSON on stdout."""


@dataclass(frozen=True)
class Train(RunOptions, RankOptions, RecipeOptions):
    """Train a decoder on text.

    The folder --out gets the corpus, the checkpoints, a line for each step (steps.jsonl) and the report. Ctrl-C ends the run
    after a checkpoint, with exit code 0. Exit code 1: the training was not sound (its last loss is not finite, or too many
    steps were skipped).

    Examples: gpubound train --model 10m --data texts/ --steps 2000 --out first
              gpubound train config.yaml --resume
    """

    allow: tuple[str, ...] = ()
    """With --resume: what the recipe may change, which is refused otherwise: lr, schedule, clip, weight_decay, betas, seq,
    batch, data, validation. In a config file: resume: {allow: [lr]}."""
    auto_batch: bool = False
    """Try micro-batches and use the largest that fits on the GPU. A step keeps its number of tokens."""
    memory: str | None = None
    """Use no more of the GPU than this, as on a smaller card: 24 GB, 22.5 GiB, or a number of GiB."""
    from_: Annotated[str | None, tyro.conf.arg(name="from", metavar="FILE")] = None
    """A config of axolotl, TRL, transformers, LLaMA-Factory or torchtune, translated; what could not be is listed. Options
    override it."""
    print: bool = False
    """With --from: print the translated config, and exit."""
    list: bool = False
    """List the models that --model knows by name, and exit."""


OPTIONS = {field.name: field for field in dataclasses.fields(Train) if field.name not in ("from_", "print")}
RL = {field.name for field in dataclasses.fields(RLRecipe)}
PATHS = ("out", "model", "data", "eval_data", "tokenizer", "chat_template", "export")  # keys that may name a file or a folder


def translated(path: str) -> tuple[Train, str]:
    """Return the options in a config of another tool, and the config as text, with what could not be translated."""
    from ..train.translate import translate

    translation = translate(read_config(path), OPTIONS)
    ordered = {key: translation.values[key] for key in OPTIONS if key in translation.values}  # in the order of --help
    values = {key: _expand_home(value) if key in PATHS else value for key, value in ordered.items()}
    lines = [f"# {path}, a config of {translation.tool}", yaml.safe_dump(values, sort_keys=False, width=120).rstrip()]
    accumulated = isinstance(values.get("accumulate"), int) and values["accumulate"] > 1
    lines += ["# accumulate counts the micro-batches of all GPUs together: multiply it by their number"] if accumulated else []
    padded = values.get("pack") == "none"
    lines += ["# pack: none pads each row to seq: pack: examples, or buckets: 4, computes less"] if padded else []
    lines += [f"# without effect here: {text}" for text in translation.left_out]
    lines += [f"# not translated: {text}" for text in translation.missing] or ["# everything was translated"]
    try:
        return Train(**convert(values, OPTIONS)), "\n".join(lines)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def split_aliases(argv: Sequence[str], known: Collection[str], command: str = "train") -> tuple[list[str], dict[str, Any]]:
    """Return (the arguments without options of other trainers, the values of those). An option without a value is true."""
    ours, theirs, name = list[str](), dict[str, list[Any]](), None
    for word in argv:
        if word.startswith("--"):
            option, equals, text = word.partition("=")
            name, key = None, normal(option[2:])
            if is_alias(key, known):
                theirs.setdefault(name := key, []).extend([text] if equals else [])
                continue
            ours_or_part = {key, key.removeprefix("no_"), key.partition(".")[0]}
            if not ours_or_part & {*known, "help", "from", "print"} and "?" in (
                meant := advice(key, {*known} - {"objective_options", "lora"})  # keys of configs alone
            ):
                meant = meant.replace("mean '", "mean '--")
                raise ValueError(f"there is no option {option}; {meant} See gpubound {command} --help.")
        (ours if name is None else theirs[name]).append(word)
    values = {}
    for name, words in theirs.items():
        try:
            read = [load_yaml(word) for word in words]
        except (ValueError, yaml.YAMLError):
            read = words
        values[name] = True if not read else read[0] if len(read) == 1 else read
    return ours, values


AnyOptions = TypeVar("AnyOptions", bound=RecipeOptions)


def with_aliases(default: AnyOptions, theirs: dict[str, Any], argv: list[str], known: Mapping[str, Any]) -> AnyOptions:
    """Return `default` with options under other trainers' names. An option that `argv` gives under our name is refused."""
    values = convert(theirs, known, "options")
    typed = {normal(word.partition("=")[0].removeprefix("--")) for word in argv if word.startswith("--")}
    if both := sorted(typed & values.keys()):
        raise ValueError(f"options: --{both[0].replace('_', '-')} is given under two names; give one of them.")
    if "lora" in values:
        values["lora"] = default.lora | values["lora"]
    return dataclasses.replace(default, **values)


def override_length(options: AnyOptions, default: AnyOptions) -> AnyOptions:
    """Return the options in which --steps overrides the epochs of the config file, --eval-every its evals_per_epoch, ..."""
    keys = [key for pair in EITHER.items() for key in pair]
    changed = {key: getattr(options, key) for key in keys if getattr(options, key) != getattr(default, key)}
    return dataclasses.replace(options, **of_either(changed))


def read_config(path: str) -> dict[Any, Any]:
    """Return the keys and values in a YAML file."""
    if Path(path).is_dir():
        raise ValueError(f"config: {path} is a folder, wanted a YAML file; a model's folder is given as --model {path}.")
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
        for key in values.keys() - OPTIONS.keys():
            if key in RL and not is_alias(key, OPTIONS):
                raise ValueError(f"config: {key!r} is a key of gpubound rl; write gpubound rl {path}, or leave it out.")
        values = {key: _expand_home(value) if key in PATHS else value for key, value in values.items()}
        if isinstance(resume := values.get("resume"), dict):
            if list(resume) != ["allow"]:
                raise ValueError(f"config: resume: got {shown(resume)}, wanted true, or allow: with a list such as [lr].")
            values = values | {"resume": True, "allow": resume["allow"]}
        options = Train(**convert(values, OPTIONS))
        if complete:
            options.recipe()
        return options
    except ValueError as error:
        from ..train.translate import tool_of

        tool = tool_of(values) if any(key in values for key in ("base_model", "finetuning_type", "checkpointer")) else None
        other = f" It looks like a config of {tool}, which is translated: gpubound train --from {path}" if tool else ""
        raise ValueError(f"{path}: {error}{other}") from error


def recorded(out: str) -> dict[str, Any]:
    """Return the config of the run in the folder `out`, which a resumed run takes where no option is given."""
    from ..monitor.tape import ABOUT, RunTape  # 90 modules, which --help needs not

    config = RunTape.open(out).about.get("config") or {} if Path(out, ABOUT).exists() else {}
    if "rewards" in config:
        raise ValueError(f"resume: out: {out} is a run of gpubound rl; go on with that, or give the folder of another run.")
    return {key: value for key, value in config.items() if value not in (None, {}, []) and key != "out"}


def checked(options: RecipeOptions, default: RecipeOptions, file: str | None) -> Recipe:
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


def export_folder(options: Any) -> Path | None:
    """Return the folder of --export, of train or rl; raise ValueError before the run is prepared if it cannot be written."""
    if options.merge and not (options.export and options.lora):
        raise ValueError("merge: it says what --export writes of a run with lora; give both, or leave it out.")
    if options.export is None:
        return None
    if not options.export.strip():
        raise ValueError("export: got an empty text; give hf or a folder.")
    folder = Path(options.out, "hf") if options.export == "hf" else Path(options.export)
    if os.path.realpath(folder) == os.path.realpath(options.out):
        raise ValueError(f"export: {folder} is --out itself, which holds the run's own files; give hf or another folder.")
    check_creatable(folder, "export")
    if folder.exists() and options.model and Path(options.model).exists() and folder.samefile(options.model):
        raise ValueError(f"export: {folder} holds the model that the run begins with; give another folder.")
    if folder.is_dir():
        from ..lora.files import CONFIG as ADAPTER

        check_replaceable(folder, "export", run=exporting_run(folder) or "")  # the run compares its id
        adapter = bool(options.lora) and not options.merge
        if (folder / ("config.json" if adapter else ADAPTER)).exists():
            old, new = ("a whole model", "an adapter") if adapter else ("an adapter", "a whole model")
            raise ValueError(
                f"export: {folder} holds {old}, and {new} is no update of it; give another folder, or remove that one."
            )
    return folder


def write_export(run: Any, folder: Path, merge: bool) -> Path:
    advice = f"the run is saved in {run.folder}. Free space, or give another --export; then go on with --resume."
    with explain_disk_full(folder, advice):
        return run.export(folder, merge)


def _expand_home(value: Any) -> Any:
    """Expand `~` in paths, as a shell does."""
    if isinstance(value, list):
        return [_expand_home(one) for one in value]
    if isinstance(value, dict):
        return {_expand_home(key): _expand_home(one) for key, one in value.items()}
    return os.path.expanduser(value) if isinstance(value, str) else value
