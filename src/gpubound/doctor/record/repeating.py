"""A step of a script in which no optimizer makes one: what repeats.

An update written by hand has a backward for each step. A generation loop or an inference server calls one module again and
again: the outermost with parameters, whose call is the step, or replays one CUDA graph. Modules are watched only until an
optimizer is made or backward is called, because a hook on all modules slows each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ...trace import hooked

FEWEST = 50  # calls of a module or replays of a graph, after which they are steps
UPDATES = 10  # calls of backward without any optimizer, after which they are steps
REPLAY = "a replay of a CUDA graph"
PATIENT = 200  # of backward, where an optimizer exists: it may update after many micro-batches


class Repeating:
    """Inside its block, calls `step` after every backward, or every call of a module, once it has repeated often enough.

    `name` says what a step is, in words; empty as long as nothing was chosen.
    """

    def __init__(self, step: Callable[[], None]):
        self._step = step
        self.name = ""
        self._over = self._has_optimizer = False
        self._inside = self._depth = self._backwards = 0  # modules, calls of backward
        self._calls: Counter[int] = Counter()  # by the id of an outermost module, or of a graph
        self._ending, self._hooks = ExitStack(), ExitStack()

    def __enter__(self) -> Repeating:
        for owner, name, hook in (
            (torch.autograd, "backward", self._backward),
            (torch.optim.Optimizer, "__init__", self._optimizer),
            (torch.cuda.CUDAGraph, "replay", self._replay),
        ):
            if hasattr(owner, name):  # the pretend device has no graphs
                self._ending.enter_context(hooked(owner, name, hook))
        for handle in (
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        ):
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
        self._ending.close()

    def end(self) -> None:
        """Choose nothing any more: an optimizer makes the steps."""
        self._over, self.name = True, ""
        self._hooks.close()

    def _optimizer(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        self._has_optimizer = True
        self._hooks.close()
        original(*args, **kwargs)

    def _backward(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        self._hooks.close()  # it trains
        self._depth += 1
        try:
            result = original(*args, **kwargs)
        finally:
            self._depth -= 1
        if self._over or self._depth:  # checkpointed layers call backward inside of it
            return result
        self._backwards += 1
        if self._backwards > (PATIENT if self._has_optimizer else UPDATES):
            self.name = "a call of backward()"
            self._step()
        return result

    def _replay(self, original: Callable, graph: torch.cuda.CUDAGraph) -> None:
        original(graph)
        if self._over or self._has_optimizer or self._backwards or self.name not in ("", REPLAY):
            return
        self._calls[id(graph)] += 1
        self.name = self.name or (REPLAY if self._calls[id(graph)] == FEWEST else "")
        if self.name and self._calls.most_common(1)[0][0] == id(graph):
            self._step()

    def _entered(self, module: nn.Module, inputs: Any) -> None:
        self._inside += 1

    def _left(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._inside = max(self._inside - 1, 0)
        if self._inside or self._over or self.name or next(module.parameters(), None) is None:
            return
        self._calls[id(module)] += 1
        if self._calls[id(module)] == FEWEST:
            self._hooks.close()
            self.name = f"a call of {type(module).__name__}"
            handle = module.register_forward_hook(lambda *_: None if self._over else self._step())
            self._ending.callback(handle.remove)
