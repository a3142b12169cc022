"""The allocator gives its memory back to the driver in every step, and asks for it again."""

from ..plant import Plant

PLANT = Plant(("free", "alloc", "sync"), planted={"report": "torch.cuda.empty_cache()  # stall"}, dry=False)
