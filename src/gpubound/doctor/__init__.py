"""The doctor: what made the GPU wait for its host, what it cost, and what to write instead."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .record.run import doctor

__all__ = ["doctor"]


def __getattr__(name: str):
    if name != "doctor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .record.run import doctor

    return doctor


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
