"""Kernels of hyper-connections: two launches before a layer, one after the layer. Arithmetic is in fp32.

Before a layer, every product of a token sums over all of its S · D values: 16,384 in V4-Flash, by 24 weight rows, 1.5 MB. So
several programs split the sums of a token (split-K), and write (splits, N, products) partial sums, including the sum of
squares. Each program of the second launch adds a token's partial sums in order, and computes a slice of u. The first program of
each token computes post, and comb by Sinkhorn iterations in registers, which take longer than a slice of u.

Up to FEW tokens, a program multiplies a token's slice without tensor cores. More tokens are multiplied 16 or 64 at a time on
tensor cores, in three tf32 products, which together have fp32 precision.

Kernels of a decoding step's hyper-connections. A program has the same columns of all streams of a token.

Before its PDL wait, `hc_write` loads the sums and the next weight, and computes comb; after the wait, it loads the streams and
the part's output. Every program computes comb redundantly.

If the part's output comes through a peer exchange, `hc_write` reads and computes everything before the wait: the streams were
written with their sums, and each received value has a stamp that shows its arrival. The preceding launch, which sent this
device's values, ends meanwhile.
"""

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from .....kernels.peer_exchange import Mail
from .....kernels.plans.types import MatrixPlan, TilePlan, cdiv, job_of, power_of_two
from .....kernels.triton._launch import _begin, _wait, in_place, launch, options
from .....kernels.triton.peer_exchange import _mail_arguments, _stamp, _summed, _take, _warps_taking
from ..hyper_connections import FEW, stretch


@triton.jit
def _shares(z, inside):
    """Return the softmax of each row of [N, S, S]; 0 in the padding of smaller matrices."""
    z = tl.where(inside, z, -1e30)
    e = tl.where(inside, tl.exp(z - tl.max(z, 2)[:, :, None]), 0.0)
    return e / tl.maximum(tl.sum(e, 2), 1e-30)[:, :, None]


@triton.jit
def _balanced(p, inside, eps, ROUNDS: tl.constexpr):
    """Return p + eps after ROUNDS iterations."""
    m = tl.where(inside, p + eps, 0.0)
    m = tl.where(inside, m / (tl.sum(m, 1)[:, None] + eps), 0.0)
    for _ in range(ROUNDS - 1):
        m = tl.where(inside, m / (tl.sum(m, 2)[:, :, None] + eps), 0.0)
        m = tl.where(inside, m / (tl.sum(m, 1)[:, None] + eps), 0.0)
    return m


MOST = 128  # splits of a sum: a token's 128 partial sums are 32 KB, which fit in L2
PROGRAMS = 2  # per multiprocessor, if there are fewer tokens


