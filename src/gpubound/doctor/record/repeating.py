"""A step of a script in which no optimizer makes one: what repeats.

An update written by hand has a backward for each step. A generation loop or an inference server calls one module again and
again: the outermost, whose call is the step. Modules are watched only from a call of `eval()` on, and only while no optimizer
was made, because a hook on all modules slows each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ...watch.ops import replaced

FEWEST = 50  # calls without a step of an optimizer, after which they are steps
PATIENT = 200  # of backward, where an optimizer exists: it may update after many micro-batches


class Repeating:
    """Inside its block, calls `step` after every backward, or every call of a module, once it has repeated often enough.

    `name` says what a step is, in words; empty as long as nothing was chosen.
    """

    def __init__(self, step: Callable[[], None]):
        self._step = step
        self.name = ""
        self._over = self._has_optimizer = self._watching = False
        self._depth = self._backwards = 0
        self._calls: Counter[int] = Counter()  # by the id of an outermost module
        self._ending, self._hooks = ExitStack(), ExitStack()

    def __enter__(self) -> Repeating:
        for owner, name, make in (
            (torch.autograd, "backward", self._backward),
            (torch.optim.Optimizer, "__init__", self._optimizer),
            (nn.Module, "train", self._evaluating),  # eval() calls it, also that of transformers
        ):
            self._ending.enter_context(replaced(owner, name, make))
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
        self._ending.close()

    def end(self) -> None:
        """Choose nothing any more: an optimizer makes the steps."""
        self._over, self.name = True, ""
        self._hooks.close()

    def _optimizer(self, original: Callable) -> Callable:
        def made(*args: Any, **kwargs: Any) -> None:
            self._has_optimizer = True
            self._hooks.close()
            original(*args, **kwargs)

        return made

    def _backward(self, original: Callable) -> Callable:
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._hooks.close()  # it trains
            self._depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
            if self._over or self._depth:  # checkpointed layers call backward inside of it
                return result
            self._backwards += 1
            if self._backwards > (PATIENT if self._has_optimizer else FEWEST):
                self.name = "a call of backward()"
                self._step()
            return result

        return backward

    def _evaluating(self, original: Callable) -> Callable:
        def evaluating(module: nn.Module, mode: bool = True) -> nn.Module:
            if not (mode or self._over or self._has_optimizer or self._backwards or self._watching):
                self._watching, self._depth = True, 0
                for handle in (
                    register_module_forward_pre_hook(self._entered),
                    register_module_forward_hook(self._left, always_call=True),
                ):
                    self._hooks.callback(handle.remove)
            return original(module, mode)

        return evaluating

    def _entered(self, module: nn.Module, inputs: Any) -> None:
        self._depth += 1

    def _left(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth or self._over:
            return
        self._calls[id(module)] += 1
        if self._calls[id(module)] == FEWEST:
            self._hooks.close()
            self.name = f"a call of {type(module).__name__}"
            handle = module.register_forward_hook(lambda *_: None if self._over else self._step())
            self._ending.callback(handle.remove)
