"""Low-rank adapters over a frozen model, added in place. PEFT owns them (`pip install gpubound[hf]`); gpubound computes them.

add, remove            on the linear layers of any model, placed or not
parameters             for an optimizer
disable, enable        switch them off and on
merge, unmerge         add them to the weights, and restore the weights bit for bit
rows                   several in one batch, one for each row
save, load             PEFT's files, both ways
quantize_base          store the frozen weights in fewer bits; dequantize_base undoes it
"""

from .base import dequantize_base as dequantize_base, quantize_base as quantize_base
from .files import load as load, merge as merge, save as save, unmerge as unmerge
from .model import (
    add as add,
    disable as disable,
    enable as enable,
    parameters as parameters,
    remove as remove,
    rows as rows,
)
