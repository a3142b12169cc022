"""A GradScaler reads whether a gradient overflowed, because the optimizer is not fused."""

from ..plant import Plant

WIDE = {
    "build": "dtype = torch.float32\nmodel = nn.Sequential(*(Block() for _ in range(DEPTH))).to(device, dtype)",
    "optimizer": "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)",
    "forward": "loss = functional.mse_loss(model(x.float()), y.float())",
}
PLANT = Plant(
    ("sync",),
    planted=WIDE
    | {
        "setup": "state.scaler = torch.amp.GradScaler(device.type)",
        "backward": "state.scaler.scale(loss).backward()",
        "update": "state.scaler.step(optimizer)  # stall\nstate.scaler.update()",
    },
    clean=WIDE,
)
