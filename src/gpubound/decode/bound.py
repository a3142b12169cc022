"""Whether a decoder's steps still fit its model. Graphs hold the addresses of weights, and every number that a step took beside
them is baked into them.
"""

from torch import nn

from ..trace import notice
from .numbers import ScalarSnapshot
from .runner import ModuleTree
from .step_graphs import StepGraphs, Stepper


class ModelWatch:
    """What a decoder took from the model. Before each request it asks whether that is still so."""

    def __init__(self, model: nn.Module, stepper: Stepper, graphs: StepGraphs) -> None:
        self.model, self.body, self.stepper, self.graphs = model, stepper.body, stepper, graphs
        self._unbound: str | None = None  # what has changed, until all is bound anew
        self._look()

    def _look(self) -> None:
        self._modules, self._taken = ModuleTree(self.model), self.body.taken
        self._read_values()

    def _read_values(self) -> None:
        self._numbers = self.body.numbers()
        self._values = ScalarSnapshot(self.model, some=self._numbers is None)

    def follow(self) -> None:
        """If a weight has moved since, or a number is another, say so, bind anew and let graphs be captured again.

        What is refused then, or breaks off, is no longer told as changed: each request tries again until it is bound.
        """
        if changed := self._unbound or self._changed():
            self._unbound = changed
            self.body.rebind()
            self.stepper.rebind()
            self.graphs.clear()
            self._look()
            self._unbound = None
            notice(f"decoder: {changed}; bound to the weights as they are now, graphs captured again")
        if self.body.taken != self._taken:  # the caller has called `rebind`
            self.graphs.clear()
            self._taken = self.body.taken

    def moved(self) -> str | None:
        """The name of a weight that is no longer where the graphs read it."""
        return self.body.moved() or self.stepper.moved()

    def _changed(self) -> str | None:
        if name := self._modules.replaced() or self.moved():
            return f"{name} is no longer where it was"
        if (name := self._values.changed()) is None:
            return None
        before = self._numbers
        self._read_values()
        return f"{name} is no longer what it was" if before is None or self._numbers != before else None
