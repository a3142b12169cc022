"""Batch-invariant products and attention: a row's result has the same bits, however many rows are computed with it.

Any two paths through a model round differently, so a sampler's log-probabilities are near the trainer's and not equal to them.
Two paths that consist of these ops and of row-wise ones are equal. Every sum has one order: over K in steps of one tile, with
one accumulator; over keys in blocks that begin at the sequence's first, by one program. Neither is split among programs.

The definitions compute row by row, by equal calls.

Legend: N rows, B sequences, T tokens of each, H query heads, G key and value heads, D width of a head.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import implementation, require
from .registry import definition, draw, frozen, ints

BLOCK = 64  # keys that are read together; a page of a cache holds as many
MEMBERS = 16  # rows that read blocks together: the queries of half a tile, where a key has two of a row


class SharedKeys(NamedTuple):
    """Rows of a cache that begin with equal keys and values, as the samples of a prompt do."""

    rows: Tensor  # (groups, MEMBERS) int32: the rows of each group, then -1
    counts: Tensor  # (B,) int32: of how many first tokens, for each row; 0 without a group


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weightᵀ + bias for x (N, inputs), in x's dtype, summed in fp32."""
    why = "the kernel reads row after row"
    require("invariant_linear", "weight", weight, None, ("outputs", "inputs"), x.device, why)
    if len(x):
        require("invariant_linear", "x", x, weight.dtype, ("N", weight.shape[1]), x.device, why)
    if bias is not None:
        require("invariant_linear", "bias", bias, weight.dtype, weight.shape[:1], x.device, "it has one number for each output")
    return implementation("invariant_linear", x)(x, weight, bias)


@definition(lambda g, rows=70, outputs=72: (frozen(draw(g, rows, 80)), frozen(draw(g, outputs, 80)), frozen(draw(g, outputs))))
def invariant_linear_reference(x, weight, bias=None):
    compute = torch.promote_types(x.dtype, torch.float32)
    w, b = weight.to(compute), None if bias is None else bias.to(compute)
    y = x.new_empty(len(x), len(weight))
    for row, out in zip(x, y):
        out.copy_(F.linear(row.to(compute, copy=True)[None], w, b)[0])
    return y


