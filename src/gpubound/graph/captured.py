"""gpubound.capture, the one CUDA-graph wrapper, and Captured, which it returns."""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import GraphError
from ..trace import count, notice, timed
from .certify import Certificate, Lend, certify, lend_nothing
from .guards import StaticInputs
from .recording import Recording
from .runner import open_gate


@dataclass(frozen=True)
class CaptureOptions:
    pool: Any
    state: Any
    verify: bool
    other_inputs: Sequence[tuple] | None
    tolerance: float
    clone: bool
    gate: Callable[[], None]
    warm_in_pool: bool = False
    lend: Lend = lend_nothing
    reads: Sequence[Tensor] = ()


class Captured:
    """A captured function, returned by `capture`. Call it with inputs like those of the capture.

    The outputs are the graph's own tensors, and the next call overwrites them: clone what you keep, or capture with clone=True.
    Only one thread at a time may call it. Functions that share a pool must be replayed on one stream.
    """

    certificate: Certificate | None
    pool: Any
    device: torch.device
    mode: str
    _recording: Recording
    _released: bool

    def __init__(self, fn: Callable, inputs: tuple, options: CaptureOptions) -> None:
        self._fn, self._options = fn, options
        self.name = name_of(fn)
        self.replays = 0
        self._build(StaticInputs(inputs))

    def __call__(self, *inputs: Any) -> Any:
        """Copy the inputs into the static buffers, replay, and return the static outputs."""
        if self._released:
            raise GraphError(f"{self.name}: its graph was given up by release(); capture it again with recapture().")
        recording, static = self._recording, self._recording.inputs
        tensors = static.tensors(inputs)
        recording.guards.check()
        static.copy_in(tensors)
        recording.runner.replay()
        self.replays += 1
        count("graph.replay")
        if self._options.clone:
            return tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves], self._spec)
        return recording.outputs if self._immutable else tree_unflatten(self._leaves, self._spec)

    def recapture(self, *inputs: Any) -> "Captured":
        """Capture again, in place: after a weight moved, a constant changed, or fn computes something else.

        Without arguments, the inputs of the last call serve as the example. Tensors returned before belong to the old graph.
        """
        self._options = replace(self._options, warm_in_pool=False)  # other graphs may be in the pool by now
        self._build(StaticInputs(inputs) if inputs else self._recording.inputs)
        return self

    def release(self) -> None:
        """Release the graph and its blocks of the pool. NCCL's communicators end only after the graphs that use them."""
        if not self._released:
            self._released = True
            self._recording.runner.release()

    @property
    def inputs(self) -> tuple:
        """Return the static input buffers. A call that is passed one of them copies nothing."""
        return self._recording.inputs.static

    @property
    def held(self) -> list[str]:
        """Names of all tensors that the graph uses and keeps alive: external tensors, then its static inputs."""
        return list(self._recording.guards.names)

    @property
    def memory_bytes(self) -> int:
        """Memory of the graph itself: static inputs, and the growth of its pool or, without a pool, the static outputs."""
        return self._recording.memory_bytes

    def __repr__(self) -> str:
        proof = "not verified" if self.certificate is None else "verified"
        held = len(self.held)
        return f"Captured({self.name}, {self.mode} on {self.device}, {proof}, {self.replays} replays, holds {held} tensors)"

    def _build(self, inputs: StaticInputs) -> None:
        """Capture and certify, then release the previous graph."""
        options = self._options
        others = [inputs.tensors(arguments) for arguments in options.other_inputs] if options.other_inputs else None
        rest = options.state, options.pool, options.gate, options.warm_in_pool, options.reads
        with timed(f"graph of {self.name}"):
            recording = Recording(self.name, self._fn, inputs, *rest)
        try:
            with timed(f"certificate of {self.name}"):
                certificate = certify(recording, others, options.tolerance, options.lend) if options.verify else None
                recording.refuse_changed_reads()
        except BaseException:
            recording.undo()
            raise
        if certificate is None:
            unproven = "verify=False: nothing has shown that a replay computes what the function does."
            notice(f"capture({self.name}): {unproven}", logging.WARNING)
        self._recording, self.certificate, outputs = recording, certificate, recording.outputs
        self._leaves, self._spec = tree_flatten(outputs)
        # else the caller gets new lists and dicts at every call
        self._immutable = isinstance(outputs, Tensor) or (type(outputs) is tuple and len(self._leaves) == len(outputs))
        self.device, self.mode, self.pool = recording.device, recording.runner.mode, recording.runner.pool
        self._released = False
        recording.runner.gate = open_gate
        recording.release_copies()


