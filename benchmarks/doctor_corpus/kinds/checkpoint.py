"""The weights of a block are saved every five steps, while the device waits."""

from ..plant import Plant

PLANT = Plant(
    ("checkpoint",),
    planted={
        "imports": "import io",
        "report": "if step % 5 == 4:\n    torch.save(model[0].state_dict(), io.BytesIO())  # stall",
    },
    dry=False,
)
