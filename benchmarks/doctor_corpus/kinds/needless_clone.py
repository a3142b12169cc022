"""Every block clones an output that nobody else holds."""

from ..hosts import SLOTS
from ..plant import Plant

RETURN = "return x + self.down(functional.gelu(self.up(self.norm(x))))"
PLANT = Plant(
    ("clone",),
    planted={"classes": SLOTS["classes"].replace(RETURN, RETURN.replace("return x +", "return (x +") + ").clone()  # stall")},
)
