"""The last layer was never moved, so its input goes to the host and its work is done there."""

from ..plant import Plant

PLANT = Plant(
    ("cpu_op", "d2h"),
    planted={
        "setup": "state.head = nn.Linear(WIDTH, 4).requires_grad_(False)",
        "forward": (
            "hidden = model(x).float().cpu()  # stall\n"
            "loss = (state.head(hidden) - y[:, :4].float().cpu()).square().mean()  # stall"
        ),
    },
    clean={
        "setup": "state.head = nn.Linear(WIDTH, 4).to(device).requires_grad_(False)",
        "forward": "hidden = model(x).float()\nloss = (state.head(hidden) - y[:, :4].float()).square().mean()",
    },
)
