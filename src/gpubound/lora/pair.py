"""One adapter of one layer, as a module."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..layers.linear_formats import Adapter, shape_of
from ..layers.state_dict_storage import own_storages
from .adapter import LowRank

SCALING = ("alpha", "rslora")  # what its scale is made of


class Pair(nn.Module):
    """One adapter of one layer: y += scale · dropout(x) aᵀ bᵀ. Of a convolution a is one, too, and b one of a single pixel."""

    HALVES: ClassVar[dict[str, str]] = {"lora_A.weight": "a", "lora_B.weight": "b"}  # by what PEFT's files call them
    DROPS: ClassVar[bool] = True  # whether it may have dropout

    def __init__(self, weight: Tensor, rank: int, alpha: float, dropout: float, rslora: bool):
        super().__init__()
        dtype = torch.promote_types(weight.dtype, torch.float32)  # small updates of a 16-bit one would be lost
        a, b = self.shapes(weight, rank)
        self.a = nn.Parameter(torch.empty(a, dtype=dtype, device=weight.device))
        self.b = nn.Parameter(torch.empty(b, dtype=dtype, device=weight.device))
        self.dropout = nn.Dropout(dropout)
        self.alpha, self.rslora = alpha, rslora
        self.on, self.merged = True, False
        self.register_state_dict_post_hook(own_storages)  # those of q, k and v come to lie in one memory

    @staticmethod
    def shapes(weight: Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a and b."""
        outputs, *inputs = shape_of(weight)
        return (rank, *inputs), (outputs, rank, *(1 for _ in inputs[1:]))

    @staticmethod
    def most_rank(weight: Tensor) -> int:
        outputs, *inputs = shape_of(weight)
        return min(outputs, math.prod(inputs))

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def adds(self) -> bool:
        return self.on and not self.merged

    @property
    def scale(self) -> float:
        return self.alpha / self._below

    @scale.setter
    def scale(self, scale: float) -> None:
        self.alpha = scale * self._below

    @property
    def _below(self) -> float:
        return math.sqrt(self.rank) if self.rslora else self.rank

    def belong_to(self, adapters: Any) -> None:
        """Become one of a layer's `Adapters`. Not as nn.Module sets attributes: they are no part of this one."""
        vars(self)["_adapters"] = adapters

    def __setattr__(self, name: str, value: Any) -> None:
        """What is set on a live adapter takes effect at once: the weight's record, which holds the old value, is made anew."""
        adapters = vars(self).get("_adapters")
        if adapters is not None and name in SCALING:
            self._check_scaling(name, value)
        super().__setattr__(name, value)
        heard = name in SCALING or name == "dropout" or name in self.HALVES.values()
        if heard and adapters is not None and any(own is self for own in adapters.values()):
            adapters.hang()

    def _check_scaling(self, name: str, value: Any) -> None:
        if self.merged:
            raise ValueError(
                f"lora: {name} was set on an adapter that is merged into its weight, which has the scale it had then; call "
                f"gb.lora.unmerge first."
            )
        if name == "alpha" and not is_number(value):
            raise ValueError(f"lora: alpha must be a finite number, got {value!r}.")

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_adapters"}  # who have it say so of a copy

    def begin(self, init: bool | str, weight: Tensor) -> None:
        """PEFT's ways to begin: all but False, which adds noise, add nothing at first."""
        if init == "orthogonal":
            return self._begin_orthogonal()
        if init == "gaussian":
            nn.init.normal_(self.a, std=1 / self.rank)
        else:
            nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        if init is False:
            nn.init.kaiming_uniform_(self.b, a=math.sqrt(5))
        else:
            nn.init.zeros_(self.b)

    @torch.no_grad()
    def _begin_orthogonal(self) -> None:
        """b a is zero and neither of them: their ranks are mixed from rows of one orthogonal matrix, every other one."""
        (rank, inputs), outputs = self.a.shape, self.b.shape[0]
        mixing, _ = torch.linalg.qr(torch.randn(rank, rank, device="cpu", dtype=torch.float32))
        self.a.copy_((torch.randn(inputs, rank // 2, device="cpu", dtype=torch.float32) @ mixing[0::2]).t() / 10)
        self.b.copy_(torch.randn(rank // 2, outputs, device="cpu", dtype=torch.float32).t() @ mixing[1::2] / 10)

    def added(self, weight: Tensor) -> Tensor:
        """What it adds to the layer's weight, of which this is a copy, in fp32 or wider."""
        a, b = self.a.to(weight.dtype), self.b.to(weight.dtype)
        return (self.scale * (b.flatten(1) @ a.flatten(1))).view(b.shape[0], *a.shape[1:])

    def part(self, weight: Tensor) -> Adapter:
        """What it is in the weight's record."""
        return LowRank(self.a, self.b, self.scale, self.dropout)

    def filed(self, half: str) -> Tensor:
        """A half as PEFT's files have it."""
        return getattr(self, self.HALVES[half]).detach()

    def take(self, half: str, value: Tensor) -> None:
        """A half from such a file."""
        getattr(self, self.HALVES[half]).copy_(value)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
