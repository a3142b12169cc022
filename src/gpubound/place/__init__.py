"""`place`: a model on its device, through verified fast kernels, and a table of what runs where and why."""

from .placement import Placement as Placement
from .placement import Row as Row
from .placer import place as place
