"""Audit whether a CUDA graph can hold a function or model, and every module that its call passes through.

The audit captures from the outside in. A graph of the outermost callable holds all its modules, so where that capture succeeds
nothing else is tried. Where it fails, its modules are captured, and an obstacle is reported at the innermost one.
"""

import copy
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..device import label
from ..errors import GraphError
from ..trace import hooked
from ..watch import watch
from ..watch.events import Site, cause_of, here, site_of_error
from ..watch.ops import leave, listen
from . import Certificate, capture
from .captured import name_of
from .discover import Hazard, tensors_in
from .guards import StaticInputs
from .reachable import Reachable
from .recording import choose_device

INPUT = object()  # marks the place of a static input in a call
TOTALS = ("syncs", "h2d_copies", "d2h_copies", "allocations", "launches")  # of the ledger, in the first lines
SHARED = (nn.Module, str, bytes, bool, int, float, complex, type(None))  # never copied
GROWS = (
    "; its first call succeeded, so look for state that grows between calls, such as a cache: "
    "keep it in tensors of fixed size, and write with index_copy_ at a position that is a tensor"
)
NOT_CAPTURED = "Nothing was captured: there is no GPU here, so waits inside kernels and libraries stay unseen."


@dataclass(frozen=True)
class Obstacle:
    """A reason why no graph can hold a part, with the remedy, and its line if that is known."""

    reason: str
    line: Site | None = None

    @classmethod
    def of(cls, hazard: Hazard) -> "Obstacle":
        return cls(str(hazard), hazard.place.line)

    @property
    def key(self) -> str:
        """A key that is equal for one reason in several layers. A file's line number counts, names of layers do not."""
        if " of the replay is off by " in self.reason:  # the diagnosis may differ between a part and its holder
            return "replay"
        after = self.reason.partition(": ")[2] or self.reason
        return re.sub(r"(?<!\.py:)\b\d+", "*", self.reason if self.line is not None else after)


@dataclass
class AuditedPart:
    """A function or module with the arguments of its first call, and the result of its audit."""

    name: str
    fn: Callable
    args: tuple
    kwargs: dict[str, Any]
    parts: list["AuditedPart"] = field(default_factory=list)
    obstacles: list[Obstacle] = field(default_factory=list)
    inside: int = 0  # obstacles that its parts report
    within: str = ""  # the ready part whose graph holds this one
    certificate: str = ""
    not_copied: set[str] = field(default_factory=set)  # types of arguments that cannot be copied

    def __post_init__(self) -> None:
        self.args, self.kwargs = self.copies()

    @property
    def ready(self) -> bool:
        return not self.obstacles and not self.inside

    def copies(self) -> tuple[tuple, dict[str, Any]]:
        """Return copies of the arguments for one call, which may change them (a cache grows)."""
        return self._copy(self.args), self._copy(self.kwargs)

    def run(self) -> Any:
        args, kwargs = self.copies()
        return self.fn(*args, **kwargs)

    def walk(self) -> Iterator["AuditedPart"]:
        """Yield this part and all parts inside, in the order of their calls."""
        yield self
        for part in self.parts:
            yield from part.walk()

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone()
        if type(value) in (tuple, list):
            return type(value)(map(self._copy, value))
        if type(value) is dict:
            return {key: self._copy(item) for key, item in value.items()}
        if isinstance(value, SHARED) or callable(value):
            return value
        try:
            return copy.deepcopy(value)
        except (RuntimeError, TypeError):  # it holds a lock, or a tensor of a backward pass
            self.not_copied.add(type(value).__name__)
            return value


