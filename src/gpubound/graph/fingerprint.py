"""64-bit fingerprint of a storage's bytes, computed on their device. Different bytes collide in one case in 2^64.

Each eight-byte word is mixed with its position, and the results are summed: the order of the sums does not matter, and the
fingerprint is the same on any device.
"""

import torch
from torch import Tensor

PART = 1 << 24  # bytes at a time, of which some five times as many are held
# splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators): its step and its finalizer.
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def fingerprint(raw: Tensor) -> int:
    """Return the fingerprint of `raw`, a dense uint8 tensor that begins at a multiple of eight. Waits for the device."""
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for number, part in enumerate(raw.split(PART)):
        words = _words(part)
        place = torch.arange(len(words), dtype=torch.int64, device=raw.device).add_(number * (PART // 8) + 1)
        total += _mixed(words ^ _mixed(place.mul_(_signed(STEP)))).sum()
    return int(total.item())


def _words(part: Tensor) -> Tensor:
    """Return the bytes as words; an incomplete last word is padded with its number of bytes."""
    left = part.numel() % 8
    if not left:
        return part.view(torch.int64)
    last = torch.zeros(8, dtype=torch.uint8, device=part.device)
    last[:left] = part[-left:]
    last[7] = left
    return torch.cat([part[:-left].view(torch.int64), last.view(torch.int64)])


def _mixed(x: Tensor) -> Tensor:
    """Mix the words in place: each bit affects every other one, and the mapping is one to one."""
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))).mul_(_signed(factor))
    return x


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
