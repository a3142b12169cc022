"""What YAML read, or a key=value says, as the fields of a recipe want it."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, fields
from typing import Any, get_args

import yaml

from ..train.kinds import check_kind
from ..train.recipe import Recipe
from ..words import hint, shown

RECIPE = {field.name: field for field in fields(Recipe)}


class AsWritten(yaml.SafeLoader):
    """Reads YAML and refuses what PyYAML would take otherwise than it looks, in silence: of a key that stands twice in one
    place the last, 1:30 for 90, 010 for 8."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        lines = dict[tuple[str, str], int]()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and (first := lines.setdefault((key.tag, key.value), line)) != line:
                raise ValueError(f"{shown(key.value)} stands twice, in lines {first} and {line}; leave one of them out")
        return super().construct_mapping(node, deep)

    def construct_number(self, node: Any) -> int | float:
        whole = node.tag == "tag:yaml.org,2002:int"
        found = self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)
        digits = node.value.replace("_", "").lstrip("+-")
        if ":" in digits or (whole and digits.isdecimal() and int(digits) != abs(found)):
            count = "sixties" if ":" in digits else "eights"
            raise ValueError(
                f"{shown(node.value)} in line {node.start_mark.line + 1} is {found} in YAML, counted in {count}; write the "
                f"number in tens, or a text in quotes"
            )
        return found


for _kind in ("int", "float"):
    AsWritten.add_constructor(f"tag:yaml.org,2002:{_kind}", AsWritten.construct_number)


def typed(found: Mapping[Any, Any], known: Mapping[str, Field], where: str = "config") -> dict[str, Any]:
    """`found`, its values as the `known` fields want them. Unknown keys are refused; values of another kind, by the recipe."""
    for key, value in found.items():
        if key not in known:
            raise ValueError(f"{where}: {shown(key)} is unknown; {hint(key, known, 'the keys are')}")
        if key not in RECIPE:
            check_kind(known[key], value)
    return {key: _as(known[key], value) for key, value in found.items()}


def _phase(phase: Any) -> Any:
    """A phase's own values; which of them a phase may have is the recipe's to say."""
    if not isinstance(phase, dict):
        return phase
    known = {name: field for name, field in RECIPE.items() if name != "phases"}
    return {key: _as(known[key], value) if key in known else value for key, value in phase.items()}


def _as(field: Field, value: Any) -> Any:
    """What YAML read, as the field wants it: it reads 3e-4 as a text, and 12 blocks as a number."""
    wanted = (get_args(field.type) or (field.type,))[0]
    if field.name == "lora" and isinstance(value, dict):
        from ..train.adapters import Lora

        if not value:
            Lora.of(value)  # refuses it: an empty section would train every weight
        known = {f.name: f for f in fields(Lora)}
        return {key: _as(known[key], own) if key in known else own for key, own in value.items()}
    if field.name == "data":
        return tuple(value) if isinstance(value, list) else (value,)
    if field.name == "phases":
        return tuple(map(_phase, value)) if isinstance(value, list) else value
    if wanted is float and isinstance(value, str | int) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):  # the recipe's sentence names the field
            return float(value)
    return str(value) if wanted is str and type(value) is int else value
