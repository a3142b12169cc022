"""`place`: a model on its device, through verified fast kernels, and a table of what runs where and why."""

from .placer import Placement as Placement, place as place, unplaced as unplaced
