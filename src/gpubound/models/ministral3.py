"""Ministral 3: Mistral with queries that grow with the logarithm of their position, beyond the length of its first training.

In a step of the decoder nothing scales the queries, so its texts end where the scale begins.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..layers.attention import Mask
from .hf_modules import SWAPS as LLAMA, HFAttention, HFStack, attention, stack
from .reader import Reader
from .registry import Maker

BETA = "llama_4_scaling_beta"


def first_scaled(config: Any) -> int:
    """Return the first position whose queries are scaled."""
    return config.rope_parameters["original_max_position_embeddings"]


class ScaledAttention(HFAttention):
    """`mix` takes the angles and, where some may be scaled, the positions."""

    def mix(self, x: Tensor, rope: Any, mask: Mask = None) -> Tensor:
        cos, sin, positions = rope
        q, k, v = (t.transpose(1, 2) for t in self.project(x, (cos, sin)))
        y, _ = self.attended(q, k, v, mask, position_ids=positions)
        return self.output(y.flatten(-2))

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, cached: bool = False, position_ids: Tensor | None = None, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        if position_ids is not None:
            often = torch.floor(position_ids / first_scaled(self.config))
            scale = 1 + self.config.rope_parameters[BETA] * torch.log(1 + often)
            q = q * scale[..., None, :, None].to(q.dtype)
        return super().attended(q, k, v, mask, cached, **kwargs)


class ScaledStack(HFStack):
    def angles(self, x: Tensor, positions: Tensor | None) -> Any:
        if positions is None and x.shape[1] > first_scaled(self.config):
            positions = torch.arange(x.shape[1], device=x.device)
        return *super().angles(x, positions), positions


SWAPS: dict[str, Maker] = LLAMA | {
    "Attention": partial(attention, part=ScaledAttention),
    "Model": partial(stack, part=ScaledStack),
}


class ScaledReader(Reader):
    READS = frozenset({BETA})

    def refusal(self, max_length: int) -> str | None:
        first = first_scaled(self.config)
        if self.config.rope_parameters.get(BETA) and max_length > first:
            return f"its queries are scaled beyond {first} tokens, and max_length is {max_length}"
        return super().refusal(max_length)


DECODING = {"ForCausalLM": ScaledReader}
