"""The ledger of the phase that locates: what it counts, it also marks on the tape that is recorded meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..watch.events import KINDS
from ..watch.ledger import Ledger
from ..watch.site import Place, here
from .tape import MARK

MARKED = frozenset({"sync", "h2d", "d2h", "alloc", "free", "pin"})
ANNOTATION: Any = getattr(torch._C._profiler, "_RecordFunctionFast", None)  # goes past dispatch modes; private


class MarkingLedger(Ledger):
    """A ledger that writes a mark for each stall into the profile that runs: the id of its place in `places`."""

    def __init__(self, gputrace: bool):
        super().__init__(None, gputrace, "ops", frozenset())
        self.places: dict[str, Place] = {}
        self._ids: dict[Place, str] = {}
        self._deaf: Collection[str] = ()

    @contextmanager
    def paused(self, kinds: Collection[str] = KINDS) -> Iterator[None]:
        """What happens inside is not counted, or not what is of these kinds."""
        before, self._deaf = self._deaf, kinds
        try:
            yield
        finally:
            self._deaf = before

    def record(
        self, kind: str, what: str, count: int = 1, bytes: int = 0, ms: float = 0, detail: str = "", place: Place | None = None
    ) -> None:
        assert kind in KINDS, kind
        if kind in self._deaf:
            return
        if kind in MARKED and place is None:
            place = here(self.origins)
            number = self._ids.setdefault(place, str(len(self._ids)))
            self.places[number] = place
            if ANNOTATION is not None:
                with ANNOTATION(MARK + number):
                    pass
        super().record(kind, what, count, bytes, ms, detail, place)
