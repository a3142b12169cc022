"""Dequantisation of NF4: bound by memory, half a byte read and two written a number.

The sixteen values of the code are in one line of the L1, in sixteen banks: a warp's look-up is one load. A fused product would
repeat the look-up for every tile of x, so from some hundred tokens on it is faster to write the weights and multiply by
cuBLAS.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..nf4 import BLOCK, GROUP, Nf4, dynamic_code, nf4_code
from ..plans import cdiv
from ._launch import bump_versions

BLOCKS = 64  # of a program


@triton.jit
def _dequantize_nf4_kernel(codes_ptr, absmax_ptr, scale_ptr, offset_ptr, code_ptr, dynamic_ptr, out_ptr, blocks,
                           B: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    block = tl.program_id(0) * B + tl.arange(0, B)
    in_range = block < blocks
    absmax = tl.load(absmax_ptr + block, mask=in_range, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + block // GROUP, mask=in_range, other=0.0)
    largest = tl.load(dynamic_ptr + absmax) * scale + tl.load(offset_ptr)
    block = block.to(tl.int64)
    at = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None]
    two = tl.load(codes_ptr + at, mask=in_range[:, None], other=0).to(tl.int32)
    numbers = tl.interleave(tl.load(code_ptr + (two >> 4)), tl.load(code_ptr + (two & 15)))
    to = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None]
    tl.store(out_ptr + to, (numbers * largest[:, None]).to(out_ptr.dtype.element_ty), mask=in_range[:, None])


@torch.no_grad()
def dequantize_nf4(weight: Nf4, out: Tensor) -> Tensor:
    blocks = len(weight.absmax)
    _dequantize_nf4_kernel[(cdiv(blocks, BLOCKS),)](
        *weight, nf4_code(out.device), dynamic_code(out.device), out, blocks, B=BLOCKS, BLOCK=BLOCK, GROUP=GROUP, num_warps=4
    )
    bump_versions(out)
    return out
