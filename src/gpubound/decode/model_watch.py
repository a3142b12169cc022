"""Changes of a model under a decoder: replaced modules, moved tensors, new values, changed scalars.

CUDA graphs hold the addresses of weights and the scalars that a step read (eps, scales, windows, activations). Each request
compares them with the model, so the comparison has to be quick.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..errors import GenerateError
from ..graph.guards import address_check
from ..layers.fused_weights import has_reader, site_of
from ..lora.layers import adapted_layers, adding
from ..trace import notice


class ModelTensor(NamedTuple):
    """A tensor of a model, its name, and the dict that holds it."""

    name: str
    holder: dict[str, Any]
    key: str
    tensor: Tensor


def model_tensors(model: nn.Module, *dicts: str) -> Iterator[ModelTensor]:
    """Yield every tensor of these dicts of modules: "_parameters", "_buffers"."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for each in dicts:
            holder = getattr(module, each)
            for key, tensor in holder.items():
                if tensor is not None:
                    yield ModelTensor(f"{prefix}.{key}".lstrip("."), holder, key, tensor)


class TensorWatch:
    """Detect tensors of a model that were replaced, moved or added: graphs hold the addresses of those that they read.

    Values may change. A bias that is added, and a PEFT layer with other adapters, are detected too, because graphs hold their
    products.
    """

    def __init__(self, model: nn.Module, *dicts: str) -> None:
        self._watched = list(model_tensors(model, *dicts))
        self._empty = [
            (f"{name}.{key}", holder, key)
            for name, module in model.named_modules()
            for holder in (getattr(module, each) for each in dicts)
            for key, tensor in holder.items()
            if tensor is None
        ]
        tensors = [one.tensor for one in self._watched]
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._same_addresses = address_check(tensors, self._addresses)
        self._layers = [(name, layer, _added(layer)) for name, layer in adapted_layers(model)]

    def moved(self) -> str | None:
        """Return the name of the first tensor that was replaced or has moved, or of a layer with other adapters, or None."""
        for one in self._watched:
            if one.holder.get(one.key) is not one.tensor:
                return one.name
        for name, layer, added in self._layers:
            if _added(layer) != added:
                return name
        for name, holder, key in self._empty:
            if holder.get(key) is not None:
                return name
        if self._same_addresses():
            return None
        addressed = zip(self._watched, self._addresses)
        return next((one.name for one, address in addressed if one.tensor.data_ptr() != address), None)


def _added(layer: Any) -> tuple:
    """Return what an adapted layer adds to its product."""
    if not has_reader(layer):
        return adding(layer)
    site = site_of(layer)
    return site.why, *(adapter.identity for adapter in site.adapters)


class ModuleTree:
    """Detect modules of a model that were replaced: nothing reads the weights of the new ones."""

    def __init__(self, model: nn.Module) -> None:
        modules = model.named_modules()
        self._watched = [(name, module._modules, dict(module._modules)) for name, module in modules if module._modules]

    def replaced(self) -> str | None:
        """Return the name of the first replaced module. For 320 modules this takes 5 us, a walk over them 200."""
        for name, children, were in self._watched:
            if children != were:  # module by module, by identity
                key = next(key for key in {**children, **were} if children.get(key) is not were.get(key))
                return f"{name}.{key}".lstrip(".")
        return None


PLAIN = (bool, int, float, str, type(None))
# Attributes that no step depends on: the mode, settings of training, and those of every nn.Module. Linear layers and embeddings
# are skipped, too: their sizes follow from their weights.
IGNORED = {"training", "gradient_checkpointing", *vars(nn.Module())}
WITHOUT_SCALARS = (nn.Linear, nn.Embedding)


