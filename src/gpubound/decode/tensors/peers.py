"""What one device tells the others in a step: the boxes of all exchanges, and how each device uses them.

A step has three kinds. The first device tells the others what it chose: the stream of the next token, and its position. Every
part of a layer is a sum over all devices (`kernels/mail.py`): attention and MLP have a box each, so they take turns. At the end
the others hand the first their stretch of the logits, or of their partial maxima. A box of the last and of the first kind is
written once a step, after the other kind has been answered: so none is written before it was read.

On a GPU a product and its sum are one kernel, which asks for words that the others' kernels send meanwhile. Where one device
computes after the other (on a CPU, or a step outside a graph), all send before any asks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from ...kernels import send_words, take_words
from ...kernels.mail import POLLS, Mail, addresses_of

SUMS = ("attention", "mlp")  # the boxes that sums take turns with


class Peer:
    """One of the devices."""

    together = False  # whether the others compute at the same time

    def __init__(self, number: int, device: torch.device) -> None:
        self.number, self.device = number, device
        self.epoch = torch.ones(1, device=device, dtype=torch.int32)  # of a new box, stamps are 0
        self.polls = POLLS
        self._mails: dict[str, Mail] = {}
        self._summed = 0  # sums of this step

    def connect(self, kind: str, boxes: Sequence[Tensor], own: int | None, sender: int = 0) -> None:
        found = addresses_of(boxes, self.device)
        self._mails[kind] = Mail(tuple(boxes), own, sender, self.epoch, addresses=found)

    def add_product(self, product: Any, h: Tensor, x: Tensor, mode: int) -> None:
        """x += the product of all devices: here and now, or when `close` is called."""
        if self.together:
            product.add_product(h, x, mode, self._sum())
            self._summed += 1
        else:
            part = torch.zeros_like(x)
            product.add_product(h, part, mode)
            send_words(part, self._sum())

    def close(self, x: Tensor) -> None:
        if not self.together:
            take_words(x, self._sum(), added=True)
            self._summed += 1

    def _sum(self) -> Mail:
        return self._mails[SUMS[self._summed % 2]]._replace(number=self._summed, polls=self.polls)

    def send(self, kind: str, y: Tensor, column: int = 0) -> None:
        send_words(y, self._mails[kind], column)

    def take(self, kind: str, out: Tensor) -> None:
        take_words(out, self._mails[kind]._replace(polls=self.polls))

    def end(self) -> None:
        """Of a step: the stamps of the next go on behind this one's."""
        self.epoch.add_(max(1, self._summed))
        self._summed = 0


def connected(devices: Sequence[torch.device], rows: int, hidden: int, home: dict[str, int]) -> list[Peer]:
    """A peer for each device. home: the columns of what the others hand to the first, by kind."""
    _let_reach(devices)
    peers = [Peer(number, device) for number, device in enumerate(devices)]

    def boxes(to: Sequence[torch.device], senders: int, columns: int) -> list[Tensor]:
        return [torch.zeros(senders, rows, columns, device=device, dtype=torch.int64) for device in to]

    for kind in SUMS:
        made = boxes(devices, len(peers), hidden)
        for peer in peers:
            peer.connect(kind, made, peer.number, peer.number)
    for kind, columns in (("stream", hidden), ("position", 1)):
        made = boxes(devices[1:], 1, columns)
        for peer in peers:
            peer.connect(kind, made, peer.number - 1 if peer.number else None)
    for kind, columns in home.items():
        made = boxes(devices[:1], 1, columns)
        for peer in peers:
            peer.connect(kind, made, None if peer.number else 0)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a box is zeros before another device writes into it
    return peers


def _let_reach(devices: Sequence[torch.device]) -> None:
    """torch lets a GPU's kernels write another's memory from the first copy between them on."""
    for here, there in permutations(devices, 2):
        torch.zeros(1, device=here).to(there)


@contextmanager
def together(peers: Sequence[Peer], polls: int = POLLS) -> Iterator[None]:
    """Kernels that are launched inside compute at the same time on all devices. polls 0: they wait for none."""
    for peer in peers:
        peer.together, peer.polls = True, polls
    try:
        yield
    finally:
        for peer in peers:
            peer.together, peer.polls = False, POLLS
