"""In which form this process holds a model: all of it, rows of all of it, or all that trains and rows of the rest."""

from typing import Any

from ..parallel import Ranks
from ..parallel.pieces import any_sharded
from .frozen_rows import HoldsFrozenRows
from .holding import HoldsAll
from .rows import HoldsRows


def holding(model: Any, ranks: Ranks) -> HoldsAll:
    """What of `model` this process holds."""
    if not any_sharded(model.parameters()):
        return HoldsAll(model, ranks)
    trained = [p for p in model.parameters() if p.requires_grad]
    return HoldsRows(model) if any_sharded(trained) or not trained else HoldsFrozenRows(model)
