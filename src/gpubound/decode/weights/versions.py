"""Whether a model's parameters have other numbers than when copies of them were made.

A weight that is changed in place raises its version counter. Two ways to change a weight count as no version: writing through
`.data`, and the replay of a graph that holds an optimizer's step. After those, call `rebind`, or tell torch by
`torch.autograd.graph.increment_version(parameters)`.
"""

from itertools import chain

from torch import nn


class WeightVersions:
    def __init__(self, model: nn.Module, buffers: bool = False) -> None:
        """buffers: of them too, where weights in codes are some."""
        held = chain(model.named_parameters(), model.named_buffers() if buffers else ())
        self._found = [(name, weight, weight._version) for name, weight in held]

    def changed(self) -> str | None:
        """The name of the first that has changed since."""
        return next((name for name, weight, version in self._found if weight._version != version), None)
