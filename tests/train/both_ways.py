"""A small language model whose tokens see both sides of themselves, made of plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Below(nn.Module):
    """Token ids to hidden states: one head of attention to all places, and a gated product."""

    def __init__(self, words: int, places: int, width: int):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(places, width))
        self.qkv, self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second, self.last = (nn.LayerNorm(width) for _ in range(3))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        places = self.places[: input_ids.shape[1]] if position_ids is None else self.places[position_ids]
        x = self.words(input_ids) + places
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], mask)[:, 0]
        return self.last(x + self.down(F.gelu(self.up(self.second(x)))))


class BothWays(nn.Module):
    """`seen` keeps the ids of each call."""

    def __init__(self, words: int = 16, places: int = 32, width: int = 16, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.below, self.head = Below(words, places, width), nn.Linear(width, words, bias=False)
        self.seen: list[Tensor] = []
        self.below.register_forward_pre_hook(lambda module, inputs: self.seen.append(inputs[0]))

    @property
    def base_model(self) -> nn.Module:
        return self.below

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return self.head(self.below(input_ids, position_ids, mask))
