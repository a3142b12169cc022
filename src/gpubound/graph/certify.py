"""Certificate of a CUDA graph: replays on inputs other than the captured ones, compared with eager calls from the same state.

A graph that has baked in a value which it should compute agrees with eager only on the captured inputs. Each round starts from
one state, runs eagerly, restores the state, replays, and compares every output, written tensor and new gradient. The next round
resumes from the last round's state, so counters and moments must advance. After a mismatch, additional calls find the cause.

Besides the capture's snapshot, one copy of the state suffices: it holds the state at a round's start, then is exchanged for the
state that eager left. The first round starts from the snapshot. Of a storage whose copy would be on the host, a fingerprint of
the eager state replaces it, and the second round's start is recomputed from the snapshot by the first round's replay. If
fingerprints differ, the rounds begin again with copies of these storages, to measure the difference; then the others must be
storages that no call changes.

The rounds' inputs keep the shapes and dtypes of the example. Floating tensors are drawn again with its mean, spread and range.
Integers and booleans are shuffled, so that ids stay in range and a mask keeps its count; if a shuffle changes nothing (one
position, a constant), an integer counts down and a boolean flips. The certificate names inputs that cannot be varied.

Random numbers of Python and NumPy are baked into a graph. Two draws among few values may be equal by chance, so each eager call
draws from another seed. The time is baked in, too, and is not varied: as an fp32 number it is constant for two minutes.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import GraphError
from ..formatting import readable
from ..trace import timed
from .memory import EQUAL, CopyBudget, Difference, StorageCopy, StorageFingerprint, bytes_of, difference, elements_of
from .reachable import storage_key
from .recording import Recording

Lend = Callable[[], AbstractContextManager[Sequence[Tensor]]]
"""Returns a context that lends tensors, whose memory the rounds' copies take, and makes their contents again at its end."""


def lend_nothing() -> AbstractContextManager[Sequence[Tensor]]:
    return nullcontext(())


MAX_INPUTS = 16  # tried for a diagnosis: each takes two calls
ATOMIC = 1e-2  # sums in another order differ by less than this, a counter on the host by more

HOST_STATE = (
    "fn keeps something on the host between calls (a number, a list, an attribute that it rebinds); "
    "keep it in a tensor and update it in place"
)


@dataclass(frozen=True)
class Certificate:
    """Report of the comparison of replays with eager calls."""

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
    memory_bytes: int  # of the graph
    snapshot_bytes: int  # copies that the capture needed while it ran
    snapshot_on: str

    def __str__(self) -> str:
        agreement = (
            "bit for bit" if self.bitwise else f"within {self.worst.relative:.1e} of the largest value ({self.worst_name})"
        )
        names = ", ".join(self.mutated[:4]) + (f" and {len(self.mutated) - 4} more" if len(self.mutated) > 4 else "")
        compared = f"{_count(self.outputs, 'output')} and {_count(len(self.mutated), 'mutated tensor')} compared"
        unvaried = f", not {', '.join(self.unvaried)} (pass other_inputs=)" if self.unvaried else ""
        copies = f"{readable(self.snapshot_bytes)} of snapshots in {self.snapshot_on}"
        snapshots = copies if self.snapshot_bytes else "no snapshot was needed"
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


def certify(
    recording: Recording, others: list[list[Tensor]] | None, tolerance: float, lend: Lend = lend_nothing
) -> Certificate:
    """Run the rounds. GraphError names the first tensor that disagrees."""
    started = time.perf_counter()
    examples = [buffer.detach().clone() for buffer in recording.inputs.buffers]
    rounds = [(inputs, []) for inputs in others] if others else [perturb(examples, index) for index in range(2)]
    all_inputs = [inputs for inputs, _ in rounds]
    snapshot, names = list(recording.snapshot.copies.values()), recording.inputs.names
    with lend() as memory:
        lent = [bytes_of(tensor) for tensor in memory if storage_key(tensor) not in recording.external]
        # Keys of large storages that are copied: sums that begin at zero, whose last bits are others at each call.
        room = max(map(len, lent), default=0)
        copied = {key for key, copy in recording.snapshot.copies.items() if copy.saved is None and len(copy.live) <= room}
        while isinstance(result := _run_rounds(recording, all_inputs, examples, others is None, tolerance, lent, copied), set):
            copied |= result
    copies = [copy.saved for copy in [*snapshot, *result.workspace] if copy.saved is not None]
    devices = {"host memory" if copy.device.type == "cpu" else str(copy.device) for copy in copies}
    snapshot_bytes = sum(copy.numel() for copy in copies)
    mutated = [copy.name for copy in snapshot if copy.changed()]
    mutated += [leaf.name for leaf in recording.new_leaves if leaf.name not in mutated]
    recording.reset()
    recording.inputs.copy_in(examples)
    unvaried = set.intersection(*(set(unvaried) for _, unvaried in rounds))
    return Certificate(
        rounds=len(rounds),
        inputs=len(examples),
        unvaried=tuple(names[index] for index in sorted(unvaried)),
        outputs=len(tree_leaves(recording.outputs)),
        mutated=tuple(mutated),
        bitwise=result.worst.bitwise,
        worst=result.worst,
        worst_name=result.worst_name,
        tolerance=tolerance,
        same_random_state=result.same_random_state,
        seconds=time.perf_counter() - started,
        memory_bytes=recording.memory_bytes,
        snapshot_bytes=snapshot_bytes,
        snapshot_on=" and ".join(sorted(devices)),
    )


