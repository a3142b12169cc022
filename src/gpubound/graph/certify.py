"""The certificate: replays with inputs other than those captured with, against eager calls from the same state.

A graph that has baked in what it should compute agrees with eager on the inputs it was captured with, and on no others. Each
round starts from one state, runs eagerly, puts the state back, replays, and compares every output, every tensor written and
every gradient made. The next round goes on from where the last ended, so counters and moments are seen to move as they should.

Beside the capture's snapshot one copy of the state is enough: it holds what a round starts from, then in exchange what eager
has left. The first round starts from the snapshot itself.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ..errors import GraphError
from ..words import readable
from .diagnose import cause
from .memory import EQUAL, Difference, Memory, Room, difference, where
from .trial import Results, Subject, eager_call, replay_call
from .vary import varied, vary


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
        unvaried = f", not {', '.join(self.unvaried)} (pass other_inputs=)" if self.unvaried else ""
        lines = [
            f"{_count(self.rounds, 'round')} of replay against eager agree {agreement}",
            f"{_count(self.outputs, 'output')} and {_count(len(self.mutated), 'mutated tensor')} compared"
            + (names and f": {names}"),
            f"{self.inputs - len(self.unvaried)} of {_count(self.inputs, 'input')} varied{unvaried}",
            f"{self.seconds:.2f} s, {self._snapshots}; the graph holds {readable(self.memory_bytes)}",
        ]
        if not self.same_random_state:
            lines.append("a replay leaves the random generators elsewhere than an eager call does")
        return "\n".join(lines)

    @property
    def _snapshots(self) -> str:
        if not self.snapshot_bytes:
            return "no snapshot was needed"
        return f"{readable(self.snapshot_bytes)} of snapshots in {self.snapshot_on}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


def certify(subject: Subject, others: list[list[Tensor]] | None, tolerance: float) -> dict[str, Any]:
    """Run the rounds. Returns the certificate's fields; GraphError names the first tensor that disagrees."""
    started = time.perf_counter()
    examples = [buffer.detach().clone() for buffer in subject.inputs.buffers]
    names = subject.inputs.names
    rounds = [(given, []) for given in others] if others else [vary(examples, index) for index in range(2)]
    subject.reset()
    room = Room(subject.device)
    kept = list(subject.snapshot.memories.values())
    workspace = [Memory(memory.tensor, memory.name, room, now=False) for memory in kept]
    worst, worst_name, same_random = EQUAL, "", True
    for index, (given, _) in enumerate(rounds):
        last = index == len(rounds) - 1
        verdicts, random = _round(subject, given, workspace, others is None, turn=index, last=last)
        same_random = same_random and random
        for name, found in verdicts:
            if not found.bitwise and not found.relative <= tolerance:
                raise GraphError(
                    f"{subject.name}: {name} of the replay is off by {found.absolute:.3g} ({found.relative:.1e} of the largest "
                    f"value) from eager in round {index + 1} of {len(rounds)}: {cause(subject, name, given, examples)}."
                )
            if found.relative > worst.relative or (worst.bitwise and not found.bitwise):
                worst, worst_name = found, name
    copies, where_they_lie = sum(memory.nbytes for memory in [*kept, *workspace]), where([*kept, *workspace])
    mutated = [memory.name for memory in kept if memory.changed()]
    made = [leaf.name for leaf in subject.new_leaves if leaf.name not in mutated]
    subject.reset()
    subject.inputs.copy_in(examples)
    unvaried = set.intersection(*(set(same) for _, same in rounds))
    return {
        "rounds": len(rounds),
        "inputs": len(examples),
        "unvaried": tuple(names[index] for index in sorted(unvaried)),
        "outputs": len(tree_flatten(subject.outputs)[0]),
        "mutated": tuple(mutated + made),
        "bitwise": worst.bitwise,
        "worst": worst,
        "worst_name": worst_name,
        "tolerance": tolerance,
        "same_random_state": same_random,
        "seconds": time.perf_counter() - started,
        "snapshot_bytes": copies,
        "snapshot_on": where_they_lie,
    }


def _round(
    subject: Subject, given: list[Tensor], workspace: list[Memory], made_up: bool, turn: int, last: bool
) -> tuple[list[tuple[str, Difference]], bool]:
    """Eager, then the replay, from one state: at first the snapshot, later the workspace, which holds eager's results next."""
    before = subject.generators.states()
    with varied(turn, subject.reach):
        eager = eager_call(subject, given, made_up)
    subject.generators.set(before)
    for memory in workspace:
        memory.keep() if turn == 0 else memory.swap()
    if turn == 0:
        subject.snapshot.restore()
    replayed = replay_call(subject, given)
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
