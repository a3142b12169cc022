"""Low-rank adapters over a frozen model, added in place.

add, remove            on the linear layers of any model, placed or not
parameters             what an optimizer is given
disable, enable        switched off, for a while or until further notice
merge, unmerge         folded into the weights, and taken out again bit for bit
rows                   several in one batch, each row with its own
save, load             in PEFT's files, both ways
quantize_base          the frozen weights in fewer bits; dequantize_base makes them numbers again
"""

from .add import add as add, disable as disable, enable as enable, parameters as parameters, remove as remove
from .base import dequantize_base as dequantize_base, quantize_base as quantize_base
from .files import load as load, save as save
from .merge import merge as merge, unmerge as unmerge
from .rows import rows as rows

__all__ = [
    "add", "dequantize_base", "disable", "enable", "load", "merge", "parameters", "quantize_base", "remove", "rows", "save",
    "unmerge",
]  # fmt: skip
