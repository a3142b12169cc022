"""Memory of a training step: optimizer state on the host, and activation checkpointing.

In host memory moments and masters pass through the GPU in parts, as each is updated.

The copies of one part to the GPU, the update of the part before, and the copies of the one before that back to the host run at
the same time, on three streams, through two buffers. The host launches all of it and waits for nothing, so the first copies run
while backward does. Updated within backward (device_step.py) most of them do. A step then takes at least as long as its
bytes take over the link: a parameter of 10 bytes, both ways at once, 0.18 ms a million parameters at 55 GB/s.

An update is elementwise, so it has the bits of an update that keeps its state on the GPU. Only the random numbers by which
"bf16-pure" rounds are drawn for each part.

With activation checkpointing a block keeps only its input and computes the rest again in backward.

It costs a third more work and saves most of the memory, for every block or the first few. The first blocks recompute because
backward reaches them last, when the activations of the others have been freed. With "cheap", only gpubound's layers compute
norms and gated activations again (layers/linear_product.py); with "none", nothing is recomputed.
"""

import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from ..device import host_bytes
from ..formatting import readable
from ..kernels.adamw import BLOCK
from ..layers.linear_product import KEEP_ALL
from ..models.registry import switch

WHERE = "offload_optimizer"
PART = BLOCK << 15  # elements: 100 MB of fp32 moments and masters
SHARE = 0.9  # of the free host memory that the state may take
ALIGN = 256  # bytes between the tensors of a part
PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts
State = list[Tensor | None]  # moments and master, or None, of some elements


class StateMemory:
    """Memory of moments and masters, on the device that updates them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)

    def wait(self) -> None:
        """Wait until all that was launched can be read by the host, where it is in its memory."""


class HostMemory(StateMemory):
    """Host memory, and the way of its tensors through the GPU. On a CPU there is one memory, and the copies are plain ones."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._turn = 0
        self._buffers: list[_Buffer] = []
        self._loading, self._storing = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return zeros in host memory, pinned where there is a GPU."""
        if not size or self.device.type == "cpu":
            return torch.zeros(size, dtype=dtype, device="cpu")
        if self.device.type != "cuda":  # the pretend device
            return torch.zeros(size, dtype=dtype, device="cpu").pin_memory()
        # torch's pinned memory comes in powers of two: 34 GB would take 64. A mapping shares no page with another: none may be
        # registered twice, and is_pinned() asks of a storage's first byte.
        mapped = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        zeros = torch.frombuffer(mapped, dtype=dtype)  # which keeps it
        pages = -(-zeros.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(zeros.data_ptr(), pages, PORTABLE))
        finalize(self, _unregister, zeros, self.device).atexit = False
        return zeros

    def reserve(self, parts: list[State]) -> None:
        """Make the buffers, for the largest of these parts."""
        most = max((sum(_aligned(t.nbytes) for t in part if t is not None) for part in parts), default=0)
        self._buffers = [_Buffer(most, self.device) for _ in range(2)]
        for stream in (self._loading, self._storing):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self.device))  # on which the memory may have been in use
                for buffer in self._buffers:
                    buffer.bytes.record_stream(stream)  # else it could be given away while the stream still copies

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers on the GPU."""
        return sum(buffer.bytes.nbytes for buffer in self._buffers)

    def begin(self) -> None:
        """Begin an update of all parts: what the last one stored is loaded from now on."""
        if self._loading is not None and self._storing is not None:
            self._loading.wait_stream(self._storing)

    @contextmanager
    def on_device(self, stored: State) -> Iterator[State]:
        """Yield copies of one part's tensors on the GPU, which replace them after the block. The host does not wait."""
        buffer, self._turn = self._buffers[self._turn % 2], self._turn + 1
        copies = buffer.tensors_like(stored)
        pairs = [(copy, tensor) for copy, tensor in zip(copies, stored) if copy is not None and tensor is not None]
        with self._on(self._loading):
            buffer.wait(self._loading, "stored")
            for copy, tensor in pairs:
                copy.copy_(tensor, non_blocking=True)
            buffer.record(self._loading, "loaded")
        computing = None if self._loading is None else torch.cuda.current_stream(self.device)
        buffer.wait(computing, "loaded")
        yield copies
        buffer.record(computing, "updated")
        with self._on(self._storing):
            buffer.wait(self._storing, "updated")
            for copy, tensor in pairs:
                tensor.copy_(copy, non_blocking=True)
            buffer.record(self._storing, "stored")

    def wait(self) -> None:
        if self._storing is not None:
            self._storing.synchronize()

    def _on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager:
        return nullcontext() if stream is None else torch.cuda.stream(stream)