def invariant_attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention within sequences that follow each other: q (N, H, D), k and v (N, G, D) -> (N, H, D), and the
    log-sum-exp (H, N, fp32) of each token's scaled scores.

    bounds (S + 1), int32: where sequences begin, ascending from 0 to N. A sequence may be empty. Tokens of none keep any value.
    """
    _check("invariant_attention", q, k, v)
    require("invariant_attention", "bounds", bounds, torch.int32, ("S",), q.device, "the kernel reads it")
    if len(bounds) < 2:
        raise ValueError("invariant_attention: bounds: got one number, wanted where a sequence begins and ends, at least.")
    return implementation("invariant_attention", q)(q, k, v, bounds, scale)


@definition(lambda g, width=32: (*_draw(g, 150, 4, 2, width), ints(0, 70, 70, 150), width**-0.5))
def invariant_attention_reference(q, k, v, bounds, scale):
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    edges = bounds.tolist()
    for begin, end in pairwise(edges):
        for at in range(begin, end):
            out[at], lse[:, at] = _attend(q[at], k[begin : at + 1], v[begin : at + 1], scale)
    return out, lse


def invariant_cached_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, position: Tensor, scale: float, shared: SharedKeys | None = None
) -> Tensor:
    """`invariant_attention` of T tokens of each sequence, at positions from `position` (B, int32) on, which the cache holds.

    q (B, T, H, D) -> (B, T, H, D). k and v (blocks, G, L, D): the cache. blocks (B, P, int32): the blocks of each sequence, a
    row of L positions or pages of BLOCK. Positions after a sequence's last token are not read. A
    sequence with a block or a position that the cache does not have gets NaN.

    shared: for T = 1 and pages, the groups whose blocks of common tokens are read once, those of the row that is at the largest
    position, for the rows that are beyond them. The bits are the same.
    """
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"invariant_cached_attention: got q, k and v of {q.dim()}, {k.dim()} and {v.dim()} dimensions, wanted 4."
        )
    op = "invariant_cached_attention"
    _check(op, q, k[:, :, 0], v[:, :, 0])
    require(op, "blocks", blocks, torch.int32, (len(q), "P"), q.device, "the kernel reads it")
    require(op, "position", position, torch.int32, (len(q),), q.device, "the kernel reads it")
    if k.stride() != v.stride() or k.stride(3) != 1 or (blocks.shape[1] > 1 and k.shape[2] != BLOCK):
        raise ValueError(
            f"{op}: k and v: got strides {k.stride()} and {v.stride()} of shape {tuple(k.shape)}, wanted "
            f"equal ones with dense heads, and blocks of {BLOCK} where a sequence has several."
        )
    if shared is None or q.shape[1] > 1 or blocks.shape[1] == 1:
        return implementation(op, q)(q, k, v, blocks, position, scale)
    require(op, "shared.rows", shared.rows, torch.int32, ("groups", MEMBERS), q.device, "the kernel reads it")
    require(op, "shared.counts", shared.counts, torch.int32, (len(q),), q.device, "the kernel reads it")
    return implementation(op, q, None, (32, True))(q, k, v, blocks, position, scale, shared)


def _cached_example(g, width=32, grouped=False):
    q, k, v = (frozen(draw(g, *shape, width)) for shape in ((2, 1 if grouped else 3, 4), (5, 2, BLOCK), (5, 2, BLOCK)))
    if not grouped:
        return q, k, v, ints(3, 1, 4, 2).view(2, 2), ints(70, 20), width**-0.5
    shared = SharedKeys(ints(1, 0, *[-1] * (MEMBERS - 2)).view(1, -1), ints(BLOCK, BLOCK))
    return q, k, v, ints(3, 1, 3, 2).view(2, 2), ints(70, 100), width**-0.5, shared


@definition(_cached_example)
def invariant_cached_attention_reference(q, k, v, blocks, position, scale, shared=None):
    out = torch.empty_like(q)
    for queries, mine, first, results in zip(q, blocks.tolist(), position.tolist(), out):
        last, length = first + len(queries), k.shape[2]
        mine = mine[: -(-max(last, 0) // length)]
        if first < 0 or last > len(mine) * length or not all(0 <= block < len(k) for block in mine):
            results.fill_(float("nan"))
            continue
        keys, values = (torch.cat([t[block] for block in mine], 1).transpose(0, 1) for t in (k, v))
        for number, query in enumerate(queries):
            end = first + number + 1
            results[number] = _attend(query, keys[:end], values[:end], scale)[0]
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention of one token q (H, D) to keys (S, G, D), and its log-sum-exp (H)."""
    group, compute = q.shape[0] // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    keys, values = (t.transpose(0, 1).to(compute).contiguous() for t in (k, v))
    scores = torch.bmm(q.to(compute).view(-1, group, q.shape[1]), keys.transpose(1, 2)) * scale
    y = torch.bmm(scores.softmax(-1), values)
    return y.reshape(q.shape).to(q.dtype), scores.logsumexp(-1).flatten()


def _draw(g, tokens, heads, kv_heads, width):
    return tuple(frozen(draw(g, tokens, count, width)) for count in (heads, kv_heads, kv_heads))


def _check(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check q (..., H, D), k and v (M, G, D)."""
    same = q.dim() >= k.dim() == 3 and k.shape == v.shape and q.dtype == k.dtype == v.dtype and q.shape[-1] == k.shape[2]
    if not same or not q.is_contiguous() or k.stride(2) != 1 or v.stride(2) != 1 or q.shape[-2] % k.shape[1]:
        raise ValueError(
            f"{op}: got q, k and v of {q.dtype} {tuple(q.shape)}, {k.dtype} {tuple(k.shape)} and {v.dtype} {tuple(v.shape)}, "
            f"wanted one dtype and width, a contiguous q, dense heads, and a number of heads that those of k divide."
        )
    if q.shape[-2] // k.shape[1] > BLOCK:
        raise ValueError(f"{op}: got {q.shape[-2] // k.shape[1]} query heads for each of k, wanted at most {BLOCK}.")
