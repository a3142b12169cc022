"""Exchange of partial sums between devices (kernels/peer_exchange.py): writes into the inboxes of others, and reads.

A word and its sequence number are written by one store of 64 bits, which reaches another device's memory whole or not at all.
Reads bypass the L1, which may hold an old value. They are a small kernel: polled by the programs of a product, they would
occupy multiprocessors that its next programs need. Two H200s, 4096 x 7168 in bf16: 16.9 us alone, 28.8 summed inside (4 waves
of programs), and a separate sum takes 3.1.

Timestamps are of a GPU's clock, which counts ns and goes on at one pace whatever the clocks of its multiprocessors do.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from ..decode_product import EARLY
from ..peer_exchange import LATE, Mail, addresses_of
from ..plans.types import cdiv, power_of_two
from ._launch import _begin, _wait, in_place, options

_LATE = tl.constexpr(LATE)
SCALARS = ["number", "sender", "room"]  # of a kernel's arguments: their values compile nothing anew


@triton.jit
def _addresses(boxes, BOXES: tl.constexpr):
    """Load the addresses of the inboxes. It can be done early: they are the same in every launch."""
    i = tl.arange(0, BOXES)
    return tl.load(boxes + i)


@triton.jit
def _stamp(state, number):
    return (tl.load(state) + number).to(tl.int64) << 32


@triton.jit
def _send(addresses, at, bits, stamp, mask):
    """`bits`, int32, at the places `at` of all boxes."""
    to = (addresses[:, None] + 8 * at.to(tl.int64)[None]).to(tl.pointer_type(tl.int64))
    words = (bits.to(tl.int64) & 0xFFFFFFFF) | stamp
    tl.store(to, tl.broadcast_to(words[None], to.shape), mask=(addresses != 0)[:, None] & mask[None])


@triton.jit
def _missing(words, stamp, wanted):
    return tl.max(tl.max((wanted & ((words ^ stamp) >> 32 != 0)).to(tl.int32), 1), 0)


@triton.jit
def _take(box, state, at, stamp, mask, room, SENDERS: tl.constexpr, S: tl.constexpr):
    """The words at the places `at` of each sender, (S, places) int32, when all are there, or LATE. In `_warps_taking` warps."""
    s = tl.arange(0, S)
    wanted = (s < SENDERS)[:, None] & mask[None]
    from_ = box + s.to(tl.int64)[:, None] * room + at[None]
    words = tl.load(from_, mask=wanted, other=0, volatile=True)
    missing = _missing(words, stamp, wanted)
    polls = tl.load(state + 1, volatile=True)
    while (missing > 0) & (polls > 0):
        words = tl.load(from_, mask=wanted, other=0, volatile=True)
        missing = _missing(words, stamp, wanted)
        polls -= 1
    tl.store(state + 1, 0, mask=missing > 0)
    return tl.where((words ^ stamp) >> 32 == 0, words.to(tl.int32), _LATE)


@triton.jit
def _summed(words, SENDERS: tl.constexpr, S: tl.constexpr):
    """The words of each sender as numbers, added in their order."""
    s = tl.arange(0, S)[:, None]
    values = words.to(tl.float32, bitcast=True)
    total = tl.sum(tl.where(s == 0, values, 0.0), 0)
    for sender in tl.static_range(1, SENDERS):
        total += tl.sum(tl.where(s == sender, values, 0.0), 0)
    return total


def _warps_taking(words: int, most: int) -> int:
    """At most `most` warps, for a program that takes so many words, or none: no more threads than words.

    With more threads than words, Triton keeps a word in several threads, and each of them loads it. `_missing` looks at one of
    these copies; another, which was loaded a moment earlier, may still lack its stamp. Inside a warp one load serves all.
    """
    return max(1, min(most, words // 32)) if words else most


def _mail_arguments(mail: Mail | None) -> dict[str, Any]:
    """Return a kernel's arguments for an exchange; without one, placeholders."""
    if mail is None:
        return dict.fromkeys(("boxes", "box", "state")) | dict.fromkeys((*SCALARS, "BOXES", "SENDERS", "S"), 0)
    senders, rows, columns = mail.boxes[0].shape
    return {
        "boxes": addresses_of(mail.boxes, mail.state.device) if mail.addresses is None else mail.addresses,
        "box": mail.state if mail.own is None else mail.box,  # where nothing is taken, it is not read
        "state": mail.state,
        "number": mail.number,
        "sender": mail.sender,
        "room": rows * columns,
        "BOXES": power_of_two(len(mail.boxes)),
        "SENDERS": senders,
        "S": power_of_two(senders),
    }


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


@in_place
def send_words(y, mail, column=0, more=None):
    rows, columns = y.shape
    block, bits = min(WORDS, power_of_two(columns)), y.view(torch.int32)
    _send_words_kernel[(cdiv(columns, block), rows)](
        bits, bits if more is None else more, columns, mail.boxes[0].shape[2], column, **_mail_arguments(mail),
        MORE=0 if more is None else more.shape[1], BLOCK=block, **options(WARPS),
    )  # fmt: skip
    return mail.boxes


@in_place
def take_words(out, mail, added=False, dependent=0):
    block = min(WORDS, max(32, power_of_two(out.numel())))
    to, args = out if added else out.view(torch.int32), _mail_arguments(mail)
    warps = _warps_taking(args["S"] * block, WARPS)
    _take_words_kernel[(cdiv(out.numel(), block),)](
        to, out.numel(), **args, BLOCK=block, ADDED=added, **options(warps, min(dependent, EARLY))
    )
    return out


@triton.jit(do_not_specialize=["place"])
def _stamp_kernel(clocks_ptr, place):
    tl.store(clocks_ptr + place, globaltimer())


def _stamp_clock(clocks: Tensor, place: int) -> None:
    with torch.cuda.device(clocks.device):
        _stamp_kernel[(1,)](clocks, place, num_warps=1)
