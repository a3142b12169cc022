"""The inputs of a draft head's layer (kernels/draft_inputs.py): a program for each entry of a verified step, or each row."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..draft_inputs import Reads
from ..plans import power_of_two
from ._launch import in_place, options
from .sampling import _embedding, _finite, _largest, _start

PARTS = 1024  # partial maxima at a time


@triton.jit
def _keep_stream_kernel(x_ptr, to_ptr, position_ptr, first_ptr, index_ptr, apart, H, rows, T: tl.constexpr,
                        BLOCK: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _start(DEPENDENT)
    n, col = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    source = n if index_ptr is None else tl.load(index_ptr + n)
    tl.store(to_ptr + n * apart + col, tl.load(x_ptr + source * H + col, mask=col < H, other=0.0), mask=col < H)
    if position_ptr is not None:  # noqa: SIM102  this is a constant of the compiler, the program's number is not
        if n == 0:
            b = tl.arange(0, ROWS)
            tl.store(first_ptr + b, tl.load(position_ptr + b * T, mask=b < rows, other=0), mask=b < rows)


@triton.jit
def _normed(x, norm_ptr, eps, col, H, GAIN: tl.constexpr):
    gain = tl.load(norm_ptr + col, mask=col < H, other=0.0).to(tl.float32) + GAIN
    return x / tl.sqrt(tl.sum(x * x, 0) / H + eps) * gain


@triton.jit
def _write_both(both_ptr, x_ptr, token, table_ptr, words, embedded_ptr, embedded_eps, feature_ptr, feature_eps, H,
                BLOCK: tl.constexpr, EMBEDDED: tl.constexpr, FEATURE: tl.constexpr):  # fmt: skip
    """Write [normed embedding of the token, normed x] to both_ptr; NaN for a token that has no embedding."""
    col = tl.arange(0, BLOCK)
    known = (token >= 0) & (token < words)
    row = tl.load(table_ptr + tl.where(known, token, 0).to(tl.int64) * H + col, mask=col < H, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + col, mask=col < H, other=0.0)
    row = _normed(tl.where(known, row, float("nan")), embedded_ptr, embedded_eps, col, H, EMBEDDED)
    tl.store(both_ptr + col, row, mask=col < H)
    tl.store(both_ptr + H + col, _normed(x, feature_ptr, feature_eps, col, H, FEATURE), mask=col < H)


@triton.jit
def _begin_draft_kernel(token_ptr, position_ptr, alive_ptr, text_ptr, first_ptr, x_ptr, table_ptr, embedded_ptr, feature_ptr,
                        chunk_ptr, chunk_position_ptr, living_ptr, place_ptr, last_ptr, both_ptr, embed_ptr, to_ptr,
                        embedded_eps, feature_eps, length, words, H, to_words, width, T: tl.constexpr, BLOCK: tl.constexpr,
                        EMBEDDED: tl.constexpr, FEATURE: tl.constexpr, TILE: tl.constexpr,
                        DEPENDENT: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    b, t = at // T, (at % T).to(tl.int32)
    _start(DEPENDENT)
    position, first = tl.load(position_ptr + b), tl.load(first_ptr + b)
    place = tl.minimum(tl.maximum(first + t, 0), length - 1)
    tl.store(place_ptr + at, place)
    tl.store(chunk_position_ptr + at, tl.minimum(tl.maximum(position + t, 0), length - 1))
    tl.store(living_ptr + at, tl.load(alive_ptr + b))
    following = tl.load(text_ptr + b * length + tl.minimum(place + 1, length - 1))
    _write_both(both_ptr + at * 2 * H, x_ptr + at * H, following, table_ptr, words, embedded_ptr, embedded_eps, feature_ptr,
                feature_eps, H, BLOCK, EMBEDDED, FEATURE)  # fmt: skip
    if t == 0:
        tl.store(last_ptr + b, b * T + tl.minimum(tl.maximum(position - first - 1, 0), T - 1))
        token = tl.load(token_ptr + b)
        tl.store(chunk_ptr + at, token)
        if embed_ptr is not None:
            _embedding(embed_ptr, to_ptr + at * width, token, to_words, width, TILE)


@triton.jit
def _extend_draft_kernel(best_ptr, arg_ptr, targets_ptr, token_ptr, x_ptr, table_ptr, embedded_ptr, feature_ptr, chunk_ptr,
                         both_ptr, embed_ptr, to_ptr, embedded_eps, feature_eps, at, P, targets, words, H, to_words, width,
                         T: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, EMBEDDED: tl.constexpr,
                         FEATURE: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    _start(DEPENDENT)
    token = tl.load(token_ptr + b)
    if best_ptr is not None:
        top, chosen = _largest(best_ptr + b * P, arg_ptr + b * P, P, PARTS)
        if _finite(top):
            token = tl.load(targets_ptr + tl.minimum(chosen, targets - 1)).to(tl.int32)
        tl.store(token_ptr + b, token)
    tl.store(chunk_ptr + b * T + at, token)
    if both_ptr is not None:
        _write_both(both_ptr + b * 2 * H, x_ptr + b * H, token, table_ptr, words, embedded_ptr, embedded_eps, feature_ptr,
                    feature_eps, H, BLOCK, EMBEDDED, FEATURE)  # fmt: skip
    if embed_ptr is not None:
        _embedding(embed_ptr, to_ptr + (b * T + at) * width, token, to_words, width, TILE)


def _plan(reads: Reads, embed: Tensor | None, dependent: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return (words, H, words and width of the model's embedding), and the constants and options of a launch."""
    block = power_of_two(reads.table.shape[1])
    shape = (*reads.table.shape, *((0, 0) if embed is None else embed.shape))
    constants = {"BLOCK": block, "TILE": block, "EMBEDDED": reads.embedded.offset, "FEATURE": reads.feature.offset}
    return shape, constants | options(max(1, min(8, block // 256)), dependent)


@in_place
def keep_stream(x, to, dependent=0, index=None, position=None, first=None):
    block, (rows, tokens) = power_of_two(x.shape[1]), (1, 1) if position is None else position.shape
    _keep_stream_kernel[(len(to),)](
        x, to, position, first, index, to.stride(0), x.shape[1], rows, T=tokens, BLOCK=block, ROWS=power_of_two(rows),
        **options(max(1, min(8, block // 256)), dependent),
    )  # fmt: skip
    return (to,) if first is None else (to, first)


@in_place
def begin_draft(rows, text, first, x, reads, chunk, place, last, both, embed=None, to=None, dependent=0):
    (table, embedded, feature), (shape, constants) = reads, _plan(reads, embed, dependent)
    _begin_draft_kernel[(chunk.token.numel(),)](
        rows.token, rows.position, rows.alive, text, first, x, table, embedded.weight, feature.weight, *chunk, place, last,
        both, embed, to, embedded.eps, feature.eps, text.shape[1], *shape, T=chunk.token.shape[1], **constants,
    )  # fmt: skip
    changed = (*chunk, place, last, both, *(() if to is None else (to,)))
    return changed


@in_place
def extend_draft(best, arg, targets, token, x, reads, chunk, at, both, embed=None, to=None, dependent=0):
    (table, embedded, feature), (shape, constants) = reads, _plan(reads, embed, dependent)
    parts = 0 if best is None else best.shape[1]
    _extend_draft_kernel[(len(x),)](
        best, arg, targets, token, x, table, embedded.weight, feature.weight, chunk.token, both, embed, to, embedded.eps,
        feature.eps, at, parts, len(targets), *shape, T=chunk.token.shape[1], PARTS=max(16, min(PARTS, power_of_two(parts))),
        **constants,
    )  # fmt: skip
    changed = (token, chunk.token, *(t for t in (both, to) if t is not None))
    return changed
