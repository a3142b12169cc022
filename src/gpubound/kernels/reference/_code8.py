"""Eight bits for a number from 0 to 1, or with its sign in int8: the dynamic code that 8-bit optimizers keep their moments in.

Moments lie over many powers of ten, and small ones matter as much as large ones. So the leading zeros of a code say how small
it is, a factor of 8 for each, and the bits behind them divide that range evenly: 128 steps (64 with a sign) between 1/8 and 1,
half as many between 1/64 and 1/8, down to 8^-7 (8^-6). Code 0 is 0, the largest is 1. Powers of two make it exact arithmetic on
a float's own bits, without a table.

Numbers are coded in blocks of 256, each over its own largest magnitude, which is kept beside the codes in fp32.
"""

import torch
from torch import Tensor

BLOCK = 256
_TINY = 2.0**-126  # one over anything smaller may overflow: a block whose largest is smaller is all zeros


def zeros_most(dtype: torch.dtype) -> int:
    """How many leading zeros a magnitude can have: of 8 bits, or of 7 behind a sign."""
    return 6 if dtype == torch.int8 else 7


def decode(codes: Tensor) -> Tensor:
    """fp32 numbers from -1 to 1."""
    c = codes.to(torch.int32).abs().float()
    power = c.clamp(min=1).frexp().exponent - 1  # c lies from 2^power to just below 2^(power + 1)
    steps = torch.ldexp(c + 1, -power) - 1
    x = torch.ldexp(0.125 + 0.875 * steps, -3 * (zeros_most(codes.dtype) - power))
    return torch.where(c == 0, 0.0, x) * torch.where(codes < 0, -1.0, 1.0)


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest code's magnitude, as int32, of numbers from 0 to 1."""
    most = zeros_most(dtype)
    power = torch.where(x > 0, x.frexp().exponent, -99)
    zeros = ((-power).clamp(min=0) // 3).clamp(max=most)
    steps = torch.ldexp(torch.ones_like(x), most - zeros)
    step = ((torch.ldexp(x, 3 * zeros) - 0.125) * (8 / 7 * steps) + 0.5).floor()
    return (steps - 1 + step).to(torch.int32)


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes, the largest magnitude of each block) of a flat fp32 tensor. int8 keeps the sign; in uint8 all must be positive.

    In uint8 only 0 becomes code 0: a second moment that vanished would make of a small step a jump.
    """
    blocks = -(-x.numel() // BLOCK)
    padded = torch.nn.functional.pad(x, (0, blocks * BLOCK - x.numel())).view(blocks, BLOCK)
    scale = padded.abs().amax(1)
    scale = torch.where(scale < _TINY, 0.0, scale)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    codes = encode((padded.abs() * inverse[:, None]).clamp(max=1), dtype)
    if dtype == torch.int8:
        codes = torch.where(padded < 0, -codes, codes)
    else:
        codes = torch.where((padded > 0) & (scale[:, None] > 0), codes.clamp(min=1), codes)
    return codes.to(dtype).view(-1)[: x.numel()], scale


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 numbers again."""
    return decode(codes) * scales.repeat_interleave(BLOCK, output_size=len(scales) * BLOCK)[: codes.numel()]
