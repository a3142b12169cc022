"""`place`: a model on its device, through verified fast kernels, and a table of what runs where and why."""

from .placement import Placement as Placement
from .placer import as_it_is as as_it_is, place as place
