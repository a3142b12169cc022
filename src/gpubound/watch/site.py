"""Where a stall belongs: the user's line, not the library's.

A sync is made deep inside torch, an optimizer or a trainer. The stack is walked outwards to the first frame that is neither
torch's, nor the standard library's, nor an installed package's; the innermost library frame on the way is kept as `via`.

In backward there may be no user frame at all: a C++ node runs on an autograd thread. Then the node's sequence number leads
back to the forward line that built it, which `Origins` noted while the forward ran.
"""

import linecache
import os
import re
import sys
import sysconfig
import threading
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType, FrameType

import torch

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PATHS = sysconfig.get_paths()
_STDLIB = tuple({os.path.abspath(_PATHS[name]) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({os.path.abspath(_PATHS[name]) + os.sep for name in ("purelib", "platlib")})
_GPUBOUND = os.path.dirname(os.path.dirname(_OWN)) + os.sep

USER, LIBRARY, STDLIB, TORCH, PLUMBING, OWN, UNNAMED = "user", "library", "stdlib", "torch", "plumbing", "own", "unnamed"

# torch's frames that stand on the way to everything and explain nothing
_PLUMBING = tuple(
    os.path.join(_TORCH, name)
    for name in ("_ops.py", "_compile.py", "_dynamo/", "utils/_contextlib.py", "utils/_python_dispatch.py", "utils/_pytree.py")
)


@lru_cache(maxsize=4096)
def owner(filename: str) -> str:
    """Whose code a file is. `<string>` and its like are UNNAMED: the user's only when they run as __main__."""
    if filename.startswith("<"):
        return USER if filename.startswith(("<stdin>", "<ipython")) else UNNAMED
    path = os.path.abspath(filename)
    if path.startswith(_OWN):
        return OWN
    if path.startswith(_TORCH):
        return PLUMBING if path.startswith(_PLUMBING) else TORCH
    if path.startswith((_GPUBOUND, *_INSTALLED)) or "site-packages" in path or "dist-packages" in path or _put_there(path):
        return LIBRARY
    return STDLIB if path.startswith(_STDLIB) else USER


def _put_there(path: str) -> bool:
    """Whether pip put this file into a folder of sys.path that is nobody's site-packages (`pip install --target`)."""
    for folder in map(os.path.abspath, filter(None, sys.path)):
        if path.startswith(folder + os.sep) and path[len(folder) + 1 :].split(os.sep)[0] in _packages(folder):
            return True
    return False


@cache
def _packages(folder: str) -> frozenset[str]:
    """The top-level names that pip's records in `folder` list. The user's own files may lie beside them."""
    names: set[str] = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        names.update(re.split("[/,]", line, maxsplit=1)[0] for line in record.read_text(errors="replace").splitlines())
    return frozenset(names)


@dataclass(frozen=True, slots=True)
class Site:
    """One statement in a source file: `line` to `end` when it spans several."""

    file: str
    line: int
    function: str
    code: str
    end: int

    def __str__(self) -> str:
        return f"{shorten(self.file)}:{self.line}" + ("" if self.function == "<module>" else f" in {self.function}")

    def as_dict(self) -> dict:
        return {"file": self.file, "line": self.line, "function": self.function, "code": self.code}


@dataclass(frozen=True, slots=True)
class Place:
    """Where something happened: the user's line if there is one, the library frame it went through, and in backward the
    node.
    """

    site: Site | None = None
    via: str = ""
    node: str = ""  # the autograd node that was running
    built: Site | None = None  # the forward line that made this node
    thread: str = ""  # empty for the thread that opened the ledger


def shorten(file: str) -> str:
    """The path from the working directory, or else its last two parts."""
    here = os.getcwd() + os.sep
    if file.startswith(here):
        return file[len(here) :]
    return os.sep.join(file.split(os.sep)[-2:])


_sites: dict[tuple[int, int], tuple[CodeType, Site]] = {}  # the code object is held so that its id is not reused


def site_of(frame: FrameType) -> Site:
    code, at = frame.f_code, frame.f_lasti
    known = _sites.get((id(code), at))
    if known is None:
        line = frame.f_lineno or code.co_firstlineno
        end = _last_line(code, at) or line
        text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
        known = _sites[id(code), at] = (code, Site(code.co_filename, line, code.co_name, text, max(line, end)))
    return known[1]


def _last_line(code: CodeType, at: int) -> int | None:
    for offset, (_, end, _, _) in enumerate(code.co_positions()):
        if offset * 2 == at:
            return end
    return None


def _in_library(frame: FrameType) -> str:
    """A library's frame in words, its file from the package's folder on."""
    file = os.path.abspath(frame.f_code.co_filename)
    roots = [os.path.dirname(_TORCH[:-1]), os.path.dirname(_GPUBOUND[:-1]), *(path[:-1] for path in _INSTALLED)]
    root = next((root for root in roots if file.startswith(root + os.sep)), None)
    return f"{file[len(root) + 1 :] if root else shorten(file)}:{frame.f_lineno} {frame.f_code.co_name}"


def _user_frame(frame: FrameType | None, in_backward: bool) -> tuple[FrameType | None, FrameType | None]:
    """(the user's frame, the library frame that it went through). In backward the search ends where the engine was called."""
    torch_frame = library_frame = None
    while frame is not None:
        code = frame.f_code
        whose = owner(code.co_filename)
        if whose is USER or (whose is UNNAMED and frame.f_globals.get("__name__") == "__main__"):
            return frame, library_frame or torch_frame
        if whose is OWN:  # what lies further in was called by a sensor or by the pretend device, not by the user
            torch_frame = library_frame = None
        elif whose is TORCH:
            if in_backward and code.co_name == "_engine_run_backward":
                break
            torch_frame = torch_frame or frame
        elif whose is LIBRARY:
            library_frame = library_frame or frame
        frame = frame.f_back
    return None, library_frame or torch_frame


class Origins:
    """Which forward line built each autograd node, by the node's sequence number."""

    LIMIT = 200_000  # entries; about 30 MB, some hundred steps of a large model

    def __init__(self):
        self._built: dict[int, tuple[str, Site]] = {}
        self.home = threading.get_ident()

    def note(self, op: str) -> None:
        """Called as `op` is dispatched: its node, if it got one, has just taken the newest sequence number."""
        if not torch.is_grad_enabled() or threading.get_ident() != self.home or _current_node() is not None:
            return
        number = torch._C._autograd._get_sequence_nr() - 1
        if number in self._built:
            return  # an op without a node: the number is still the one before
        frame, _ = _user_frame(sys._getframe(1), False)
        if frame is not None:
            if len(self._built) >= self.LIMIT:
                self._built = dict(list(self._built.items())[self.LIMIT // 2 :])
            self._built[number] = (_letters(op), site_of(frame))

    def of(self, node) -> Site | None:
        """The line that built `node`. Numbers count per thread, so another thread's node may carry the same one: the
        names must agree.
        """
        op, site = self._built.get(node._sequence_nr(), ("", None))
        name, made_by_torch, _ = node.name().partition("Backward0")
        name = _letters(name)
        return site if not made_by_torch or op.startswith(name) or name.startswith(op) else None


def _letters(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalpha())


def _current_node():
    return torch._C._current_autograd_node()


def here(origins: Origins | None = None) -> Place:
    """The place of whatever the caller is in the middle of."""
    node = _current_node()
    user, library = _user_frame(sys._getframe(1), node is not None)
    via = _in_library(library) if library is not None else ""
    thread = "" if origins is None or threading.get_ident() == origins.home else threading.current_thread().name
    if node is None:
        if user is None and library is not None:
            return Place(site_of(library), "", thread=thread)
        return Place(site_of(user) if user is not None else None, via, thread=thread)
    built = origins.of(node) if origins is not None else None
    return Place(site_of(user) if user is not None else None, via, node.name(), built, "autograd" if thread else "")
