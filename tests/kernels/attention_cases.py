"""Attention of a decoding step: a case over caches of any form, its results as numbers, and the comparison of both mirrors."""

import torch
from torch import Tensor

from gpubound.kernels.decode_attention import KINDS, Heads, LayerCache, Scratch, decode, encode
from gpubound.kernels.decode_product import Norm
from gpubound.kernels.registry import load

from .cases import SOURCES, draw, same

L, PAGE = 150, 64
NAMES = ("out", "keys", "values")


class Case:
    """`tokens` of each row from its position on, over a cache of any form that is NaN wherever nobody may look.

    kind, paged       of the cache
    pairs             that are rotated; None: all
    whole, offset     of the norms: over whole rows instead of heads, and their gain
    new, v_eps        heads of the product for each kv head besides the queries' (0: the cache has the token's); of values' norm
    """

    def __init__(
        self, device, dtype, positions, kind=None, paged=False, kv=2, group=2, width=16, tokens=1, normed=False,
        pairs=None, whole=False, offset=0.0, cap=0.0, interleaved=False, gated=False, new=2, v_eps=0.0,
    ):  # fmt: skip
        self.device, self.dtype, self.kv, self.group, self.width, self.tokens = device, dtype, kv, group, width, tokens
        self.kind, rows = KINDS.get(kind), len(positions)
        self.qkv = draw(device, torch.float32, rows * tokens, ((2 if gated else 1) * group + new) * kv * width)
        first = torch.tensor(positions, device=device, dtype=torch.int32)
        self.position = first[:, None] + torch.arange(tokens, device=device, dtype=torch.int32) if tokens > 1 else first
        angles = draw(device, torch.float32, L, pairs or width // 2, seed=3)
        norms = [None, None]
        if normed:
            sizes = (kv * group * width, kv * width) if whole else (width, width)
            norms = [Norm(draw(device, dtype, size, seed=4 + i), 1e-6, offset) for i, size in enumerate(sizes)]
        self.heads = Heads(angles.cos(), angles.sin(), *norms, width**-0.5, 0, cap, interleaved, None, gated, v_eps)
        caches = [draw(device, torch.float32, rows, kv, L, width, seed=1 + i) for i in range(2)]
        for cache in caches:
            for row, position in enumerate(positions):
                cache[row, :, position if new else position + tokens :] = float("nan")
        self.pages, self.shared = shuffled(rows, device) if paged else None, None
        kept = [self.keep(cache) for cache in caches]
        self.caches = [parts[0] for parts in kept] + [parts[1] for parts in kept if len(parts) > 1]

    def keep(self, cache: Tensor) -> list[Tensor]:
        """In the case's form. What nobody may look at are NaN codes and scales, where codes can be NaN."""
        if self.kind is None:
            return [into_pages(cache.to(self.dtype), self.pages)]
        codes, scale = encode(cache, self.kind)
        if self.kind == torch.float8_e4m3fn:
            codes.view(torch.uint8)[scale.isnan()] = 0x7F
        return [into_pages(codes.view(torch.uint8), self.pages).view(self.kind), into_pages(scale, self.pages)]

    def scratch(
        self, rows: int, splits: int = 4, tiles: int = 1, most: int = 0, parts: Tensor | None = None, **ways: bool
    ) -> Scratch:
        heads = self.kv * self.group if ways.get("by_query") else self.kv
        partial = torch.full((rows, self.kv, splits, self.group, self.width + 2), float("nan"), device=self.device)
        return Scratch(partial, torch.zeros(rows * heads, device=self.device, dtype=torch.int32), tiles, most, parts, **ways)

    def __call__(
        self, source, window=0, rows=None, part=None, caches=None, splits=4, dependent=0, tiles=1, most=0, parts=None,
        **ways,
    ):  # fmt: skip
        """`rows`: of the batch, those alone; `part`: of the tokens of each row, that one alone."""
        qkv, position = self.qkv, self.position
        caches = [cache.clone() for cache in self.caches] if caches is None else caches
        if rows is not None:
            qkv, position, caches = qkv[rows], position[rows], [cache[rows] for cache in caches]
        if part is not None:
            qkv, position = qkv[part :: self.tokens].contiguous(), position[:, part].contiguous()
        cache = LayerCache(*caches)._replace(pages=self.pages, shared=self.shared)
        scratch = self.scratch(len(qkv), splits, tiles, most, parts, **ways)
        out = torch.empty(len(qkv), self.kv * self.group * self.width, device=self.device, dtype=self.dtype)
        op = "decode_attention" if self.kind is None else "quantized_decode_attention"
        result = load(source, op)(qkv, position, cache, self.heads._replace(window=window), scratch, out, dependent)
        assert not scratch.finished.any(), "a launch must leave its counters at zero"
        return result


def shuffled(rows: int, device) -> Tensor:
    """Three pages a row, anywhere among them; page 0 is nobody's."""
    order = torch.randperm(rows * 3, generator=torch.Generator().manual_seed(7)) + 1
    return order.view(rows, 3).to(device, torch.int32)


def into_pages(cache: Tensor, pages: Tensor | None) -> Tensor:
    """(B, K, L, ...) into pages (P, K, PAGE, ...) that hold the same, or as it is."""
    if pages is None:
        return cache
    whole = cache.new_zeros((len(cache), cache.shape[1], pages.shape[1] * PAGE, *cache.shape[3:]))
    whole[:, :, :L] = cache
    found = cache.new_zeros((pages.numel() + 1, cache.shape[1], PAGE, *cache.shape[3:]))
    found[pages.long()] = whole.unflatten(2, (-1, PAGE)).transpose(1, 2)
    return found


def out_of_pages(cache: Tensor, pages: Tensor | None) -> Tensor:
    return cache if pages is None else cache[pages.long()].transpose(1, 2).flatten(2, 3)[:, :, :L]


def stored(case: Case, result: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """(out, then keys and values as numbers, row by row)."""
    out, k, v, *scales = result
    if case.kind is None:
        return out, *(out_of_pages(t, case.pages) for t in (k, v))
    codes = [out_of_pages(t.view(torch.uint8), case.pages).view(case.kind) for t in (k, v)]
    return out, *(decode(c, out_of_pages(s, case.pages)) for c, s in zip(codes, scales))


def parity(case: Case, limit: float, cache_limit: float | None = None, **call) -> None:
    """Compare both mirrors; NaN is at the same places."""
    for name, got, want in zip(NAMES, *(stored(case, case(source, **call)) for source in SOURCES)):
        assert torch.equal(got.isnan(), want.isnan()), name
        allowed = limit if name == "out" or cache_limit is None else cache_limit
        same(name, got.nan_to_num(), want.nan_to_num(), allowed)


def one_by_one(case: Case, source: str, window: int = 0) -> None:
    """Assert that several tokens of a row in one call are the bits of those tokens one after the other."""
    together = stored(case, case(source, window, splits=2))
    caches, alone = [cache.clone() for cache in case.caches], torch.empty_like(together[0])
    for t in range(case.tokens):
        one = case(source, window, None, t, caches, splits=2)
        alone[t :: case.tokens] = one[0]
    for name, got, want in zip(NAMES, together, (alone, *stored(case, one)[1:])):
        assert torch.equal(got.nan_to_num(9e9), want.nan_to_num(9e9)), (source, name)
