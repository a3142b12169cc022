"""A tensor of constants is built from Python numbers in every step."""

from ..plant import Plant

MADE = "state.weights = torch.tensor([0.25, 0.75], device=device, dtype=dtype)"
LOSS = "loss = functional.mse_loss(model(x), y) * state.weights.sum()"
PLANT = Plant(
    ("h2d", "sync"),
    planted={"forward": f"{MADE}  # stall\n{LOSS}"},
    clean={"setup": MADE, "forward": LOSS},
)
