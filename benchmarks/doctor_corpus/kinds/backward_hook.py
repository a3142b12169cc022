"""A hook in backward looks for NaN, on autograd's thread."""

from ..plant import Plant


def hook(body: str) -> str:
    return f"def watched(gradient):\n    {body}\n\nnext(model.parameters()).register_hook(watched)"


PLANT = Plant(
    ("sync",),
    planted={"setup": hook("return gradient.nan_to_num() if gradient.isnan().any() else gradient  # stall")},
    clean={"setup": hook("return gradient.nan_to_num()")},
)
