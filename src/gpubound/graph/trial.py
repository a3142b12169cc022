"""One call of the function, eagerly or as a replay, from the state that lies there, with all that it leaves behind."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ..errors import GraphError
from .inputs import StaticInputs
from .memory import Generators, Snapshot
from .reach import Reach, storage_key
from .rehearse import Leaf


class Subject(Protocol):
    """What a certificate needs of a captured function."""

    name: str
    device: torch.device
    inputs: StaticInputs
    reach: Reach
    snapshot: Snapshot
    generators: Generators
    outputs: Any
    leaves: list[Leaf]

    @property
    def new_leaves(self) -> list[Leaf]: ...  # those whose gradients a call makes anew
    def eager(self, inputs: tuple) -> Any: ...
    def replay(self) -> None: ...
    def bind_gradients(self) -> None: ...
    def poison_results(self) -> None: ...
    def reset(self) -> None: ...


@dataclass(frozen=True)
class Results:
    """What one call gave. The memory that it wrote lies where it is."""

    outputs: list[Any]
    gradients: dict[str, Tensor | None]
    random: list[Tensor]


def eager_call(subject: Subject, given: Sequence[Tensor], made_up: bool) -> Results:
    """Call on fresh copies of the inputs. The results outlive a restored state; gradients are bound to the graph's again."""
    copies = [tensor.detach().clone().requires_grad_(b.requires_grad) for tensor, b in zip(given, subject.inputs.buffers)]
    subject.bind_gradients()
    try:
        outputs = subject.eager(subject.inputs.fill(copies))
    except Exception as error:
        if not made_up:
            raise
        raise GraphError(
            f"{subject.name}: failed on inputs made up for its certificate ({type(error).__name__}: {error}); "
            "pass other_inputs=, a list of two tuples of arguments that it can take."
        ) from error
    leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_flatten(outputs)[0]]
    gradients = {leaf.name: _own(subject, leaf.tensor.grad) for leaf in subject.leaves}
    subject.bind_gradients()
    return Results(leaves, gradients, subject.generators.states())


def replay_call(subject: Subject, given: Sequence[Tensor]) -> Results:
    """Replay on `given`. The results are the graph's own tensors: compare or copy them before the next replay."""
    subject.inputs.copy_in(given)
    subject.poison_results()
    subject.replay()
    gradients = {leaf.name: leaf.tensor.grad for leaf in subject.leaves}
    return Results(tree_flatten(subject.outputs)[0], gradients, subject.generators.states())


def _own(subject: Subject, gradient: Tensor | None) -> Tensor | None:
    """A gradient that eager made anew is kept as it is; one that lies in restored memory is copied."""
    if gradient is None:
        return None
    return gradient.detach().clone() if storage_key(gradient) in subject.snapshot.memories else gradient.detach()
