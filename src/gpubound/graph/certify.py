"""Certificate of a CUDA graph: replays on inputs other than the captured ones, compared with eager calls from the same state.

A graph that has baked in a value which it should compute agrees with eager only on the captured inputs. Each round starts from
one state, runs eagerly, restores the state, replays, and compares every output, written tensor and new gradient. The next round
resumes from the last round's state, so counters and moments must advance. After a mismatch, additional calls find the cause.

Besides the capture's snapshot, one copy of the state suffices: it holds the state at a round's start, then is exchanged for the
state that eager left. The first round starts from the snapshot. If the copy had to be on the host, a fingerprint of the eager
state replaces it, and the second round's start is recomputed from the snapshot by the first round's replay. Storages with
fingerprints are copied only where these differ, to measure the difference.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import GraphError
from ..formatting import readable
from .calls import Results, run_eager, run_replay
from .cause import cause
from .memory import EQUAL, Difference, Memory, MemoryMark, Room, difference, where
from .perturb import other_seeds, perturb
from .prepare import Recording


@dataclass(frozen=True)
class Certificate:
    """Report of the comparison of replays with eager calls: what was compared, and the differences."""

    rounds: int
    inputs: int
    unvaried: tuple[str, ...]  # inputs whose values could not be varied: give other_inputs= to cover them
    outputs: int
    mutated: tuple[str, ...]  # every tensor that changed, by name; gradients that the function makes are among them
    bitwise: bool
    worst: Difference
    worst_name: str
    tolerance: float
    same_random_state: bool  # after a replay the generators have the state that eager leaves
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


def certify(recording: Recording, others: list[list[Tensor]] | None, tolerance: float) -> Certificate:
    """Run the rounds. GraphError names the first tensor that disagrees."""
    started = time.perf_counter()
    examples = [buffer.detach().clone() for buffer in recording.inputs.buffers]
    names = recording.inputs.names
    rounds = [(given, []) for given in others] if others else [perturb(examples, index) for index in range(2)]
    judged = None
    with suppress(Unlike):
        judged = _judge(recording, rounds, examples, others is None, tolerance, marks=True)
    if judged is None:  # out here, where the error holds none of the copies
        judged = _judge(recording, rounds, examples, others is None, tolerance, marks=False)
    kept, workspace = list(recording.snapshot.memories.values()), judged.workspace
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
        bitwise=judged.worst.bitwise,
        worst=judged.worst,
        worst_name=judged.worst_name,
        tolerance=tolerance,
        same_random_state=judged.same_random,
        seconds=time.perf_counter() - started,
        memory_bytes=recording.memory_bytes,
        snapshot_bytes=copies,
        snapshot_on=places,
    )


class Unlike(Exception):
    """Raised when a replay's fingerprint differs from eager's. Measuring the difference takes copies."""


@dataclass
class Judged:
    """Results of the rounds."""

    workspace: list[Memory]
    worst: Difference = EQUAL
    worst_name: str = ""
    same_random: bool = True


def _judge(
    recording: Recording,
    rounds: Sequence[tuple[list[Tensor], Any]],
    examples: list[Tensor],
    made_up: bool,
    tolerance: float,
    marks: bool,
) -> Judged:
    """Run all rounds from the state before the first call. `marks`: fingerprints instead of copies on the host, or Unlike."""
    recording.reset()
    workspace = _workspace(recording, marks)
    judged = Judged([one for one in workspace if isinstance(one, Memory)])
    marked = len(judged.workspace) < len(workspace)
    for index, (given, _) in enumerate(rounds):
        again = [before for before, _ in rounds[:index]] if marked else []
        verdicts, random = _round(recording, given, workspace, made_up, index, index == len(rounds) - 1, again)
        judged.same_random = judged.same_random and random
        for name, found in verdicts:
            if not found.bitwise and not found.relative <= tolerance:
                why = cause(recording, name, given, examples)
                raise GraphError(
                    f"{recording.name}: {name} of the replay is off by {found.absolute:.3g} ({found.relative:.1e} of the "
                    f"largest value) from eager in round {index + 1} of {len(rounds)}: {why}."
                )
        worst = max([(judged.worst_name, judged.worst), *verdicts], key=lambda it: (not it[1].bitwise, it[1].relative))
        judged.worst_name, judged.worst = worst
    return judged


def _workspace(recording: Recording, marks: bool) -> list[Memory | MemoryMark]:
    """Return for each storage that a call writes room for a copy, or a fingerprint where device memory does not suffice."""
    room, found, taken = Room(recording.device), list[Memory | MemoryMark](), 0
    for memory in recording.snapshot.memories.values():
        if marks and not room.holds(memory.live, taken):
            found.append(MemoryMark(memory))
        else:
            found.append(Memory(memory.tensor, memory.name, room, now=False))
            taken += memory.live.numel()
    return found


def _round(
    recording: Recording,
    given: list[Tensor],
    workspace: list[Memory | MemoryMark],
    made_up: bool,
    turn: int,
    last: bool,
    again: list[list[Tensor]],
) -> tuple[list[tuple[str, Difference]], bool]:
    """Eager, then the replay, from one state: at first the snapshot, later the workspace, which holds eager's results next.
    `again`: what the rounds before were given, where their replays make that state once more."""
    before = recording.generators.states()
    with other_seeds(turn):
        eager = run_eager(recording, given, made_up)
    exchanged = turn > 0 and not again
    for memory in workspace:
        memory.swap() if exchanged and isinstance(memory, Memory) else memory.keep()
    if not exchanged:
        recording.snapshot.restore()
        recording.generators.rewind()
    for earlier in again:
        run_replay(recording, earlier)
    recording.generators.set(before)
    replayed = run_replay(recording, given)
    verdicts = _compare(eager, replayed)
    for memory in workspace:
        if isinstance(memory, MemoryMark):
            if memory.changed():
                raise Unlike(memory.name)
            verdicts.append((memory.name, EQUAL))
            continue
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
