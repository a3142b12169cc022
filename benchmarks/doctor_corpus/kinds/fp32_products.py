"""The weights are in fp32, and products may not use the tensor cores. The clean script lets them, with TF32."""

from ..plant import Plant

CODE = {
    "build": "dtype = torch.float32\nmodel = nn.Sequential(*(Block() for _ in range(DEPTH))).to(device, dtype)",
    "classes": """class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))  # stall
""",
    "forward": "loss = functional.mse_loss(model(x.float()), y.float())  # stall",
}
PLANT = Plant(
    ("precision",),
    planted=CODE,
    clean=CODE | {"setup": 'torch.set_float32_matmul_precision("high")'},
    dry=False,
    hidden=("launch-bound",),  # products of 64 x 128, while the device waits for launches
)
