"""`place`: a model on its device, through verified fast kernels, and a table of what runs where and why."""

from .placement import Placement as Placement
from .placer import place as place, unplaced as unplaced
