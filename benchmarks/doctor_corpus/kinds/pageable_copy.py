"""Batches are copied from pageable memory, and the host waits for each copy."""

from ..plant import Plant

PLANT = Plant(
    ("h2d", "sync", "pageable"),
    planted={
        "data": "batches = itertools.cycle([(host_rows(), host_rows()) for _ in range(16)])",
        "upload": "x, y = x.to(device), y.to(device)  # stall",
    },
    clean={
        "data": "batches = itertools.cycle([(pinned(host_rows()), pinned(host_rows())) for _ in range(16)])",
        "upload": "x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)",
    },
)
