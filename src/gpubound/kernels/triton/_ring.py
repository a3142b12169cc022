"""The causal convolution with SiLU of a decoding step, whose earlier inputs are in a ring by position."""

import triton
import triton.language as tl


@triton.jit
def _convolved(x_ptr, ring_ptr, conv_ptr, bias_ptr, channel, inside, position, writes, C, PLACES: tl.constexpr,
               TAPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """silu of the convolution of some channels: the newest inputs are at x_ptr, the older ones in the ring, which gets them.

    No program reads the place that is written: a ring has a place for each tap, and the newest input is that of the product.
    """
    kind = ring_ptr.dtype.element_ty
    place = position + tl.zeros([BLOCK], tl.int32)
    newest = tl.load(x_ptr, mask=inside, other=0.0).to(kind)
    total = newest.to(tl.float32) * tl.load(conv_ptr + channel * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(1, TAPS):
        tap = tl.load(conv_ptr + channel * TAPS + TAPS - 1 - j, mask=inside, other=0.0).to(tl.float32)
        at = tl.maximum(place - j, 0) % PLACES
        total += tap * tl.load(ring_ptr + at * C + channel, mask=inside & (place >= j), other=0.0).to(tl.float32)
    here = ring_ptr + tl.maximum(place, 0) % PLACES * C + channel
    tl.store(here, newest, mask=inside & (place >= 0) & writes)
    return total / (1.0 + tl.exp(-total))
