"""The command line, `gpubound COMMAND`. One file a command, imported only when it is called; its options are a dataclass.

Exit codes, the same everywhere: 0 done, 1 a gate failed, 2 bad input or the user's script failed, 3 could not measure,
130 Ctrl-C, 141 stdout was closed by its reader.
"""

import ast
import errno
import inspect
import io
import os
import select
import shutil
import sys
import textwrap
import traceback
import types
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args

from ..errors import BudgetError, GpuboundError, MeasureError
from ..formatting import hint
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
    "train": "gpubound train config.yaml",
    "plan": "gpubound plan config.yaml --gpus 8",
    "generate": 'gpubound generate path/to/checkpoint --prompt "Once"',
    "doctor": "gpubound doctor train.py --epochs 3",
    "bench": "gpubound bench kernels",
    "report": "gpubound report runs/first",
}

# An option's type -> its metavar in the help, and its name in a refusal.
KINDS: dict[type, tuple[str, str]] = {int: ("N", "a whole number"), float: ("X", "a number"), str: ("TEXT", "a text")}
WIDEST = 100  # columns of a command's description
UNSET = "unset"  # how the help writes the default of an option that has none


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is returned, never raised."""
    if sys.stdout is None:  # the caller has closed it
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for the rest of the process)
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "help"):
        return guarded("help", lambda _: _answer(_help()), rest)
    if name in ("-V", "--version", "version"):
        return guarded("version", lambda _: _answer(f"gpubound {__version__}"), rest)
    if name not in COMMANDS:
        near = hint(name, COMMANDS, "the commands are")
        print(printable(f"gpubound: there is no command {name!r}; {near} See gpubound --help."), file=sys.stderr)
        return 2
    share_cores(name)
    return guarded(name, lambda argv: import_module(f".{name}", __name__).main(argv), rest)


def share_cores(name: str) -> None:
    """Let threads sleep while they wait for each other, unless the user's OMP_WAIT_POLICY or GOMP_SPINCOUNT says otherwise.

    By default they spin. Two threads on two cores beside other processes made 0.3 training steps a second spinning and 3.4
    sleeping; on idle cores 23.5 and 22.3. OpenMP reads this when torch is imported. A script under the doctor runs unchanged.
    """
    if name != "doctor" and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def guarded(name: str, command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """The exit code of `command(argv)`. A user's mistake is one line on stderr; GPUBOUND_TRACEBACK=1 adds the traceback."""
    try:
        if "RANK" in os.environ:  # before torch is imported to ask
            from ..distributed import launched
            from .many import one_of_many

            if launched():
                return one_of_many(name, lambda: _code(command, argv), _explained)
        code = _code(command, argv)
        sys.stdout.flush()  # here, where its failure can be told
        return code
    except KeyboardInterrupt:
        print("gpubound: interrupted", file=sys.stderr)
        return 130
    except EXPECTED as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 141
        if os.environ.get("GPUBOUND_TRACEBACK") == "1":
            traceback.print_exc()
        code, said = _explained(error)
        print(f"gpubound {name}: {said.removeprefix(f'{name}: ')}", file=sys.stderr)  # the library's functions name themselves
        return code


EXPECTED = (GpuboundError, ValueError, OSError)
FULL = (errno.ENOSPC, errno.EDQUOT)


def _explained(error: Exception) -> tuple[int, str]:
    """The exit code and the one line of an error. One that no command expects is named, too: it is a defect."""
    said = " ".join(printable(str(error)).split()) or type(error).__name__
    if isinstance(error, OSError) and error.errno in FULL and error.filename is None:  # a stream's, most often stdout's
        said = f"there is no room for what is written ({error.strerror}); free some space, or write to another disk."
    if not isinstance(error, EXPECTED):
        return 1, f"{type(error).__name__}: {said}"
    return (1 if isinstance(error, BudgetError) else 3 if isinstance(error, MeasureError) else 2), said


