"""The audit: one call under the ledger, then a capture with a certificate of the whole, and of each part where that fails.

It goes from the outside in. A graph of the whole holds all its parts, so where the whole is ready nothing more is tried.
Where it is not, its parts are, and a line that stops several is told at the innermost one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...errors import GraphError
from ...graph import Certificate, capture
from ...graph.captured import name_of
from ...graph.held import StaticInputs
from ...graph.operations import Hazard, tensors_in
from ...graph.prepare import choose_device
from ...graph.reach import Reach
from ...watch import watch
from ...watch.events import cause_of
from ...watch.site import here, site_of_error
from ...watch.unseen import leave, listen
from .parts import AuditedPart, parts_of
from .readiness import Obstacle, PartReadiness, Readiness

INPUT = object()  # stands where a trial puts a static input
AGAIN = (
    "; its first call went well, so look for what it keeps between calls and lets grow, such as a cache: "
    "keep that in tensors of fixed size, and write with index_copy_ at a position that is a tensor"
)


def ready(
    fn: Callable,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    other_inputs: Sequence[tuple] | None = None,
    tolerance: float = 0.0,
) -> Readiness:
    """Try whether CUDA graphs can hold `fn(*inputs, **kwargs)`, as a whole and module by module. `print` the result.

    fn is called twice as it is: once to see which modules it passes through, once under the ledger. What it is given is copied
    for each call. Then it is captured, on a CPU rehearsed: state that this changes is put back.

    other_inputs  inputs for the replays where invented values would not do: a list of argument tuples
    tolerance     as for `gpubound.capture`: the largest relative difference between a replay and eager; 0: equal bits
    """
    if not callable(fn):
        raise ValueError(f"ready: fn: got {type(fn).__name__}, wanted a function or module; pass the callable itself.")
    root = AuditedPart(name_of(fn), fn, inputs, dict(kwargs or {})).keep()
    device = choose_device(StaticInputs(()), Reach(fn, [*tensors_in((root.args, root.kwargs))]))
    heard: list[Hazard] = []
    try:
        with _listening(heard):
            parts_of(root)
    except Exception as error:  # the user's own code may raise anything: its name and line are the audit's answer
        obstacles = [*map(Obstacle.of, heard), _raised(error)]
        return Readiness(root.name, device, [PartReadiness(root.name, obstacles=obstacles)])
    with watch(gputrace=True if device.type == "cuda" else None) as ledger:
        root.run()
    return Readiness(root.name, device, list(_audit(root, other_inputs, tolerance)), ledger.as_dict())


@contextmanager
def _listening(heard: list[Hazard]) -> Iterator[None]:
    """Waits that no operation shows. Only a capture on a GPU would find them, and a CPU has none."""

    def note(what: str, device_type: str) -> None:
        heard.append(Hazard(here(), cause_of("sync", what)))

    listen(note)
    try:
        yield
    finally:
        leave(note)


def _audit(part: AuditedPart, others: Sequence[tuple] | None, tolerance: float, within: str = "") -> Iterator[PartReadiness]:
    """The part's row, and those of the parts inside."""
    if within:  # a ready part, whose graph holds this one
        for inner in part.walk():
            yield PartReadiness(inner.name, within=within, calls=inner.calls)
        return
    certificate, obstacles = _tried(part, others, tolerance)
    holder = "" if obstacles else part.name
    inside = [row for inner in part.parts for row in _audit(inner, None, tolerance, holder)]
    told = {obstacle.key for row in inside for obstacle in row.obstacles}
    own = [obstacle for obstacle in obstacles if obstacle.key not in told]
    yield PartReadiness(
        part.name,
        obstacles=own,
        inside=len(obstacles) - len(own),
        holds=0 if obstacles else len(inside),
        certificate=str(certificate) if certificate is not None else "",
        calls=part.calls,
        shared=tuple(dict.fromkeys(part.shared)),
    )
    yield from inside


def _tried(part: AuditedPart, others: Sequence[tuple] | None, tolerance: float) -> tuple[Certificate | None, list[Obstacle]]:
    """(the certificate of a graph of this part, what stops it)."""
    call, tensors = _with_tensors(part)
    flat = [tuple(_flat((given, part.kwargs))[1]) for given in others] if others else None
    try:
        certificate = capture(call, *tensors, other_inputs=flat, tolerance=tolerance).certificate
    except GraphError as error:
        return None, [*dict.fromkeys(map(Obstacle.of, error.hazards))] or [Obstacle(_sentence(error, part.name))]
    except Exception as error:  # as above: what a part raises on other inputs, or inside a capture, is what stops it
        return None, [_raised(error, AGAIN)]
    assert certificate is not None
    if not certificate.outputs and not certificate.mutated:
        return None, [Obstacle("it gives no tensor and changes none, so nothing shows what a replay does; return its tensors")]
    return certificate, []


def _with_tensors(part: AuditedPart) -> tuple[Callable, list[Tensor]]:
    """The part as a function of its tensors alone, and these. All else that it was given is a constant, or state."""
    fn = part.fn
    (given, spec), tensors = _flat(part.given())

    def call(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        args, kwargs = tree_unflatten([next(rest) if leaf is INPUT else leaf for leaf in given], spec)
        return list(tensors_in(fn(*args, **kwargs)))

    call.__name__ = part.name
    return call, tensors


def _flat(given: tuple) -> tuple[tuple[list, Any], list[Tensor]]:
    """((leaves, their nesting), the tensors), INPUT where a tensor was. An object, such as a cache, stays whole."""
    leaves, spec = tree_flatten(given, is_leaf=lambda value: type(value) not in (tuple, list, dict))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return ([INPUT if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec), tensors


def _raised(error: Exception, note: str = "") -> Obstacle:
    line = site_of_error(error)
    at = f" at {line.at}" if line is not None else ""
    said = (str(error).strip().partition("\n")[0] or "no message").rstrip(".")
    return Obstacle(f"raised {type(error).__name__}{at}: {said}{note}", line)


def _sentence(error: GraphError, name: str) -> str:
    return str(error).removeprefix("cannot capture ").removeprefix(f"{name}: ").rstrip(".")
