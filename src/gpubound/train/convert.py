"""Keys and values as YAML, JSON or Python give them, converted to the fields of a Recipe."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, fields
from typing import Any, get_args

from ..formatting import listed, shown
from .aliases import advice, read
from .field_types import check_type
from .lora_options import Lora
from .recipe import Recipe

RECIPE = {field.name: field for field in fields(Recipe)}


def convert(values: Mapping[Any, Any], known: Mapping[str, Field], where: str = "config") -> dict[str, Any]:
    """Return `values` under the names and with the types of the `known` fields; aliases.py has their other names.

    Unknown keys are refused here, wrong types by the recipe.
    """
    values = read(values, known, where)
    if "allow" in values:
        values["allow"] = tuple(listed(values["allow"]))
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{where}: {shown(key)} is unknown; {advice(key, known)}")
        if key not in RECIPE:
            check_type(known[key], value)
    return {key: _convert_value(known[key], value) for key, value in values.items()}


def _convert_value(field: Field, value: Any) -> Any:
    """Return a value of YAML's with the type of the field: YAML reads 3e-4 as a text."""
    wanted = (get_args(field.type) or (field.type,))[0]
    if field.name == "lora" and isinstance(value, dict):
        if not value:
            Lora.of(value)  # refuses it: an empty section would train every weight
        return _convert_known({f.name: f for f in fields(Lora)}, value)
    if field.name == "betas" and isinstance(value, list | tuple):
        return tuple(float(number) if isinstance(number, str | int) and _is_number(number) else number for number in value)
    if field.name == "clip" and value in ("none", "off"):
        return None
    if field.name in ("data", "eval_data"):
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    if field.name == "phases" and isinstance(value, list):
        known = {name: field for name, field in RECIPE.items() if name != "phases"}
        return tuple(_convert_known(known, phase) if isinstance(phase, dict) else phase for phase in value)
    if wanted is float and _is_number(value):  # else the recipe's error names the field
        return float(value)
    return str(value) if wanted is str and type(value) is int else value


def _is_number(value: Any) -> bool:
    """Return whether this is a finite number, or a text of one."""
    with suppress(ValueError, OverflowError, TypeError):
        return isinstance(value, str | int | float) and not isinstance(value, bool) and float(value) is not None
    return False


def _convert_known(known: Mapping[str, Field], values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values of known keys; the recipe refuses the others."""
    return {key: _convert_value(known[key], value) if key in known else value for key, value in values.items()}


def make_recipe(**values: Any) -> Recipe:
    """Return the recipe of these keys, which may have the names of other trainers and the types of YAML."""
    return Recipe(**convert(values, RECIPE, "recipe"))
