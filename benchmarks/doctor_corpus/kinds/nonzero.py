"""Some rows are picked by their index, and how many they are must be read back."""

from ..plant import Plant

PLANT = Plant(
    ("sync",),
    planted={
        "forward": "rows = (y[:, 0] > -1.0).nonzero().flatten()  # stall\nloss = functional.mse_loss(model(x)[rows], y[rows])"
    },
    clean={
        "forward": "keep = (y[:, :1] > -1.0).to(y.dtype)\nloss = ((model(x) - y).square() * keep).mean() / keep.mean()",
    },
)
