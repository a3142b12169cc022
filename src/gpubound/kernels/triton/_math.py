"""Arithmetic that several kernels share, in few instructions: kernels that move 4 to 6 bytes an element have about 30 for it.

Compiled for compute capability 9.0, tl.exp takes 5 instructions and tl.exp2 one; 1 / x takes 8 (it scales x into range and
back), rsqrt(x)² two. A unit's worth of digits is left out: rsqrt is good to 2^-22.9, its square to 3e-7.

Functions shared by the norms: a program's loop over tiles of rows, and the reduction of sums over rows.

A backward's programs each sum the gradients of the small weights over their own rows. Their parts (P, S, C) fp32 hold, for each
of P programs, its sums for S weights of C elements. They become the gradients in one launch, where torch would take three for
two bf16 weights. The order of summation depends on P alone, so the bits are the same in every run (atomics' would not be).
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..accumulate import aside, deliver, main_gradient, opens
from ..plans.types import RowPlan, cdiv, job_of, power_of_two
from ._launch import launch


@triton.jit
def reciprocal(x):
    """1 / x for x >= 1, infinity included (0)."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(−z)); where exp is infinite, 0."""
    return reciprocal(1.0 + tl.exp2(-1.4426950408889634 * z))  # 1 / ln 2


@triton.jit
def add_both(a, b, c, d):
    """For tl.reduce over two tensors at once: half the barriers of two sums."""
    return a + c, b + d


@triton.jit
def capped(x, CAP: tl.constexpr):
    """CAP · tanh(x / CAP)."""
    e = tl.exp(-2.0 / CAP * tl.abs(x))
    y = CAP * (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -y, y)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """One of decode_product.ACTIVATED of fp32 x."""
    if ACTIVATION == "relu":
        y = tl.where(x < 0.0, 0.0, x)  # a NaN stays
    elif ACTIVATION == "relu2":
        y = tl.where(x < 0.0, 0.0, x * x)
    elif ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh u) / 2 = sigmoid(2u)
        y = x / (1.0 + tl.exp(-x * (1.5957691216057308 + 0.07135481282636 * x * x)))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y


ROWS = 64  # of parts, at a time; masked where there are fewer, so that few programs and many are one compiled kernel
COLUMNS = 32  # of a tile: 8 elements a thread


@triton.jit
def _columns(ptr, COLS: tl.constexpr, BLOCK: tl.constexpr):
    """One number for each column. They are loaded before a row's sums, whose barriers no load is moved across."""
    col = tl.arange(0, BLOCK)
    return tl.load(ptr + col, mask=col < COLS, other=0.0).to(tl.float32)


