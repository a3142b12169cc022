"""The allocator gives its memory back to the driver in every step, and asks for it again."""

from ..plant import Plant

SCRATCH = "state.scratch = torch.empty(64 << 20, dtype=torch.uint8, device=device)\nstate.scratch = None"
PLANT = Plant(
    ("free", "alloc", "sync"),
    planted={"report": f"{SCRATCH}\ntorch.cuda.empty_cache()  # stall"},
    clean={"report": SCRATCH},
    dry=False,
)
