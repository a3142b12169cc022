"""The loss is printed every step. Printing dispatches its reads where no mode sees them."""

from ..plant import Plant

PLANT = Plant(
    ("sync",),
    planted={
        "imports": "import io",
        "setup": "state.log = io.StringIO()",
        "report": "print(loss, file=state.log)  # stall",
    },
    clean={"report": "state.kept = loss.detach()"},
)
