"""Keys and values as YAML, JSON or Python give them, converted to the fields of a Recipe."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, fields
from typing import Any, get_args

from ..formatting import listed, shown
from .aliases import advice, read
from .fields import Lora, check_type
from .recipe import Recipe

RECIPE = {field.name: field for field in fields(Recipe)}


def convert(values: Mapping[Any, Any], known: Mapping[str, Field], where: str = "config") -> dict[str, Any]:
    """Return `values` under the names and with the types of the `known` fields; aliases.py has their other names.

    Unknown keys are refused here, wrong types by the recipe.
    """
    values = _read_sources(read(values, known, where), where)
    if "allow" in values:
        values["allow"] = tuple(listed(values["allow"]))
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{where}: {shown(key)} is unknown; {advice(key, known)}")
        if key not in RECIPE or key in ("lora", "objective_options"):  # which an option parser cannot hold as other types
            check_type(RECIPE.get(key, known[key]), value)
    return {key: _convert_value(known[key], value) for key, value in values.items()}


def _convert_value(field: Field, value: Any) -> Any:
    """Return a value of YAML's with the type of the field: YAML reads 3e-4 as a text."""
    wanted = (get_args(field.type) or (field.type,))[0]
    if field.name == "lora" and isinstance(value, dict):
        if not value:
            Lora.of(value)  # refuses it: an empty section would train every weight
        return _convert_known({f.name: f for f in fields(Lora)}, value)
    if field.name in ("betas", "data_weights"):
        numbers = value if isinstance(value, list | tuple) else (value,)
        return tuple(float(number) if isinstance(number, str | int) and _is_number(number) else number for number in numbers)
    if field.name == "clip" and value in ("none", "off"):
        return None
    if field.name in ("data", "eval_data"):
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    if field.name == "phases" and isinstance(value, list):
        known = {name: field for name, field in RECIPE.items() if name != "phases"}
        return tuple(_convert_known(known, _read_sources(p, "phases")) if isinstance(p, dict) else p for p in value)
    if wanted is float and _is_number(value):  # else the recipe's error names the field
        return float(value)
    return str(value) if wanted is str and type(value) is int else value


def _read_sources(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the values with `data: [{path: a, weight: 2}, b]`, or `{a: 2, b: 1}`, as paths and data_weights."""
    for key, weights_key in (("data", "data_weights"), ("eval_data", None)):
        entries = values.get(key)
        if isinstance(entries, Mapping) and "path" not in entries:
            if any(not _is_number(weight) for weight in entries.values()):
                raise ValueError(
                    f"{where}: {key}: got {shown(dict(entries))}, wanted a path, a list of them, or weights by path such as "
                    "{a.jsonl: 2}."
                )
            entries = [{"path": path, "weight": weight} for path, weight in entries.items()]
        entries = entries if isinstance(entries, list | tuple) else [entries]
        if not any(isinstance(entry, Mapping) for entry in entries):
            continue
        sources = [entry if isinstance(entry, Mapping) else {"path": entry} for entry in entries]
        allowed = {"path", "weight"} if weights_key else {"path"}
        for source in sources:
            if "path" not in source or source.keys() - allowed:
                example = "{path: a.jsonl, weight: 2}" if weights_key else "{path: a.jsonl}"
                raise ValueError(
                    f"{where}: {key}: got {shown(dict(source))}, wanted a path or {example}; other "
                    f"keys of data, such as format, are the recipe's."
                )
        values = values | {key: [source["path"] for source in sources]}
        if weights_key and weights_key in values:
            raise ValueError(f"{where}: {weights_key}: got it and weights in data; give one of them.")
        if weights_key:
            values[weights_key] = [source.get("weight", 1) for source in sources]
    return values


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
