"""`place`: a model on its device, through verified fast kernels, and a table of what runs where and why."""

from .core import place as place
from .table import Placement as Placement
from .table import Row as Row
