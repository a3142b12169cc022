"""Run a user's script in this process, as `python script.py args` or `python -m module args` would, and find its steps.

The script is `__main__` with its sys.argv and sys.path[0], and its children started by spawn import it as always, without the
doctor. It is stopped by an exception that no `except Exception` catches, so that its `finally` blocks run. A step ends with an
`Optimizer.step`, a call of gb.TrainStep, or the function or annotation that the user names.

Where no optimizer makes the steps, a step is what repeats. An update written by hand has a backward for each step. A generation
loop or an inference server calls one module again and again: the outermost with parameters, whose call is the step, or replays
one CUDA graph. Modules are watched only until an optimizer is made or backward is called, because a hook on all modules slows
each of them.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import runpy
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import get_importer
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...trace import hooked, replaced
from ...train.device_step import StepResult
from ...train.step import TrainStep
from ...watch.pretend import NAME, SimTensor

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


_LIBRARY = str(Path(__file__).parents[2]) + os.sep
RUNS = "fix it, and check that it runs without the doctor"
NO_CUDA = "it needs CUDA itself, which the pretend device of a dry run is not; run the doctor on a GPU"
NO_OP = "the pretend device of a dry run has no {}; run the doctor on a GPU"
NOT_PLAIN = "it needs plain tensors, which those of a dry run's pretend device are not; run the doctor on a GPU"
MISSING_OP = re.compile(r"Could not run '(\S+)'|the pretend device has no (.+)")


class StopScript(BaseException):
    """Raised in the script when the doctor has measured all phases."""


class Forked(SystemExit):
    """Ends a process that the script forked, with the exit code that it would have had."""


@dataclass(frozen=True)
class Script:
    target: str  # a file, or a module's name
    arguments: tuple[str, ...] = ()
    module: bool = False

    def __post_init__(self) -> None:
        if not self.module and self.target.endswith(".ipynb"):
            raise ValueError(
                f"script: {self.target} is a notebook, which python cannot run; make a script of it, as jupyter nbconvert "
                "--to script does."
            )

    @property
    def name(self) -> str:
        """The name in reports, without folders of this machine."""
        return f"-m {self.target}" if self.module else os.path.basename(os.path.abspath(self.target))

    def run(self) -> bool:
        """Run the script. Return whether it ended by itself. A failing script raises one sentence, after its traceback."""
        try:
            with self._stage(), _forks_leave():
                if self.module:
                    runpy.run_module(self.target, run_name="__main__", alter_sys=True)
                elif get_importer(self.target) is None:
                    _run_file(os.path.abspath(self.target))
                else:  # a folder or an archive, with a __main__ in it
                    runpy.run_path(self.target, run_name="__main__")
        except StopScript:
            return False
        except Forked:
            raise
        except SystemExit as stop:
            if stop.code in (None, 0):
                return True
            if not isinstance(stop.code, int):
                print(stop.code, file=sys.stderr)
            raise self._failed(stop.code if isinstance(stop.code, int) else 1) from stop
        except Exception as error:
            own = _its_own(error.__traceback__)
            if isinstance(error, ImportError) and own is None:
                what = f"there is no module {self.target} that" if self.module else f"{self.target} is nothing that"
                raise ValueError(f"script: {what} can be run: {str(error).rstrip('.')}.") from error
            traceback.print_exception(type(error), error, own)
            if isinstance(error, BrokenPipeError):  # `| head`, perhaps: the command knows whose reader has left
                raise
            raise self._failed(1, self._advice(error)) from error
        return True

    def _failed(self, code: int, advice: str = RUNS) -> ValueError:
        return ValueError(f"{self.name} failed with code {code}; {advice}.")

    def _advice(self, error: Exception) -> str:
        if isinstance(error, ImportError) and "no known parent package" in str(error):
            return f"it imports from its own package, as a module alone can; run gpubound doctor {self._as_module()}"
        if isinstance(error, NotImplementedError) and (missing := MISSING_OP.search(str(error))):
            return NO_OP.format(missing[1] or missing[2])
        if re.search(rf"{SimTensor.__name__}|{NAME}(?!\w*Type)", str(error)):  # "simgpuFloatType" is in torch's own messages
            return NOT_PLAIN
        return NO_CUDA if _asked_for_cuda(error) else RUNS

    def _as_module(self) -> str:
        """Return the arguments that run this file by its package, and the folder to do it in."""
        path = Path(self.target).resolve()
        package = path if path.is_dir() else path.parent
        names = [package.name] if path.is_dir() or path.stem == "__main__" else [package.name, path.stem]
        home = package.parent
        while (home / "__init__.py").exists():
            home, names = home.parent, [home.name, *names]
        where = os.path.relpath(home)
        return f"-m {'.'.join(names)}" + ("" if where == "." else f" in {where}")

    @contextmanager
    def _stage(self) -> Iterator[None]:
        """Set what Python sets before it runs a script; afterwards restore it, the working directory and the streams."""
        argv, path, here = sys.argv, sys.path[:], os.getcwd()
        folder = here if self.module else os.path.dirname(os.path.realpath(self.target))
        sys.argv = [self.target, *self.arguments]
        sys.path[:] = [folder, *path[1:]]
        try:
            with _streams(), replaced(os, "_exit", _leaving), hooked(threading, "excepthook", _unless_enough):
                yield
        finally:
            sys.argv, sys.path[:] = argv, path
            os.chdir(here)


@contextmanager
def _forks_leave() -> Iterator[None]:
    """End a process that the script forked as it would end without the doctor: only its parent has a verdict."""
    process = os.getpid()
    try:
        yield
    except SystemExit as stop:
        if os.getpid() == process:
            raise
        if not isinstance(stop.code, int | None):  # sys.exit("why") prints it, and is code 1
            print(stop.code, file=sys.stderr)
        raise Forked(stop.code if isinstance(stop.code, int | None) else 1) from None
    except Exception as error:
        if os.getpid() == process:
            raise
        traceback.print_exception(type(error), error, _its_own(error.__traceback__))
        raise Forked(1) from None
    if os.getpid() != process:
        raise Forked(0)


def _unless_enough(report: Callable, failed: Any) -> None:
    """Report a failed thread, but not one whose step was the last one."""
    if failed.exc_type is not StopScript:
        report(failed)


def _leaving(leave: Callable[[int], None]) -> Callable[[int], None]:
    """Replace os._exit, so that it ends the script but not the doctor: no verdict with code 0 would pass every budget. Forks
    exit."""
    process, thread = os.getpid(), threading.get_ident()

    def left(code: int) -> None:
        if os.getpid() != process:
            leave(code)
        if threading.get_ident() == thread:
            raise SystemExit(code)
        print(f"gpubound doctor: a thread of the script called os._exit({code}); there is no verdict.", file=sys.stderr)
        leave(code or 2)

    return left


_LEFT: list[object] = []  # streams of scripts: one that wraps the doctor's would close it when it is collected


@contextmanager
def _streams() -> Iterator[None]:
    """Restore sys.stdout and sys.stderr after the block, unless the script has taken over their buffers."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    try:
        yield
    finally:
        for name, stream in before.items():
            if (now := getattr(sys, name)) is not stream:
                _LEFT.append(now)
                with suppress(AttributeError, ValueError, OSError):  # buffered output comes before the verdict
                    now.flush()
                with suppress(ValueError, OSError):  # closed or detached by the script
                    stream.flush()
                    setattr(sys, name, stream)


