"""The model's output is taken to the host in every step."""

from ..plant import Plant

FORWARD = "state.output = model(x)\nloss = functional.mse_loss(state.output, y)"
PLANT = Plant(
    ("d2h", "sync"),
    planted={"forward": FORWARD, "report": "state.kept = state.output.detach().cpu()  # stall"},
    clean={"forward": FORWARD, "report": "state.kept = state.output.detach()"},
)
