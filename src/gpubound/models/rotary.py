"""A Hugging Face model's rotary positions in the kernels' form: each angle once, in fp32."""

from typing import Any

import torch
from torch import Tensor

from ..layers.rope import Rope

FIXED = ("default", "linear", "llama3", "yarn")  # the other rope types change their frequencies with the length that is read


class HFAngles:
    """Positions -> cos and sin, by the model's own rotary module but in fp32: its frequencies, scaling and all."""

    def __init__(self, rotary: Any) -> None:
        self.rotary = rotary

    def __call__(self, positions: Tensor) -> Rope:
        like = torch.empty(0, device=positions.device, dtype=torch.float32)  # read for its dtype and device alone
        cos, sin = self.rotary(like, positions.reshape(-1, positions.shape[-1]))
        shape = (*positions.shape, cos.shape[-1] // 2)
        return cos[..., : shape[-1]].reshape(shape), sin[..., : shape[-1]].reshape(shape)

    def stamp(self) -> tuple[int, int]:
        frequencies: Tensor = self.rotary.inv_freq
        return frequencies.data_ptr(), frequencies._version


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
