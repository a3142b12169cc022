"""Which line of the user's code is running: every complaint about a captured function names it."""

import linecache
import os
import sys
import warnings
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import CodeType, FrameType, TracebackType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep


@cache
def _inner() -> tuple[str, ...]:
    """Where code lies that no user wrote: this package, Triton, Python's import machinery and its way to show a warning."""
    triton = find_spec("triton")
    compiler = (os.path.dirname(triton.origin) + os.sep,) if triton and triton.origin else ()
    return (_HERE, "<frozen", warnings.__file__, *compiler)


# Files of torch whose reads of the device have a better remedy than the general one (explain.REMEDIES).
_CULPRITS = ("torch/optim/", "torch/amp/grad_scaler", "torch/nn/utils/clip_grad")


@dataclass(frozen=True)
class Place:
    """A line of code, and the file of torch through which it came to the operation, when that file is a known culprit."""

    file: str
    line: int
    culprit: str | None = None

    def __str__(self) -> str:
        return f"{_shown(self.file)}:{self.line}"

    @property
    def source(self) -> str:
        """The line's text, cut to what fits a message."""
        text = linecache.getline(self.file, self.line).strip()
        return text if len(text) <= 90 else text[:87] + "..."


def here() -> Place | None:
    """The innermost frame that is not torch's, Triton's or this package's; None on an autograd thread without Python."""
    culprit = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kind = _kind(frame.f_code)
        if kind is None:
            return Place(frame.f_code.co_filename, frame.f_lineno, culprit)
        culprit = culprit or (kind or None)
        frame = frame.f_back
    return None


def from_traceback(traceback: TracebackType | None) -> Place | None:
    """The innermost line of an exception that is not torch's, Triton's or this package's."""
    found = None
    while traceback is not None:
        if _kind(traceback.tb_frame.f_code) is None:
            found = Place(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


@cache
def _kind(code: CodeType) -> str | None:
    """None for the user's code, else "" or the culprit that a frame of torch stands for."""
    file = code.co_filename
    if file.startswith(_TORCH):
        plain = "torch/" + file[len(_TORCH) :].replace(os.sep, "/")
        return next((culprit for culprit in _CULPRITS if plain.startswith(culprit)), "")
    if file.startswith(_inner()) or file.endswith(f"{os.sep}contextlib.py"):
        return ""
    return None


@cache
def _shown(file: str) -> str:
    """The path relative to the working directory when it lies below it, else as it is."""
    inside = os.path.relpath(file) if os.path.isabs(file) else file
    return file if inside.startswith("..") else inside
