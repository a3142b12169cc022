"""Diagnosis of a replay that differs from eager: additional calls find the likeliest cause and its remedy."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .calls import Results, copied, run_eager, run_replay
from .memory import EQUAL, Difference, difference, whole
from .perturb import SOURCES, other_seeds
from .prepare import Recording

MOST_INPUTS = 16  # each costs two calls
ATOMIC = 1e-2  # sums in another order differ by less than this, a counter on the host by more

HOST_STATE = (
    "fn keeps something on the host between calls (a number, a list, an attribute that it rebinds); "
    "keep it in a tensor and update it in place"
)


def cause(recording: Recording, name: str, given: Sequence[Tensor], examples: Sequence[Tensor]) -> str:
    """The likeliest cause of a difference in the tensor called `name`, and what to do."""
    first, again = (_value(recording, name, given, turn=0) for _ in range(2))
    noise = _between(first, again)
    if not noise.bitwise and noise.relative < ATOMIC:
        return f"eager differs from itself by {noise.relative:.1e} (atomic adds); pass tolerance={4 * noise.relative:.0e}"
    if not noise.bitwise:
        return f"eager itself gives another result at each call from one state, so {HOST_STATE}"
    if not _between(again, _value(recording, name, given, turn=1)).bitwise:
        return (
            f"fn reads {SOURCES} on the host, which a graph bakes in; draw on the device (torch.rand), "
            "or pass the value as an input tensor"
        )
    if ignored := _ignored(recording, given, examples):
        return (
            f"the replay ignores {' and '.join(ignored)}, which fn takes from the host (a Python number, a NumPy copy, "
            "a cached tensor); compute from the input's tensor inside fn"
        )
    return f"eager agrees with itself, so {HOST_STATE}"


def _value(recording: Recording, name: str, given: Sequence[Tensor], turn: int) -> Any:
    """Return the tensor called `name` of an eager call; another turn has other seeds of the host's random generators."""
    recording.reset()
    with other_seeds(turn):
        results = run_eager(recording, given, made_up=True)
    return copied(dict(_left(recording, results))[name])


def _left(recording: Recording, results: Results) -> list[tuple[str, Any]]:
    """Return all results of one call by name: outputs, gradients, and the memory that the call may have written."""
    outputs = [(f"output {index}", output) for index, output in enumerate(results.outputs)]
    memories = [(memory.name, whole(memory.tensor)) for memory in recording.snapshot.memories.values()]
    return [*outputs, *results.gradients.items(), *memories]


def _between(one: Any, other: Any) -> Difference:
    return difference(one, other) if isinstance(one, Tensor) else EQUAL


def _ignored(recording: Recording, given: Sequence[Tensor], examples: Sequence[Tensor]) -> list[str]:
    """Return the names of the inputs whose change alone alters the eager result but not the replay's."""

    def both(tensors: Sequence[Tensor]) -> tuple[list, list]:
        recording.reset()
        eager = [copied(value) for _, value in _left(recording, run_eager(recording, tensors, made_up=True))]
        recording.reset()
        return eager, [copied(value) for _, value in _left(recording, run_replay(recording, tensors))]

    eager, replayed = both(examples)
    found = []
    for index, name in enumerate(recording.inputs.names[:MOST_INPUTS]):
        other, replayed_other = both([given[i] if i == index else example for i, example in enumerate(examples)])
        if not _same(eager, other) and _same(replayed, replayed_other):
            found.append(name)
    return found


def _same(some: list, others: list) -> bool:
    """Return whether two calls left the same tensors."""
    one, other = ([value for value in left if isinstance(value, Tensor)] for left in (some, others))
    return len(one) == len(other) and all(a.shape == b.shape and difference(a, b).bitwise for a, b in zip(one, other))
