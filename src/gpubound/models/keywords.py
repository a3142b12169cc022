"""Names of the KV cache in transformers: `cache` since 5.24, `past_key_values` before, and in models from elsewhere."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

NAMES = ("cache", "past_key_values")


def cache_name(takes: Callable[..., Any]) -> str | None:
    """The keyword by which a function, or the class of an output, takes keys and values; None where it takes none."""
    known = signature(takes).parameters
    return next((name for name in NAMES if name in known), None)


def cache_word(takes: Callable[..., Any]) -> str:
    """Return the keyword of the KV cache of a function that is known to take one."""
    name = cache_name(takes)
    assert name is not None, f"{takes} takes no keys and values"
    return name


def cache_in(output: Mapping[str, Any]) -> Any:
    """Return the keys and values among a model's outputs, or None. Asking 5.24's outputs for the older name would warn."""
    return next((value for name, value in output.items() if name in NAMES), None)