def _code(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    try:
        return command(argv)
    except SystemExit as stop:  # how an argument parser says that it has already answered
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2


def _answer(text: str) -> int:
    print(text)
    return 0


def _nobody_reads() -> bool:
    """Return True when stdout broke, as in `| head`, and no other pipe. Later writes to stdout then go nowhere."""
    stdout = select.poll()
    stdout.register(1, 0)  # 0: tell of errors alone
    if not stdout.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains once more at its end
    return True


def _help() -> str:
    """Return the help, from the modules' docstrings without importing them: torch takes seconds."""
    columns = min(shutil.get_terminal_size().columns, WIDEST)
    width = max(map(len, COMMANDS))
    lines = ["usage: gpubound COMMAND [options]", "", "Makes PyTorch transformers GPU-bound, and proves it.", "", "commands:"]
    for name in COMMANDS:
        source = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
        first, *_ = (ast.get_docstring(ast.parse(source)) or "").split("\n")
        lines.append(_filled(first, columns, f"  {name:{width}}  ", " " * (width + 4)))
    lines += ["", "examples:", *(f"  {example}" for example in COMMANDS.values()), ""]
    lines.append(_filled("Each command explains itself with --help. gpubound --version prints the version.", columns))
    return "\n".join(lines)


def arguments(kind: type[Config], argv: Sequence[str], command: str, default: Config | None = None) -> Config:
    """Parse `argv` into the dataclass `kind`. Its docstring is the help text, its fields' docstrings are the options'.

    `--help` prints the docstring, which holds an example. A ValueError names an unknown option and the most similar one.
    """
    import tyro  # here, because gpubound's own --help and --version are answered without it

    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_in_words)
    config = (tyro.conf.FlagCreatePairsOff,)
    start: Any = {} if default is None else {"default": default}
    _join_lines(kind)  # type: ignore[arg-type]
    about = _in_lines(kind.__doc__ or "", min(shutil.get_terminal_size().columns, WIDEST))
    prog = f"gpubound {command}"
    _check_names(kind, argv, prog)

    def parse() -> Config:
        return tyro.cli(kind, args=list(argv), prog=prog, description=about, config=config, registry=registry, **start)

    try:
        with redirect_stderr(io.StringIO()) as said:
            return parse()
    except SystemExit as stop:
        if stop.code != 2:
            raise
    raise ValueError(f"{_unboxed(said.getvalue()).rstrip('.')}. See {prog} --help.")


def _check_names(kind: type, argv: Sequence[str], prog: str) -> None:
    """Refuse an option that does not exist, with the most similar one that does."""
    names = {f"--{field.name.rstrip('_').replace('_', '-')}" for field in fields(kind)}  # from_ is --from
    for word in argv:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name not in names | {"--help"} and f"--{name.removeprefix('--no-')}" not in names:
            near = hint(name, names, "")
            raise ValueError(f"there is no option {name}{f'; {near}' if '?' in near else '.'} See {prog} --help.")


def _unboxed(text: str) -> str:
    """Return the first paragraph in a box of tyro's as one line: the other refusals of a command are one line, too."""
    lines = [line.strip("│ ") for line in text.splitlines()]
    rule = [index for index, line in enumerate(lines) if set(line) <= set("─╭╮╰╯")]
    body = lines[1 : next((index for index in rule if index > 0), None)] if lines[0].startswith("╭") else lines
    return " ".join(" ".join(body).split())


@cache
def _join_lines(kind: type) -> None:
    """An option's help is one paragraph, however many lines its docstring has: tyro keeps breaks before what is indented."""
    from docstring_parser import parse_from_object
    from tyro.conf import arg

    for own in kind.__mro__[:-1]:
        told = {param.arg_name: param.description or "" for param in parse_from_object(own).params}
        for name, of_type in vars(own).get("__annotations__", {}).items():
            if name in told:
                own.__annotations__[name] = Annotated[of_type, arg(help=" ".join(told[name].split()))]


def _in_lines(text: str, columns: int) -> str:
    """Its paragraphs in lines of that length, which tyro would join if they were not indented. Examples stay as they are."""
    return "\n\n".join(
        textwrap.indent(paragraph if paragraph.startswith("Example") else _filled(paragraph, columns - 2), "  ")
        for paragraph in inspect.cleandoc(text).split("\n\n")
    )


def _filled(paragraph: str, columns: int, first: str = "", rest: str = "") -> str:
    return textwrap.fill(
        paragraph, columns, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )


def _in_words(info: "PrimitiveTypeInfo") -> "PrimitiveConstructorSpec | None":
    """N in place of INT, and of {None}|INT where the option may be left out."""
    from tyro.constructors import PrimitiveConstructorSpec

    members = get_args(info.type) if info.type_origin in (Union, types.UnionType) else (info.type,)
    kinds = [member for member in members if member is not type(None)]
    if len(kinds) != 1 or kinds[0] not in KINDS:
        return None
    (kind,) = kinds
    optional, (metavar, wanted) = len(members) > 1, KINDS[kind]
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
