"""Finds the steps of a script: what ends one is an `Optimizer.step`, a call of gb.TrainStep, or whatever the user names."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...train.device_step import StepResult
from ...train.step import TrainStep
from ...watch.python_calls import replaced


class TrainSteps:
    """Calls `made` after every call of a gb.TrainStep that made a step. `inside` says whether one is being made.

    A replayed graph calls neither Optimizer.step nor backward. The step that is captured calls both several times: it is
    rehearsed and certified. So what is called inside says nothing of how many steps there were.
    """

    def __init__(self, on_step: Callable[[TrainStep, StepResult], None]):
        self._on_step = on_step
        self.inside = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        with replaced(TrainStep, "__call__", self._watched):
            yield

    def _watched(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def watched(train_step: TrainStep, *args: Any, **kwargs: Any) -> StepResult | None:
            self.inside = True
            try:
                result = original(train_step, *args, **kwargs)
            finally:
                self.inside = False
            if result is not None:  # None: its batches have come to their end
                self._on_step(train_step, result)
            return result

        return watched


class Steps:
    """Calls `ended` after every step, in the process that opened it: a forked worker's steps are its own.

    With several optimizers, as of a GAN or one a parameter, the first that steps is the one that counts; a TrainStep is one of
    them. `marker` names what ends a step instead: MODULE:FUNCTION, or an annotation (torch.profiler.record_function).
    """

    def __init__(self, ended: Callable[[], None], marker: str = ""):
        self._ended, self._marker = ended, marker
        self._leader: weakref.ref[Optimizer | TrainStep] | None = None
        self._train_steps = TrainSteps(lambda train_step, _: self._updated(train_step))
        self._ending = ExitStack()

    def __enter__(self) -> Steps:
        self._process = os.getpid()
        module, colon, function = self._marker.partition(":")
        if not self._marker:
            handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._updated(optimizer))
            self._ending.callback(handle.remove)
            self._ending.enter_context(self._train_steps.listening())
        elif colon:
            owner, name = _function(module, function, self._marker)
            self._ending.enter_context(replaced(owner, name, self._counted))
        else:
            self._ending.enter_context(replaced(record_function, "__exit__", self._annotated))
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.close()

    def _updated(self, optimizer: Optimizer | TrainStep) -> None:
        if self._train_steps.inside:
            return
        if self._leader is None or self._leader() is None:
            self._leader = weakref.ref(optimizer)
        if self._leader() is optimizer:
            self._step()

    def _counted(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._step()
            return result

        return counted

    def _annotated(self, original: Callable) -> Callable:
        def leave(annotation: Any, *error: Any) -> None:
            original(annotation, *error)
            if annotation.name == self._marker and not any(error):
                self._step()

        return leave

    def _step(self) -> None:
        if os.getpid() == self._process and not torch.compiler.is_compiling():
            self._ended()


def _function(module: str, function: str, marker: str) -> tuple[Any, str]:
    try:
        owner: Any = import_module(module)
        *path, name = function.split(".")
        for part in path:
            owner = getattr(owner, part)
        getattr(owner, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"step-marker: got {marker!r}, wanted MODULE:FUNCTION that can be imported, or an annotation's name: {error}."
        ) from error
    return owner, name
