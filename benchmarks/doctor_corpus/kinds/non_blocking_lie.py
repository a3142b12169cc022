"""The copies say non_blocking, but the memory is pageable, so they block all the same."""

from ..plant import Plant
from .pageable_copy import PLANT as PAGEABLE

PLANT = Plant(
    ("h2d", "sync", "pageable"),
    planted={
        "data": PAGEABLE.planted["data"],
        "upload": "x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)  # stall",
    },
    clean=PAGEABLE.clean,
)