@dataclass(frozen=True)
class Audit:
    """Result of `audit`: the parts in the order of their calls, and the ledger of one call."""

    name: str
    device: torch.device
    parts: list[AuditedPart]
    ledger: dict[str, Any] | None = None

    @property
    def ready(self) -> bool:
        """True if no obstacle was found. Unless `captured` is true, only a CPU checked."""
        return all(part.ready for part in self.parts)

    @property
    def captured(self) -> bool:
        """True if there was a device on which graphs are captured."""
        return self.device.type == "cuda"

    def __str__(self) -> str:
        if self.ledger is None:
            counts = "its call raised, so nothing inside was tried"
        elif not self.captured:
            counts = "one call: waits, copies and launches were not counted without a GPU"
        else:
            totals = self.ledger["totals"]
            counts = "one call: " + ", ".join(f"{name} {totals[name]:g}" for name in TOTALS if name in totals)
        lines = [f"CUDA graph audit of {self.name} on {label(self.device)}", counts, ""]
        for names, part in _groups([part for part in self.parts if part.obstacles]):
            lines += [f"NOT READY  {names}", *(f"    {obstacle.reason}." for obstacle in part.obstacles)]
        waiting = [part for part in self.parts if part.inside and not part.obstacles]
        lines += [f"stopped by its parts  {names}" for names, _ in _groups(waiting)]
        outermost = [part for part in self.parts if part.ready and not part.within]
        lines += [f"ready      {names}{_remark(part)}" for names, part in _groups(outermost)]
        return "\n".join([*lines, "", self._summary()])

    def _summary(self) -> str:
        ready = f"{sum(part.ready for part in self.parts)} of {len(self.parts)} parts ready"
        if not self.ready:
            reasons = len({obstacle.key for part in self.parts for obstacle in part.obstacles})
            text = f"NOT READY: {reasons} reason{'s' * (reasons > 1)}; {ready}. Fix these and audit again: each may hide more."
        elif self.captured:
            text = "READY: one graph holds all of it, and replays on other inputs agree with eager calls."
        else:
            text = f"Nothing was found that stops a graph; {ready}."
        return text if self.captured else f"{text} {NOT_CAPTURED}"


def audit(
    fn: Callable,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    tolerance: float = 0.0,
) -> Audit:
    """Check whether CUDA graphs can hold `fn(*inputs, **kwargs)`, as a whole and module by module. `print` the result.

    fn is called twice: once to record the modules that it calls, once under the ledger. Each call gets copies of the arguments.
    Then it is captured; on a CPU its operations are checked and replayed eagerly. State that this changes is restored.

    tolerance  as for `gpubound.capture`: the largest relative difference between a replay and eager; 0: equal bits
    """
    if not callable(fn):
        raise ValueError(f"audit: fn: got {type(fn).__name__}, wanted a function or module; pass the callable itself.")
    root = AuditedPart(name_of(fn), fn, inputs, dict(kwargs or {}))
    device = choose_device(StaticInputs(()), Reachable(fn, [*tensors_in((root.args, root.kwargs))]))
    waits: list[Hazard] = []  # that no operation shows, such as torch.cuda.synchronize(), which raises on a CPU

    def note_wait(what: str, device_type: str) -> None:
        waits.append(Hazard(here(), cause_of("sync", what)))

    listen(note_wait)
    try:
        record_parts(root)
    except Exception as error:  # the user's code may raise anything: the error and its line are the audit's result
        root.obstacles = [*map(Obstacle.of, waits), _raised(error)]
        root.parts = []
        return Audit(root.name, device, [root])
    finally:
        leave(note_wait)
    with watch(gputrace=True if device.type == "cuda" else None) as ledger:
        root.run()
    _capture_parts(root, tolerance)
    return Audit(root.name, device, [*root.walk()], ledger.as_dict())


