"""gpubound.capture, the one CUDA-graph wrapper, and Captured, which it returns."""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..trace import count, notice
from .certify import Certificate, certify
from .inputs import StaticInputs
from .poison import Poison
from .prepare import prepare

WARMUP = 3  # one call for what only a first call does, one to use it, one to see that the state has settled


@dataclass(frozen=True)
class CaptureOptions:
    pool: Any
    state: Any
    verify: bool
    poison: bool
    warmup: int
    other_inputs: Sequence[tuple] | None
    tolerance: float
    clone: bool


class Captured:
    """A captured function. Call it with inputs like those it was captured with; `capture` explains the rest.

    The outputs are the graph's own tensors: the next call overwrites them. Clone what must outlive it, or capture with
    clone=True. One thread at a time may call it, and functions that share a pool must be replayed on one stream.
    """

    certificate: Certificate | None
    pool: Any
    device: torch.device
    mode: str

    def __init__(self, fn: Callable, inputs: tuple, options: CaptureOptions) -> None:
        self._fn, self._options = fn, options
        self.name = name_of(fn)
        self.replays = 0
        self._build(StaticInputs(inputs))

    def __call__(self, *inputs: Any) -> Any:
        """Copy the inputs into the static buffers, replay, and return the static outputs."""
        tensors = self._inputs.tensors(inputs)
        self._held.check()
        self._inputs.copy_in(tensors)
        if self._poison is None:
            self._runner.replay()
        else:
            self._last = [tensor.detach().clone() for tensor in tensors]
            self._poison.before()
            self._runner.replay()
            self._poison.after()
        self.replays += 1
        count("graph.replay")
        return self._give()

    def recapture(self, *inputs: Any) -> "Captured":
        """Capture again in place, after a weight has moved, a constant has changed or fn computes something else.

        Without arguments the inputs of the last call are the example. Tensors returned before belong to the old graph.
        """
        if not inputs and self._poison is not None:
            self._inputs.copy_in(self._last)
        self._build(StaticInputs(inputs) if inputs else self._inputs)
        return self

    @property
    def inputs(self) -> tuple:
        """The static buffers. What is written there and passed as it is costs no copy."""
        return self._inputs.static

    @property
    def held(self) -> list[str]:
        """The names of every tensor that the graph uses and keeps alive: those from outside, then its static inputs."""
        return list(self._held.names)

    @property
    def memory_bytes(self) -> int:
        """What the graph holds by itself: static inputs, and its pool's growth or, without one, the static outputs."""
        outputs = sum(leaf.nbytes for leaf in self._leaves if isinstance(leaf, Tensor))
        return sum(buffer.nbytes for buffer in self._inputs.buffers) + (self._runner.memory_bytes or outputs)

    def __repr__(self) -> str:
        proof = "not verified" if self.certificate is None else "verified"
        held = len(self.held)
        return f"Captured({self.name}, {self.mode} on {self.device}, {proof}, {self.replays} replays, holds {held} tensors)"

    def _build(self, inputs: StaticInputs) -> None:
        """Capture and certify; only then let go of the graph before."""
        options = self._options
        others = [inputs.tensors(given) for given in options.other_inputs] if options.other_inputs else None
        work = prepare(self.name, self._fn, inputs, options.state, options.pool, options.warmup)
        facts = None
        if options.verify:
            try:
                facts = certify(work, others, options.tolerance)
            except BaseException:
                work.reset()
                raise
        else:
            notice(
                f"capture({self.name}): verify=False: nothing has shown that a replay computes what the function does.",
                logging.WARNING,
            )
        self._inputs, self._runner, self._held = inputs, work.runner, work.held
        self._outputs = work.outputs
        self._leaves, self._spec = tree_flatten(work.outputs)
        self._fixed = isinstance(work.outputs, Tensor) or (
            type(work.outputs) is tuple and len(self._leaves) == len(work.outputs)
        )
        self.device, self.mode, self.pool = work.device, work.runner.mode, work.runner.pool
        self.certificate = Certificate(**facts, memory_bytes=self.memory_bytes) if facts else None
        self._poison, self._last = None, []
        if options.poison:
            self._last = [buffer.detach().clone() for buffer in inputs.buffers]
            self._poison = Poison(inputs.buffers, work.outputs, work.made_gradients(), work.foreign, self.pool, self.device)
        work.release()

    def _give(self) -> Any:
        if self._options.clone:
            return tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves], self._spec)
        return self._outputs if self._fixed else tree_unflatten(self._leaves, self._spec)


def capture(
    fn: Callable,
    *example_inputs: Any,
    pool: Any = None,
    state: Any = None,
    verify: bool = True,
    poison: bool = False,
    warmup: int = WARMUP,
    other_inputs: Sequence[tuple] | None = None,
    tolerance: float = 0.0,
    clone: bool = False,
) -> Captured:
    """Capture `fn(*example_inputs)` in a CUDA graph that checks itself; on a CPU, the same checks around eager calls.

    fn may do anything on one device: forward, backward, an optimizer's step. Inputs are tensors and constants in any nesting of
    tuples, lists and dicts. What else fn uses is found by watching it. The state that warm-up and capture change (weights,
    moments, caches, torch's random generators) is put back bit for bit.

    The certificate calls fn on other inputs, with the host's clocks decades ahead and with other random numbers: a graph that
    has baked one of them in is refused.

    pool          another Captured's `.pool`, to share its memory: for functions that are replayed one after the other
    state         modules, optimizers, tensors, generators in any nesting that fn uses unseen (in an extension's kernels)
    verify        compare replays on other inputs with eager calls: the certificate. False saves its time and says so
    poison        for tests: NaN into static inputs, outputs and free pool memory around every replay
    warmup        watched eager calls before the capture, at least 3
    other_inputs  a list of argument tuples for the certificate, a round each, where made-up values would not do
    tolerance     how far a replay may be from eager, over the largest value; 0 is bit for bit
    clone         return copies of the outputs, which the next call does not overwrite

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
    if not isinstance(warmup, int) or warmup < 3:
        raise ValueError(
            f"warmup: got {warmup!r}, wanted an integer of at least 3: one call for what only a first call does, "
            "one to use it, one to see it settled."
        )
    if not isinstance(tolerance, (int, float)) or not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance: got {tolerance!r}, wanted a finite number of 0 or more; 0 asks for equality bit for bit.")
    if other_inputs is not None and not (
        isinstance(other_inputs, (list, tuple)) and other_inputs and all(isinstance(given, tuple) for given in other_inputs)
    ):
        raise ValueError("other_inputs: wanted a list of argument tuples, one for each round, as in [(x1, y1), (x2, y2)].")
    return Captured(fn, example_inputs, CaptureOptions(pool, state, verify, poison, warmup, other_inputs, tolerance, clone))


def name_of(fn: Callable) -> str:
    """The function's name in messages."""
    if isinstance(fn, functools.partial):
        return name_of(fn.func)
    return type(fn).__name__ if isinstance(fn, nn.Module) else getattr(fn, "__name__", type(fn).__name__)
