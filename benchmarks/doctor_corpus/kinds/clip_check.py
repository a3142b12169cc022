"""Clipping that checks the norm on the host."""

from ..plant import Plant

CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0"
PLANT = Plant(
    ("sync",),
    planted={"after_backward": f"{CLIP}, error_if_nonfinite=True)  # stall"},
    clean={"after_backward": f"{CLIP})"},
)