class _Buffer:
    """Memory of one part on the GPU, with an event for each of its three uses."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        uses = ("loaded", "updated", "stored") if device.type == "cuda" else ()
        self._events = {use: torch.cuda.Event() for use in uses}

    def tensors_like(self, tensors: State) -> State:
        views, at = State(), 0
        for tensor in tensors:
            size = 0 if tensor is None else tensor.nbytes
            views.append(None if tensor is None else self.bytes[at : at + size].view(tensor.dtype))
            at += _aligned(size)
        return views

    def record(self, stream: torch.cuda.Stream | None, use: str) -> None:
        if stream is not None:
            self._events[use].record(stream)

    def wait(self, stream: torch.cuda.Stream | None, use: str) -> None:
        if stream is not None:
            stream.wait_event(self._events[use])


def check(optimizer: Any, alone: bool, size: int = 0) -> None:
    """Raise ValueError for a step whose state, of `size` bytes, cannot be in host memory."""
    if not optimizer.by_element:
        raise ValueError(
            f"TrainStep: {WHERE}: got {type(optimizer).__name__}, wanted an optimizer whose state can pass through the GPU in "
            f"parts; take AdamW or AdamW8bit, or leave {WHERE} out."
        )
    if not alone:
        raise ValueError(
            f"TrainStep: {WHERE}: got several ranks, wanted one process; shard the model instead (parallel: fsdp), or leave "
            f"{WHERE} out."
        )
    free = host_bytes()
    if free is not None and size > SHARE * free:
        raise ValueError(
            f"TrainStep: {WHERE}: masters and moments take {readable(size)} of host memory, of which {readable(free)} are "
            f"free; take AdamW8bit and precision='bf16-split', 4 bytes a parameter."
        )


def move_to_host(parameters: list[Parameter]) -> Callable[[], None]:
    """Move parameters on a GPU to host memory, so that theirs is free for flat buffers. Return a call that moves those back
    which are still there."""
    moved = [(parameter, parameter.device) for parameter in parameters if parameter.is_cuda]
    for parameter, _ in moved:
        parameter.data = parameter.data.cpu()

    def move_back() -> None:
        for parameter, device in moved:
            if parameter.device != device:
                parameter.data = parameter.data.to(device)

    return move_back


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _unregister(memory: Tensor, device: torch.device) -> None:
    """Make `memory` pageable again, which lives until then: views of it may be all that the optimizer keeps."""
    torch.cuda.synchronize(device)  # a copy may still run
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


MODES = ("cheap", "none", "blocks")


def parse(recompute: str | int) -> tuple[str, int]:
    """Return (one of MODES, 0) or ("count", blocks).

    >>> parse("blocks"), parse("12")
    (('blocks', 0), ('count', 12))
    """
    if recompute in MODES:
        return str(recompute), 0
    if str(recompute).isdecimal():
        return "count", int(recompute)
    raise ValueError(f"recompute: got {recompute!r}, wanted cheap, none, blocks or a number of blocks.")


def recompute_as(model: nn.Module, how: str | int) -> Callable[[], None]:
    """Switch on what `how` says, as TrainStep takes it, and return a function that undoes it."""
    mode, count = parse(how)
    if mode == "cheap":
        return lambda: None
    return recompute_from(model, KEEP_ALL) if mode == "none" else recompute_blocks(model, count if mode == "count" else None)


def recompute_from(model: nn.Module, least: float) -> Callable[[], None]:
    """Let the parts of `model` recompute results of `least` bytes and more. Return a function that undoes it."""
    return switch((part, {"recompute_bytes": least}) for part in model.modules() if hasattr(part, "recompute_bytes"))


def recompute_blocks(model: nn.Module, count: int | None = None) -> Callable[[], None]:
    """Checkpoint every block of `model`, or the first `count` of them; return a function that undoes it."""
    # Dropout must drop the same elements twice. Only then is the RNG state saved: a captured step cannot read it.
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=drops_out(model))
    ready, blocks = _ready(model), blocks_of(model)
    if count is not None and not 0 <= count <= len(blocks):
        raise ValueError(f"recompute: got {count} blocks, the model has {len(blocks)}; give at most so many.")
    if not ready:
        return switch((block, {"forward": partial(again, block.forward)}) for block in blocks[:count])
    chosen = {id(module) for module in (ready if count is None else blocks[:count])}
    on = {"_gradient_checkpointing_func": again}
    return switch((module, on | {"gradient_checkpointing": id(module) in chosen}) for module in ready)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the outermost lists of two or more modules of one class that have parameters."""
    for module in model.modules():
        children = list(module.children())
        alike = len(children) > 1 and len({type(m) for m in children}) == 1
        if isinstance(module, nn.ModuleList | nn.Sequential) and alike and next(module.parameters(), None) is not None:
            return children
    raise ValueError(
        f"recompute='blocks': {type(model).__name__} has no list of blocks of one class (nn.ModuleList, nn.Sequential); "
        f"leave it out, or checkpoint inside the model."
    )


def drops_out(model: nn.Module) -> bool:
    """Return whether any module has dropout."""
    rates = ("p", "dropout", "attention_dropout")
    return any(isinstance(rate := getattr(m, name, None), float) and rate > 0 for m in model.modules() for name in rates)


def _ready(model: nn.Module) -> list[nn.Module]:
    """Return the modules with Hugging Face's protocol, as gpubound's blocks. Hugging Face marks the model around them, too."""
    return [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that can be recomputed."""
    return [module for module in _ready(model) if len(_ready(module)) == 1] or find_blocks(model)
