"""What a plant, a control and a decoy are, and a script that was written from one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = "# stall"  # ends a line that is to blame; the written script does not have it

Slots = Mapping[str, str]


@dataclass(frozen=True)
class Plant:
    """One kind of stall: the code for some slots of a script (`hosts.SLOTS`), planted and clean.

    kinds: the words for it; a finding must have one of them. `dry`: a ledger on the pretend device sees it, too.
    `loop`: the line of the loop itself is also right, because that is where the host waits for its data. `hidden`: models in
    which it costs nothing, whatever a timing says.
    """

    kinds: tuple[str, ...]
    planted: Slots
    clean: Slots = field(default_factory=dict)
    dry: bool = True
    loop: bool = False
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True)
class Calm:
    """A control or a decoy: slots, and the one host and model that it is written for."""

    slots: Slots
    host: str = "plain"
    model: str = "gpu-bound"


@dataclass(frozen=True)
class Case:
    """One plant in one host with one model."""

    name: str
    host: str
    model: str

    def __str__(self) -> str:
        return f"{self.name}/{self.host}/{self.model}"


@dataclass(frozen=True)
class Script:
    """A written script: the file to run, and the (file name, line) pairs that are to blame."""

    path: Path
    kinds: tuple[str, ...] = ()
    blamed: frozenset[tuple[str, int]] = frozenset()
