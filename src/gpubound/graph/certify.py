"""The certificate: replays with inputs other than those captured with, against eager calls from the same state.

A graph that has baked in what it should compute agrees with eager on the inputs it was captured with, and on no others. Each
round starts from one state, runs eagerly, puts the state back, replays, and compares every output, every tensor written and
every gradient made. The next round goes on from where the last ended, so counters and moments are seen to move as they should.
Where they disagree, more calls find out why.

Beside the capture's snapshot one copy of the state is enough: it holds what a round starts from, then in exchange what eager
has left. The first round starts from the snapshot itself.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import GraphError
from ..words import readable
from .memory import EQUAL, Difference, Memory, Room, difference, where, whole
from .prepare import Recording
from .reach import storage_key
from .vary import SOURCES, varied, vary


@dataclass(frozen=True)
class Certificate:
    """What `capture` compared with eager calls, and how well it agreed."""

    rounds: int
    inputs: int
    unvaried: tuple[str, ...]  # inputs whose values could not be varied: give other_inputs= to cover them
    outputs: int
    mutated: tuple[str, ...]  # every tensor that changed, by name; gradients that the function makes are among them
    bitwise: bool
    worst: Difference
    worst_name: str
    tolerance: float
    same_random_state: bool  # after a replay the generators stand where eager leaves them
    seconds: float
    memory_bytes: int  # held by the graph from now on
    snapshot_bytes: int  # copies that the capture needed while it ran
    snapshot_on: str

    def __str__(self) -> str:
        agreement = (
            "bit for bit" if self.bitwise else f"within {self.worst.relative:.1e} of the largest value ({self.worst_name})"
        )
        names = ", ".join(self.mutated[:4]) + (f" and {len(self.mutated) - 4} more" if len(self.mutated) > 4 else "")
        compared = f"{_count(self.outputs, 'output')} and {_count(len(self.mutated), 'mutated tensor')} compared"
        unvaried = f", not {', '.join(self.unvaried)} (pass other_inputs=)" if self.unvaried else ""
        held = f"{readable(self.snapshot_bytes)} of snapshots in {self.snapshot_on}"
        snapshots = held if self.snapshot_bytes else "no snapshot was needed"
        lines = [
            f"{_count(self.rounds, 'round')} of replay against eager agree {agreement}",
            f"{compared}: {names}" if names else compared,
            f"{self.inputs - len(self.unvaried)} of {_count(self.inputs, 'input')} varied{unvaried}",
            f"{self.seconds:.2f} s, {snapshots}; the graph holds {readable(self.memory_bytes)}",
        ]
        elsewhere = "a replay leaves the random generators elsewhere than an eager call does"
        return "\n".join(lines if self.same_random_state else [*lines, elsewhere])


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


@dataclass(frozen=True)
class Results:
    """What one call gave. The memory that it wrote lies where it is."""

    outputs: list[Any]
    gradients: dict[str, Tensor | None]
    random: list[Tensor]


def certify(recording: Recording, others: list[list[Tensor]] | None, tolerance: float) -> Certificate:
    """Run the rounds. GraphError names the first tensor that disagrees."""
    started = time.perf_counter()
    examples = [buffer.detach().clone() for buffer in recording.inputs.buffers]
    names = recording.inputs.names
    rounds = [(given, []) for given in others] if others else [vary(examples, index) for index in range(2)]
    recording.reset()
    room = Room(recording.device)
    kept = list(recording.snapshot.memories.values())
    workspace = [Memory(memory.tensor, memory.name, room, now=False) for memory in kept]
    (worst_name, worst), same_random = ("", EQUAL), True
    for index, (given, _) in enumerate(rounds):
        last = index == len(rounds) - 1
        verdicts, random = _round(recording, given, workspace, others is None, turn=index, last=last)
        same_random = same_random and random
        for name, found in verdicts:
            if not found.bitwise and not found.relative <= tolerance:
                why = cause(recording, name, given, examples)
                raise GraphError(
                    f"{recording.name}: {name} of the replay is off by {found.absolute:.3g} ({found.relative:.1e} of the "
                    f"largest value) from eager in round {index + 1} of {len(rounds)}: {why}."
                )
        worst_name, worst = max([(worst_name, worst), *verdicts], key=lambda it: (not it[1].bitwise, it[1].relative))
    copies, places = sum(memory.nbytes for memory in [*kept, *workspace]), where([*kept, *workspace])
    mutated = [memory.name for memory in kept if memory.changed()]
    made = [leaf.name for leaf in recording.new_leaves if leaf.name not in mutated]
    recording.reset()
    recording.inputs.copy_in(examples)
    unvaried = set.intersection(*(set(same) for _, same in rounds))
    return Certificate(
        rounds=len(rounds),
        inputs=len(examples),
        unvaried=tuple(names[index] for index in sorted(unvaried)),
        outputs=len(tree_leaves(recording.outputs)),
        mutated=tuple(mutated + made),
        bitwise=worst.bitwise,
        worst=worst,
        worst_name=worst_name,
        tolerance=tolerance,
        same_random_state=same_random,
        seconds=time.perf_counter() - started,
        memory_bytes=recording.memory_bytes,
        snapshot_bytes=copies,
        snapshot_on=places,
    )


def _round(
    recording: Recording, given: list[Tensor], workspace: list[Memory], made_up: bool, turn: int, last: bool
) -> tuple[list[tuple[str, Difference]], bool]:
    """Eager, then the replay, from one state: at first the snapshot, later the workspace, which holds eager's results next."""
    before = recording.generators.states()
    with varied(turn, recording.reach):
        eager = eager_call(recording, given, made_up)
    recording.generators.set(before)
    for memory in workspace:
        memory.keep() if turn == 0 else memory.swap()
    if turn == 0:
        recording.snapshot.restore()
    replayed = replay_call(recording, given)
    verdicts = _compare(eager, replayed)
    for memory in workspace:
        found = memory.difference()
        verdicts.append((memory.name, found))
        if not found.bitwise and not last:
            memory.keep()
    same = all(torch.equal(a, b) for a, b in zip(eager.random, replayed.random))
    return verdicts, same


