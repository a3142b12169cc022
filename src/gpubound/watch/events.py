"""One vocabulary of host events: what makes a GPU wait for its host, why, what to write instead, and which line of the user did
it.

An event has a kind (sync, h2d, launch, ...) and says in a few words what was called. Sensors count events, the ledger adds
them up, `no_stall` forbids some, and a graph cannot hold others: all of them take causes and remedies from here. `ops.py` finds
the events among dispatched ops and among Python calls that dispatch none.

A stall is attributed to the user's line, not the library's. A sync is made deep inside torch, an optimizer or a trainer. The
stack is walked outwards to the first frame that is neither torch's, nor the standard library's, nor an installed package's; the
innermost library frame on the way is kept as `via`.

In backward there may be no user frame at all: a C++ node runs on an autograd thread. Then the node's sequence number leads
back to the forward line that built it, which `Origins` noted while the forward ran.
"""

import linecache
import os
import re
import sys
import sysconfig
import threading
import tokenize
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType

import torch


@dataclass(frozen=True, slots=True)
class Cause:
    """Effect of a line, as the end of a sentence that begins with the line, and the remedy."""

    does: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.does}; {self.remedy}"


def shape(remedy: str) -> Cause:
    """Return the cause of an op whose result has a size that is read back first."""
    return Cause("makes a shape that depends on the values", remedy)


READ = Cause(
    "reads the device from the host",
    "keep the value on the device (torch.where, masks), or read it a step later from pinned memory",
)
WAIT = Cause("waits for the device", "leave it out, or wait once at the end; the device keeps its order without it")
UPLOAD = Cause(
    "copies a CPU tensor to the device",
    "make it there, or copy it from pinned memory with non_blocking=True (gpubound.feed does both)",
)
DOWNLOAD = Cause("copies the device to the host", "copy into pinned memory with non_blocking=True, and read it a step later")
HOST_DATA = Cause(
    "builds a tensor from host data", "make it once before the step, or from sizes alone (torch.full, torch.arange)"
)
NUMBER = Cause(
    "copies a Python number from the host into one place",
    "write x[i : i + 1] = number; at an index that is a tensor index_fill_, at a mask masked_fill_",
)
FILL_VALUE = Cause("reads the value to fill with from the device", "pass a Python number, or use torch.where(mask, value, x)")
DEVIATION = Cause(
    "checks from the host that no standard deviation is negative",
    "write mean + std * torch.randn_like(mean), or rsample().detach() of a distribution, which do not check",
)
BOUNDS = Cause("reads the smallest and the largest value for its bounds", "pass min= and max=")
FACTORISING = ("_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_lstsq", "linalg_matrix_exp", "linalg_pinv")
FACTORISED = Cause(
    "waits for a factorisation and its error code", "factorise every n steps, or iterate on the device by products"
)
MASK = shape("use torch.where or multiply by the mask instead of indexing with it")
MASK_PUT = shape("use torch.where(mask, values, x) instead of assigning through the mask")
PRINT = Cause("prints a tensor, which reads the device from the host", "print it a step later, or a copy of it")

_COUNT = shape("count with scatter_add into a tensor of fixed size")

