"""The loss is read every step, to be added up."""

from ..plant import Plant

PLANT = Plant(
    ("sync",),
    planted={"setup": "state.total = 0.0", "report": "state.total += loss.item()  # stall"},
    clean={"setup": "state.total = 0.0", "report": "state.total += loss.detach()"},
)