@dataclass
class RoundsResult:
    """Largest difference of all rounds, and the copies that they needed."""

    workspace: list[StorageCopy]
    worst: Difference = EQUAL
    worst_name: str = ""
    same_random_state: bool = True


def _run_rounds(
    recording: Recording,
    rounds: Sequence[list[Tensor]],
    examples: list[Tensor],
    invented: bool,
    tolerance: float,
    lent: list[Tensor],
    copied: set[int],
) -> RoundsResult | set[int]:
    """Run all rounds from the state before the first call.

    copied  keys of storages that are copied, into `lent` memory or on the host. Return the keys of others whose fingerprints
            differ
    """
    recording.reset()
    budget, workspace, pending = CopyBudget(recording.device, lent=lent), dict[int, StorageCopy | StorageFingerprint](), 0
    for key, copy in recording.snapshot.copies.items():
        if fits := budget.fits(copy.live, pending):
            pending += copy.live.numel()
        if fits or key in copied:
            workspace[key] = StorageCopy(copy.tensor, copy.name, budget, now=False)
        else:
            workspace[key] = StorageFingerprint(copy, constant=bool(copied))
    result = RoundsResult([storage for storage in workspace.values() if isinstance(storage, StorageCopy)])
    replayed_again = not copied and len(result.workspace) < len(workspace)
    for index, inputs in enumerate(rounds):
        earlier, last = list(rounds[:index]) if replayed_again else [], index == len(rounds) - 1
        differences, same_random_state, other = _round(recording, inputs, workspace, invented, index, last, earlier)
        if other:
            return other
        result.same_random_state = result.same_random_state and same_random_state
        for name, diff in differences:
            if not diff.bitwise and not diff.relative <= tolerance:
                why = cause(recording, name, inputs, examples)
                raise GraphError(
                    f"{recording.name}: {name} of the replay is off by {diff.absolute:.3g} ({diff.relative:.1e} of the "
                    f"largest value) from eager in round {index + 1} of {len(rounds)}: {why}."
                )
        worst = [(result.worst_name, result.worst), *differences]
        result.worst_name, result.worst = max(worst, key=lambda it: (not it[1].bitwise, it[1].relative))
    return result


def _round(
    recording: Recording,
    inputs: list[Tensor],
    workspace: dict[int, StorageCopy | StorageFingerprint],
    invented: bool,
    index: int,
    last: bool,
    earlier: list[list[Tensor]],
) -> tuple[list[tuple[str, Difference]], bool, set[int]]:
    """Call eagerly, then replay, from one state: the snapshot in the first round, later the workspace, which then holds eager's
    results. Return the differences, whether the random states agree, and the keys of storages with other fingerprints.

    earlier  inputs of the rounds before, whose replays make this round's first state again
    """
    random_states = recording.generators.states()
    with timed(f"eager call of round {index + 1}"), other_seeds(index):
        eager = run_eager(recording, inputs, invented)
    exchanged = index > 0 and not earlier
    for storage in workspace.values():
        storage.swap() if exchanged and isinstance(storage, StorageCopy) else storage.save()
    if not exchanged:
        recording.snapshot.restore()
        recording.generators.rewind()
    for earlier_inputs in earlier:
        run_replay(recording, earlier_inputs)
    recording.generators.set(random_states)
    replayed = run_replay(recording, inputs)
    differences, other = _compare(eager, replayed), set[int]()
    for key, storage in workspace.items():
        if isinstance(storage, StorageFingerprint):
            if storage.changed():
                other.add(key)
            differences.append((storage.name, EQUAL))
            continue
        diff = storage.difference()
        differences.append((storage.name, diff))
        if not diff.bitwise and not last:
            storage.save()
    return differences, all(torch.equal(a, b) for a, b in zip(eager.random, replayed.random)), other


@dataclass(frozen=True)
class Results:
    """Results of one call: outputs and gradients. Memory that the call wrote is not copied."""

    outputs: list[Any]
    gradients: dict[str, Tensor | None]
    random: list[Tensor]


