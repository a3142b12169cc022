"""Drafts from a row's own text, a program a token; and which of them the model's choices bear out, a program a row."""

import triton
import triton.language as tl

from ..ngram_speculation import NGRAM
from ..plans import power_of_two
from ..sampling import changed
from ._launch import in_place, options
from .sampling import ROWS, _embedding, _shape, _start

TILE = 1024  # places of a text, or elements of an embedding, at a time

GRAM = tl.constexpr(NGRAM)


@triton.jit
def _found(text_ptr, last, length, BLOCK: tl.constexpr):
    """Return the end of the earlier occurrence of the row's last tokens: longest, then latest; -1 for a single token."""
    score = tl.full([BLOCK], -1, tl.int32)
    for start in range(0, last, BLOCK):
        i = start + tl.arange(0, BLOCK)
        same = i < last
        matched = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(GRAM):
            in_range = same & (i >= back)
            token = tl.load(text_ptr + tl.maximum(last - back, 0))
            same = in_range & (tl.load(text_ptr + i - back, mask=in_range, other=-1) == token)
            matched += same.to(tl.int32)
        score = tl.maximum(score, tl.where(i < last, matched * length + i, -1))
    return tl.where(last > 0, tl.max(score, 0) % length, -1)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _propose_kernel(position_ptr, alive_ptr, text_ptr, chunk_ptr, place_ptr, living_ptr, embed_ptr, x_ptr, length, words, H,
                    T: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    b, t = at // T, (at % T).to(tl.int32)
    text_ptr += b * length
    _start(DEPENDENT)
    last = tl.minimum(tl.maximum(tl.load(position_ptr + b), 0), length - 1)
    period = last - _found(text_ptr, last, length, BLOCK)
    token = tl.load(text_ptr + tl.where(t == 0, last, last - period + 1 + tl.maximum(t - 1, 0) % period))
    tl.store(chunk_ptr + at, token)
    tl.store(place_ptr + at, tl.minimum(last + t, length - 1))
    tl.store(living_ptr + at, tl.load(alive_ptr + b))
    if embed_ptr is not None:
        _embedding(embed_ptr, x_ptr + at * H, token, words, H, BLOCK)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _accept_kernel(chosen_ptr, going_ptr, chunk_ptr, token_ptr, position_ptr, alive_ptr, bad_ptr, text_ptr, emitted_ptr,
                   seen_ptr, chosen_logprob_ptr, logprob_ptr, length, V, stride, logprob_stride, T: tl.constexpr,
                   WIDE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, WIDE)
    _start(DEPENDENT)
    live, position = tl.load(alive_ptr + b) != 0, tl.load(position_ptr + b)
    chosen = tl.load(chosen_ptr + b * T + t, mask=t < T, other=-1)
    going = tl.load(going_ptr + b * T + t, mask=t < T, other=0)
    chunk = tl.load(chunk_ptr + b * T + t, mask=t < T, other=0)
    following = tl.load(chunk_ptr + b * T + t + 1, mask=t + 1 < T, other=-1)
    foreseen = (t + 1 < T) & (going != 0) & (chosen == following)
    end = tl.min(tl.where(foreseen, WIDE, t), 0)  # the last that the row gets
    taken = (t <= tl.where(live, end, -1)) & (chosen >= 0)
    tl.store(emitted_ptr + t * stride + b, tl.where(taken, chosen, -1), mask=t < T)
    place = position + 1 + t
    tl.store(text_ptr + b * length + place, chosen, mask=taken & (place >= 0) & (place < length))
    if seen_ptr is not None:
        tl.store(seen_ptr + b * V + chosen, 1, mask=taken & (chosen < V))
    if logprob_ptr is not None:
        logprob = tl.load(chosen_logprob_ptr + b * T + t, mask=t < T, other=0.0)
        tl.store(logprob_ptr + t * logprob_stride + b, tl.where(taken, logprob, float("nan")), mask=t < T)
    if live:
        final, drafted = tl.sum(tl.where(t == end, chosen, 0), 0), tl.sum(tl.where(t == end, chunk, 0), 0)
        goes_on = tl.sum(tl.where(t == end, going, 0), 0)
        tl.store(bad_ptr + b, position + end + 1, mask=(final < 0) & (tl.load(bad_ptr + b) == 0))
        tl.store(token_ptr + b, tl.where(final >= 0, final, drafted))
        tl.store(position_ptr + b, position + end + goes_on)
        tl.store(alive_ptr + b, (goes_on != 0).to(tl.int32))


@in_place
def propose(rows, text, chunk, embed=None, x=None, dependent=False):
    _propose_kernel[(chunk.token.numel(),)](
        rows.position, rows.alive, text, *chunk, embed, x, text.shape[1], *_shape(embed), chunk.token.shape[1],
        min(TILE, max(16, power_of_two(text.shape[1]))), **options(4, dependent),
    )  # fmt: skip
    return chunk if x is None else (*chunk, x)


@in_place
def accept(chunk, chosen, rows, text, emitted, seen=None, dependent=False):
    batch, tokens = chunk.token.shape
    to, logprob = emitted
    _accept_kernel[(batch,)](
        chosen.token, chunk.alive, chunk.token, rows.token, rows.position, rows.alive, rows.bad, text, to, seen,
        chosen.logprob, logprob, text.shape[1], 0 if seen is None else seen.shape[1], to.stride(0),
        0 if logprob is None else logprob.stride(0), tokens, power_of_two(tokens), **options(1, dependent),
    )  # fmt: skip
    written = changed(rows, to, text, seen, logprob)
    return written
