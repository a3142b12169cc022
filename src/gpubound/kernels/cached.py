"""Keys and values in 8 bits: each token's, in each kv head, over a scale of its own. What a cache of them holds.

int8   whole numbers from -127 to 127; the scale is the largest magnitude / 127
fp8    e4m3 numbers; the scale is the largest magnitude / 448

Of normal numbers, 128 wide, int8 loses 0.6 % of their spread and fp8 2.6 %. The kernels round as `encode` does, bit for bit:
what a prompt leaves in a cache is what single steps would have left, were its keys the same.
"""

import torch
from torch import Tensor

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TINY = 2.0**-100  # the smallest scale: of zeros, and of numbers that fp32 would soon lose
LEAST = 2.0**-10  # of e4m3 the largest that becomes 0; put there by hand, or a small negative number would become -0


@torch.no_grad()
def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes (..., D), scales (...) in fp32) of x (..., D). Where one number is not finite the scale is NaN, the codes 0."""
    x = x.float()
    top = torch.where(x.isfinite(), x.abs(), torch.inf).amax(-1)
    scale = torch.where(top.isfinite(), (top * (1 / LARGEST[dtype])).clamp_min(TINY), torch.nan)
    level = x / scale[..., None]  # divided, as rounded kernels do: times 1 / scale would lie on the other side of some halves
    level = torch.where(level == level, level, 0.0)
    if dtype == torch.int8:
        return level.round().to(dtype), scale
    return torch.where(level.abs() <= LEAST, 0.0, level).clamp(-448.0, 448.0).to(dtype), scale


@torch.no_grad()
def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that codes (..., D) over scales (...) stand for."""
    wide = codes.to(torch.bfloat16) if codes.dtype == torch.float8_e4m3fn else codes  # exact; fp8 is not promoted
    return (wide * scale[..., None]).to(dtype)
