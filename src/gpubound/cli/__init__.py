"""The command line, `gpubound COMMAND`. One file per command, imported only when it is called; its options are a dataclass.

Exit codes, the same everywhere: 0 done, 1 a gate failed, 2 bad input or the user's script failed, 3 could not measure,
130 Ctrl-C, 141 stdout was closed by its reader.
"""

import ast
import errno
import inspect
import io
import os
import re
import select
import shutil
import signal
import sys
import textwrap
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import BudgetError, GpuboundError, MeasureError, host_bytes_wanted
from ..formatting import hint, readable
from ..trace import printable
from ..version import __version__

if TYPE_CHECKING:
    from tyro.constructors import PrimitiveConstructorSpec, PrimitiveTypeInfo

Config = TypeVar("Config")

# Command -> an example of it. Its module is gpubound.cli.<command>, with main(argv) -> int; the first line of that module's
# docstring is its help here.
COMMANDS = {
    "demo": "gpubound demo",
    "env": "gpubound env --json",
    "place": "gpubound place path/to/checkpoint",
    "init": "gpubound init lora > config.yaml",
    "train": "gpubound train config.yaml",
    "rl": "gpubound rl config.yaml",
    "plan": "gpubound plan config.yaml --gpus 8",
    "generate": 'gpubound generate path/to/checkpoint --prompt "Once"',
    "chat": "gpubound chat path/to/checkpoint",
    "serve": "gpubound serve path/to/base",
    "doctor": "gpubound doctor train.py --epochs 3",
    "fix": "gpubound fix --try --apply",
    "bench": "gpubound bench kernels",
    "report": "gpubound report runs/first",
    "completion": "gpubound completion bash >> ~/.bashrc",
}