def run_eager(recording: Recording, inputs: Sequence[Tensor], invented: bool) -> Results:
    """Call eagerly on copies of the inputs. The results survive a restored state; the graph's gradients are attached again."""
    copies = [tensor.detach().clone().requires_grad_(b.requires_grad) for tensor, b in zip(inputs, recording.inputs.buffers)]
    recording.attach_gradients()
    try:
        outputs = recording.eager(recording.inputs.fill(copies))
    except Exception as error:
        if not invented:
            raise
        raise GraphError(
            f"{recording.name}: failed on inputs made up for its certificate ({type(error).__name__}: {error}); "
            "pass other_inputs=, a list of two tuples of arguments that it can take."
        ) from error
    leaves = [_copy(leaf) for leaf in tree_leaves(outputs)]
    gradients = {leaf.name: leaf.tensor.grad for leaf in recording.leaves}
    for name, gradient in gradients.items():  # a new gradient survives without a copy, one in restored memory does not
        if gradient is not None and storage_key(gradient) in recording.snapshot.copies:
            gradients[name] = _copy(gradient)
    recording.attach_gradients()
    return Results(leaves, gradients, recording.generators.states())


def run_replay(recording: Recording, inputs: Sequence[Tensor]) -> Results:
    """Replay on `inputs`. The results are the graph's own tensors: compare or copy them before the next replay."""
    recording.inputs.copy_in(inputs)
    recording.poison_results()
    recording.runner.replay()
    gradients = {leaf.name: leaf.tensor.grad for leaf in recording.leaves}
    return Results(tree_leaves(recording.outputs), gradients, recording.generators.states())


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _compare(eager: Results, replayed: Results) -> list[tuple[str, Difference]]:
    differences = []
    if len(eager.outputs) != len(replayed.outputs):
        raise GraphError(
            f"outputs: eager returns {len(eager.outputs)}, the graph {len(replayed.outputs)}; return the same every time."
        )
    for index, (want, got) in enumerate(zip(eager.outputs, replayed.outputs)):
        if isinstance(want, Tensor) and isinstance(got, Tensor):
            differences.append((f"output {index}", _checked_difference(f"output {index}", got, want)))
        elif type(want) is not type(got) or want != got:
            raise GraphError(
                f"output {index}: the graph always returns {got!r}, eager returns {want!r} with other inputs; "
                "return a tensor instead."
            )
    for name, want in eager.gradients.items():
        got = replayed.gradients[name]
        if (want is None) != (got is None):
            makes, omits = ("eager", "the replay") if got is None else ("the replay", "eager")
            raise GraphError(f"{name}: {makes} makes this gradient, {omits} does not; make the same gradients at every call.")
        if want is not None and got is not None:
            differences.append((name, _checked_difference(name, got, want)))
    return differences


def _checked_difference(name: str, got: Tensor, want: Tensor) -> Difference:
    if got.shape != want.shape or got.dtype != want.dtype:
        raise GraphError(
            f"{name}: eager gives {want.dtype} {tuple(want.shape)} with other inputs, the graph {got.dtype} "
            f"{tuple(got.shape)}; a graph's shapes are fixed."
        )
    return difference(got, want)


def cause(recording: Recording, name: str, inputs: Sequence[Tensor], examples: Sequence[Tensor]) -> str:
    """Return the likeliest cause of a difference in the tensor called `name`, and the remedy, by additional calls."""

    def eager_value(seed: int) -> Any:
        recording.reset()
        with other_seeds(seed):
            results = run_eager(recording, inputs, invented=True)
        return _copy(dict(_named_results(recording, results))[name])

    def compare(one: Any, other: Any) -> Difference:
        return difference(one, other) if isinstance(one, Tensor) else EQUAL

    first, second = eager_value(0), eager_value(0)
    noise = compare(first, second)
    if not noise.bitwise and noise.relative < ATOMIC:
        return f"eager differs from itself by {noise.relative:.1e} (atomic adds); pass tolerance={4 * noise.relative:.0e}"
    if not noise.bitwise:
        return f"eager itself gives another result at each call from one state, so {HOST_STATE}"
    if not compare(second, eager_value(1)).bitwise:
        return (
            f"fn reads {SOURCES} on the host, which a graph bakes in; draw on the device (torch.rand), "
            "or pass the value as an input tensor"
        )
    if ignored := _ignored_inputs(recording, inputs, examples):
        return (
            f"the replay ignores {' and '.join(ignored)}, which fn takes from the host (a Python number, a NumPy copy, "
            "a cached tensor); compute from the input's tensor inside fn"
        )
    return f"eager agrees with itself, so {HOST_STATE}"


