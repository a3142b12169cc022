"""The script collects garbage in every step."""

from ..plant import Plant

PLANT = Plant(("gc",), planted={"imports": "import gc", "report": "gc.collect()  # stall"})