# Ops that read a size or a value back from the device before they return: roughly the user's expression, and the cause.
WAITING_OPS: dict[str, tuple[str, Cause]] = {
    "_local_scalar_dense": ("item", READ),
    "equal": ("torch.equal", READ),
    "allclose": ("allclose", READ),
    "nonzero": ("nonzero", shape("use torch.where(condition, a, b), or torch.nonzero_static with a fixed size")),
    "masked_select": ("masked_select", shape("use torch.where, or multiply by the mask")),
    "masked_scatter_backward": (
        "masked_scatter's backward",
        shape("gather by mask.cumsum(-1) - 1 and choose by torch.where instead of masked_scatter"),
    ),
    "_unique2": ("unique", _COUNT),
    "unique_dim": ("unique", _COUNT),
    "unique_consecutive": ("unique_consecutive", _COUNT),
    "unique_dim_consecutive": ("unique_consecutive", _COUNT),
    "bincount": ("bincount", shape("use scatter_add into torch.zeros(bins)")),
    "repeat_interleave": ("repeat_interleave", shape("pass output_size=")),
    "_linalg_check_errors": (
        "linalg error check",
        Cause("checks a factorisation from the host", "use the _ex form (torch.linalg.inv_ex, solve_ex, cholesky_ex)"),
    ),
    **{name: (name.strip("_").replace("_", ".", 1), FACTORISED) for name in FACTORISING},
    "_to_sparse": ("to_sparse", shape("keep it dense, or make the sparse tensor once")),
}

# Python calls that read or wait without a dispatched op, named as in ops.py.
SCALARS = "torch.tensor of device scalars"
WAITING_CALLS: dict[str, Cause] = {
    "print": PRINT,
    SCALARS: Cause("reads each scalar from the device", "use torch.stack"),
}

# Files of torch whose reads of the device have a special remedy.
THROUGH: dict[str, Cause] = {
    "torch/optim/lr_scheduler.py": Cause(
        "reads the metric that it is given from the host", "step this scheduler once an epoch, by a value that was read anyway"
    ),
    "torch/optim/lbfgs.py": Cause(
        "decides on the host how its search goes on", "take fewer steps of more work (max_iter, larger batches), or Adam"
    ),
    "torch/optim/": Cause(
        "reads the optimizer's step from the host", "build the optimizer with capturable=True (on a CPU: fused=True)"
    ),
    "torch/amp/grad_scaler": Cause("reads the scaler's found_inf from the host", "train in bf16 without a GradScaler"),
    "torch/nn/utils/clip_grad": Cause("reads the gradient norm from the host", "pass error_if_nonfinite=False"),
}

# Every kind of event, with its cause unless a table above has a more specific one.
KINDS: dict[str, Cause] = {
    "sync": WAIT,
    "h2d": UPLOAD,
    "d2h": DOWNLOAD,
    "repeat": Cause("uploads bytes that are on the device already", "upload them once and keep the device's tensor"),
    "clone": Cause("clones a tensor whose source is not used again", "use the source itself"),
    "launch": Cause("launches work on the device", "fuse it, or capture the step in a graph (gpubound.capture)"),
    "cpu_op": Cause("computes on the host", "move the tensors to the device, or the work into the loader"),
    "alloc": Cause("asks the driver for memory, which stops the device", "run the largest shapes first; keep shapes fixed"),
    "free": Cause("gives memory back to the driver, which stops the device", "leave out torch.cuda.empty_cache()"),
    "retry": Cause("runs out of memory, frees what is unused and tries again", "make the batch or the model smaller"),
    "pin": Cause("pins host memory, which stops the device", "pin a buffer once, and use it again"),
    "compile": Cause("compiles", "warm up with every shape, or mark what varies as dynamic"),
    "gc": Cause("collects garbage", "call gc.freeze() after the warm-up, or collect between steps"),
    "fallback": Cause("takes a slow path", "fix what its reason names"),
}

MASKING = "boolean mask"  # name of the wait of an op with a boolean mask
FILLING, DRAWING, BINNING = "fill value", "torch.normal", "histc"
EMPTIED = "empty_cache"  # frees memory
_BY_WORDS = (
    WAITING_CALLS | dict(WAITING_OPS.values()) | {MASKING: MASK, FILLING: FILL_VALUE, DRAWING: DEVIATION, BINNING: BOUNDS}
)


def cause_of(kind: str, what: str = "", through: str = "") -> Cause:
    """Return the cause of an event of this kind. `through` is a key of THROUGH, for a read by a file of torch."""
    if kind == "sync" and through in THROUGH:
        return THROUGH[through]
    return _BY_WORDS.get(what, KINDS[kind]) if kind == "sync" else KINDS[kind]