@triton.jit
def _tile(first, rows, COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """(the rows of a tile, the offsets of its elements, their mask)."""
    row, col = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = row[:, None].to(tl.int64) * COLS + col[None]
    mask = (row < rows)[:, None]
    if BLOCK != COLS:
        mask &= (col < COLS)[None]
    return row, at, mask


@triton.jit
def _tile_of(ptr, at, mask, HINT: tl.constexpr):
    return tl.load(ptr + at, mask=mask, other=0.0, eviction_policy=HINT).to(tl.float32)


def walk(
    kernel: Any, op: str, way: str, x: Tensor, sums: int, tensors: tuple[Tensor, ...], own: Sequence[tuple[int, ...]] = (),
    **constants: Any,
) -> list[Tensor]:  # fmt: skip
    """Launch a norm's kernel over the rows of x. For each shape in `own`, a tensor with a slice for each program.

    `sums` is how many gradients of a row's width its plan must leave room for.
    """
    rows, cols = prod(x.shape[:-1]), x.shape[-1]
    job = job_of(op, way, (cols, sums), x)

    def run(plan: RowPlan) -> list[Tensor]:
        grid = plan.grid(rows, job)
        buffers = [torch.empty(*grid, *shape, device=x.device, dtype=torch.float32) for shape in own]
        kernel[grid](
            *tensors, *buffers, rows=rows, COLS=cols, BLOCK=power_of_two(cols), ROWS=plan.rows, STAGES=plan.stages,
            HINT=plan.hint, **constants, num_warps=plan.warps,
        )  # fmt: skip
        return buffers

    return launch(job, run)


@triton.jit
def _put(out_ptr, at, value, mask, add):
    if add != 0:
        value += tl.load(out_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["programs", "add_first", "add_second", "add_number"])
def _norm_sums_kernel(parts_ptr, numbers_ptr, first_ptr, second_ptr, number_ptr, programs, add_first, add_second, add_number,
                      COLS: tl.constexpr, SUMS: tl.constexpr, NUMBER: tl.constexpr, BLOCK: tl.constexpr,
                      ROWS: tl.constexpr):  # fmt: skip
    """first and second: the sums of each of their columns. number: of numbers_ptr, one a program, if NUMBER.

    Each is added to the output if its `add` is not 0. A step's first micro-batch writes and the others add: as constants
    they would be two compilations.
    """
    which = tl.program_id(1)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = col < COLS
    if which < SUMS:
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, programs, ROWS):
            row = start + tl.arange(0, ROWS)
            at = (row[:, None] * SUMS + which) * COLS + col[None]
            total += tl.load(parts_ptr + at, mask=(row < programs)[:, None] & mask[None], other=0.0)
        sums = tl.sum(total, 0)
        if which == 0:
            _put(first_ptr, col, sums, mask, add_first)
        else:
            _put(second_ptr, col, sums, mask, add_second)
    elif NUMBER and tl.program_id(0) == 0:
        several = tl.zeros([ROWS], tl.float32)
        for start in range(0, programs, ROWS):
            row = start + tl.arange(0, ROWS)
            several += tl.load(numbers_ptr + row, mask=row < programs, other=0.0)
        only = tl.arange(0, 1)
        _put(number_ptr, only, tl.sum(several, 0) + tl.zeros([1], tl.float32), only < 1, add_number)


def deliver_parts(
    parts: Tensor, weights: Sequence[Tensor], numbers: Tensor | None = None, number: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """`accumulate.deliver` of parts[:, s].sum(0) for each of at most two `weights`, then of numbers.sum() for `number`."""
    programs, sums, cols = parts.shape
    owners = [*weights, *([] if number is None else [number])]
    mains = [main_gradient(owner) for owner in owners]
    # The kernel may not write while dynamo traces, nor into an accumulator of other strides.
    if torch.compiler.is_compiling() or not all(main is None or main.is_contiguous() for main in mains):
        gradients = [
            *parts.sum(0).unbind(0),
            *([] if numbers is None or number is None else [numbers.sum().view(number.shape)]),
        ]
        return tuple(deliver(owner, gradient) for owner, gradient in zip(owners, gradients))
    outs = [torch.empty(t.shape, device=t.device, dtype=t.dtype) if main is None else main for t, main in zip(owners, mains)]
    adds = [main is not None and not opens([owner]) for main, owner in zip(mains, owners)]
    block = min(power_of_two(cols), COLUMNS)
    first, second = (outs[s] if s < sums else parts for s in range(2))
    add_first, add_second = (int(adds[s]) if s < sums else 0 for s in range(2))
    add_number = int(adds[-1]) if number is not None else 0

    def put() -> None:
        _norm_sums_kernel[(cdiv(cols, block) if sums else 1, sums + (number is not None))](
            parts, parts if numbers is None else numbers, first, second, parts if number is None else outs[-1], programs,
            add_first, add_second, add_number, cols, sums, number is not None, block, ROWS, num_warps=8,
        )  # fmt: skip

    if all(main is not None for main in mains):
        aside(owners[0], put, parts, *([] if numbers is None else [numbers]))
    else:  # autograd takes what it writes
        put()
    return tuple(out if main is None else None for out, main in zip(outs, mains))
