"""What the library keeps on a tensor beside its values: one record, as one attribute, with declared fields.

`main_grad`, a parameter's fp32 accumulator, stays an attribute of its own: it is a convention that other libraries share. All
else that hangs on a tensor is a field here.

A record is this process's. Copies of a parameter have none, and a pickled one comes back empty.
"""

from typing import Any

from torch import Tensor

ATTRIBUTE = "gpubound"


class Record:
    __slots__ = ("adapters", "format", "numbers", "opening", "origin", "side")

    # of a parameter: how it is multiplied by, and where its gradient goes
    format: Any  # a Format of layers/linear_site.py; None: as it is
    adapters: tuple[Any, ...]  # what its products add to their results, Adapters of layers/linear_site.py
    # The next delivery to main_grad begins a new sum, so it writes: True where a CUDA graph records that, whose replays then
    # begin the sum again, False where none does. None: it adds.
    opening: bool | None
    side: Any  # aside.Side: the stream on which deliveries run while a backward has it open; None: on the current stream
    # of what a forward computed
    origin: Any  # how backward may have it again rather than keep it, a Normed of layers/recompute.py
    # of a state in codes
    numbers: Any  # from its storage's bytes to the numbers that they stand for, part by part: what a certificate compares

    def __init__(self) -> None:
        self.format = self.opening = self.side = self.origin = self.numbers = None
        self.adapters = ()

    def __reduce__(self):
        return Record, ()

    @property
    def empty(self) -> bool:
        fields = self.format, self.opening, self.side, self.origin, self.numbers
        return len(self.adapters) == 0 and all(field is None for field in fields)


def record_of(tensor: Tensor) -> Record | None:
    return getattr(tensor, ATTRIBUTE, None)


def made_record(tensor: Tensor) -> Record:
    """The tensor's record, a new one if it has none."""
    record = record_of(tensor)
    if record is None:
        record = Record()
        setattr(tensor, ATTRIBUTE, record)
    return record


def drop_record(tensor: Tensor) -> None:
    """Take the record off if it says nothing any more."""
    record = record_of(tensor)
    if record is not None and record.empty:
        delattr(tensor, ATTRIBUTE)
