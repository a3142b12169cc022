"""A compiled function is specialised on a number that changes in every step."""

from ..plant import Plant

PLANT = Plant(
    ("compile",),
    planted={
        "setup": (
            "torch._dynamo.config.recompile_limit = 1000\n"
            'state.scaled = torch.compile(lambda x, n: x * n / n, backend="eager", dynamic=False)\n'
            "state.unit = torch.ones(())"
        ),
        "upload": "x = x * state.scaled(state.unit, state.step + 1)  # stall",
    },
    clean={"upload": "x = x * ((state.step + 1) / (state.step + 1))"},
)
