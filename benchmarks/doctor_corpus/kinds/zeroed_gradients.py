"""Gradients are set to zero and added to, instead of being made anew."""

from ..plant import Plant

PLANT = Plant(("optimizer", "zero_grad"), planted={"zero": "optimizer.zero_grad(set_to_none=False)  # stall"}, dry=False)