def record_parts(root: AuditedPart) -> None:
    """Call `root` once and add a part for each module that the call passes through."""
    stack, known = [root], {id(root.fn)}
    names = _named(root.fn, "", {}) if isinstance(root.fn, nn.Module) else {}
    caller = threading.get_ident()

    def watched(original: Callable, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != caller or id(module) in known:
            return original(module, *args, **kwargs)
        known.add(id(module))
        if id(module) not in names:  # the outermost module that a function calls
            names.update(_named(module, name_of(module), names))
        part = AuditedPart(names[id(module)], module, args, kwargs)
        stack[-1].parts.append(part)
        stack.append(part)
        try:
            return original(module, *args, **kwargs)
        finally:
            stack.pop()

    with hooked(nn.Module, "__call__", watched):
        root.run()


def _named(module: nn.Module, prefix: str, names: Mapping[int, str]) -> dict[int, str]:
    number = 1 + sum(re.fullmatch(rf"{re.escape(prefix)}(#\d+)?", name) is not None for name in names.values())
    prefix = prefix if number == 1 else f"{prefix}#{number}"
    return {id(child): name for name, child in module.named_modules(prefix=prefix) if id(child) not in names}


def _capture_parts(part: AuditedPart, tolerance: float) -> None:
    """Capture the part, and the parts inside where that fails."""
    certificate, obstacles = _capture(part, tolerance)
    if not obstacles:
        part.certificate = str(certificate)
        for inner in [*part.walk()][1:]:
            inner.within = part.name
        return
    for inner in part.parts:
        _capture_parts(inner, tolerance)
    reported = {obstacle.key for inner in part.parts for row in inner.walk() for obstacle in row.obstacles}
    part.obstacles = [obstacle for obstacle in obstacles if obstacle.key not in reported]
    part.inside = len(obstacles) - len(part.obstacles)


def _capture(part: AuditedPart, tolerance: float) -> tuple[Certificate | None, list[Obstacle]]:
    """Return the certificate of a graph of this part, and what stops it."""
    fn, ((leaves, spec), tensors) = part.fn, _flat(part.copies())

    def call(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        args, kwargs = tree_unflatten([next(rest) if leaf is INPUT else leaf for leaf in leaves], spec)
        return list(tensors_in(fn(*args, **kwargs)))

    call.__name__ = part.name
    try:
        certificate = capture(call, *tensors, tolerance=tolerance).certificate
    except GraphError as error:
        text = str(error).removeprefix("cannot capture ").removeprefix(f"{part.name}: ").rstrip(".")
        return None, [*dict.fromkeys(map(Obstacle.of, error.hazards))] or [Obstacle(text)]
    except Exception as error:  # as above: an error on other inputs, or inside a capture, is an obstacle
        return None, [_raised(error, GROWS)]
    assert certificate is not None
    if not certificate.outputs and not certificate.mutated:
        return None, [Obstacle("it returns no tensor and changes none, so a replay shows nothing; return its tensors")]
    return certificate, []


def _flat(arguments: tuple) -> tuple[tuple[list, Any], list[Tensor]]:
    """Return ((leaves, their nesting), the tensors), INPUT in place of a tensor. An object such as a cache is a leaf."""
    leaves, spec = tree_flatten(arguments, is_leaf=lambda value: type(value) not in (tuple, list, dict))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return ([INPUT if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec), tensors


def _raised(error: Exception, note: str = "") -> Obstacle:
    line = site_of_error(error)
    at = f" at {line.at}" if line is not None else ""
    text = (str(error).strip().partition("\n")[0] or "no message").rstrip(".")
    return Obstacle(f"raised {type(error).__name__}{at}: {text}{note}", line)


def _remark(part: AuditedPart) -> str:
    inside = f"  with {len([*part.walk()]) - 1} inside" if part.parts else ""
    shared = (
        f"  (could not copy {', '.join(sorted(part.not_copied))}: calls changed the caller's own)" if part.not_copied else ""
    )
    return inside + shared


def _groups(parts: list[AuditedPart]) -> list[tuple[str, AuditedPart]]:
    """Return (name, first part) of parts that differ only in a layer's number, which becomes *, with how many they are."""
    groups: dict[tuple, list[AuditedPart]] = {}
    for part in parts:
        name = re.sub(r"\b\d+\b", "*", part.name)
        groups.setdefault((name, tuple(o.key for o in part.obstacles), _remark(part)), []).append(part)
    return [(f"{key[0]} ({len(same)})" if len(same) > 1 else same[0].name, same[0]) for key, same in groups.items()]
