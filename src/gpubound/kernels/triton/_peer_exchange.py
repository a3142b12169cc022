"""Writes into the inboxes of other devices and reads of a device's own (peer_exchange.py).

A place is written by one store of 64 bits, which reaches another device's memory whole or not at all. It is asked for past the
L1, which may hold what was there before. What asks is a small kernel of its own. Asked for by the programs of the product
itself, whoever waits holds a place that the next program of the product needs: two H200s, 4096 x 7168 in bf16, 16.9 us alone,
28.8 summed inside (4 waves of programs), and a sum by itself takes 3.1.
"""

from typing import Any

import triton
import triton.language as tl

from ..peer_exchange import LATE, Mail, addresses_of
from ..plans import power_of_two

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
def _send(addresses, at, bits, stamp, there):
    """`bits`, int32, at the places `at` of all boxes."""
    to = (addresses[:, None] + 8 * at.to(tl.int64)[None]).to(tl.pointer_type(tl.int64))
    words = (bits.to(tl.int64) & 0xFFFFFFFF) | stamp
    tl.store(to, tl.broadcast_to(words[None], to.shape), mask=(addresses != 0)[:, None] & there[None])


@triton.jit
def _missing(words, stamp, wanted):
    return tl.max(tl.max((wanted & ((words ^ stamp) >> 32 != 0)).to(tl.int32), 1), 0)


@triton.jit
def _take(box, state, at, stamp, there, room, SENDERS: tl.constexpr, S: tl.constexpr):
    """The words at the places `at` of each sender, (S, places) int32, when all are there, or LATE. In `warps_taking` warps."""
    s = tl.arange(0, S)
    wanted = (s < SENDERS)[:, None] & there[None]
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


def warps_taking(words: int, most: int) -> int:
    """At most `most` warps, for a program that takes so many words, or none: no more threads than words.

    With more threads than words, Triton keeps a word in several threads, and each of them loads it. `_missing` looks at one of
    these copies; another, which was loaded a moment earlier, may still lack its stamp. Inside a warp one load serves all.
    """
    return max(1, min(most, words // 32)) if words else most


def mailed(mail: Mail | None) -> dict[str, Any]:
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
