"""The choice of the next token and the step of a row: one program a row, in one launch.

`sample` reads the logits once for the largest, and once more for the race of kernels/sampling.py. Under top-k, top-p or min-p
it reads them instead to set aside what may be kept; thresholds are searched and the race is run among that (_top_k_top_p.py).
What is off is skipped at run time, by the settings on the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans import cdiv, power_of_two
from ..sampling import Into, Rows, Settings, changed
from ._launch import bump_versions, options
from ._top_k_top_p import NOBODY, _keep, _lead, _leader, _logits, _race, _race_aside

TILE = 4096  # elements of a row at a time, 4 a thread: a search keeps five numbers for each, and 1024 threads have 64 registers
# One number a row is read or written here. Alignment gains nothing, and an `emitted` that is now and then aligned, such as the
# next place of a ring of tokens, would have the kernel compiled again in the middle of a capture.
ROWS = [f"{name}_ptr" for name in (*Rows._fields, *Settings._fields[:-1], "emitted", "logprob")]


@triton.jit
def _start(DEPENDENT: tl.constexpr):
    """Let the next kernel in, and wait for what the one before writes."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _finite(x):
    return (x > float("-inf")) & (x < float("inf"))  # false for NaN


@triton.jit
def _logprob(logits_ptr, token, V, BLOCK: tl.constexpr):
    """log softmax(logits)[token]."""
    top = tl.full([BLOCK], -3e38, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        z = tl.load(logits_ptr + i, mask=i < V, other=float("-inf"))
        higher = tl.maximum(top, z)
        mass = mass * tl.exp(top - higher) + tl.exp(z - higher)
        top = higher
    highest = tl.max(top, 0)
    return tl.load(logits_ptr + token) - highest - tl.log(tl.sum(mass * tl.exp(top - highest), 0))


@triton.jit
def _advance(b, token, good, token_ptr, position_ptr, alive_ptr, limit_ptr, bad_ptr, stops_ptr, emitted_ptr, seen_ptr, V,
             stops, STOPS: tl.constexpr):  # fmt: skip
    """Advance an active row, as the reference's _advance does."""
    position = tl.load(position_ptr + b)
    goes_on = 0
    if good:
        s = tl.arange(0, STOPS)
        stop = tl.max((tl.load(stops_ptr + s, mask=s < stops, other=-1) == token).to(tl.int32), 0)
        goes_on = ((stop == 0) & (position + 2 < tl.load(limit_ptr + b))).to(tl.int32)
        tl.store(token_ptr + b, token)
        tl.store(position_ptr + b, position + goes_on)
        if seen_ptr is not None:
            tl.store(seen_ptr + token, 1, mask=(token >= 0) & (token < V))
    else:
        if tl.load(bad_ptr + b) == 0:
            tl.store(bad_ptr + b, position + 1)
    tl.store(alive_ptr + b, goes_on)
    tl.store(emitted_ptr + b, tl.where(good, token, -1))


@triton.jit
def _embedding(embed_ptr, x_ptr, token, words, H, BLOCK: tl.constexpr):
    """The token's row of the embedding; NaN for a token that has none."""
    known = (token >= 0) & (token < words)
    embed_ptr += tl.where(known, token, 0).to(tl.int64) * H
    for start in range(0, H, BLOCK):
        i = start + tl.arange(0, BLOCK)
        row = tl.load(embed_ptr + i, mask=i < H, other=0.0).to(tl.float32)
        tl.store(x_ptr + i, tl.where(known, row, float("nan")), mask=i < H)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _pick_kernel(best_ptr, arg_ptr, token_ptr, position_ptr, alive_ptr, limit_ptr, bad_ptr, stops_ptr, emitted_ptr, seen_ptr,
                 embed_ptr, x_ptr, P, V, words, H, stops, STOPS: tl.constexpr, BLOCK: tl.constexpr,
                 DEPENDENT: tl.constexpr):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    if seen_ptr is not None:
        seen_ptr += b * V
    _start(DEPENDENT)
    token = tl.load(token_ptr + b)
    if tl.load(alive_ptr + b) != 0:
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        arg = tl.full([BLOCK], NOBODY, tl.int32)
        for start in range(0, P, BLOCK):
            i = start + tl.arange(0, BLOCK)
            value = tl.load(best_ptr + b * P + i, mask=i < P, other=float("-inf"))
            best, arg = _lead(value, tl.load(arg_ptr + b * P + i, mask=i < P, other=NOBODY), best, arg)
        top, first = _leader(best, arg)
        good = _finite(top)
        _advance(b, first, good, token_ptr, position_ptr, alive_ptr, limit_ptr, bad_ptr, stops_ptr, emitted_ptr, seen_ptr,
                 V, stops, STOPS)  # fmt: skip
        token = tl.where(good, first, token)
    else:
        tl.store(emitted_ptr + b, -1)
    if embed_ptr is not None:
        _embedding(embed_ptr, x_ptr + b * H, token, words, H, BLOCK)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _sample_kernel(logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, penalty_ptr, seed_ptr, row_ptr, token_ptr,
                   position_ptr, alive_ptr, limit_ptr, bad_ptr, stops_ptr, emitted_ptr, seen_ptr, logprob_ptr, embed_ptr, x_ptr,
                   values_ptr, quads_ptr, stride, V, words, H, stops, STOPS: tl.constexpr, BLOCK: tl.constexpr,
                   DEPENDENT: tl.constexpr):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    logits_ptr += b * stride
    values_ptr += b * tl.cdiv(V, BLOCK) * BLOCK
    quads_ptr += b * tl.cdiv(V, BLOCK) * (BLOCK // 4)
    if seen_ptr is not None:
        seen_ptr += b * V
    _start(DEPENDENT)
    token = tl.load(token_ptr + b)
    logprob = tl.full([], float("nan"), tl.float32)
    if tl.load(alive_ptr + b) != 0:
        penalty = tl.load(penalty_ptr + b)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        arg = tl.full([BLOCK], NOBODY, tl.int32)
        for start in range(0, V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            best, arg = _lead(_logits(logits_ptr, seen_ptr, penalty, i, V), i, best, arg)
        top, drawn = _leader(best, arg)
        good = _finite(top)
        if good:
            temperature = tl.load(temperature_ptr + b)
            if temperature > 0.0:
                inverse = tl.div_rn(1.0, tl.maximum(temperature, 1e-30))
                seed, position, row = tl.load(seed_ptr + b), tl.load(position_ptr + b), tl.load(row_ptr + b)
                top_k, top_p, min_p = tl.load(top_k_ptr + b), tl.load(top_p_ptr + b), tl.load(min_p_ptr + b)
                if ((top_k > 0) & (top_k < V)) | (top_p < 1.0) | (min_p > 0.0):
                    count, depth, floor = _keep(values_ptr, quads_ptr, logits_ptr, seen_ptr, penalty, top, inverse, V, best,
                                                top_k, top_p, min_p, BLOCK)  # fmt: skip
                    drawn = _race_aside(values_ptr, quads_ptr, count, depth, floor, seed, position, row, BLOCK)
                else:
                    drawn = _race(logits_ptr, seen_ptr, penalty, top, inverse, V, seed, position, row, BLOCK)
            if logprob_ptr is not None:
                logprob = _logprob(logits_ptr, drawn, V, BLOCK)
        _advance(b, drawn, good, token_ptr, position_ptr, alive_ptr, limit_ptr, bad_ptr, stops_ptr, emitted_ptr, seen_ptr,
                 V, stops, STOPS)  # fmt: skip
        token = tl.where(good, drawn, token)
    else:
        tl.store(emitted_ptr + b, -1)
    if logprob_ptr is not None:
        tl.store(logprob_ptr + b, logprob)
    if embed_ptr is not None:
        _embedding(embed_ptr, x_ptr + b * H, token, words, H, BLOCK)


def _plan(columns: int, x: Tensor | None, stops: Tensor, dependent: bool) -> tuple[tuple, dict]:
    """(stops, STOPS, BLOCK) of both kernels, and the options of their launch. A tile is 4 elements a thread."""
    block = max(16, min(TILE, power_of_two(max(columns, 0 if x is None else x.shape[1]))))
    return (len(stops), power_of_two(max(1, len(stops))), block), options(max(1, block // 128), dependent)


@torch.no_grad()
def pick(
    best: Tensor, arg: Tensor, rows: Rows, into: Into, seen: Tensor | None = None, dependent: bool = False
) -> tuple[Tensor, ...]:
    shape, launch = _plan(best.shape[1], into.x, rows.stops, dependent)
    _pick_kernel[(len(best),)](
        best, arg, *rows, into.emitted, seen, into.embed, into.x, best.shape[1], 0 if seen is None else seen.shape[1],
        *_shape(into.embed), *shape, **launch,
    )  # fmt: skip
    written = changed(rows, into.emitted, seen, into.x)
    bump_versions(*written)
    return written


@torch.no_grad()
def sample(
    logits: Tensor, rows: Rows, settings: Settings, into: Into, logprob: Tensor | None = None, dependent: bool = False
) -> tuple[Tensor, ...]:
    *scalars, seen = settings
    emitted, embed, x = into
    shape, launch = _plan(logits.shape[1], x, rows.stops, dependent)
    room = len(logits) * cdiv(logits.shape[1], shape[2]) * shape[2]  # for what is set aside; at worst everything
    values = torch.empty(room, device=logits.device, dtype=torch.float32)
    quads = torch.empty(room // 4, device=logits.device, dtype=torch.int32)
    _sample_kernel[(len(logits),)](
        logits, *scalars, *rows, emitted, seen, logprob, embed, x, values, quads, logits.stride(0), logits.shape[1],
        *_shape(embed), *shape, **launch,
    )  # fmt: skip
    written = changed(rows, emitted, seen, logprob, x)
    bump_versions(*written)
    return written


def _shape(embed: Tensor | None) -> tuple[int, int]:
    return (0, 0) if embed is None else (embed.shape[0], embed.shape[1])
