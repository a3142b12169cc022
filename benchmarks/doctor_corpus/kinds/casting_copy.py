"""The memory is pinned, but the blocking copy changes the dtype: the host converts it into a pageable buffer."""

from ..plant import Plant

DATA = "batches = itertools.cycle([(pinned(host_rows().double()), pinned(host_rows().double())) for _ in range(16)])"
PLANT = Plant(
    ("h2d", "sync", "pageable"),
    planted={
        "data": DATA,
        "upload": "x, y = x.to(device, dtype), y.to(device, dtype)  # stall",
    },
    clean={
        "data": DATA.replace(".double()", ""),
        "upload": "x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)",
    },
)
