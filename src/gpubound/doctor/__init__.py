"""The doctor: what made the GPU wait for its host, what it cost, and what to write instead."""

from typing import TYPE_CHECKING

from .. import _lazy

if TYPE_CHECKING:
    from .record.run import doctor

__all__ = ["doctor"]
__getattr__, __dir__ = _lazy(__name__, {"doctor": "record.run"})
