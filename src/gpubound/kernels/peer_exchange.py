"""Peer exchange: words that the devices of one process send each other while all of them work on one token.

Each device has an inbox in its memory. The kernels of other devices know its address and write to it directly, without the host
and without copy engines. A slot of an inbox is 64 bits: a value, and the sequence number of the exchange. Both are written by
one store, so a value that has arrived is recognised by its sequence number: there is no flag, no fence, nothing to reset.
Receivers poll until the sequence numbers match.

An inbox is overwritten in the next exchange that uses it. So between two of them each sender must know that the receiver has
read the first. All-reduces that alternate between two inboxes guarantee this: none ends before the words of all devices have
arrived.

Legend: S senders, B rows, C columns.

Timestamps: a device writes them when it reaches a point of its work, in the order of its stream. So they work inside a CUDA
graph, too, and a later reader gets the times of each step: an event that a graph records holds those of the newest replay
alone.
"""

import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import triton  # the package: its files, which import triton itself, are imported when called for
from .dispatch import can_launch, implementation, require
from .plans.types import power_of_two
from .registry import definition, draw, ints

# How often a kernel asks for a word before it takes NaN, so that a device that has failed does not hold the others for ever.
# At 0.5 to 1 us each, 10 s or more: the host launches one device's work after the other's, and may be interrupted in between.
# A device that timed out once polls no more, or every later exchange would take as long again.
POLLS = 1 << 24
LATE = -1  # a word that has not come: all ones, which is NaN, or -1


class Mail(NamedTuple):
    """An exchange, as one device sees it."""

    boxes: tuple[Tensor, ...]  # where it is sent, each on its own device: int64 (S, at least B, C)
    own: int | None  # which of them is this device's; None: it takes nothing
    sender: int  # which place of each box this device writes to
    state: Tensor  # `new_state`'s, on this device
    number: int = 0  # of this exchange in its epoch: the stamp is the sum of both
    addresses: Tensor | None = (
        None  # `addresses_of(boxes)`, on this device. None: made in each call, which waits for the device
    )

    @property
    def box(self) -> Tensor:
        assert self.own is not None
        return self.boxes[self.own]

    def stamp(self) -> Tensor:
        """int32, which wraps."""
        return self.state[:1] + self.number

    def words(self, rows: int) -> Tensor:
        """Return the received values, int32 (S, rows, C), with LATE for missing ones: the definition of receiving."""
        found = self.box[:, :rows]
        return torch.where((found >> 32).int() == self.stamp(), found.int(), LATE)

    def summed(self, rows: int) -> Tensor:
        """The words (rows, C) of all senders as numbers, added in their order: the same bits on every device."""
        total: Any = 0.0
        for words in self.words(rows).view(torch.float32):
            total = total + words
        return total

    def post(self, y: Tensor, column: int = 0) -> None:
        """Write the words of y (B, C) into each box, from `column` on. The definition of sending."""
        words = (y.view(torch.int32).long() & 0xFFFFFFFF) | (self.stamp().long() << 32)
        for box in self.boxes:
            box[self.sender, : len(y), column : column + y.shape[1]] = words.to(box.device)


def new_state(device: torch.device) -> Tensor:
    """int32 (2,): the epoch, which is the same on all devices; and how often a word is asked for, 0 once one has not come."""
    return torch.tensor([1, POLLS], dtype=torch.int32, device="cpu").to(device)  # of a new box, stamps are 0


def addresses_of(boxes: Sequence[Tensor], device: torch.device) -> Tensor:
    """int64, a power of two of them, the rest zeros; good as long as no box moves."""
    found = [box.data_ptr() for box in boxes]
    found += [0] * (power_of_two(len(found)) - len(found))
    return torch.tensor(found, dtype=torch.int64, device="cpu").to(device)


def send_words(y: Tensor, mail: Mail, column: int = 0, more: Tensor | None = None) -> tuple[Tensor, ...]:
    """Write y (B, C), of float32 or int32, into the boxes of `mail`, from their column `column` on.

    more  (B, some, C) fp32, with y of float32: what is added to y first, in their order
    """
    if y.dim() != 2 or y.dtype not in (torch.float32, torch.int32) or not y.is_contiguous():
        raise ValueError(
            f"send_words: y must be a contiguous float32 or int32 (rows, columns), got {y.dtype} {tuple(y.shape)}."
        )
    check_mail("send_words", mail, (len(y), column + y.shape[1]), y.device)
    if more is not None:
        require("send_words", "y", y, torch.float32, (len(y), y.shape[1]), y.device, "more is added to it")
        require("send_words", "more", more, torch.float32, (len(y), "some", y.shape[1]), y.device, "it is added to y")
    some = 0 if more is None else more.shape[1]
    return implementation("send_words", y.view(torch.float32), None, (some,))(y, mail, column, more)