@triton.jit(do_not_specialize=["tokens"])
def _hc_project_kernel(x_ptr, w_ptr, part_ptr, tokens, chunk, K: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
                       ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Compute partial products of one K split of some tokens, followed by their sum of squares."""
    _begin(DEPENDENT)
    split, first = tl.program_id(0), tl.program_id(1) * ROWS
    p, row, col = tl.arange(0, PP), first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    begin, live = split * chunk, row < tokens
    stop = min(begin + chunk, K)
    to = part_ptr + (split.to(tl.int64) * tokens + row[:, None]) * PP + p[None]
    x_ptr += row[:, None].to(tl.int64) * K
    if ROWS == 1:
        total, square = tl.zeros([PP, BLOCK], tl.float32), tl.zeros([1, BLOCK], tl.float32)
        at = begin + col
        w = tl.load(w_ptr + p[:, None] * K + at[None], mask=(p < P)[:, None] & (at < stop)[None], other=0.0)
        _wait(DEPENDENT)
        for start in range(begin, stop, BLOCK):
            at = start + col
            x = tl.load(x_ptr + at[None], mask=live[:, None] & (at < K)[None], other=0.0).to(tl.float32)
            total += w.to(tl.float32) * x
            square += x * x
            at += BLOCK
            w = tl.load(w_ptr + p[:, None] * K + at[None], mask=(p < P)[:, None] & (at < stop)[None], other=0.0)
        sums, squares = tl.sum(total, 1)[None], tl.sum(square, 1)
    else:
        _wait(DEPENDENT)
        sums, squares = tl.zeros([ROWS, PP], tl.float32), tl.zeros([ROWS], tl.float32)
        for start in range(begin, stop, BLOCK):
            at = start + col
            x = tl.load(x_ptr + at[None], mask=live[:, None] & (at < K)[None], other=0.0).to(tl.float32)
            w = tl.load(w_ptr + p[None] * K + at[:, None], mask=(p < P)[None] & (at < K)[:, None], other=0.0)
            sums = tl.dot(x, w.to(tl.float32), sums, input_precision="tf32x3")
            squares += tl.sum(x * x, 1)
    tl.store(to, tl.where((p == P)[None], squares[:, None], sums), mask=live[:, None] & (p <= P)[None])


@triton.jit
def _gate(part_ptr, base_ptr, scale, factor, valid, step, START: tl.constexpr, S: tl.constexpr, SPLITS: tl.constexpr):
    """Return the sigmoids (1, S) of the S products from START on."""
    split, s = tl.arange(0, SPLITS)[:, None], tl.arange(0, S)[None]
    z = tl.sum(tl.load(part_ptr + split * step + START + s, mask=valid, other=0.0), 0)[None] * factor
    z = z * scale + tl.load(base_ptr + START + s).to(tl.float32)
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def _factor(part_ptr, splits, step, norm_eps, REACH: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr):
    """Return a token's RMSNorm factor, from the squares of its REACH values, and a mask of the valid splits."""
    split = tl.arange(0, SPLITS)
    square = tl.sum(tl.load(part_ptr + split * step + P, mask=split < splits, other=0.0), 0)
    return 1.0 / tl.sqrt(square / REACH + norm_eps), (split < splits)[:, None]


@triton.jit
def _spread(part_ptr, scale_ptr, base_ptr, factor, valid, step, eps, S: tl.constexpr, SPLITS: tl.constexpr,
            ROUNDS: tl.constexpr):  # fmt: skip
    """Compute post (1, S) and comb (1, S, S) from a token's partial sums."""
    post = 2.0 * _gate(part_ptr, base_ptr, tl.load(scale_ptr + 1).to(tl.float32), factor, valid, step, S, S, SPLITS)
    place = tl.arange(0, S)[:, None] * S + tl.arange(0, S)[None]
    logits = part_ptr + tl.arange(0, SPLITS)[:, None, None] * step + 2 * S + place[None]
    z = tl.sum(tl.load(logits, mask=valid[:, :, None], other=0.0), 0) * factor * tl.load(scale_ptr + 2).to(tl.float32)
    z = (z + tl.load(base_ptr + 2 * S + place).to(tl.float32))[None]
    whole = place[None] >= 0
    return post, _balanced(_shares(z, whole), whole, eps, ROUNDS)


@triton.jit(do_not_specialize=["tokens", "splits"])
def _hc_finish_kernel(x_ptr, part_ptr, scale_ptr, base_ptr, u_ptr, post_ptr, comb_ptr, tokens, splits, eps, norm_eps,
                      D: tl.constexpr, S: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, BLOCK: tl.constexpr,
                      SPLITS: tl.constexpr, ROUNDS: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Compute u, post and comb from partial sums. ROUNDS 0: only u."""
    _begin(DEPENDENT)
    _wait(DEPENDENT)
    n = tl.program_id(0).to(tl.int64)
    step = tokens.to(tl.int64) * PP
    part_ptr += n * PP
    factor, valid = _factor(part_ptr, splits, step, norm_eps, S * D, P, SPLITS)
    stretch = tl.program_id(1) - (1 if ROUNDS > 0 else 0)
    if stretch >= 0:
        pre = _gate(part_ptr, base_ptr, tl.load(scale_ptr).to(tl.float32), factor, valid, step, 0, S, SPLITS) + eps
        s, col = tl.arange(0, S)[:, None], stretch * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + (n * S + s) * D + col[None], mask=(col < D)[None], other=0.0).to(tl.float32)
        u = tl.sum(tl.trans(pre) * x, 0)
        tl.store(u_ptr + n * D + col, u.to(u_ptr.dtype.element_ty), mask=col < D)
    elif ROUNDS > 0:
        post, comb = _spread(part_ptr, scale_ptr, base_ptr, factor, valid, step, eps, S, SPLITS, ROUNDS)
        tl.store(post_ptr + n * S + tl.arange(0, S)[None], post)
        place = tl.arange(0, S)[:, None] * S + tl.arange(0, S)[None]
        tl.store(comb_ptr + n * S * S + place[None], comb)


@triton.jit
def _hc_post_kernel(x_ptr, y_ptr, post_ptr, comb_ptr, out_ptr, D: tl.constexpr, S: tl.constexpr,
                            BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    _wait(DEPENDENT)
    n = tl.program_id(0).to(tl.int64)
    s, t = tl.arange(0, S)[:, None], tl.arange(0, S)[None]
    post = tl.load(post_ptr + n * S + t).to(tl.float32)[:, :, None]
    comb = tl.load(comb_ptr + n * S * S + s * S + t).to(tl.float32)[:, :, None]
    col = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None]
    mask = col < D
    x = tl.load(x_ptr + (n * S + s) * D + col, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + n * D + col, mask=mask, other=0.0).to(tl.float32)
    out = tl.sum(comb * x[:, None], 0) + tl.sum(post * y[:, None], 0)
    tl.store(out_ptr + (n * S + s) * D + col, out.to(out_ptr.dtype.element_ty), mask=mask)


def _pre(
    x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float, rounds: int
) -> tuple[Tensor, ...]:
    """Compute (u, post, comb), or (u,) if rounds is 0."""
    x, weight, scale, base = (t.contiguous() for t in (x, weight, scale, base))
    *leading, streams, width = x.shape
    tokens, products = prod(leading), weight.shape[0]
    padded, reach = power_of_two(products + 1), streams * width
    u = torch.empty(*leading, width, device=x.device, dtype=x.dtype)
    sizes = ((streams,), (streams, streams)) if rounds else ()
    small = [torch.empty(*leading, *size, device=x.device, dtype=torch.float32) for size in sizes]

    def project(plan: MatrixPlan) -> Tensor:
        tiles, blocks = cdiv(tokens, plan.rows), cdiv(reach, plan.columns)
        # Up to FEW tokens, the number of splits is that of one token: a token's bits are then the same in any such batch.
        most = min(MOST, blocks, max(1, PROGRAMS * job.chip.sms // (1 if tokens <= FEW else tiles)))
        chunk = cdiv(blocks, 1 << (most.bit_length() - 1)) * plan.columns
        splits = cdiv(reach, chunk)
        parts = torch.empty(splits, tokens, padded, device=x.device, dtype=torch.float32)
        _hc_project_kernel[(splits, tiles)](
            x, weight, parts, tokens, chunk, reach, products, padded, plan.rows, plan.columns, **options(plan.warps)
        )
        return parts

    job = job_of("hc_pre", "few" if tokens <= FEW else "many", (max(FEW, power_of_two(tokens)), reach), x)
    parts = launch(job, project)

    def finish(plan: TilePlan) -> None:
        _hc_finish_kernel[(tokens, cdiv(width, plan.elements // streams) + (rounds > 0))](
            x, parts, scale, base, u, small[0] if small else u, small[1] if small else u, tokens, len(parts), eps, norm_eps,
            width, streams, products, padded, plan.elements // streams, power_of_two(len(parts)), rounds, **options(plan.warps),
        )  # fmt: skip

    launch(job_of("hc_mix", "pre", (width,), x), finish)
    return u, *small


@torch.no_grad()
def hc_pre(x, weight, scale, base, eps=1e-6, norm_eps=1e-6, iterations=20):
    u, post, comb = _pre(x, weight, scale, base, eps, norm_eps, iterations)
    return u, post, comb


@torch.no_grad()
def hc_post(x, y, post, comb):
    given = [t.contiguous() for t in (x, y, post, comb)]
    out = torch.empty_like(given[0])
    *leading, streams, width = x.shape

    def run(plan: TilePlan) -> None:
        block = plan.elements // streams
        _hc_post_kernel[(prod(leading), cdiv(width, block))](*given, out, width, streams, block, **options(plan.warps))

    launch(job_of("hc_mix", "post", (width,), x), run)
    return out


@torch.no_grad()
def hc_head(x, weight, scale, base, eps=1e-6, norm_eps=1e-6):
    return _pre(x, weight, scale, base, eps, norm_eps, 0)[0]


WARPS = 4


@triton.jit(do_not_specialize=["tokens", "number", "room"])
def _hc_write_kernel(x_ptr, y_ptr, more_ptr, part_ptr, scale_ptr, base_ptr, w_ptr, out_ptr, sums_ptr, tokens, eps, norm_eps,
                     box, state, number, room, D: tl.constexpr, S: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
                     Z: tl.constexpr, ZP: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, MORE: tl.constexpr,
                     Q: tl.constexpr, QP: tl.constexpr, SENDERS: tl.constexpr, SENDERSP: tl.constexpr,
                     DEPENDENT: tl.constexpr):  # fmt: skip
    """Update the streams, and compute sums. ROUNDS 0: unchanged streams. Q: products of the next part, or 0. SENDERS: devices
    whose values sum to y, or 0."""
    _begin(DEPENDENT)
    n, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, q, col = tl.arange(0, S), tl.arange(0, QP), piece * BLOCK + tl.arange(0, BLOCK)
    inside = (col < D)[None]
    if Q > 0:
        at = q[:, None, None] * (S * D) + s[None, :, None] * D + col[None, None]
        w = tl.load(w_ptr + at, mask=(q < Q)[:, None, None] & inside[None], other=0.0).to(tl.float32)
    if ROUNDS > 0:
        part_ptr += n * PP
        step = tokens.to(tl.int64) * PP
        factor, valid = _factor(part_ptr, Z, step, norm_eps, S * D, P, ZP)
        post, comb = _spread(part_ptr, scale_ptr, base_ptr, factor, valid, step, eps, S, ZP, ROUNDS)
        comb = tl.reshape(comb, [S, S])
    at = (n * S + s[:, None]) * D + col[None]
    if SENDERS == 0:
        _wait(DEPENDENT)
    x = tl.load(x_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
    if ROUNDS > 0:
        if SENDERS > 0:
            words = _take(box, state, n * D + col, _stamp(state, number), col < D, room, SENDERS, SENDERSP)
            y = tl.where(col < D, _summed(words, SENDERS, SENDERSP), 0.0)[None]  # masked columns were not received
        else:
            y = tl.load(y_ptr + n * D + col[None], mask=inside, other=0.0)
        for nth in tl.static_range(MORE):
            y += tl.load(more_ptr + (n * MORE + nth) * D + col[None], mask=inside, other=0.0)
        x = tl.sum(comb[:, :, None] * x[:, None], 0) + tl.trans(post) * y
    if Q > 0:
        sums = tl.sum(tl.sum(w * x[None], 2), 1)
        square = tl.sum(tl.sum(x * x, 1), 0)
    if SENDERS > 0:
        _wait(DEPENDENT)
    if ROUNDS > 0:
        tl.store(out_ptr + at, x, mask=inside)
    if Q > 0:
        tl.store(sums_ptr + (piece.to(tl.int64) * tokens + n) * QP + q, tl.where(q == Q, square, sums))


def _launch_step(
    x: Tensor, y: Tensor | Mail, sums: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float, rounds: int,
    more: Tensor | None, weight: Tensor | None, out: Tensor, following: Tensor | None,
) -> None:  # fmt: skip
    tokens, streams, width = x.shape
    block, products = stretch(width), 0 if weight is None else len(weight)
    pieces = cdiv(width, block)
    more_ptr, weight_ptr, sums_ptr = (x if t is None else t for t in (more, weight, following))
    added, mail = 0 if more is None else more.shape[1], _mail_arguments(y if isinstance(y, Mail) else None)
    _hc_write_kernel[(tokens, pieces)](
        x, x if isinstance(y, Mail) else y, more_ptr, sums, scale, base, weight_ptr, out, sums_ptr, tokens, eps, norm_eps,
        *(mail[key] for key in ("box", "state", "number", "room")), width, streams, (2 + streams) * streams, sums.shape[2],
        pieces, power_of_two(pieces), block, rounds, added, products, power_of_two(products + 1), mail["SENDERS"], mail["S"],
        **options(_warps_taking(mail["S"] * block, WARPS)),
    )  # fmt: skip


@in_place
def hc_sums(x, weight, sums):
    _launch_step(x, x, sums, x, x, 0.0, 0.0, 0, None, weight, x, sums)
    return sums


@in_place
def hc_read(x, sums, scale, base, eps, norm_eps, u):
    tokens, streams, width = x.shape

    def run(plan: TilePlan) -> None:
        block = plan.elements // streams
        _hc_finish_kernel[(tokens, cdiv(width, block))](
            x, sums, scale, base, u, u, u, tokens, len(sums), eps, norm_eps, width, streams, len(base), sums.shape[2], block,
            power_of_two(len(sums)), 0, **options(plan.warps),
        )  # fmt: skip

    launch(job_of("hc_mix", "read", (width,), x), run)
    return u


@in_place
def hc_write(x, y, sums, scale, base, eps, norm_eps, rounds, more, weight, out, following):
    _launch_step(x, y, sums, scale, base, eps, norm_eps, rounds, more, weight, out, following)
    return out, following
