"""Keys and values of a masked diffusion model, kept between the steps of a block (the dual cache of Fast-dLLM, Wu et al. 2025).

A full pass computes all positions of a row, and stores their keys and values: of the prompt, of finished blocks, of the block
itself, and of the masks after it. A pass of the block computes the block's positions alone. It replaces their keys and values,
and attends to all that are stored.

The result is approximate. Attention goes in both directions, so each token that is written changes the hidden states of all
other positions from the second layer on, and with them their keys and values, which stay those of the last full pass. A pass of
the block that directly follows a full pass of the same tokens is exact.

Legend: B rows, L positions of a row, N positions of a block, K key and value heads, D width of a head.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...layers.attention import Attention, Rope
from ...layers.block import must_be_called, normed_for, run_blocks
from ..language_model import LanguageModel


def why_uncached(model: Any) -> str | None:
    """Return why keys and values of the model cannot be cached by `BlockCache`; None if they can."""
    name = type(model).__name__
    if not isinstance(model, LanguageModel):
        return f"{name} is no gb.Decoder or gb.RichardsDecoder"
    if getattr(model.config, "time", "none") != "none":
        return f"the blocks of {name} read the time of each step"
    for block in model.model.layers:
        attention = block.self_attn
        if not isinstance(attention, Attention) or type(attention).mix is not Attention.mix:
            return f"its attention is a {type(attention).__name__}"
        if must_be_called(block) or must_be_called(attention):
            return "its blocks carry hooks or another forward"
        if block.apart or block.gathered is not None:
            return "its blocks are on several devices"
    return None


class BlockCache:
    """Keys and values (B, L, K, D) of each layer, at fixed addresses, and the model's passes that write and read them."""

    def __init__(self, model: Any, rows: int, length: int) -> None:
        self.trunk: Any = model.model
        attention, weight = self.trunk.layers[0].self_attn, self.trunk.embed_tokens.weight
        sizes = len(self.trunk.layers), rows, length, attention.kv_heads, attention.head_dim
        self.k, self.v = weight.new_zeros(2, *sizes)
        self.number = {block: number for number, block in enumerate(self.trunk.layers)}
        self.back = int(getattr(model.config, "shifted", False))  # how far before a token's position it is predicted

    def full(self, ids: Tensor, at: Tensor, mask: Tensor | None) -> Tensor:
        """Return the hidden states that predict the tokens at positions `at` (B, N) of ids (B, L), after a full pass.

        mask  SDPA's, of padded rows
        """
        x = self._run(ids, None, None, mask)
        place = (at - self.back).clamp(min=0)
        return x.gather(1, place[..., None].expand(*at.shape, x.shape[-1]))

    def block(self, ids: Tensor, at: Tensor, mask: Tensor | None) -> Tensor:
        """Return the same after a pass of the block's positions `at` alone, and of the one before them if it predicts."""
        if self.back:
            at = torch.cat([at[:, :1] - 1, at], 1)
        x = self._run(ids.gather(1, at), at, at[:1] if mask is None else at, mask)  # unpadded rows begin at equal positions
        return x[:, :-1] if self.back else x

    def _run(self, ids: Tensor, at: Tensor | None, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        rope = None if self.trunk.rope is None else self.trunk.rope.of(ids, positions)
        step = partial(self._block, at=at)
        return run_blocks(self.trunk.layers, self.trunk.norm, self.trunk.embed(ids), rope, mask, step)

    def _block(
        self, block: Any, x: Tensor, pending: Tensor | None, rope: Rope | None, mask: Tensor | None, *, at: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run a block as layers.block.run_block does, with the keys and values of its positions (all, or `at`) stored."""
        attention, mlp = block.self_attn, block.mlp
        y, x = normed_for(attention, block.input_layernorm, x, pending)
        q, *new = attention.project(y, rope)
        number = self.number[block]
        keys, values = stored = self.k[number], self.v[number]
        for kept, one in zip(stored, new):
            if at is None:
                kept.copy_(one)
            else:
                kept.scatter_(1, at[..., None, None].expand_as(one), one)
        y, _ = attention.attended(q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), mask)
        y, x = normed_for(mlp, block.post_attention_layernorm, x, attention.output(y.flatten(-2)))
        return x, mlp(y) if must_be_called(mlp) else mlp.mix(y)