@definition(
    lambda g, some=0: (
        draw(g, 2, 24).detach(),
        example_mail(g, 2, 1, 40),
        8,
        draw(g, 2, some, 24).detach() if some else None,
    )
)
def send_words_reference(y, mail, column=0, more=None):
    for one in () if more is None else more.unbind(1):
        y = y + one
    mail.post(y, column)
    return mail.boxes


def take_words(out: Tensor, mail: Mail, added: bool = False, dependent: int = 0) -> Tensor:
    """out (B, C) = the words of one sender, as soon as all are there; or, `added`, out += the sum of all senders' words.

    A word that does not come is NaN, or -1 as an int32. `dependent` is as in a step's products (decode_product.py): the kernel
    before sends what is taken.
    """
    if out.dim() != 2 or out.dtype not in (torch.float32, torch.int32)[: 2 - added] or not out.is_contiguous():
        dtypes = "float32" if added else "float32 or int32"
        raise ValueError(f"take_words: out must be a contiguous {dtypes} (rows, columns), got {out.dtype} {tuple(out.shape)}.")
    check_mail("take_words", mail, (len(out), out.shape[1]), out.device, takes=True)
    if not added and len(mail.box) != 1:
        raise ValueError(f"take_words: got words of {len(mail.box)} senders, wanted one; with added=True they are summed.")
    return implementation("take_words", out.view(torch.float32), None, (added,))(out, mail, added, dependent)


@definition(lambda g, added=False: (draw(g, 2, 40).detach(), example_mail(g, 1, 3 if added else 1, 40, own=-1), added))
def take_words_reference(out, mail, added=False, dependent=0):
    if added:
        return out.add_(mail.summed(len(out)))
    out.view(torch.int32).copy_(mail.words(len(out))[0])
    return out


def check_mail(
    op: str, mail: Mail, size: tuple[int, int], device: torch.device, takes: bool = False, fills: bool = False
) -> None:
    """That words of `size` have room in each box. fills: that they take all of its columns."""
    require(op, "mail.state", mail.state, torch.int32, (2,), device, "each device counts for itself; `new_state` makes it")
    if mail.addresses is not None:
        size_of = (power_of_two(len(mail.boxes)),)
        require(op, "mail.addresses", mail.addresses, torch.int64, size_of, device, "`addresses_of` makes it")
    for box in mail.boxes:
        fits = box.dim() == 3 and box.dtype == torch.int64 and box.is_contiguous() and mail.sender < len(box)
        fits = fits and box.shape == mail.boxes[0].shape and box.shape[1] >= size[0] and box.shape[2] >= size[1]
        if not fits or (fills and box.shape[2] > size[1]):
            raise ValueError(
                f"{op}: mail.boxes must be contiguous torch.int64 (senders, rows, columns) of one size, with room for {size} "
                f"words of sender {mail.sender}{' and no more columns' if fills else ''}, got {box.dtype} {tuple(box.shape)}."
            )
    if takes and (mail.own is None or mail.box.device != device or mail.box.shape[2] != size[1]):
        raise ValueError(f"{op}: mail.own must be the number of a box of {size[1]} columns on {device}, got {mail.own}.")


def example_mail(g: torch.Generator, boxes: int, senders: int, columns: int, own: int = 0, rows: int = 2) -> Mail:
    """The words of all senders but `own`, which is this device, have come."""
    inboxes = tuple(torch.zeros(senders, 3, columns, device="cpu", dtype=torch.int64) for _ in range(boxes))
    mail = Mail(inboxes, 0, own, ints(7, POLLS), 5)
    for sender in range(senders):
        if sender != own:
            mail._replace(sender=sender).post(draw(g, rows, columns).detach())
    return mail


def can_stamp(device: torch.device) -> bool:
    """Return whether `Stamps` work on that device: on a CPU, and on a GPU where kernels can be launched."""
    return device.type == "cpu" or can_launch(device)


class Stamps:
    """`times`, int64 (places,) on the device, in ns. Those of one device may be subtracted; two devices' clocks differ."""

    def __init__(self, device: torch.device, places: int):
        self.times = torch.zeros(places, dtype=torch.int64, device=device)
        # Past torch: to a step that is being recorded, a number that the host writes would be a mistake.
        self._here = self.times.numpy() if device.type == "cpu" else None

    def put(self, place: int) -> None:
        """times[place] = the time when the device comes here."""
        if self._here is None:
            import_module(f"{triton.__name__}.peer_exchange")._stamp_clock(self.times, place)
        else:
            self._here[place] = time.perf_counter_ns()