def capture(
    fn: Callable,
    *example_inputs: Any,
    pool: Any = None,
    state: Any = None,
    verify: bool = True,
    other_inputs: Sequence[tuple] | None = None,
    tolerance: float = 0.0,
    clone: bool = False,
    gate: Callable[[], None] = open_gate,
    warm_in_pool: bool = False,
    lend: Lend = lend_nothing,
    reads: Sequence[Tensor] = (),
) -> Captured:
    """Capture `fn(*example_inputs)` in a CUDA graph that checks itself. On a CPU the same checks surround eager calls.

    fn may do anything on one device: forward, backward, an optimizer's step. Its inputs are tensors and constants in any
    nesting of tuples, lists and dicts. capture watches fn and so finds every other tensor that it uses. Warm-up and capture
    change state (weights, moments, caches, torch's random generators); all of it is restored bit for bit.

    For the certificate, fn is called again with other inputs, and with other random numbers of the host. A graph that
    repeats an old value of any of these is refused.

    pool          another Captured's `.pool`, to share its memory between functions that are replayed one after the other
    state         what fn uses where watching cannot see it (in an extension's kernels): modules, optimizers, tensors and
                  generators, in any nesting
    verify        True: the certificate, replays on other inputs compared with eager calls. False: none, which is logged
    other_inputs  inputs for the certificate where invented values would not do: a list of argument tuples, one per round
    tolerance     the largest difference allowed between replay and eager, relative to the largest value; 0: equal bits
    clone         return copies of the outputs, which the next call does not overwrite
    gate          called before fn is run or replayed, until the certificate is there; what it raises ends the capture. For an
                  fn that waits for other processes, each of which must capture it at the same time
    warm_in_pool  warm up in the pool's memory, too. Only for the first graph of a pool: replays of one before would overwrite
                  what the warm-up makes and fn keeps
    lend          returns a context that lends tensors, whose memory the certificate's copies take instead of the host's. Those
                  that fn uses are left alone
    reads         tensors of `state` that fn does not write: they are not copied, and a fingerprint shows that it is so

    >>> import torch
    >>> double = capture(lambda x: x * 2, torch.ones(3))
    >>> double(torch.tensor([1.0, 2.0, 3.0]))
    tensor([2., 4., 6.])
    """
    if not callable(fn):
        raise ValueError(f"fn: got {type(fn).__name__}, wanted a function or module; pass the callable itself, not its result.")
    if pool is not None and not isinstance(pool, tuple):
        raise ValueError(
            f"pool: got {type(pool).__name__}, wanted a handle; pass another Captured's .pool, "
            "or torch.cuda.graph_pool_handle()."
        )
    if not isinstance(tolerance, (int, float)) or not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance: got {tolerance!r}, wanted a finite number of 0 or more; 0 asks for equality bit for bit.")
    if other_inputs is not None and not (
        isinstance(other_inputs, (list, tuple))
        and other_inputs
        and all(isinstance(arguments, tuple) for arguments in other_inputs)
    ):
        raise ValueError("other_inputs: wanted a list of argument tuples, one for each round, as in [(x1, y1), (x2, y2)].")
    options = CaptureOptions(pool, state, verify, other_inputs, tolerance, clone, gate, warm_in_pool, lend, reads)
    return Captured(fn, example_inputs, options)


def name_of(fn: Callable) -> str:
    """Return the function's name for messages."""
    if isinstance(fn, functools.partial):
        return name_of(fn.func)
    return type(fn).__name__ if isinstance(fn, nn.Module) else getattr(fn, "__name__", type(fn).__name__)