# Type of an option -> its metavar in the help, and its name in an error.
TYPE_NAMES: dict[type, tuple[str, str]] = {int: ("N", "a whole number"), float: ("X", "a number"), str: ("TEXT", "a text")}
MAX_COLUMNS = 100  # of a command's description
UNSET = "unset"  # default of an option that has none; the help leaves it out
EXPECTED = (GpuboundError, ValueError, OSError)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # EFBIG: ulimit -f, or more than the file system allows


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is returned, never raised."""
    if sys.stdout is None:  # the caller has closed it
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for the rest of the process)
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name == "help" and rest and rest[0] in COMMANDS:
        name, rest = rest[0], ["--help"]
    if name in ("-h", "--help", "help"):
        return guarded("help", lambda _: print(_help()), rest)
    if name in ("-V", "--version", "version"):
        return guarded("version", lambda _: print(f"gpubound {__version__}"), rest)
    if name not in COMMANDS:
        near = hint(name, COMMANDS, "the commands are")
        print(printable(f"gpubound: there is no command {name!r}; {near} See gpubound --help."), file=sys.stderr)
        return 2
    # Threads spin by default while they wait for each other. Two on two cores, next to other processes, made 0.3 training steps
    # a second spinning and 3.4 sleeping; on idle cores 23.5 and 22.3. OpenMP reads this when torch is imported. A script under
    # the doctor runs unchanged.
    if name not in ("doctor", "fix") and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return guarded(name, lambda argv: import_module(f".{name}", __name__).main(argv), rest)


def guarded(name: str, command: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> int:
    """Return the exit code of `command(argv)`. A mistake of a user is one line; GPUBOUND_TRACEBACK=1 adds a traceback."""

    def run() -> int:
        try:
            return command(argv) or 0
        except SystemExit as stop:  # of an argument parser, after its answer
            return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2

    try:
        if "RANK" in os.environ:  # before torch is imported to ask
            from ..distributed import launched
            from .ranks import run_as_rank

            if launched():
                return run_as_rank(name, run, _explain)
        with nullcontext() if name == "doctor" else interruptible_imports():  # a script finds the handlers that it expects
            code = run()
        sys.stdout.flush()  # a failure of which is reported below
        return code
    except KeyboardInterrupt:
        print("gpubound: interrupted", file=sys.stderr)
        return 130
    except EXPECTED as error:
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():
            return 141
        if os.environ.get("GPUBOUND_TRACEBACK") == "1":
            traceback.print_exc()
        code, text = _explain(error)
        print(f"gpubound {name}: {text.removeprefix(f'{name}: ')}", file=sys.stderr)  # the library's functions name themselves
        return code
    except RuntimeError as error:
        if (wanted := host_bytes_wanted(error)) is None or os.environ.get("GPUBOUND_TRACEBACK") == "1":
            raise
        advice = "free some, or take shorter sequences, fewer at once, or a smaller model."
        print(f"gpubound {name}: out of memory: the host has not {readable(wanted)} more; {advice}", file=sys.stderr)
        return 2


@contextmanager
def interruptible_imports() -> Iterator[None]:
    """Let Ctrl-C end the process at once while it imports torch, whose C++ answers a KeyboardInterrupt with abort()."""

    def interrupt(number: int, frame: Any) -> None:
        if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
            os.write(2, b"gpubound: interrupted\n")
            os._exit(130)
        signal.default_int_handler(number, frame)

    ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:  # else it is ignored, or the caller has a handler
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if ours and signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _explain(error: Exception) -> tuple[int, str]:
    """Return the exit code and the line of an error. An unexpected error is named by its class: it is a defect."""
    text = " ".join(printable(str(error)).split()) or type(error).__name__
    if isinstance(error, OSError) and error.errno in DISK_FULL:  # without a file's name: a stream's, most often stdout's
        where = "" if error.filename is None else printable(f"{error.filename}: ")
        text = f"{where}there is no room for what is written ({error.strerror}); free some space, or write to another disk."
    if not isinstance(error, EXPECTED):
        return 1, f"{type(error).__name__}: {text}"
    return (1 if isinstance(error, BudgetError) else 3 if isinstance(error, MeasureError) else 2), text


def _stdout_is_closed() -> bool:
    """Return True when the reader of stdout, and not of another pipe, has left, as in `| head`. Later writes are dropped."""
    stdout = select.poll()
    stdout.register(1, 0)  # 0: report only errors
    if not stdout.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python reports the error again at exit
    return True


def _help() -> str:
    """Return the help. No command is imported for it: torch takes seconds."""
    columns = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    width = max(map(len, COMMANDS))
    lines = ["usage: gpubound COMMAND [options]", "", "Makes PyTorch transformers GPU-bound, and proves it.", "", "commands:"]
    for name in COMMANDS:
        lines.append(fill(summary(name), columns, f"  {name:{width}}  ", " " * (width + 4)))
    lines += ["", "examples:", *(f"  {example}" for example in COMMANDS.values()), ""]
    lines.append(fill("Each command explains itself with --help. gpubound --version prints the version.", columns))
    return "\n".join(lines)


def summary(command: str) -> str:
    """Return the first line of a command's module, without importing it."""
    source = (Path(__file__).parent / f"{command}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def split_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return (the config file, or None, and the options): the file comes first."""
    words = list(argv)
    if any(word.partition("=")[0] == "--config" for word in words):
        raise ValueError(
            "there is no option --config; the config file comes first, without it, as in gpubound train config.yaml."
        )
    return (words[0], words[1:]) if words and not words[0].startswith("-") else (None, words)


def arguments(kind: type[Config], argv: Sequence[str], command: str, default: Config | None = None) -> Config:
    """Parse `argv` into the dataclass `kind`. Its docstring is the help text, its fields' docstrings are the options'.

    `--help` prints the docstring, which holds an example. A ValueError names an unknown option and the most similar one.

    default  of a command that takes a config file before its options: the file's
    """
    import tyro  # here, because gpubound's own --help and --version are answered without it

    prog = f"gpubound {command}"
    values, lists, flags, hidden = dict[str, Any](), set[str](), set[str](), set[str]()
    for name, of in get_type_hints(kind, include_extras=True).items():
        plain, *marks = get_args(of) if get_origin(of) is Annotated else (of,)
        option = f"--{name.rstrip('_').replace('_', '-')}"  # from_ is --from
        values[option] = getattr(kind if default is None else default, name, None)
        if get_origin(plain) in (tuple, list) and tyro.conf.UseAppendAction not in marks:
            lists.add(option)
        if plain is bool:
            flags.add(option)
        if tyro.conf.Suppress in marks:  # a key of a config file
            hidden.add(option)
    before: set[str] = set()
    for word in argv:
        name = word.partition("=")[0].replace("_", "-")
        if name in lists & before:
            raise ValueError(
                f"{name} is given twice, and the second would replace the first; give all values after one {name}."
            )
        before.add(name)
        if (key := name.partition(".")[0]) in hidden:
            key = key[2:].replace("-", "_")
            cure = "write it into one, as gpubound init prints them"
            raise ValueError(f"there is no option {name}: {key} is a key of config files alone; {cure}.")
        if name.startswith("--") and name not in {*values, "--help"} and f"--{name.removeprefix('--no-')}" not in values:
            known = [f"no-{one[2:]}" if one in flags and values[one] else one[2:] for one in values.keys() - hidden]
            near = hint(name[2:], known, "").replace("mean '", "mean '--")  # equal dashes would make all names similar
            raise ValueError(f"there is no option {name}{f'; {near}' if '?' in near else '.'} See {prog} --help.")

    # Flags that repeat what the config file or the default says: tyro knows only those that change it.
    repeated = {name if values[name] else f"--no-{name[2:]}" for name in flags}
    argv = [word for word in argv if word not in repeated]
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_primitive)
    _join_help_lines(kind)  # type: ignore[arg-type]
    columns = min(shutil.get_terminal_size().columns, MAX_COLUMNS) - 2
    paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    filled = [text if text.startswith("Example") or "  " in text else fill(text, columns) for text in paragraphs]
    options: dict[str, Any] = {} if default is None else {"default": default}
    # Indented lines, which tyro does not join. Examples and tables keep theirs.
    options |= {"description": "\n\n".join(textwrap.indent(text, "  ") for text in filled)}
    usage = prog if default is None else f"{prog} [CONFIG]"
    stderr = io.StringIO()
    try:
        with redirect_stderr(stderr):
            return tyro.cli(
                kind, args=list(argv), prog=usage, config=(tyro.conf.FlagCreatePairsOff,), registry=registry, **options
            )
    except SystemExit as stop:
        if stop.code != 2:
            raise
    raise ValueError(f"{_refusal(stderr.getvalue()).rstrip('.')}. See {prog} --help.")


