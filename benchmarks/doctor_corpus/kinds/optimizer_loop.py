"""The optimizer updates one parameter after another."""

from ..plant import Plant

PLANT = Plant(
    ("optimizer",),
    planted={
        "optimizer": "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)  # stall",
        "update": "optimizer.step()  # stall",
    },
    dry=False,
)
