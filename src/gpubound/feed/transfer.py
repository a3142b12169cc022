"""The road from host to device: staging memory, copies, and the events that say when a copy or a use is over.

The ring is written against this small interface, so that its order of events is tested on the CPU with events that come late.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import GraphError
from ..trace import count
from .leaves import Padding, Tree, flatten

# Where a leaf starts in the staged bytes: torch's own allocations on a GPU start at multiples of 512.
ALIGN = 512

# How often the ring's thread asks for an event. It asks instead of calling synchronize(), which ledgers count as a wait of the
# host, in any thread: the training loop does not wait here. Being late by this much holds nothing up, since the batches of the
# other slots are on their way.
POLL_SECONDS = 2e-4


class Lane(Protocol):
    device: torch.device

    def admit(self) -> None:
        """Raise if the consumer cannot take a batch where it stands."""

    def staging(self, size: int) -> Tensor:
        """Host memory to copy from."""

    def send(self, staged: Tensor, event: Any) -> tuple[Tensor, Any]:
        """Start copying `staged` to fresh memory on the device; the event ends the copy. `event` may be used anew."""

    def wait(self, event: Any) -> None:
        """Hold this host thread until `event` is over."""

    def receive(self, sent: Tensor, event: Any) -> None:
        """Let the consumer's stream, not its host, wait for the copy."""

    def mark(self, event: Any) -> Any:
        """An event that is over when the device has done what the consumer launched so far."""


class HostLane:
    """To a device without streams and pinned memory: the CPU, or a backend other than CUDA. A copy is over when it returns."""

    def __init__(self, device: torch.device):
        self.device = device

    def admit(self) -> None: ...

    def staging(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def send(self, staged: Tensor, event: Any) -> tuple[Tensor, Any]:
        return (staged.clone() if self.device.type == "cpu" else staged.to(self.device)), None

    def wait(self, event: Any) -> None: ...

    def receive(self, sent: Tensor, event: Any) -> None: ...

    def mark(self, event: Any) -> Any: ...


class CudaLane:
    """Pinned memory and a copy stream of its own."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def admit(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise GraphError(
                "feed: a batch was asked of the ring inside a graph capture, which cannot hold a copy made outside it; take "
                "the batch before and copy it into the graph's inputs, or keep a corpus resident and call its fetch()."
            )

    def staging(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def send(self, staged: Tensor, event: Any) -> tuple[Tensor, Any]:
        with torch.cuda.stream(self.stream):
            sent = torch.empty(staged.numel(), dtype=torch.uint8, device=self.device)
            sent.copy_(staged, non_blocking=True)
            return sent, self._record(event, self.stream)

    def wait(self, event: Any) -> None:
        while not event.query():
            time.sleep(POLL_SECONDS)

    def receive(self, sent: Tensor, event: Any) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        sent.record_stream(stream)

    def mark(self, event: Any) -> Any:
        return self._record(event, torch.cuda.current_stream(self.device))

    @staticmethod
    def _record(event: Any, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = event or torch.cuda.Event()
        event.record(stream)
        return event


def lane_to(device: torch.device) -> Lane:
    return CudaLane(device) if device.type == "cuda" else HostLane(device)


@dataclass(frozen=True)
class Parcel:
    """A host batch made ready to send: which leaves must be copied, and where each lies in one flat run of bytes."""

    tree: Tree
    copied: Sequence[tuple[int, int, tuple[int, ...]]]  # (leaf, offset, strides)
    size: int  # bytes of the run
    payload: int  # bytes of the leaves themselves
    passed: int  # leaves already on the device

    def stage(self, staged: Tensor) -> None:
        """Write the leaves into host memory. One copy then takes them all: launching nine small ones would cost more than it
        moves."""
        with torch.no_grad():
            for leaf, offset, strides in self.copied:
                tensor = self.tree.leaves[leaf]
                _place(staged, offset, tensor, strides).copy_(tensor)

    def unpack(self, sent: Tensor) -> Any:
        """The batch, its copied leaves being views of `sent`."""
        leaves = list(self.tree.leaves)
        for leaf, offset, strides in self.copied:
            leaves[leaf] = _place(sent, offset, leaves[leaf], strides)
        return self.tree.rebuild(leaves)


def pack(batch: Any, device: torch.device, padding: Padding, always: bool = False) -> Parcel:
    """Look at every leaf of `batch`: what lies on `device` passes, the rest is given a place in the run. `always`: copy all
    the same."""
    tree = flatten(batch)
    padding.apply(tree)
    copied, offset, payload, passed = [], 0, 0, 0
    for i, leaf in tree.tensors():
        if leaf.device == device and not always:
            passed += 1
            continue
        _check_layout(leaf)
        copied.append((i, offset, _strides(leaf)))
        size = leaf.numel() * leaf.element_size()
        payload += size
        offset += -(-size // ALIGN) * ALIGN
    return Parcel(tree, copied, offset, payload, passed)


def _check_layout(leaf: Tensor) -> None:
    if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
        raise ValueError(
            f"feed: got a leaf with layout {leaf.layout}, wanted plain dense tensors; send its indices and values, or put it "
            f"on the device in the source."
        )


def _strides(leaf: Tensor) -> tuple[int, ...]:
    """Its own strides where the memory format means something (channels_last), else contiguous ones."""
    if leaf.dim() in (4, 5):
        form = torch.channels_last if leaf.dim() == 4 else torch.channels_last_3d
        if leaf.is_contiguous(memory_format=form):
            return leaf.stride()
    strides, step = [], 1
    for size in reversed(leaf.shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _place(run: Tensor, offset: int, like: Tensor, strides: tuple[int, ...]) -> Tensor:
    piece = run[offset : offset + like.numel() * like.element_size()]
    return piece.view(like.dtype).as_strided(like.shape, strides)


@dataclass(frozen=True)
class Served:
    """A batch and what it took: leaves that lay on the device because of the feed, were there already, or had to be copied."""

    batch: Any
    resident: int = 0
    passed: int = 0
    copied: int = 0
    bytes: int = 0
    waited: float = 0.0  # seconds for the source
    held_back: float = 0.0  # seconds for the device to catch up


def count_copied(size: int) -> None:
    if size:
        count("h2d_bytes", size)
