"""Kernels of a decoding step's hyper-connections. A program has the same columns of all streams of a token.

Before its PDL wait, `hc_write` loads the sums and the next weight, and computes comb; after the wait, it loads the streams and
the part's output. Every program computes comb redundantly.

If the part's output comes through a peer exchange, `hc_write` reads and computes everything before the wait: the streams were
written with their sums, and each received value has a stamp that shows its arrival. The preceding launch, which sent this
device's values, ends meanwhile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .....kernels.peer_exchange import Mail
from .....kernels.plans.types import TilePlan, cdiv, job_of, power_of_two
from .....kernels.triton._launch import bump_versions, launch, options
from .....kernels.triton._pdl import _begin, _wait
from .....kernels.triton._peer_exchange import _stamp, _summed, _take, mailed, warps_taking
from ..hc_step import stretch
from .hyper_connections import _factor, _hc_finish_kernel, _spread

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
        factor, there = _factor(part_ptr, Z, step, norm_eps, S * D, P, ZP)
        post, comb = _spread(part_ptr, scale_ptr, base_ptr, factor, there, step, eps, S, ZP, ROUNDS)
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


def _launch(
    x: Tensor, y: Tensor | Mail, sums: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float, rounds: int,
    more: Tensor | None, weight: Tensor | None, out: Tensor, following: Tensor | None,
) -> None:  # fmt: skip
    tokens, streams, width = x.shape
    block, products = stretch(width), 0 if weight is None else len(weight)
    pieces = cdiv(width, block)
    more_ptr, weight_ptr, sums_ptr = (x if t is None else t for t in (more, weight, following))
    added, mail = 0 if more is None else more.shape[1], mailed(y if isinstance(y, Mail) else None)
    _hc_write_kernel[(tokens, pieces)](
        x, x if isinstance(y, Mail) else y, more_ptr, sums, scale, base, weight_ptr, out, sums_ptr, tokens, eps, norm_eps,
        *(mail[key] for key in ("box", "state", "number", "room")), width, streams, (2 + streams) * streams, sums.shape[2],
        pieces, power_of_two(pieces), block, rounds, added, products, power_of_two(products + 1), mail["SENDERS"], mail["S"],
        **options(warps_taking(mail["S"] * block, WARPS)),
    )  # fmt: skip


@torch.no_grad()
def hc_sums(x: Tensor, weight: Tensor, sums: Tensor) -> Tensor:
    _launch(x, x, sums, x, x, 0.0, 0.0, 0, None, weight, x, sums)
    bump_versions(sums)
    return sums


@torch.no_grad()
def hc_read(x: Tensor, sums: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float, u: Tensor) -> Tensor:
    tokens, streams, width = x.shape

    def run(plan: TilePlan) -> None:
        block = plan.elements // streams
        _hc_finish_kernel[(tokens, cdiv(width, block))](
            x, sums, scale, base, u, u, u, tokens, len(sums), eps, norm_eps, width, streams, len(base), sums.shape[2], block,
            power_of_two(len(sums)), 0, **options(plan.warps),
        )  # fmt: skip

    launch(job_of("hc_mix", "read", (width,), x), run)
    bump_versions(u)
    return u


@torch.no_grad()
def hc_write(
    x: Tensor, y: Tensor | Mail, sums: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float, rounds: int,
    more: Tensor | None, weight: Tensor | None, out: Tensor, following: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    _launch(x, y, sums, scale, base, eps, norm_eps, rounds, more, weight, out, following)
    bump_versions(out, following)
    return out, following
