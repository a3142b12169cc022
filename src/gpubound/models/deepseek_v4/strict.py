"""What stays in fp32 in a model of 16 bits: streams' mixing, norms, sinks, the routers' corrections.

transformers before 5.18 multiplies by a norm's fp32 weight after it has rounded, and so gives fp32, which the next product in
16 bits refuses. `rounded` lets each norm give its input's dtype, as later releases do.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def keep_in_fp32(model: Any) -> None:
    """As transformers' own loading does. Its norms are `rounded` for good."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in model._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.float()
    rounded(model)


def rounded(model: nn.Module) -> list[RemovableHandle]:
    """What was registered, to be removed: nothing where norms round already."""
    norms: list[Any] = [m for m in model.modules() if type(m).__name__ == "DeepseekV4RMSNorm"]
    if not norms or norms[0](norms[0].weight.detach().bfloat16()).dtype == torch.bfloat16:
        return []
    return [norm.register_forward_hook(_round) for norm in norms]


def _round(norm: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return y.to(inputs[0].dtype)
