"""A masked diffusion sampler in plain torch, the peer of `gpubound bench diffusion`: eager, with and without the dual cache.

It reads the weights of a gb.Decoder. Like the published loops, each step computes the model, takes the likeliest token of each
masked position, and writes those with the highest probabilities. Unlike them it computes the logits of the block alone, and
softmax in fp32, not fp64: a peer that wastes nothing which is easily saved.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class PlainDecoder:
    """The forward of LLaDA over a Decoder's weights, with the keys and values of its last full pass."""

    def __init__(self, model: Any, length: int) -> None:
        self.c, self.model = model.config, model.model
        self.head = model.lm_head
        half = torch.arange(0, self.c.head_dim, 2, device=self.head.weight.device).float()
        angle = torch.arange(length, device=half.device).float()[:, None] * self.c.rope_theta ** (-half / self.c.head_dim)
        self.cos, self.sin = (t.repeat(1, 2).to(self.head.weight.dtype) for t in (angle.cos(), angle.sin()))
        self.kept: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def logits(self, ids: Tensor, block: slice, whole: bool, keep: bool) -> Tensor:
        """Of the tokens in `block`, in fp32. whole: all positions are computed; keep: and their keys and values are cached."""
        at = slice(0, ids.shape[1]) if whole else block
        x = F.embedding(ids[:, at], self.model.embed_tokens.weight)
        kept = []
        for number, layer in enumerate(self.model.layers):
            attention, mlp, eps = layer.self_attn, layer.mlp, self.c.eps
            y = F.rms_norm(x, x.shape[-1:], layer.input_layernorm.weight, eps)
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            q, k, v = (p(y).unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2) for p in projections)
            q, k = self._turned(q, at), self._turned(k, at)
            if keep:
                kept.append((k, v))
            elif not whole:
                for cached, new in zip(self.kept[number], (k, v)):
                    cached[:, :, block] = new
                k, v = self.kept[number]
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.c.heads != self.c.kv_heads)
            x = x + attention.o_proj(y.transpose(1, 2).flatten(2))
            y = F.rms_norm(x, x.shape[-1:], layer.post_attention_layernorm.weight, eps)
            x = x + mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))
        self.kept = kept or self.kept
        x = x[:, block] if whole else x
        return self.head(F.rms_norm(x, x.shape[-1:], self.model.norm.weight, self.c.eps)).float()

    def _turned(self, x: Tensor, at: slice) -> Tensor:
        one, two = x.chunk(2, -1)
        return x * self.cos[at] + torch.cat([-two, one], -1) * self.sin[at]


def generate(
    plain: PlainDecoder, prompts: Tensor, tokens: int, block: int, steps: int, mask: int, cached: bool
) -> list[list[int]]:
    """Return the answers to prompts (B, P): `steps` steps, split evenly among the blocks and the block's tokens."""
    rows, begin = prompts.shape
    ids = torch.cat([prompts, prompts.new_full((rows, tokens), mask)], 1)
    each = steps * block // tokens
    for first in range(begin, begin + tokens, block):
        at = slice(first, first + block)
        for number in range(each):
            logits = plain.logits(ids, at, whole=not cached or number == 0, keep=cached and number == 0)
            logits[..., mask] = -torch.inf
            probability, token = logits.softmax(-1).max(-1)
            open_ = ids[:, at] == mask
            count = block // each + (number < block % each)
            chosen = torch.where(open_, probability, -1.0).topk(count, dim=1).indices
            ids[:, at] = ids[:, at].scatter(1, chosen, token.gather(1, chosen))
    return ids[:, begin:].tolist()