_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LOADERS = os.path.join(_TORCH, "utils", "data") + os.sep
_PATHS = sysconfig.get_paths()
_STDLIB = tuple({os.path.abspath(_PATHS[name]) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({os.path.abspath(_PATHS[name]) + os.sep for name in ("purelib", "platlib")})
_GPUBOUND = os.path.dirname(os.path.dirname(_OWN)) + os.sep

USER, LIBRARY, STDLIB, UNNAMED, OWN = "user", "library", "stdlib", "unnamed", "own"
TORCH, READER, PLUMBING = "torch", "reader", "plumbing"

# torch's files whose reads have a special remedy
_READERS = {os.path.join(_TORCH, name.removeprefix("torch/")): name for name in THROUGH}


@cache
def _plumbing() -> tuple[str, ...]:
    """Return files that are on every stack and explain nothing: torch's dispatch, graph and doctor here, Triton."""
    names = (
        "_ops.py",
        "_compile.py",
        "_dynamo/",
        "utils/_contextlib.py",
        "utils/_device.py",
        "utils/_python_dispatch.py",
        "utils/_pytree.py",
    )
    triton = find_spec("triton")
    compiler = (os.path.dirname(triton.origin) + os.sep,) if triton and triton.origin else ()
    own = (*(os.path.join(_GPUBOUND, name) + os.sep for name in ("graph", "doctor")), os.path.join(_GPUBOUND, "trace.py"))
    return (*(os.path.join(_TORCH, name) for name in names), *own, *compiler)


@lru_cache(maxsize=4096)
def owner(filename: str) -> str:
    """Return the owner of a file. `<string>` and similar names are UNNAMED: the user's only if they run as __main__."""
    if filename.startswith("<"):
        return USER if filename.startswith(("<stdin>", "<ipython")) else UNNAMED
    path = os.path.abspath(filename)
    if path.startswith(_OWN):
        return OWN
    if path.startswith(_plumbing()):
        return PLUMBING
    if path.startswith(_TORCH):
        return READER if path.startswith(tuple(_READERS)) else TORCH
    installed = path.startswith((_GPUBOUND, *_INSTALLED)) or "site-packages" in path or "dist-packages" in path
    if installed or _installed_there(path):
        return LIBRARY
    return STDLIB if path.startswith(_STDLIB) else USER


def _installed_there(path: str) -> bool:
    """Return whether pip put this file into a folder of sys.path outside site-packages (`pip install --target`)."""
    folders = [folder for folder in map(os.path.abspath, filter(None, sys.path)) if path.startswith(folder + os.sep)]
    return any(path[len(folder) + 1 :].split(os.sep)[0] in _packages(folder) for folder in folders)


@cache
def _packages(folder: str) -> frozenset[str]:
    """Return the top-level names that pip's records in `folder` list. The user's files may be in the same folder."""
    records = [record.read_text(errors="replace") for record in Path(folder).glob("*.dist-info/RECORD")]
    return frozenset(re.split("[/,]", line, maxsplit=1)[0] for record in records for line in record.splitlines())


@dataclass(frozen=True, slots=True)
class Site:
    """A statement in a source file: `line` to `end` if it spans several lines."""

    file: str
    line: int
    function: str
    code: str
    end: int

    def __str__(self) -> str:
        return self.at + ("" if self.function == "<module>" else f" in {self.function}")

    @property
    def at(self) -> str:
        """File and line alone."""
        return f"{shorten(self.file)}:{self.line}"

    @property
    def in_package(self) -> str:
        """A library's line, its file relative to the package's parent: "torch/nn/utils/clip_grad.py:41 clip_grad_norm_"."""
        file = os.path.abspath(self.file)
        roots = [os.path.dirname(_TORCH[:-1]), os.path.dirname(_GPUBOUND[:-1]), *(path[:-1] for path in _INSTALLED)]
        root = next((root for root in roots if file.startswith(root + os.sep)), None)
        return f"{file[len(root) + 1 :] if root else shorten(file)}:{self.line} {self.function}"

    @property
    def portable(self) -> "Site":
        """This line without the machine's folders: relative to the package's parent or to the working directory."""
        return replace(self, file=self.in_package.rpartition(":")[0])

    def as_dict(self) -> dict:
        return {"file": self.file, "line": self.line, "function": self.function, "code": self.code}


@dataclass(frozen=True, slots=True)
class Place:
    """Location of an event: the user's line, the library's line on the way, and in backward the node."""

    site: Site | None = None
    via: Site | None = None
    through: str = ""  # a key of events.THROUGH: the file of torch that read the device
    node: str = ""  # the autograd node that was running
    built: Site | None = None  # the forward line that made this node
    thread: str = ""  # empty for the thread that opened the ledger

    @property
    def line(self) -> Site | None:
        """The innermost line that is not torch's: a library's own, else the user's."""
        return self.via if self.via is not None and owner(self.via.file) is LIBRARY else self.site


def shorten(file: str) -> str:
    """Return the path relative to the working directory, or else its last two parts."""
    here = os.getcwd() + os.sep
    return file[len(here) :] if file.startswith(here) else os.sep.join(file.split(os.sep)[-2:])


_HEADER = re.compile(r"(async\s+)?(for|with)\b")


def _last_of_header(file: str, line: int) -> int:
    """Return the last line of a block's header, up to the colon. Python's positions for the next iteration of a loop span the
    whole loop, and those for the end of a `with` its whole block."""
    with suppress(tokenize.TokenError, SyntaxError):
        rest = iter(linecache.getlines(file)[line - 1 :])
        for token in tokenize.generate_tokens(lambda: next(rest, "")):
            if token.type == tokenize.NEWLINE:
                return line - 1 + token.start[0]
    return line


_sites: dict[tuple[int, int], tuple[CodeType, Site]] = {}  # the code object is held so that its id is not reused


def site_of(frame: FrameType, at: int | None = None, line: int | None = None) -> Site:
    """Return the statement that a frame is in; `at` and `line`: its position when an exception left it."""
    code, at = frame.f_code, frame.f_lasti if at is None else at
    known = _sites.get((id(code), at))
    if known is None:
        line = line or frame.f_lineno or code.co_firstlineno
        _, end, _, _ = next(islice(code.co_positions(), max(at, 0) // 2, None))
        text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
        if end and end > line and _HEADER.match(text):
            end = min(end, _last_of_header(code.co_filename, line))
        known = _sites[id(code), at] = (code, Site(code.co_filename, line, code.co_name, text, max(line, end or line)))
    return known[1]


def site_of_error(error: BaseException) -> Site | None:
    """Return the innermost line of an exception that is the user's or a library's."""
    site, step = None, error.__traceback__
    while step is not None:
        if owner(step.tb_frame.f_code.co_filename) in (USER, LIBRARY):
            site = site_of(step.tb_frame, step.tb_lasti, step.tb_lineno)
        step = step.tb_next
    return site


def site_in(frames: list[dict]) -> Site | None:
    """Return the user's line among a recorded stack's frames, innermost first."""
    for file, line, function in ((frame["filename"], frame["line"], frame["name"]) for frame in frames):
        if file != "??" and owner(file) is USER:
            return Site(file, line, function, linecache.getline(file, line).strip(), line)
    return None


def _walk(frame: FrameType | None, in_backward: bool) -> tuple[FrameType | None, FrameType | None, str]:
    """Return the user's frame, and a library's frame and a reader's file on the way. In backward the walk ends at the call of
    the engine."""
    torch_frame = library_frame = None
    reader = ""
    while frame is not None:
        code = frame.f_code
        whose = owner(code.co_filename)
        if whose is USER or (whose is UNNAMED and frame.f_globals.get("__name__") == "__main__"):
            return frame, library_frame or torch_frame, reader
        if whose is OWN:  # inner frames were called by a sensor or by the pretend device, not by the user
            torch_frame, library_frame, reader = None, None, ""
        elif whose is TORCH:
            if in_backward and code.co_name == "_engine_run_backward":
                break
            torch_frame = torch_frame or frame
        elif whose is READER:
            torch_frame, reader = torch_frame or frame, reader or code.co_filename
        elif whose is LIBRARY:
            library_frame = library_frame or frame
        frame = frame.f_back
    return None, library_frame or torch_frame, reader


@dataclass(frozen=True, slots=True)
class Stack:
    """The statements that a thread is in: the user's and the libraries', the innermost first, the one of torch that they are
    in, and whether a DataLoader called them."""

    sites: tuple[Site, ...]
    torch: Site | None = None
    loading: bool = False

    @property
    def user(self) -> Site | None:
        return next((site for site in self.sites if owner(site.file) is not LIBRARY), None)


def stack_of(frame: FrameType | None) -> Stack:
    """Return the stack of a frame, which may be another thread's."""
    sites: list[Site] = []
    inner, loading = None, False
    while frame is not None:
        whose = owner(frame.f_code.co_filename)
        main = whose is UNNAMED and frame.f_globals.get("__name__") == "__main__"
        if whose in (USER, LIBRARY) or main:
            sites.append(site_of(frame))
        elif whose in (TORCH, READER):
            inner = site_of(frame) if inner is None and not sites else inner
            loading |= frame.f_code.co_filename.startswith(_LOADERS)
        frame = frame.f_back
    return Stack(tuple(sites), inner, loading)


class Origins:
    """The forward line that built each autograd node, by the node's sequence number."""

    LIMIT = 200_000  # entries; about 30 MB, some hundred steps of a large model

    def __init__(self):
        self._built: dict[int, tuple[str, Site]] = {}
        self.home = threading.get_ident()

    def note(self, op: str) -> None:
        """Record the line of `op` when it is dispatched: its node, if it got one, has the newest sequence number."""
        if not torch.is_grad_enabled() or threading.get_ident() != self.home or torch._C._current_autograd_node() is not None:
            return
        number = torch._C._autograd._get_sequence_nr() - 1
        if number in self._built:
            return  # an op without a node: the number is that of the op before
        frame, _, _ = _walk(sys._getframe(1), False)
        if frame is not None:
            if len(self._built) >= self.LIMIT:
                self._built = dict(list(self._built.items())[self.LIMIT // 2 :])
            self._built[number] = (_letters(op), site_of(frame))

    def of(self, node) -> Site | None:
        """Return the line that built `node`. Each thread counts separately, so names must agree, too."""
        op, site = self._built.get(node._sequence_nr(), ("", None))
        name, is_torch_node, _ = node.name().partition("Backward0")
        name = _letters(name)
        return site if not is_torch_node or op.startswith(name) or name.startswith(op) else None


def _letters(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalpha())


@cache
def _through(reader: str) -> str:
    return next(name for file, name in _READERS.items() if reader.startswith(file))


def here(origins: Origins | None = None) -> Place:
    """Return the place of the caller's current work."""
    node = torch._C._current_autograd_node()
    user, library, reader = _walk(sys._getframe(1), node is not None)
    site, via = (site_of(frame) if frame is not None else None for frame in (user, library))
    through = _through(reader) if reader else ""
    thread = "" if origins is None or threading.get_ident() == origins.home else threading.current_thread().name
    if node is None:
        return Place(via, None, through, thread=thread) if site is None else Place(site, via, through, thread=thread)
    built = origins.of(node) if origins is not None else None
    return Place(site, via, through, node.name(), built, "autograd" if thread else "")