def _run_file(file: str) -> None:
    """Run a file as Python does: its `__file__` is absolute, sys.argv[0] is as typed. runpy makes them the same."""
    main, before = ModuleType("__main__"), sys.modules["__main__"]
    main.__dict__.update(__file__=file, __builtins__=__builtins__)
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)  # this file's __future__ is not the script's
    sys.modules["__main__"] = main
    try:
        exec(code, main.__dict__)
    finally:
        sys.modules["__main__"] = before


def _asked_for_cuda(error: Exception) -> bool:
    """Return whether the error is a request for CUDA on a machine without it. Torch has many messages for it, half of them
    raised in torch/cuda."""
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    return not torch.cuda.is_available() and (
        "cuda" in str(error).lower() or file.startswith(os.path.dirname(torch.cuda.__file__))
    )


def _its_own(step: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the script's first frame on; None if there is none."""
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if not file.startswith((_LIBRARY, "<frozen")) and os.path.basename(file) not in ("runpy.py", "contextlib.py"):
            return step
        step = step.tb_next
    return None


PATIENCE = 30.0  # seconds: a thread that saves a file may end by itself


def end_anyway(code: int, before: Collection[threading.Thread], patience: float = PATIENCE) -> None:
    """End this process with `code` if, `patience` seconds after Python began to exit, threads or processes run that are not in
    `before`."""
    if not (left := _left(before)):
        return
    ending = threading.Event()
    threading._register_atexit(ending.set)  # type: ignore[attr-defined]  # atexit's own comes after threads were waited for
    threading.Thread(target=_watch, args=(ending, code, before, patience), daemon=True).start()
    _say(f"the script was stopped, and left {left}; waiting for up to {patience:g} s.")


def _watch(ending: threading.Event, code: int, before: Collection[threading.Thread], patience: float) -> None:
    ending.wait()
    end = time.monotonic() + patience
    while time.monotonic() < end and _left(before):
        time.sleep(min(patience, 0.1))
    if left := _left(before):
        _say(f"ended {left}, which waited for the script.")
        for child in multiprocessing.active_children():
            child.kill()
        sys.stdout.flush()
        os._exit(code)


def _left(before: Collection[threading.Thread]) -> str:
    threads = [thread.name for thread in threading.enumerate() if not thread.daemon and thread not in before]
    children = [child.name for child in multiprocessing.active_children() if not child.daemon]
    return ", ".join(threads + children)


def _say(text: str) -> None:
    print(f"gpubound doctor: {text}", file=sys.stderr, flush=True)


class TrainSteps:
    """Call `on_step` after every call of a gb.TrainStep that made a step. `inside` is true during such a call.

    A replayed graph calls neither Optimizer.step nor backward. The step that is captured calls both several times, for its
    warm-up and certificate. So calls inside do not show how many steps there were.
    """

    def __init__(self, on_step: Callable[[TrainStep, StepResult], None]):
        self._on_step = on_step
        self.inside = False

    def listening(self) -> AbstractContextManager[None]:
        return hooked(TrainStep, "__call__", self._watched)

    def _watched(self, original: Callable, train_step: TrainStep, *args: Any, **kwargs: Any) -> StepResult | None:
        self.inside = True
        try:
            result = original(train_step, *args, **kwargs)
        finally:
            self.inside = False
        if result is not None:  # None: there are no more batches
            self._on_step(train_step, result)
        return result


class Steps:
    """Call `ended` after every step, in the process that opened it: a forked worker's steps do not count.

    Without an optimizer a step is what repeats, and `name` says what. With several optimizers, as in a GAN or with one per
    parameter, the first that steps counts; a TrainStep is one of them. `marker` names what ends a step instead:
    MODULE:FUNCTION, or an annotation (torch.profiler.record_function).
    """

    def __init__(self, ended: Callable[[], None], marker: str = ""):
        self._ended, self._marker = ended, marker
        self.name = ""
        self._leader: weakref.ref[Optimizer | TrainStep] | None = None
        self._repeating = Repeating(lambda: None if self._train_steps.inside else self._step())
        self._train_steps = TrainSteps(lambda train_step, _: self._updated(train_step))
        self._ending = ExitStack()

    def __enter__(self) -> Steps:
        self._process = os.getpid()
        module, colon, function = self._marker.partition(":")
        if not self._marker:
            handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._updated(optimizer))
            self._ending.callback(handle.remove)
            self._ending.enter_context(self._train_steps.listening())
            self._ending.enter_context(self._repeating)
        elif colon:
            owner, name = _function(module, function, self._marker)
            self._ending.enter_context(hooked(owner, name, self._counted))
        else:
            self._ending.enter_context(hooked(record_function, "__exit__", self._annotated))
        return self

    def __exit__(self, *error: object) -> None:
        self.name = self._repeating.name
        self._ending.close()

    def _updated(self, optimizer: Optimizer | TrainStep) -> None:
        if self._train_steps.inside:
            return
        if self._leader is None:
            self._repeating.end()
        if self._leader is None or self._leader() is None:
            self._leader = weakref.ref(optimizer)
        if self._leader() is optimizer:
            self._step()

    def _counted(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._step()
        return result

    def _annotated(self, leave: Callable, annotation: Any, *error: Any) -> None:
        leave(annotation, *error)
        if annotation.name == self._marker and not any(error):
            self._step()

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
