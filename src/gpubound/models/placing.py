"""What placing asks of a family: for each role of its modules, a function that says how such a module is swapped.

A family's own `placing.py` has a table SWAPS, {role: maker}. A maker gets a module and the decoder stack that it lies in, and
gives a `Swap`. Placing does the rest: it refuses what is better left alone, verifies, and keeps the table. The part has a
method `fused_kernels`, which tells the table what it runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..kernels.choose import Call

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}

Case = Callable[[torch.dtype], tuple[Tensor, dict[str, Any]]]
"""dtype -> (x, keywords): x gets a gradient; the same values in every dtype"""


@dataclass
class Swap:
    """How a module can be swapped: for which part, with which attributes beside its own, verified on which cases."""

    part: type
    calls: tuple[Call, ...]  # what the part will call, and in which shapes, so that they can be compiled side by side
    attributes: dict[str, Any] = field(default_factory=dict)
    cases: tuple[Case, ...] = ()
    refusal: str = ""
    otherwise: type | None = None  # the part to try when `part` is found to compute something else
    trial: Callable[[], str | None] | None = None  # what the exercise would not show: why not to swap, or None


Maker = Callable[[Any, Any], Swap]
"""(module, the decoder stack with a rotary_emb that it lies in, or None) -> its Swap"""
