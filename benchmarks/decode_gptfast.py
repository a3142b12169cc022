"""gpt-fast's design, written for this benchmark: a plain Llama over a static cache, whose step of one token torch.compile turns
into one CUDA graph of generated kernels. Attention is spelled out for it, and launches are searched by coordinate descent.
The prompt is not compiled, as there by default.

It reads the model's own weights, but for q, k and v, which gpt-fast keeps as one matrix: that is a copy.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Angles = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A layer: weights of the model's, and a cache of its own."""

    def __init__(self, layer: Any, config: Any, rows: int, length: int) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.heads, self.kv_heads, self.width = config.num_attention_heads, config.num_key_value_heads, attention.head_dim
        self.first, self.second = layer.input_layernorm, layer.post_attention_layernorm
        self.out, self.gate, self.up, self.down = (
            linear.weight for linear in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        # The compiled graph reads a module's buffers and parameters where they lie. Other tensors it would copy.
        self.qkv, self.keys, self.values = map(nn.Buffer, self._made(attention, rows, length))

    def _made(self, attention: Any, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        qkv = torch.cat([linear.weight.detach() for linear in (attention.q_proj, attention.k_proj, attention.v_proj)])
        return qkv, *qkv.new_zeros(2, rows, self.kv_heads, length, self.width)

    def forward(self, x: Tensor, places: Tensor, angles: Angles, mask: Tensor) -> Tensor:
        x = x + self.attend(normed(x, self.first), places, angles, mask)
        h = normed(x, self.second)
        return x + F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)

    def attend(self, h: Tensor, places: Tensor, angles: Angles, mask: Tensor) -> Tensor:
        rows, tokens = h.shape[:2]
        shared = self.kv_heads * self.width
        parts = F.linear(h, self.qkv).split([self.heads * self.width, shared, shared], -1)
        q, k, v = (part.view(rows, tokens, -1, self.width).transpose(1, 2) for part in parts)
        self.keys[:, :, places] = turned(k, angles)
        self.values[:, :, places] = v
        again = self.heads // self.kv_heads
        keys, values = (cache.repeat_interleave(again, 1) for cache in (self.keys, self.values))
        y = F.scaled_dot_product_attention(turned(q, angles), keys, values, attn_mask=mask)
        return F.linear(y.transpose(1, 2).reshape(rows, tokens, -1), self.out)


class Llama(nn.Module):
    """The likeliest token after the last of ids (B, T), which stand at `places` (T,)."""

    def __init__(self, model: Any, rows: int, length: int) -> None:
        super().__init__()
        inner = model.model
        self.embed, self.norm, self.head = inner.embed_tokens, inner.norm, model.lm_head.weight
        self.blocks = nn.ModuleList(Block(layer, model.config, rows, length) for layer in inner.layers)
        places = torch.arange(length, device=model.device)
        turns = places[:, None].float() * inner.rotary_emb.inv_freq.float()
        self.cos, self.sin, self.seen = map(nn.Buffer, (turns.cos(), turns.sin(), places[:, None] >= places))

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        x, angles, mask = self.embed(ids), (self.cos[places], self.sin[places]), self.seen[places]
        for block in self.blocks:
            x = block(x, places, angles, mask)
        return F.linear(normed(x[:, -1:], self.norm), self.head).argmax(-1)


def normed(x: Tensor, norm: Any) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)).to(x.dtype) * norm.weight


def turned(x: Tensor, angles: Angles) -> Tensor:
    """Halves of a head by their angles, as Hugging Face lays them out, in fp32."""
    cos, sin = angles
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class GptFast:
    """A contender: ids (B, T) to `new` greedy tokens (B, new) on the host, in a cache of `length` places."""

    def __init__(self, model: Any, rows: int, length: int, new: int) -> None:
        if model.config.model_type != "llama":
            raise ValueError(f"gpt-fast: got a model of type {model.config.model_type}, wanted llama, the one written here.")
        self.llama, self.new = Llama(model, rows, length), new
        self.step: Callable[[Tensor, Tensor], Tensor] = self.llama
        if model.device.type == "cuda":
            torch._dynamo.reset()
            options = {"triton.cudagraphs": True, "coordinate_descent_tuning": True}  # mode "reduce-overhead", and the search
            self.step = torch.compile(self.llama, fullgraph=True, dynamic=False, options=options)

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        token, place, found = self.llama(ids, places), places[-1:] + 1, []
        for _ in range(self.new - 1):
            found.append(token)
            with sdpa_kernel(SDPBackend.MATH):  # products and a softmax, which the compiler fuses
                token = self.step(token, place).clone()  # the graph writes over its output
            place = place + 1
        return torch.cat([*found, token], 1).cpu()
