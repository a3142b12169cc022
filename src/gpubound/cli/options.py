"""A command's options: a dataclass, read by tyro, with words for types in place of Python's."""

import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Union, get_args

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

Config = TypeVar("Config")

# Type -> what stands for its value in the help, and in the sentence about a value that is none.
KINDS: dict[type, tuple[str, str]] = {int: ("N", "a whole number"), float: ("X", "a number"), str: ("TEXT", "a text")}
UNSET = "unset"  # how the help writes the default of an option that has none

registry = ConstructorRegistry()


def arguments(kind: type[Config], argv: Sequence[str], command: str, default: Config | None = None) -> Config:
    """Parse `argv` into the dataclass `kind`. Its docstring is the help text, its fields' docstrings are the options'.

    Unknown options end with exit code 2 and the near ones; `--help` prints the docstring, which holds an example.
    """
    config = (tyro.conf.FlagCreatePairsOff,)
    start: Any = {} if default is None else {"default": default}
    return tyro.cli(kind, args=list(argv), prog=f"gpubound {command}", config=config, registry=registry, **start)


@registry.primitive_rule
def _in_words(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """N in place of INT, and of {None}|INT where the option may be left out."""
    members = get_args(info.type) if info.type_origin in (Union, types.UnionType) else (info.type,)
    kinds = [member for member in members if member is not type(None)]
    if len(kinds) != 1 or kinds[0] not in KINDS:
        return None
    (kind,) = kinds
    optional, (metavar, _) = len(members) > 1, KINDS[kind]
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=_reader(kind, optional),
        is_instance=lambda value: (
            isinstance(value, kind) or (optional and value is None) or (kind is float and type(value) is int)
        ),
        str_from_instance=lambda value: [UNSET if value is None else str(value)],
    )


def _reader(kind: type, optional: bool) -> Callable[[list[str]], Any]:
    def read(words: list[str]) -> Any:
        (text,) = words
        if optional and text in ("None", "none"):
            return None
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"got {text!r}, wanted {KINDS[kind][1]}.") from None

    return read
