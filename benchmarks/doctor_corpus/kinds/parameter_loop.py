"""An average of the weights is kept by a Python loop, one launch a parameter."""

from ..plant import Plant

SETUP = "state.average = [p.detach().clone() for p in model.parameters()]"
PLANT = Plant(
    ("launch_bound", "launch"),
    planted={
        "setup": SETUP,
        "after_update": (
            "for average, p in zip(state.average, model.parameters()):\n    average.lerp_(p.detach(), 0.01)  # stall"
        ),
    },
    clean={
        "setup": SETUP,
        "after_update": "torch._foreach_lerp_(state.average, [p.detach() for p in model.parameters()], 0.01)",
    },
    dry=False,
)