def _named_results(recording: Recording, results: Results) -> list[tuple[str, Any]]:
    """Return all results of a call by name: outputs, gradients, and the memory that the call may have written."""
    outputs = [(f"output {index}", output) for index, output in enumerate(results.outputs)]
    storages = [(copy.name, elements_of(copy.tensor)) for copy in recording.snapshot.copies.values()]
    return [*outputs, *results.gradients.items(), *storages]


def _ignored_inputs(recording: Recording, inputs: Sequence[Tensor], examples: Sequence[Tensor]) -> list[str]:
    """Return the names of the inputs whose change alone alters the eager result but not the replay's."""

    def both(tensors: Sequence[Tensor]) -> tuple[list, list]:
        recording.reset()
        eager = [_copy(value) for _, value in _named_results(recording, run_eager(recording, tensors, invented=True))]
        recording.reset()
        return eager, [_copy(value) for _, value in _named_results(recording, run_replay(recording, tensors))]

    def equal(results: list, others: list) -> bool:
        tensors, other_tensors = ([v for v in values if isinstance(v, Tensor)] for values in (results, others))
        same_shapes = [t.shape for t in tensors] == [t.shape for t in other_tensors]
        return same_shapes and all(difference(a, b).bitwise for a, b in zip(tensors, other_tensors))

    eager, replayed = both(examples)
    ignored = []
    for index, name in enumerate(recording.inputs.names[:MAX_INPUTS]):
        other, replayed_other = both([inputs[i] if i == index else example for i, example in enumerate(examples)])
        if not equal(eager, other) and equal(replayed, replayed_other):
            ignored.append(name)
    return ignored


SOURCES = "random numbers (random, numpy.random) or the time"


def perturb(examples: Sequence[Tensor], round_: int) -> tuple[list[Tensor], list[int]]:
    """Return new tensors, and the indices of those that equal the example. The user's random generators are not used."""
    generator = torch.Generator().manual_seed(0x5EED + round_)
    inputs = [_perturbed(example, generator) for example in examples]
    unvaried = [index for index, (new, old) in enumerate(zip(inputs, examples)) if _equal(new, old) and old.numel()]
    return inputs, unvaried


def _perturbed(example: Tensor, generator: torch.Generator) -> Tensor:
    old = example.detach()
    if old.numel() == 0:
        return old.clone()
    floating = old.is_floating_point() or old.is_complex()
    if floating and bool(_fp64(old).isfinite().all()):
        return _random_like(old, generator)
    order = torch.randperm(old.numel(), generator=generator, device="cpu").to(old.device)
    new = torch.empty_like(old).copy_(old.reshape(-1)[order].reshape(old.shape))
    if not _equal(new, old) or floating:
        return new
    return ~old if old.dtype == torch.bool else torch.where(old > 0, old - 1, old)


def _random_like(old: Tensor, generator: torch.Generator) -> Tensor:
    """Draw with the mean and spread of a tensor, within its range: a loss of probabilities ends the process at others on a GPU.

    A constant has no spread, and 0 to it is its range; 0 to 1 if it is 0.
    """
    values = _fp64(old)
    low, high = values.min(), values.max()
    spread = values.std(correction=0)
    if low == high:
        low, high = low.clamp(max=0.0), torch.where(high == 0, torch.ones_like(high), high.clamp(min=0.0))
        spread = high - low
    noise = torch.randn(values.shape, generator=generator, dtype=torch.float64, device="cpu").to(values.device)
    beyond = ((noise * spread + values.mean() - low) / (high - low)).remainder(2.0)
    new = low + (high - low) * (1.0 - (1.0 - beyond).abs())  # values outside are reflected at the ends
    return torch.empty_like(old).copy_(torch.view_as_complex(new) if old.is_complex() else new)


def _fp64(tensor: Tensor) -> Tensor:
    """Return the tensor in fp64, because fp8 lacks most operations. A complex number becomes two."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _equal(new: Tensor, old: Tensor) -> bool:
    """Return whether the bits are the same: torch.equal does not support fp8, and a NaN is unequal to itself."""
    return difference(new, old).bitwise


@contextmanager
def other_seeds(round_: int) -> Iterator[None]:
    """Seed the random generators that Python and NumPy share, another seed for each round, and restore their states."""
    states: list[tuple[Any, Callable[[Any], None], Callable[[int], None]]] = [(random.getstate(), random.setstate, random.seed)]
    shared = sys.modules["numpy"].random if "numpy" in sys.modules else None
    if shared is not None and shared.get_state(legacy=False)["bit_generator"] == "MT19937":  # other generators have no seed()
        states.append((shared.get_state(), shared.set_state, shared.seed))
    try:
        for _, _, seed in states:
            seed(0x5EED + round_)
        yield
    finally:
        for state, restore, _ in states:
            restore(state)
