"""What one device tells the others in a step: the boxes of all exchanges, and how each device uses them.

A step has three kinds of exchange. The first device tells the others what it chose: the stream of the next token and its
position, or the token itself. Every part of a layer is a sum over all devices (`kernels/peer_exchange.py`): attention and MLP
have a box each, so they take turns. At the end the others hand the first their stretch of the logits, or of their partial
maxima. A box of the last and of the first kind is written once a step, after the other kind has been answered: so none is
written before it was read.

A kernel that sends waits for nobody, and one that waits has sent before. So devices may compute at once (graphs.py), or one
after the other, if all send before any takes.
"""

from collections.abc import Mapping, Sequence
from itertools import permutations
from types import MappingProxyType

import torch
from torch import Tensor

from ...kernels import send_words, take_words
from ...kernels.peer_exchange import POLLS, Mail, addresses_of, new_state

SUMS = ("attention", "mlp")  # the boxes that sums take turns with


class Peer:
    """One of the devices. All go through the same exchanges in the same order."""

    def __init__(self, number: int, device: torch.device) -> None:
        self.number, self.device = number, device
        self.state = new_state(device)
        self._mails: dict[str, Mail] = {}
        self._summed = 0  # sums of this step

    def connect(self, kind: str, boxes: Sequence[Tensor], own: int | None, sender: int = 0) -> None:
        found = addresses_of(boxes, self.device)
        self._mails[kind] = Mail(tuple(boxes), own, sender, self.state, addresses=found)

    def sum(self) -> Mail:
        """Where this device sends its part of the next sum."""
        return self._mails[SUMS[self._summed % 2]]._replace(number=self._summed)

    def add(self, x: Tensor, mode: int) -> None:
        """x += that sum, as soon as all devices have sent theirs."""
        take_words(x, self.sum(), True, mode)
        self.summed()

    def summed(self) -> None:
        """That sum has been taken."""
        self._summed += 1

    def send(self, kind: str, y: Tensor, column: int = 0) -> None:
        send_words(y, self._mails[kind], column)

    def take(self, kind: str, out: Tensor) -> None:
        take_words(out, self._mails[kind])

    def wait(self, polls: int = POLLS) -> None:
        """From here on, ask for each word so often."""
        self.state[1:].fill_(polls)

    def gave_up(self) -> bool:
        """Whether a word has not come, so that none was asked for since. It waits for the device."""
        return bool(self.state[1] == 0)

    def begin(self) -> None:
        """A step, or a prompt."""
        self._summed = 0  # also behind one that was broken off while it was captured

    def end(self) -> None:
        """Stamps of the next step go on behind this one's."""
        self.state[:1].add_(max(1, self._summed))


def connected(
    devices: Sequence[torch.device],
    streams: int,
    hidden: int,
    rows: int = 1,
    home: Mapping[str, int] = MappingProxyType({}),
    told: Mapping[str, tuple[int, int]] | None = None,
) -> list[Peer]:
    """A peer for each device. streams: the most rows of a sum; rows: of a step.

    home  the columns of what the others hand to the first, by kind
    told  what the first tells the others, (rows, columns) by kind. None: streams, and positions
    """
    _let_reach(devices)
    peers = [Peer(number, device) for number, device in enumerate(devices)]

    def boxes(to: Sequence[torch.device], senders: int, rows: int, columns: int) -> list[Tensor]:
        return [torch.zeros(senders, rows, columns, device=device, dtype=torch.int64) for device in to]

    for kind in SUMS:
        made = boxes(devices, len(peers), streams, hidden)
        for peer in peers:
            peer.connect(kind, made, peer.number, peer.number)
    for kind, size in (told or {"stream": (streams, hidden), "position": (rows, 1)}).items():
        made = boxes(devices[1:], 1, *size)
        for peer in peers:
            peer.connect(kind, made, peer.number - 1 if peer.number else None)
    for kind, columns in home.items():
        made = boxes(devices[:1], 1, rows, columns)
        for peer in peers:
            peer.connect(kind, made, None if peer.number else 0)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a box is zeros before another device writes into it
    return peers


def _let_reach(devices: Sequence[torch.device]) -> None:
    """torch lets a GPU's kernels write another's memory from the first copy between them on."""
    for here, there in permutations(devices, 2):
        torch.zeros(1, device=here, dtype=torch.float32).to(there)
