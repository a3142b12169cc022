"""Every gradient goes through the host before the update."""

from ..plant import Plant

PLANT = Plant(
    ("d2h", "h2d", "sync"),
    planted={"after_backward": "for p in model.parameters():\n    p.grad = p.grad.cpu().to(device)  # stall"},
)
