"""State that the library attaches to a tensor: one record, as one attribute, with declared fields.

`main_grad`, a parameter's fp32 accumulator, is a separate attribute, by a convention that other libraries share. All other
state is a field here.

A record, and a main_grad next to one, belong to this process. A pickled or deep-copied tensor has an empty OrderedDict instead,
which torch.load accepts by default; `record_of` removes it together with the main_grad, which would collect gradients that no
optimizer reads.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

ATTRIBUTE = "gpubound"


@dataclass(slots=True)
class Record:
    # of a parameter: the format of its product, and the destination of its gradient
    format: Any = None  # a Format of layers/linear_product.py; None: dense
    # The next delivery to main_grad begins a new sum, so it writes: True where a CUDA graph records that, whose replays then
    # begin the sum again, False where none does. None: it adds.
    opening: bool | None = None
    side: Any = None  # aside.Side: the stream on which deliveries run while a backward has it open; None: on the current stream
    arrivals: Any = None  # int32 zeros: counters of programs that share a sum of its gradient
    # of a parameter sharded by rows: the gathered Parameter that products use. Both have this record
    gathered: Any = field(default=None, compare=False)
    # of what a forward computed
    recipe: Any = None  # how backward computes it again, a RecomputeRecipe of layers/linear_product.py
    # of a quantised state: (bytes of its storage, device) -> its numbers there, part by part, for comparison by a certificate
    numbers: Any = None

    def __reduce__(self):
        return OrderedDict, ()

    @property
    def empty(self) -> bool:
        return self == Record()


def record_of(tensor: Tensor) -> Record | None:
    """Return the tensor's record, if it has one."""
    record = getattr(tensor, ATTRIBUTE, None)
    if record is None or type(record) is Record:
        return record
    for name in {ATTRIBUTE, "main_grad"} & vars(tensor).keys():  # it was pickled or copied
        delattr(tensor, name)
    return None


def made_record(tensor: Tensor) -> Record:
    """Return the tensor's record, a new one if it has none."""
    record = record_of(tensor)
    if record is None:
        record = Record()
        setattr(tensor, ATTRIBUTE, record)
    return record


def drop_record(tensor: Tensor) -> None:
    """Remove the record if all of its fields have their defaults."""
    record = record_of(tensor)
    if record is not None and record.empty and record.gathered is None:
        delattr(tensor, ATTRIBUTE)


def share_record(sharded: Tensor, gathered: Tensor) -> None:
    """Attach one record to a sharded parameter and its gathered tensor."""
    made_record(sharded).gathered = gathered
    setattr(gathered, ATTRIBUTE, record_of(sharded))


def seen(tensor: Tensor) -> Tensor:
    """Return the tensor that products multiply by: the gathered one of a sharded parameter."""
    record = record_of(tensor)
    return tensor if record is None or record.gathered is None else record.gathered
