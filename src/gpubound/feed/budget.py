"""Which device a feed serves, and how much memory it may take there."""

import os

import torch

from ..device import resolve, usable_bytes
from ..words import byte_count


def target(device: str | torch.device | None) -> torch.device:
    """The device to serve: None and the policies of gpubound.device go through its test; any other torch device is taken as
    it is."""
    if device is None:
        return concrete(resolve("auto"))
    if isinstance(device, torch.device) and device.type == "cpu":
        return concrete(device)
    if str(device).partition(":")[0] in ("auto", "require", "cpu", "cuda"):
        return concrete(resolve(device))
    return concrete(torch.device(device))


def concrete(device: torch.device, current: int | None = None) -> torch.device:
    """The device as tensors report it: 'cuda' is 'cuda:0' (or the current one), 'cpu:0' is 'cpu'. Compared as given, they are
    unequal.

    >>> concrete(torch.device("cuda"), current=1)
    device(type='cuda', index=1)
    """
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is not None:
        return device
    if current is None:
        ask = getattr(getattr(torch, device.type, None), "current_device", None)
        current = ask() if ask else 0
    return torch.device(device.type, current)


def free_bytes(device: torch.device) -> int | None:
    """Memory that could be allocated on `device` now, as measured; None where nothing measures it."""
    if device.type == "cuda":
        return usable_bytes(device)
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


# Without a word from the user a feed takes a quarter of what is free when it is made and leaves the rest to the model, its
# gradients and the optimizer, which often come later. A billion 16-bit tokens are 2 GB, so a quarter of 140 GB is seldom the
# limit.
SHARE = 4


def allowance(budget: int | str, keep: int | str | None, free: int | None) -> int | None:
    """Bytes a feed may hold resident: what `budget` says, else what is free less `keep`. None is no limit."""
    if budget != "auto":
        if keep is not None:
            raise ValueError(
                "feed: got both budget= and keep=, wanted one; budget is what the feed may take, keep what it must leave."
            )
        return parse_bytes("budget", budget)
    if free is None:
        return None
    return max(0, free - parse_bytes("keep", keep)) if keep is not None else free // SHARE


def parse_bytes(what: str, size: int | str) -> int:
    count = byte_count(size)
    if count is None:
        raise ValueError(f"feed: {what}: got {size!r}, wanted a number of bytes, as in 2_000_000_000, '2 GB' or '1.9 GiB'.")
    return count
