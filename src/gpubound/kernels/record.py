"""What the library keeps on a parameter beside its values: one record, as one attribute.

`main_grad`, the fp32 accumulator, stays an attribute of its own: it is a convention that other libraries share. All else that
is to be known of a parameter stands here, and the code that asks for it declares it here.

A record is this process's. Copies of a parameter have none, and a pickled one comes back empty.
"""

from typing import Any

from torch import Tensor

ATTRIBUTE = "gpubound"


class Record:
    """How one parameter is multiplied by, and where its gradient goes."""

    __slots__ = ("adapters", "format", "opening", "side")

    opening: Any  # accumulate.Opening: the next delivery to main_grad writes, as it begins a new sum; None: it adds
    side: Any  # aside.Side: the stream on which deliveries run while a backward has it open; None: on the current stream
    format: Any  # how products multiply by it, a Format of layers/linear_site.py; None: as it is
    adapters: tuple[Any, ...]  # what its products add to their results, Adapters of layers/linear_site.py

    def __init__(self) -> None:
        self.opening = self.side = self.format = None
        self.adapters = ()

    def __reduce__(self):
        return Record, ()

    @property
    def empty(self) -> bool:
        return self.opening is None and self.side is None and self.format is None and len(self.adapters) == 0


def record_of(parameter: Tensor) -> Record | None:
    return getattr(parameter, ATTRIBUTE, None)


def made_record(parameter: Tensor) -> Record:
    """The parameter's record, a new one if it has none."""
    record = record_of(parameter)
    if record is None:
        record = Record()
        setattr(parameter, ATTRIBUTE, record)
    return record


def drop_record(parameter: Tensor) -> None:
    """Take the record off if it says nothing any more."""
    record = record_of(parameter)
    if record is not None and record.empty:
        delattr(parameter, ATTRIBUTE)
