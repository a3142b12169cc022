"""Tensors by their places in a model: whether each still is the one, at the address, that was taken."""

from collections.abc import Iterable
from typing import Any

from ..graph.guard import address_check

Place = tuple[str, dict[str, Any], str]
"""(name, the dict that holds it, its key in there)"""


class Watched:
    """Graphs hold addresses: what stands in `places` may change in value, but neither be replaced nor move."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = list(places)
        self._kept = [holder[key] for _, holder, key in self._places]
        self._addresses = [tensor.data_ptr() for tensor in self._kept]
        self._same_addresses = address_check(self._kept, self._addresses)

    def moved(self) -> str | None:
        """The name of the first that is another tensor, or lies elsewhere; None if all stayed."""
        for (name, holder, key), kept in zip(self._places, self._kept):
            if holder.get(key) is not kept:
                return name
        if self._same_addresses():
            return None
        for (name, _, _), kept, address in zip(self._places, self._kept, self._addresses):
            if kept.data_ptr() != address:
                return name
        return None
