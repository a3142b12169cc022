"""Sends and receives as separate launches."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_product import EARLY
from ..peer_exchange import Mail
from ..plans import cdiv, power_of_two
from ._launch import bump_versions, options
from ._pdl import _begin, _wait
from ._peer_exchange import SCALARS, _addresses, _send, _stamp, _summed, _take, mailed, warps_taking

WORDS, WARPS = 512, 4  # of a program


@triton.jit(do_not_specialize=[*SCALARS, "columns", "width", "column"])
def _send_words_kernel(y_ptr, more_ptr, columns, width, column, boxes, box, state, number, sender, room, BOXES: tl.constexpr,
                       SENDERS: tl.constexpr, S: tl.constexpr, MORE: tl.constexpr, BLOCK: tl.constexpr,
                       DEPENDENT: tl.constexpr):  # fmt: skip
    """A row of y by program_id(1), into rows of `width` words."""
    _begin(DEPENDENT)
    i, b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    in_range = i < columns
    _wait(DEPENDENT)
    bits = tl.load(y_ptr + b * columns + i, mask=in_range, other=0)
    if MORE > 0:
        y = bits.to(tl.float32, bitcast=True)
        for nth in tl.static_range(MORE):
            y += tl.load(more_ptr + (b * MORE + nth) * columns + i, mask=in_range, other=0.0)
        bits = y.to(tl.int32, bitcast=True)
    _send(_addresses(boxes, BOXES), sender * room + b * width + column + i, bits, _stamp(state, number), in_range)


@triton.jit(do_not_specialize=[*SCALARS, "count"])
def _take_words_kernel(out_ptr, count, boxes, box, state, number, sender, room, BOXES: tl.constexpr,
                       SENDERS: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, ADDED: tl.constexpr,
                       DEPENDENT: tl.constexpr):  # fmt: skip
    """Received words, this device's too, mean that the kernel before is at its end: wait for it after them."""
    _begin(DEPENDENT)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_range = i < count
    words = _take(box, state, i, _stamp(state, number), in_range, room, SENDERS, S)
    _wait(DEPENDENT)
    if ADDED:
        tl.store(out_ptr + i, tl.load(out_ptr + i, mask=in_range, other=0.0) + _summed(words, SENDERS, S), mask=in_range)
    else:
        tl.store(out_ptr + i, tl.max(words, 0), mask=in_range)


@torch.no_grad()
def send_words(y: Tensor, mail: Mail, column: int = 0, more: Tensor | None = None) -> tuple[Tensor, ...]:
    rows, columns = y.shape
    block, bits = min(WORDS, power_of_two(columns)), y.view(torch.int32)
    _send_words_kernel[(cdiv(columns, block), rows)](
        bits, bits if more is None else more, columns, mail.boxes[0].shape[2], column, **mailed(mail),
        MORE=0 if more is None else more.shape[1], BLOCK=block, **options(WARPS),
    )  # fmt: skip
    bump_versions(*mail.boxes)
    return mail.boxes


@torch.no_grad()
def take_words(out: Tensor, mail: Mail, added: bool = False, dependent: int = 0) -> Tensor:
    block = min(WORDS, max(32, power_of_two(out.numel())))
    to, args = out if added else out.view(torch.int32), mailed(mail)
    warps = warps_taking(args["S"] * block, WARPS)
    _take_words_kernel[(cdiv(out.numel(), block),)](
        to, out.numel(), **args, BLOCK=block, ADDED=added, **options(warps, min(dependent, EARLY))
    )
    bump_versions(out)
    return out
