"""The causal convolution with SiLU of a decoding step, whose earlier inputs are in a ring by position."""

import triton
import triton.language as tl


@triton.jit
def _earlier(ring_ptr, conv_ptr, bias_ptr, channel, inside, position, C, PLACES: tl.constexpr, TAPS: tl.constexpr):
    """Return the last tap of some channels, and the sum of the others times earlier inputs, and of the bias.

    It may be called before the wait (_pdl.py): the ring is read past an L1 that may hold what was there before.
    """
    place = position + tl.zeros_like(channel)
    own = tl.load(conv_ptr + channel * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros_like(own)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(1, TAPS):
        tap = tl.load(conv_ptr + channel * TAPS + TAPS - 1 - j, mask=inside, other=0.0).to(tl.float32)
        here = ring_ptr + tl.maximum(place - j, 0) % PLACES * C + channel
        total += tap * tl.load(here, mask=inside & (place >= j), other=0.0, cache_modifier=".cg").to(tl.float32)
    return own, total


@triton.jit
def _convolved(x_ptr, own, total, ring_ptr, channel, inside, position, writes, C, PLACES: tl.constexpr):
    """Return silu of the convolution, of what `_earlier` returned and the newest inputs at x_ptr, which go to the ring.

    No program reads the place that is written: a ring has a place for each tap, and the newest input is that of the product.
    """
    place = position + tl.zeros_like(channel)
    newest = tl.load(x_ptr, mask=inside, other=0.0).to(ring_ptr.dtype.element_ty)
    tl.store(ring_ptr + tl.maximum(place, 0) % PLACES * C + channel, newest, mask=inside & (place >= 0) & writes)
    total += own * newest.to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _apart(both, part, AXIS: tl.constexpr):
    """Return the rows of a tile (2, N), whose row numbers are `part` (2, 1).

    Numbers that two rows of programs need in other layouts come as one such tile: of a vector with fewer numbers than threads
    the compiler repeats all loads in each layout, 280 a thread instead of 17 in a step of the delta rule (compiled for 9.0).
    """
    return tl.sum(tl.where(part == 0, both, 0.0), AXIS), tl.sum(tl.where(part == 1, both, 0.0), AXIS)


def warps_of(vector: int, matrix: int) -> int:
    """Return the warps of a program. `_apart` wants no more threads than the 2 `vector` numbers of a tile. 64 numbers of the
    matrix a thread take 128 registers, with which two programs of 8 warps share a multiprocessor (compiled for 9.0)."""
    return max(1, min(8, vector // 16), min(16, matrix // 2048))
