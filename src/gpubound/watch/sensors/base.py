"""What every sensor has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..ledger import Ledger


class Sensor:
    name: str
    counts: frozenset[str]  # the ledger's totals that this sensor can vouch for
    sees: str
    blind: str  # what it does not see; empty when nothing is known

    def __init__(self, ledger: Ledger):
        self.ledger = ledger

    def absent(self) -> str | None:
        """Why it cannot run here, or None."""
        return None

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError
