"""The loss leaves outliers out by a boolean mask, whose size must be read back; its backward reads once more."""

from ..plant import Plant

ERROR = "error = (model(x) - y).square()\n"
PLANT = Plant(
    ("sync",),
    planted={"forward": ERROR + "loss = error[error < 9.0].mean()  # stall"},
    clean={"forward": ERROR + "keep = error < 9.0\nloss = torch.where(keep, error, 0.0).sum() / keep.sum()"},
)