def scalars_of(value: Any) -> Any:
    """Return a record, such as a layer's weights, without its tensors."""
    if is_dataclass(value):
        return tuple(scalars_of(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, list | tuple):
        return tuple(map(scalars_of, value))
    return value if isinstance(value, PLAIN) or (callable(value) and not isinstance(value, Tensor)) else None


class ScalarSnapshot:
    """The scalars of a model's modules and of its config, to detect changes.

    some: floats of modules alone, for a runner that does not report which scalars a step reads; integers may be counters.
    """

    def __init__(self, model: Any, some: bool) -> None:
        types: Any = float if some else PLAIN
        holders = [(name, vars(module)) for name, module in model.named_modules() if type(module) not in WITHOUT_SCALARS]
        holders += [] if some or not hasattr(model, "config") else [("config", vars(model.config))]
        self._watched: list[tuple[str, list[str], dict[str, Any], Callable, Any]] = []
        for name, values in holders:
            if keys := [key for key, value in values.items() if isinstance(value, types) and key not in IGNORED]:
                self._watched.append((name, keys, values, itemgetter(*keys), itemgetter(*keys)(values)))

    def changed(self) -> str | None:
        """Return the name of the first scalar that has changed."""
        for name, keys, values, get, were in self._watched:
            try:
                same = get(values) == were
            except KeyError:
                same = False
            if not same:
                before = dict(zip(keys, were if len(keys) > 1 else (were,)))
                key = next(key for key in keys if key not in values or values[key] != before[key])
                return f"{name}.{key}".lstrip(".")
        return None


class WeightVersions:
    """Detect parameters whose values have changed since copies of them were made, by torch's version counters.

    Two changes raise no version: a write through `.data`, and the replay of a graph that holds an optimizer's step. After
    those call `rebind`, or `torch.autograd.graph.increment_version(parameters)`.
    """

    def __init__(self, model: nn.Module, buffers: bool = False) -> None:
        """buffers: include buffers, which hold quantised weights."""
        tensors = chain(model.named_parameters(), model.named_buffers() if buffers else ())
        self._watched = [(name, weight, weight._version) for name, weight in tensors]

    def changed(self) -> str | None:
        """Return the name of the first that has changed."""
        return next((name for name, weight, version in self._watched if weight._version != version), None)


class ModelWatch:
    """Detect, before each request, changes of the model that a decoder's graphs do not follow."""

    def __init__(self, model: nn.Module, stepper: Any, graphs: Any) -> None:
        self.model, self.body, self.stepper, self.graphs = model, stepper.body, stepper, graphs
        self._pending: str | None = None  # a change that the decoder does not follow yet
        self._snapshot()

    def _snapshot(self) -> None:
        self._modules, self._reads = ModuleTree(self.model), self.body.taken
        self._read_scalars()

    def _read_scalars(self) -> None:
        self._scalars = self.body.numbers()
        self._values = ScalarSnapshot(self.model, some=self._scalars is None)

    def follow(self) -> None:
        """Read the model again and drop the captured graphs, if a weight has moved or a scalar has changed.

        Where that is refused or interrupted, each further request tries again.
        """
        if changed := self._pending or self._changed():
            self._pending = changed
            self.body.rebind()
            self.stepper.rebind()
            self.graphs.clear()
            self._snapshot()
            self._pending = None
            notice(f"decoder: {changed}; bound to the weights as they are now, graphs captured again")
        if self.body.taken != self._reads:  # `rebind` was called
            self.graphs.clear()
            self._reads = self.body.taken

    def moved(self) -> str | None:
        """Return the name of a weight that is no longer where the graphs read it."""
        return self.body.moved() or self.stepper.moved()

    def check_unmoved(self) -> None:
        if name := self.moved():
            raise GenerateError(f"{name} was changed, moved or replaced while tokens were generated from it; start again.")

    def _changed(self) -> str | None:
        if name := self._modules.replaced() or self.moved():
            return f"{name} is no longer where it was"
        if (name := self._values.changed()) is None:
            return None
        before = self._scalars
        self._read_scalars()
        return f"{name} is no longer what it was" if before is None or self._scalars != before else None
