"""Products of 8-bit matrices: a bᵀ · scale_a · scale_b, summed in fp32. On tensor cores where there are any for fp8.

Elsewhere the same 8-bit values are multiplied in fp32, which is the definition: what fp8 does to a training run can be seen on
a CPU, though not its speed.
"""

import torch
from torch import Tensor

from ..device import constant

MULTIPLE = 16  # elements: every side of the matrices, or cuBLAS has no kernel
CAPABILITY = (8, 9)  # the first with 8-bit floating-point tensor cores


def scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None
) -> Tensor:
    """(M, K) times the transpose of (N, K), in `dtype`, or written to `out` of that dtype.

    `fast` sums in the tensor cores' own accumulators, of some 14 bits, instead of handing over to fp32 every 128 terms: good
    enough for a forward product, not for a weight gradient's 16,384 terms.
    """
    if not has_cores(a.device):
        y = (a.float() @ b.float().t()).mul_(scale_a * scale_b)
        return y.to(dtype) if out is None else out.copy_(y)
    if out is None:
        return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast, out=out)


@constant
def has_cores(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY
