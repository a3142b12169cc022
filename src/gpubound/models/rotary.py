"""A Hugging Face model's rotary positions in the kernels' form: each angle once, in fp32."""

from typing import Any

import torch
from torch import Tensor

from ..layers.attention import Rope

FIXED = ("default", "linear", "llama3", "yarn")  # the other rope types change their frequencies with the length that is read


def rope_types(rotary: Any) -> list[str]:
    """Gemma 3's module has one for each type of layer."""
    told = getattr(rotary, "rope_type", "default")
    return list(told.values()) if isinstance(told, dict) else [told]


class HFAngles:
    """Positions -> cos and sin, by the model's own rotary module but in fp32: its frequencies, scaling and all."""

    def __init__(self, rotary: Any, layer_type: str | None = None) -> None:
        self.rotary = rotary
        prefix = f"{layer_type}_" if layer_type else ""  # Gemma 3 has some for each type of layer
        self.frequencies, self.scaling = f"{prefix}inv_freq", f"{prefix}attention_scaling"
        self.options = {"layer_type": layer_type} if layer_type else {}

    def __call__(self, positions: Tensor) -> Rope:
        like = torch.empty(0, device=positions.device, dtype=torch.float32)  # read for its dtype and device alone
        cos, sin = self.rotary(like, positions.reshape(-1, positions.shape[-1]), **self.options)
        shape = (*positions.shape, cos.shape[-1] // 2)
        return cos[..., : shape[-1]].reshape(shape), sin[..., : shape[-1]].reshape(shape)

    def stamp(self) -> object:
        frequencies: Tensor = getattr(self.rotary, self.frequencies)
        return frequencies.data_ptr(), frequencies._version, getattr(self.rotary, self.scaling, None)


class ChangingAngles(HFAngles):
    """Those of a rotary module whose frequencies follow the length of what is read (longrope): asked anew for every batch."""

    def stamp(self) -> object:
        return object()


_halved: tuple[Tensor, Rope] | None = None


def halves(embeddings: tuple[Tensor, Tensor]) -> Rope:
    """Hugging Face's cos and sin (B or 1, T, D), each angle twice and in the model's dtype, as the kernels take them.

    Every layer of a forward is handed the same pair, so the last one converted is kept.
    """
    global _halved
    kept = _halved
    if kept is None or kept[0] is not embeddings[0]:
        cos, sin = ((t[0] if t.shape[0] == 1 else t)[..., : t.shape[-1] // 2].float().contiguous() for t in embeddings)
        _halved = kept = embeddings[0], (cos, sin)
    return kept[1]
