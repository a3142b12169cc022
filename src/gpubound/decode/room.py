"""Whether what a decoder is about to allocate fits in memory. Asked before: a host that has too little swaps, or kills."""

from pathlib import Path

import torch

from ..device import label, usable_bytes

MEMORY = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")  # of a container that may use less than its machine has


def check_room(needed: int, device: torch.device, max_batch: int, max_length: int) -> None:
    """`needed` bytes for `max_batch` sequences of `max_length` tokens; a ValueError where they are not free."""
    free = usable_bytes(device) if device.type == "cuda" else host_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"decoder: max_batch and max_length: got {max_batch} and {max_length}, whose keys, values and logits take "
            f"{needed / 1e9:,.1f} GB, but {free / 1e9:,.1f} GB are free on {label(device)}; ask for fewer or shorter sequences."
        )


def host_bytes() -> int | None:
    """What this process may still take of the host's memory; None where the system does not say."""
    told = [line.split() for line in MEMORY.read_text().splitlines()] if MEMORY.exists() else []
    free = [int(words[1]) * 1024 for words in told if words[0] == "MemAvailable:"]
    most, used = (_number(GROUP / f"memory.{name}") for name in ("max", "current"))
    if most is not None and used is not None:
        free.append(max(0, most - used))
    return min(free, default=None)


def _number(file: Path) -> int | None:
    """None where there is no such file or no limit ("max")."""
    text = file.read_text().strip() if file.exists() else ""
    return int(text) if text.isdecimal() else None
