"""Multi-head latent attention of a layer, with the methods of layer.CachedAttention.

A step is in the absorbed form (kernels/latent_attention.py): it multiplies queries by W_K and results by W_V, over a cache of
latents. A prompt is in the expanded form: keys and values of all its positions are computed from the latents, a layer at a
time, for scaled dot-product attention. In 16 bits both round a head's query or key once more than the other does.

Legend: B rows, T tokens of a prompt, S positions so far, H query heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import latent_attention, latent_queries, rope
from ..kernels.decode_attention import MANY
from ..kernels.latent_attention import LatentScratch
from ..kernels.rope import apart
from ..models.decoding import LatentAttentionWeights
from .layer import GEMV_ROWS, Part, Workspace, attend_prompt, normed

# Programs that share the keys of a row, and the tiles of keys that each takes at least: up to GEMV_ROWS rows, and beyond.
# A part of 128 keys has 147 KB of latents, and leaves 33 KB of sums (16 heads of 512).
GEMV_SPLITS, GEMM_SPLITS = (64, 4), (16, 4)


class CachedLatentAttention(Part):
    """Norm, products with the stream, latents to the cache, attention, output."""

    def __init__(self, weights: LatentAttentionWeights, number: int, form: object, workspace: Workspace) -> None:
        super().__init__(weights, number, form, workspace)
        w, rows, heads = weights, workspace.rows, weights.query_heads
        first, *rest, _ = w.groups()
        self.down = self.product(self.form.stacked(*first), *first)
        self.q = self.product(self.form.stacked(*rest[0]), *rest[0]) if rest else None
        self.o = self.last = self.product(self.form.stacked(w.o), w.o)
        self.widths = [len(layer.weight) for layer in first]
        self.up = w.up.weight.detach().to(workspace.device)  # in its own format; a copy only of a model in host memory
        self.rank, self.heads = self.up.shape[1], heads
        self._projected = workspace.buffer("projected", rows, sum(self.widths))
        if self.q is not None:
            self._low = workspace.buffer("low", rows, self.widths[0])
            self._q = workspace.buffer("q", rows, heads * w.head_dim)
        self._queries = workspace.buffer("queries", rows, heads, len(w.latent.weight), dtype=workspace.dtype)
        self._mixed = workspace.buffer("mixed", rows, heads * w.value, dtype=workspace.dtype)
        counts = {n: _splits(n, heads)[0] for n in (rows, min(rows, GEMV_ROWS))}
        most = max(n * splits for n, splits in counts.items())
        self._sums = workspace.buffer("sums", most, heads, self.rank)
        self._weights = workspace.buffer("weights", most, heads, 2)
        self._angles = workspace.tables[w.table]

    def compute(self, x: Tensor, position: Tensor, mode: int) -> Tensor:
        """Return the input of the last product in a step."""
        projected = self._projected[: len(x)]
        h, norm = self.operand(x, mode, self.first)
        self.down.norm_product(h, norm, projected, self.fenced(mode))
        q, latent = projected.split(self.widths, -1)
        if self.q is not None:
            # A product reads contiguous rows. Those of one row are.
            low = q if len(x) == 1 else self._low[: len(x)].copy_(q)
            q = self.q.norm_product(low, self.weights.q_norm, self._q[: len(x)], mode)
        return self._attend(q, latent, position, mode)

    def gemm_compute(self, x: Tensor, position: Tensor, mode: int) -> Tensor:
        q, latent = self.gemm(self.down, self.read(x)).split(self.widths, -1)
        if self.q is not None:
            (q,) = self.linear(self.q, normed(q, self.weights.q_norm))
        return self._attend(q, latent, position, 0)

    def _attend(self, q: Tensor, latent: Tensor, position: Tensor, mode: int) -> Tensor:
        w, rows, cache = self.weights, len(q), self.workspace.cache.latents(self.number, len(position))
        queries, mixed = self._queries[:rows], self._mixed[:rows]
        latent_queries(q, latent, position, w.latent_norm, self.up, *self._angles, cache, queries, w.interleaved, mode)
        splits, tiles = _splits(rows, self.heads)
        sums, weights = (t[: rows * splits].view(rows, splits, *t.shape[1:]) for t in (self._sums, self._weights))
        return latent_attention(queries, position, cache, self.up, w.scale, LatentScratch(sums, weights, tiles), mixed, mode)

    def prompt(self, h: Tensor, start: int, end: int) -> Tensor:
        """Return the attention's output for normed h (B, T, hidden) at positions start to end."""
        w, width = self.weights, self.weights.rotated
        q, latent = self.linear(self.down, h)
        if self.q is not None:
            (q,) = self.linear(self.q, normed(q, w.q_norm))
        latent, key = latent.split([self.rank, width], -1)
        plain, turning = q.unflatten(-1, (self.heads, -1)).split([w.head_dim - width, width], -1)
        pair = turning, key.unsqueeze(-2)
        if w.interleaved:
            pair = apart(turning, width // 2), apart(pair[1], width // 2)
        cos, sin = self._angles
        turned, key = rope(*pair, cos[start:end], sin[start:end])
        new = torch.cat([normed(latent, w.latent_norm).unsqueeze(-2), key], -1)
        cached = self.workspace.cache.extend_latents(self.number, start, new)[:, 0]  # (B, S, width of both)
        expanded = F.linear(cached[..., : self.rank], self.up).unflatten(-1, (self.heads, -1))
        k, v = expanded.split([w.head_dim - width, w.value], -1)
        k = torch.cat([k, cached[:, :, None, self.rank :].expand(-1, -1, self.heads, -1)], -1)
        v = F.pad(v, (0, max(0, w.head_dim - w.value)))  # flash attention takes values as wide as keys
        q, k, v = (t.transpose(1, 2) for t in (torch.cat([plain, turned], -1), k, v))
        mixed = attend_prompt(q, k, v, cached.shape[1] - (end - start), 0, w.scale)
        return self.linear(self.o, mixed[..., : w.value].flatten(2))[0]

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), self.up]

    def ops(self) -> list[tuple[str, str, str]]:
        low = [] if self.q is None else [("norm, q", f"{self.q.prefix}norm_product", "")]
        over = f"over latents of {self.rank} + {self.weights.rotated}, for {self.heads} heads"
        return [
            (f"{self.norm_in_product}q, latent", f"{self.down.prefix}norm_product", ""),
            *low,
            ("q W_K, rotation, cache", "latent_queries", ""),
            ("attention, W_V", "latent_attention", over),
            ("output", f"{self.o.prefix}add_product", ""),
        ]


def _splits(rows: int, heads: int) -> tuple[int, int]:
    """Return how many programs share a row's keys, and the least tiles of each. Rows of many heads fill a GPU by themselves."""
    if rows <= GEMV_ROWS:
        return GEMV_SPLITS
    most, tiles = GEMM_SPLITS
    return max(1, min(most, MANY // (rows * -(-heads // 32)))), tiles
