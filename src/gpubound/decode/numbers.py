"""What a step takes from a model beside its tensors: eps, scales, windows, kinds of activation. Graphs have baked them in.

Each request asks whether one of them has changed, so that has to be quick: it compares the plain values of modules and of the
config, and only where one differs asks the body for what it reads of them.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from operator import itemgetter
from typing import Any

from torch import Tensor, nn

PLAIN = (bool, int, float, str, type(None))
# No part of what a step computes: the mode, a setting of training, and what every nn.Module has. Linear layers and embeddings
# are left out, too: their sizes follow from their weights.
ASIDE = {"training", "gradient_checkpointing", *vars(nn.Module())}
BARE = (nn.Linear, nn.Embedding)


def numbers(value: Any) -> Any:
    """A record, such as a layer's weights, without its tensors."""
    if is_dataclass(value):
        return tuple(numbers(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, list | tuple):
        return tuple(map(numbers, value))
    return value if isinstance(value, PLAIN) or (callable(value) and not isinstance(value, Tensor)) else None


class ScalarSnapshot:
    """Those of a model's modules and of its config as they are now. `some`: floats of modules alone, where nobody says what a
    step reads; what a module counts for itself is none."""

    def __init__(self, model: Any, some: bool) -> None:
        kinds: Any = float if some else PLAIN
        holders = [(name, vars(module)) for name, module in model.named_modules() if type(module) not in BARE]
        holders += [] if some or not hasattr(model, "config") else [("config", vars(model.config))]
        self._found: list[tuple[str, list[str], dict[str, Any], Callable, Any]] = []
        for name, held in holders:
            if keys := [key for key, value in held.items() if isinstance(value, kinds) and key not in ASIDE]:
                self._found.append((name, keys, held, itemgetter(*keys), itemgetter(*keys)(held)))

    def changed(self) -> str | None:
        """The name of the first that is another now."""
        for name, keys, held, get, were in self._found:
            try:
                same = get(held) == were
            except KeyError:
                same = False
            if not same:
                before = dict(zip(keys, were if len(keys) > 1 else (were,)))
                key = next(key for key in keys if key not in held or held[key] != before[key])
                return f"{name}.{key}".lstrip(".")
        return None
