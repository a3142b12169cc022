"""A branch on the loss, to keep the best one."""

from ..plant import Plant

SETUP = 'state.best = torch.full((), float("inf"), device=device, dtype=dtype)'
PLANT = Plant(
    ("sync",),
    planted={"setup": SETUP, "report": "if loss < state.best:  # stall\n    state.best = loss.detach()"},
    clean={"setup": SETUP, "report": "state.best = torch.minimum(state.best, loss.detach())"},
)
