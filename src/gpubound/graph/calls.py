"""Eager calls and graph replays, made from one state and with the same inputs so that their results can be compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import GraphError
from .prepare import Recording
from .reachable import storage_key


@dataclass(frozen=True)
class Results:
    """Results of one call: outputs and gradients. Memory that the call wrote is not copied."""

    outputs: list[Any]
    gradients: dict[str, Tensor | None]
    random: list[Tensor]


def run_eager(recording: Recording, given: Sequence[Tensor], made_up: bool) -> Results:
    """Call eagerly on fresh copies of the inputs. The results outlive a restored state; the graph's gradients are rebound."""
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
    leaves = [copied(leaf) for leaf in tree_leaves(outputs)]
    gradients = {leaf.name: leaf.tensor.grad for leaf in recording.leaves}
    for name, gradient in gradients.items():  # a new gradient is kept, one in restored memory is copied
        if gradient is not None and storage_key(gradient) in recording.snapshot.memories:
            gradients[name] = copied(gradient)
    recording.bind_gradients()
    return Results(leaves, gradients, recording.generators.states())


def run_replay(recording: Recording, given: Sequence[Tensor]) -> Results:
    """Replay on `given`. The results are the graph's own tensors: compare or copy them before the next replay."""
    recording.inputs.copy_in(given)
    recording.poison_results()
    recording.runner.replay()
    gradients = {leaf.name: leaf.tensor.grad for leaf in recording.leaves}
    return Results(tree_leaves(recording.outputs), gradients, recording.generators.states())


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