def _compare(eager: Results, replayed: Results) -> list[tuple[str, Difference]]:
    verdicts = []
    if len(eager.outputs) != len(replayed.outputs):
        raise GraphError(
            f"outputs: eager returns {len(eager.outputs)}, the graph {len(replayed.outputs)}; return the same every time."
        )
    for index, (want, got) in enumerate(zip(eager.outputs, replayed.outputs)):
        if isinstance(want, Tensor) and isinstance(got, Tensor):
            verdicts.append((f"output {index}", _checked(f"output {index}", got, want)))
        elif type(want) is not type(got) or want != got:
            raise GraphError(
                f"output {index}: the graph always returns {got!r}, eager returns {want!r} with other inputs; "
                "return a tensor instead."
            )
    for name, want in eager.gradients.items():
        got = replayed.gradients[name]
        if (want is None) != (got is None):
            made, not_made = ("eager", "the replay") if got is None else ("the replay", "eager")
            raise GraphError(f"{name}: {made} makes this gradient, {not_made} does not; make the same gradients at every call.")
        if want is not None and got is not None:
            verdicts.append((name, _checked(name, got, want)))
    return verdicts


def _checked(name: str, got: Tensor, want: Tensor) -> Difference:
    if got.shape != want.shape or got.dtype != want.dtype:
        raise GraphError(
            f"{name}: eager gives {want.dtype} {tuple(want.shape)} with other inputs, the graph {got.dtype} "
            f"{tuple(got.shape)}; a graph's shapes are fixed."
        )
    return difference(got, want)


def eager_call(recording: Recording, given: Sequence[Tensor], made_up: bool) -> Results:
    """Call on fresh copies of the inputs. The results outlive a restored state; gradients are bound to the graph's again."""
    copies = [tensor.detach().clone().requires_grad_(b.requires_grad) for tensor, b in zip(given, recording.inputs.buffers)]
    recording.bind_gradients()
    try:
        outputs = recording.eager(recording.inputs.fill(copies))
    except Exception as error:
        if not made_up:
            raise
        raise GraphError(
            f"{recording.name}: failed on inputs made up for its certificate ({type(error).__name__}: {error}); "
            "pass other_inputs=, a list of two tuples of arguments that it can take."
        ) from error
    leaves = [_copy(leaf) for leaf in tree_leaves(outputs)]
    gradients = {leaf.name: leaf.tensor.grad for leaf in recording.leaves}
    for name, gradient in gradients.items():  # one made anew is kept as it is, one that lies in restored memory is copied
        if gradient is not None and storage_key(gradient) in recording.snapshot.memories:
            gradients[name] = _copy(gradient)
    recording.bind_gradients()
    return Results(leaves, gradients, recording.generators.states())


def replay_call(recording: Recording, given: Sequence[Tensor]) -> Results:
    """Replay on `given`. The results are the graph's own tensors: compare or copy them before the next replay."""
    recording.inputs.copy_in(given)
    recording.poison_results()
    recording.runner.replay()
    gradients = {leaf.name: leaf.tensor.grad for leaf in recording.leaves}
    return Results(tree_leaves(recording.outputs), gradients, recording.generators.states())


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
    """What an eager call gives in the tensor called `name`; in another turn the host has other clocks and random numbers."""
    recording.reset()
    with varied(turn, recording.reach):
        results = eager_call(recording, given, made_up=True)
    return _copy(dict(_left(recording, results))[name])


def _left(recording: Recording, results: Results) -> list[tuple[str, Any]]:
    """Everything that one call left, with names: outputs, gradients, and the memory it may have written."""
    outputs = [(f"output {index}", output) for index, output in enumerate(results.outputs)]
    memories = [(memory.name, whole(memory.tensor)) for memory in recording.snapshot.memories.values()]
    return [*outputs, *results.gradients.items(), *memories]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _between(one: Any, other: Any) -> Difference:
    return difference(one, other) if isinstance(one, Tensor) else EQUAL


def _ignored(recording: Recording, given: Sequence[Tensor], examples: Sequence[Tensor]) -> list[str]:
    """Inputs whose change alone moves eager's result and leaves the replay's as it was."""

    def both(tensors: Sequence[Tensor]) -> tuple[list, list]:
        recording.reset()
        eager = [_copy(value) for _, value in _left(recording, eager_call(recording, tensors, made_up=True))]
        recording.reset()
        return eager, [_copy(value) for _, value in _left(recording, replay_call(recording, tensors))]

    eager, replayed = both(examples)
    found = []
    for index, name in enumerate(recording.inputs.names[:MOST_INPUTS]):
        other, replayed_other = both([given[i] if i == index else example for i, example in enumerate(examples)])
        if not _same(eager, other) and _same(replayed, replayed_other):
            found.append(name)
    return found


def _same(some: list, others: list) -> bool:
    """Whether two calls left the same tensors."""
    one, other = ([value for value in left if isinstance(value, Tensor)] for left in (some, others))
    return len(one) == len(other) and all(a.shape == b.shape and difference(a, b).bitwise for a, b in zip(one, other))
