"""How kernels write words into the boxes of other devices and take those in their own (mail.py).

A place is written by one store of 64 bits, which reaches another device's memory whole or not at all. It is asked for past the
L1, which may hold what was there before. Programs send before they ask, and what one asks for is sent by the other devices'
programs of the same number; programs begin in the order of their numbers, so of those that ask, the first is always answered.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..mail import LATE, Mail, addresses_of
from ..plans import power_of_two

_LATE = tl.constexpr(LATE)
SCALARS = ["number", "sender", "polls", "room"]  # of a kernel's arguments: their values compile nothing anew


@triton.jit
def _addresses(boxes, BOXES: tl.constexpr):
    """Of the boxes, to be asked for early: they are the same in every launch."""
    i = tl.arange(0, BOXES)
    return tl.load(boxes + i)


@triton.jit
def _stamp(epoch, number):
    return (tl.load(epoch) + number).to(tl.int64) << 32


@triton.jit
def _send(addresses, at, bits, stamp, there):
    """`bits`, int32, at the places `at` of all boxes."""
    to = (addresses[:, None] + 8 * at.to(tl.int64)[None]).to(tl.pointer_type(tl.int64))
    words = (bits.to(tl.int64) & 0xFFFFFFFF) | stamp
    tl.store(to, tl.broadcast_to(words[None], to.shape), mask=(addresses != 0)[:, None] & there[None])


@triton.jit
def _take(box, at, stamp, there, polls, room, SENDERS: tl.constexpr, S: tl.constexpr):
    """The words at the places `at` of each sender, (S, places) int32, when all are there, or LATE."""
    s = tl.arange(0, S)
    wanted = (s < SENDERS)[:, None] & there[None]
    from_ = box + s.to(tl.int64)[:, None] * room + at[None]
    words = tl.load(from_, mask=wanted, other=0, volatile=True)
    while (tl.max(tl.max((wanted & ((words ^ stamp) >> 32 != 0)).to(tl.int32), 1), 0) > 0) & (polls > 0):
        words = tl.load(from_, mask=wanted, other=0, volatile=True)
        polls -= 1
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


def mailed(mail: Mail | None, device: torch.device) -> dict[str, Any]:
    """What a kernel gets of its mail; of none, nothing that it reads."""
    if mail is None:
        return dict.fromkeys(("boxes", "box", "epoch")) | dict.fromkeys((*SCALARS, "BOXES", "SENDERS", "S"), 0)
    senders, rows, columns = mail.boxes[0].shape
    return {
        "boxes": addresses_of(mail.boxes, device) if mail.addresses is None else mail.addresses,
        "box": mail.epoch if mail.own is None else mail.box,  # where nothing is taken, it is not read
        "epoch": mail.epoch,
        "number": mail.number,
        "sender": mail.sender,
        "polls": mail.polls,
        "room": rows * columns,
        "BOXES": power_of_two(len(mail.boxes)),
        "SENDERS": senders,
        "S": power_of_two(senders),
    }
