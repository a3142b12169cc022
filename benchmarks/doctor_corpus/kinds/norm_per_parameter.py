"""The norm of every gradient is read by itself."""

from ..plant import Plant

PLANT = Plant(
    ("sync",),
    planted={"after_backward": "state.norms = [p.grad.norm().item() for p in model.parameters()]  # stall"},
    clean={"after_backward": "state.norms = torch._foreach_norm([p.grad for p in model.parameters()])"},
)