# A refusal of tyro's -> the same as this package writes it.
REFUSALS: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"Error parsing (\S+):": r"\1:",
    r"Missing value for argument '(\S+)'\. Expected 1 values": r"\1: got no value",
    r"Missing value for argument '(\S+)'\. Expected (\d+) values": r"\1: got fewer than \2 values",
    r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\)": r"\2: got '\1', wanted one of \3",
    r"Missing from [\w ]+: \{(\S+)\} .* \(required\)": lambda m: f"got nothing, wanted one of {m[1].replace(',', ', ')}",
    r"Missing from [\w ]+: (\S+) (.*) \(required\)": r"\1 is missing: \2",
    r"Unrecognized options: (\S+\.(?:ya?ml|json))": r"got '\1' after the options; a config file comes first",
    r"Unrecognized options: (.*)": r"got '\1', which is neither an option nor the value of one",
}


def _refusal(text: str) -> str:
    """Return a refusal of tyro's as one sentence: in a frame, or where stdout is not UTF-8 between plain rules, it has a title,
    what is refused, and more."""
    lines = [line.strip("│ ") for line in text.splitlines()][1:]
    rules = [not line or set(line) <= set("─-╭╮╰╯") for line in lines]
    begin = rules.index(False)
    end = rules.index(True, begin) if True in rules[begin:] else None
    sentence = " ".join(" ".join(lines[begin:end]).split())
    for theirs, ours in REFUSALS.items():
        sentence, found = re.subn(theirs, ours, sentence)
        if found:
            break
    return sentence


@cache
def _join_help_lines(kind: Any) -> None:
    """Join the lines of each option's docstring: tyro keeps breaks before indented lines. Print defaults that say something."""
    from docstring_parser import parse_from_object
    from tyro.conf import arg

    for base in kind.__mro__[:-1]:
        docs = {param.arg_name: param.description or "" for param in parse_from_object(base).params}
        for name, annotation in vars(base).get("__annotations__", {}).items():
            if name in docs:
                text = " ".join(docs[name].split())
                base.__annotations__[name] = Annotated[annotation, arg(help=text, help_behavior_hint=_default_hint)]


def _default_hint(default: str) -> str:
    return "" if default in (UNSET, "", "''", "False", "True", "None") else f"(default: {default})"


def fill(paragraph: str, columns: int = 0, first: str = "", rest: str = "") -> str:
    """Return a paragraph in lines of `columns`, by default the terminal's."""
    columns = columns or min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    return textwrap.fill(
        paragraph, columns, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )


def _primitive(info: "PrimitiveTypeInfo") -> "PrimitiveConstructorSpec | None":
    """Name an option's type in words: N in place of INT, and of {None}|INT where the option may be left out."""
    from tyro.constructors import PrimitiveConstructorSpec

    members = get_args(info.type) if info.type_origin in (Union, types.UnionType) else (info.type,)
    kinds = [member for member in members if member is not type(None)]
    if len(kinds) != 1 or kinds[0] not in TYPE_NAMES:
        return None
    (kind,) = kinds
    optional, (metavar, wanted) = len(members) > 1, TYPE_NAMES[kind]
    accepted = (kind, *([type(None)] if optional else []), *([int] if kind is float else []))

    def read(words: list[str]) -> Any:
        (text,) = words
        if optional and text in ("None", "none"):
            return None
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"got {text!r}, wanted {wanted}.") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, accepted),
        str_from_instance=lambda value: [UNSET if value is None else str(value)],
    )
