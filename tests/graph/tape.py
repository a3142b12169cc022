"""A graph for the CPU: it records the operations of one call and does them again without Python, as a CUDA graph does.

The library's own CPU mode calls the function anew, so it cannot show what a graph gets wrong: a Python number baked in, an
input that is never read again, a gradient that stays where the capture put it. This runner can.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from gpubound.graph.discover import launches_passed_to, tensors_in
from gpubound.graph.reachable import storage_key


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
        fresh = [index for index, made in enumerate(tensors_in(out)) if storage_key(made) not in given]
        self.steps.append(lambda: redo(func, args, kwargs, out, fresh))
        return out

    def launch(self, kernel: Any, tensors: list[Tensor], launch: Callable[[], Any]) -> Any:
        def alone():
            with _disable_current_modes():  # the interpreter works with operations of its own
                return launch()

        self.steps.append(alone)
        return alone()


def redo(func, args, kwargs, out, fresh: list[int]) -> None:
    """The operation again, its results copied to where they first lay."""
    before, after = list(tensors_in(out)), list(tensors_in(func(*args, **kwargs)))
    for index in fresh:
        before[index].copy_(after[index])


class TapeRunner:
    mode = "tape"
    binds_gradients = True
    pool = stream = None
    memory_bytes = 0

    def run(self, call):
        return call()

    def release_cached(self):
        pass

    def needs_plain_call(self):
        return False

    def noting_waits(self, lines):
        return nullcontext()

    def record(self, name, call, generators, external):
        recorder = Recorder()
        with launches_passed_to(recorder.launch), recorder:
            outputs = call()
        self.steps = recorder.steps
        leaves, spec = tree_flatten(outputs)
        return tree_unflatten([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

    def replay(self):
        with torch.no_grad():
            for step in self.steps:
                step()
