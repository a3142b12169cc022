"""The same positions are uploaded in every step."""

from ..plant import Plant

POSITIONS = "torch.linspace(0, 1, WIDTH, dtype=dtype)"
PLANT = Plant(
    ("repeat", "h2d", "sync"),
    planted={"setup": f"state.positions = {POSITIONS}", "upload": "x = x + state.positions.to(device)  # stall"},
    clean={"setup": f"state.positions = {POSITIONS}.to(device)", "upload": "x = x + state.positions"},
)
