"""Parameters that stay in fp32 in a 16-bit model: hyper-connections, norms, sinks, the routers' corrections.

transformers before 5.18 rounds a norm's output and then multiplies it by the fp32 weight. The result is fp32, which the next
16-bit GEMM rejects. `rounded` makes each norm return its input's dtype, as later releases do.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def keep_in_fp32(model: Any) -> None:
    """Convert parameters to fp32 as transformers' loading does, and make the norms `rounded` permanently."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in model._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.float()
    rounded(model)


def rounded(model: nn.Module) -> list[RemovableHandle]:
    """Register hooks that round the norms' outputs, and return their handles; empty if norms already round."""
    norms: list[Any] = [m for m in model.modules() if type(m).__name__ == "DeepseekV4RMSNorm"]
    if not norms or norms[0](norms[0].weight.detach().bfloat16()).dtype == torch.bfloat16:
        return []
    return [norm.register_forward_hook(_round) for norm in norms]


def _round(norm: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return y.to(inputs[0].dtype)
