"""How fast this machine copies from pinned memory: a pageable copy's price is what it takes beyond that."""

from itertools import pairwise

import torch

BYTES = 32 << 20


def pinned_rate() -> float | None:
    """Bytes a µs, of the fastest of three copies; None where the script has left no room for one."""
    try:
        source = torch.empty(BYTES, dtype=torch.uint8, pin_memory=True, device="cpu")
        target = torch.empty(BYTES, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return None
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    marks[0].record()
    for mark in marks[1:]:
        target.copy_(source, non_blocking=True)
        mark.record()
    torch.cuda.synchronize()
    return BYTES / (1e3 * min(before.elapsed_time(after) for before, after in pairwise(marks)))
