"""A batch is augmented on the host, between the steps, although the device could."""

from ..plant import Plant

DATA = "batches = itertools.cycle([(pinned(host_rows()), pinned(host_rows())) for _ in range(16)])"
COPY = "x, y = pinned(x).to(device, non_blocking=True), y.to(device, non_blocking=True)"
PLANT = Plant(
    ("cpu_op",),
    planted={"data": DATA, "upload": f"x = (x + 0.1 * torch.randn_like(x)).clamp(-2.0, 2.0)  # stall\n{COPY}"},
    clean={"data": DATA, "upload": f"{COPY}\nx = (x + 0.1 * torch.randn_like(x)).clamp(-2.0, 2.0)"},
)
