"""Why a replay disagrees with eager: it ignores an input, fn differs from itself, or fn keeps something on the host."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .memory import EQUAL, Difference, difference
from .trial import Results, Subject, eager_call, replay_call
from .vary import SOURCES, varied

MOST_INPUTS = 16  # each costs two calls
ATOMIC = 1e-2  # sums in another order differ by less than this, a counter on the host by more

HOST_STATE = (
    "fn keeps something on the host between calls (a number, a list, an attribute that it rebinds); "
    "keep it in a tensor and update it in place"
)


def cause(subject: Subject, name: str, given: Sequence[Tensor], examples: Sequence[Tensor]) -> str:
    """The likeliest cause of a difference in the tensor called `name`, and what to do."""
    noise = _own_noise(subject, name, given)
    if not noise.bitwise and noise.relative < ATOMIC:
        return f"eager differs from itself by {noise.relative:.1e} (atomic adds); pass tolerance={4 * noise.relative:.0e}"
    if not noise.bitwise:
        return f"eager itself gives another result at each call from one state, so {HOST_STATE}"
    if _reads_the_host(subject, name, given):
        return (
            f"fn reads {SOURCES} on the host, which a graph bakes in; draw on the device (torch.rand), "
            "or pass the value as an input tensor"
        )
    if ignored := _ignored(subject, given, examples):
        return (
            f"the replay ignores {' and '.join(ignored)}, which fn takes from the host (a Python number, a NumPy copy, "
            "a cached tensor); compute from the input's tensor inside fn"
        )
    return f"eager agrees with itself, so {HOST_STATE}"


def _own_noise(subject: Subject, name: str, given: Sequence[Tensor]) -> Difference:
    """How far two eager calls from one state differ in the tensor called `name`."""
    return _between(*(_value(subject, name, given, turn=0) for _ in range(2)))


def _reads_the_host(subject: Subject, name: str, given: Sequence[Tensor]) -> bool:
    """Whether another time, or other random numbers, change what eager gives."""
    return not _between(*(_value(subject, name, given, turn) for turn in range(2))).bitwise


def _value(subject: Subject, name: str, given: Sequence[Tensor], turn: int) -> Any:
    """What an eager call gives in the tensor called `name`."""
    subject.reset()
    with varied(turn, subject.reach):
        results = eager_call(subject, given, made_up=True)
    values = {f"output {index}": out for index, out in enumerate(results.outputs)} | results.gradients
    values |= {memory.name: memory.tensor.clone() for memory in subject.snapshot.memories.values() if memory.name == name}
    return values[name]


def _between(one: Any, other: Any) -> Difference:
    return difference(one, other) if isinstance(one, Tensor) else EQUAL


def _ignored(subject: Subject, given: Sequence[Tensor], examples: Sequence[Tensor]) -> list[str]:
    """Inputs whose change alone moves eager's result and leaves the replay's as it was."""

    def both(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        subject.reset()
        eager = _copies(subject, eager_call(subject, tensors, made_up=True))
        subject.reset()
        return eager, _copies(subject, replay_call(subject, tensors))

    names = subject.inputs.names
    eager, replayed = both(examples)
    found = []
    for index, name in enumerate(names[:MOST_INPUTS]):
        other, replayed_other = both([given[i] if i == index else example for i, example in enumerate(examples)])
        if not _same(eager, other) and _same(replayed, replayed_other):
            found.append(name)
    return found


def _copies(subject: Subject, results: Results) -> list[Tensor]:
    """Everything that one call left: outputs, gradients, and the memory it may have written."""
    values = [*results.outputs, *results.gradients.values(), *(memory.live for memory in subject.snapshot.memories.values())]
    return [value.detach().clone() for value in values if isinstance(value, Tensor)]


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(a.shape == b.shape and difference(a, b).bitwise for a, b in zip(some, others))
