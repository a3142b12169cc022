"""Exchanges between the devices of a step: the buffers of all exchanges, and each device's use of them.

A step has three kinds of exchange. The first device broadcasts its choice: the stream of the next token and its position, or
the token itself. Every part of a layer is summed over all devices (`kernels/peer_exchange.py`): attention and MLP have buffers
each, which alternate. At the end the others send their logits, or partial maxima, to the first. A buffer of the last and of
the first kind is written once a step, after an exchange of the other kind: so none is written before it was read.

A kernel that sends does not wait, and one that waits has sent before. So devices may compute at the same time, or one after the
other, if all send before any receives.
"""

from collections.abc import Mapping, Sequence
from itertools import permutations
from types import MappingProxyType

import torch
from torch import Tensor

from ...kernels import send_words, take_words
from ...kernels.peer_exchange import POLLS, Mail, addresses_of, new_state

SUMS = ("attention", "mlp")  # the buffers that sums alternate between


class Peer:
    """One of the devices. All make the same exchanges in the same order."""

    def __init__(self, number: int, device: torch.device) -> None:
        self.number, self.device = number, device
        self.state = new_state(device)
        self._buffers: dict[str, Mail] = {}
        self._summed = 0  # sums of this step

    def connect(self, kind: str, boxes: Sequence[Tensor], own: int | None, sender: int = 0) -> None:
        addresses = addresses_of(boxes, self.device)
        self._buffers[kind] = Mail(tuple(boxes), own, sender, self.state, addresses=addresses)

    def sum(self) -> Mail:
        """Return the buffer of the next sum, which this device sends its term to."""
        return self._buffers[SUMS[self._summed % 2]]._replace(number=self._summed)

    def add(self, x: Tensor, mode: int) -> None:
        """Add the sum to x, as soon as all devices have sent their terms."""
        take_words(x, self.sum(), True, mode)
        self.summed()

    def summed(self) -> None:
        """Count a sum that was received."""
        self._summed += 1

    def send(self, kind: str, y: Tensor, column: int = 0) -> None:
        send_words(y, self._buffers[kind], column)

    def take(self, kind: str, out: Tensor) -> None:
        take_words(out, self._buffers[kind])

    def wait(self, polls: int = POLLS) -> None:
        """Set the number of polls for each word, after which a kernel times out."""
        self.state[1:].fill_(polls)

    def gave_up(self) -> bool:
        """Return whether an exchange has timed out. Waits for the device."""
        return bool(self.state[1] == 0)

    def begin(self) -> None:
        """Begin a step or a prompt."""
        self._summed = 0  # a capture may have been interrupted

    def end(self) -> None:
        """Advance the stamps of the exchanges beyond those of this step."""
        self.state[:1].add_(max(1, self._summed))


def connected(
    devices: Sequence[torch.device],
    streams: int,
    hidden: int,
    rows: int = 1,
    home: Mapping[str, int] = MappingProxyType({}),
    broadcast: Mapping[str, tuple[int, int]] | None = None,
) -> list[Peer]:
    """Return a peer for each device.

    streams    the most rows of a sum
    rows       the most rows of a step
    home       columns of the tensors that the others send to the first device, by kind
    broadcast  (rows, columns) of the tensors that the first device sends to the others. None: streams and positions
    """
    for source, target in permutations(devices, 2):  # from the first copy on, a GPU's kernels may write another's memory
        torch.zeros(1, device=source, dtype=torch.float32).to(target)
    peers = [Peer(number, device) for number, device in enumerate(devices)]

    def boxes(to: Sequence[torch.device], senders: int, rows: int, columns: int) -> list[Tensor]:
        return [torch.zeros(senders, rows, columns, device=device, dtype=torch.int64) for device in to]

    for kind in SUMS:
        buffers = boxes(devices, len(peers), streams, hidden)
        for peer in peers:
            peer.connect(kind, buffers, peer.number, peer.number)
    for kind, size in (broadcast or {"stream": (streams, hidden), "position": (rows, 1)}).items():
        buffers = boxes(devices[1:], 1, *size)
        for peer in peers:
            peer.connect(kind, buffers, peer.number - 1 if peer.number else None)
    for kind, columns in home.items():
        buffers = boxes(devices[:1], 1, rows, columns)
        for peer in peers:
            peer.connect(kind, buffers, None if peer.number else 0)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a box is zeros before another device writes into it
    return peers
