"""Several linear layers as one product.

q, k and v read the same x, and so do gate and up: stacked by rows they are one matrix and one product, which reads x once,
fills the GPU better than three small products, and returns one input gradient instead of three to be added.

The stacked matrix is not a parameter. The layers' weights stay the parameters, each a row slice of one buffer, so state_dict,
optimizers and adapters work as before. Moving a parameter's memory (`.to()`, `copy.deepcopy`, `load_state_dict(assign=True)`)
is detected by its address at the next call, and the buffer is filled again. A weight that must not be moved (a sharded one), or
that two layers share, is multiplied separately: a fallback.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import GraphError
from ..kernels.accumulate import join_rows
from ..trace import fallback
from .linear_product import DENSE, Joined, format_of, linear, multiply
from .weight_memory import moving_modules, own_storages, shares_memory

Kernels = tuple[str, tuple[str, ...]]
"""a description of the kernels that a module runs, for a table, and the ops that replace its {}"""


def plain(layer: Any) -> bool:
    """Return whether calling `layer` computes x weightᵀ + bias alone: no subclass, no hook, no parameter of a special kind."""
    if type(layer) is not nn.Linear or type(layer._parameters.get("weight")) is not nn.Parameter:
        return False
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return False
    return "forward" not in layer.__dict__ or not hooked(layer)


def bare(layer: Any) -> bool:
    """Return whether `layer` is plain and its weight is not quantised."""
    return plain(layer) and not format_of(layer._parameters["weight"]).coded


def hooked(module: Any, but: Container = ()) -> bool:
    """Return whether calling it runs hooks, other than those in `but`, or a forward that was patched onto the instance.

    transformers leaves hooks on a model's layers when it was once asked for hidden states; they do nothing in other calls.
    """
    patched = module.__dict__.get("forward")
    if patched is not None and getattr(patched, "func", None) not in FORWARDS:
        return True
    tables = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(tables) and any(
        hook not in but and not getattr(hook, "__module__", "").startswith("transformers.utils.")
        for hooks in tables
        for hook in hooks.values()
    )


class LinearSite(NamedTuple):
    """Weight, bias and adapters of a layer's call, or the reason why the layer must be called."""

    weight: Any = None
    bias: Any = None
    adapters: Sequence[Any] = ()
    why: str | None = None


FORWARDS: set[Callable[..., Tensor]] = set()
"""The functions that gpubound sets as a layer's forward, bound to the layer by functools.partial."""

READERS: dict[tuple[str, str], Callable[[Any], LinearSite]] = {}
"""Functions that read layers that another library puts around an nn.Linear, by the module and name of their class."""


def site_of(layer: Any) -> LinearSite:
    if plain(layer):
        return LinearSite(layer._parameters["weight"], layer._parameters["bias"])
    read = READERS.get(class_key(layer))
    return LinearSite(why=describe(layer)) if read is None else read(layer)


def has_reader(layer: Any) -> bool:
    """Return whether the layer is of another library's class that READERS has."""
    return class_key(layer) in READERS


def class_key(layer: Any) -> tuple[str, str]:
    return type(layer).__module__, type(layer).__name__


class Stacked:
    """Row slices of one buffer as the weights of several nn.Linear. A copy or pickle of it is empty."""

    def __init__(self) -> None:
        self._layout: tuple[tuple, ...] = ()
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self.fallbacks: Counter[str] = Counter()

    def __reduce__(self):
        return Stacked, ()

    def product(self, x: Tensor, layers: Sequence[Any]) -> Tensor | None:
        """Return the layers' outputs, concatenated, or None when they cannot be one product now; `fallbacks` counts why."""
        joined = self.joined(layers)
        return None if joined is None else multiply(x, joined)

    def joined(self, layers: Sequence[Any]) -> Joined | None:
        """Return the argument of `multiply`, or None as `product`."""
        if torch.compiler.is_compiling():  # addresses mean nothing to a tracer; the compiler does its own fusing
            return None
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        adapters: list[Sequence[Any]] = []
        for layer in layers:
            own = layer._parameters
            site = LinearSite(own["weight"], own["bias"]) if plain(layer) else site_of(layer)
            if site.why is not None:
                return self._refuse(f"{site.why}, so it is called")
            weights.append(site.weight)
            adapters.append(site.adapters)
            if site.bias is not None:
                biases.append(site.bias)
        if _memory([*weights, *biases]) != self._layout:
            if any(getattr(getattr(layer, "base_layer", layer), "_is_fsdp_managed_module", False) for layer in layers):
                return self._refuse("FSDP shards the weights and manages their memory")
            if why := self.repack(weights, biases):
                return self._refuse(why)
        assert self._weight is not None
        return Joined(self._weight, self._bias, weights, biases, adapters)

    def repack(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), others: Iterable[Tensor] | None = None
    ) -> str | None:
        """Make the weights (and biases) adjacent again. Return None, or the reason why they must not be moved.

        others: the parameters that they may share memory with; by default those of every `Projecting` module
        """
        if biases and len(biases) != len(weights):
            return "some of the layers have a bias and some have none"
        for group, before in ((weights, self._weight), (biases, self._bias)):
            if group and (why := _immovable(group, before, others)):
                return why
        self._weight = _stack(weights)
        self._bias = _stack(biases) if biases else None
        self._layout = _memory([*weights, *biases])
        return None

    def forget(self) -> None:
        """Release the buffers."""
        self._layout, self._weight, self._bias = (), None, None

    def _refuse(self, why: str) -> Any:
        self.forget()
        self.fallbacks[why] += 1
        fallback("layers: several weights as one product", why)
        return None


def _memory(parameters: Sequence[Tensor]) -> tuple[tuple, ...]:
    """Return address, shape and strides of each: pruning in place keeps the address."""
    layout = []
    for p in parameters:
        layout.append((p.data_ptr(), p.shape, p.stride()))
    return tuple(layout)


def run_linear(layer: Any, x: Tensor) -> Tensor:
    """Compute layer(x), by `linear` where calling the layer does nothing else."""
    if plain(layer):
        return linear(x, layer._parameters["weight"], layer._parameters["bias"])
    read = READERS.get(class_key(layer))
    if read is None or torch.compiler.is_compiling():  # the compiler traces the other library's forward
        return layer(x)
    site = read(layer)
    if site.why is not None:
        fallback("layers: a product", f"{site.why}, so it is called")
        return layer(x)
    return linear(x, site.weight, site.bias, site.adapters)


class Projecting(nn.Module):
    """A module with linear layers that read the same x."""

    PROJECTIONS: tuple[str, ...]  # names of the layers, in the order of their rows
    stacked: Stacked

    def __init__(self) -> None:
        super().__init__()
        moving_modules.add(self)

    def __setstate__(self, state: dict) -> None:
        """Restore the state. Pickle loads each slice with a private copy of the complete buffer, which is dropped here."""
        super().__setstate__(state)
        moving_modules.add(self)
        for group in zip(*(layer.parameters() for layer in self.projections())):
            if join_rows([p.detach() for p in group]) is None:
                for p in group:
                    if p.untyped_storage().nbytes() != p.nbytes:
                        p.data = p.data.clone()

    def projections(self) -> list[Any]:
        children: dict[str, Any] = self._modules
        return list(map(children.__getitem__, self.PROJECTIONS))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state; each weight has its own storage, over its part of the buffer."""
        state = super().state_dict(*args, **kwargs)
        own_storages(self, state, args[1] if len(args) > 1 else kwargs.get("prefix", ""))
        return state

    def separate(self) -> None:
        """Give each of the layers' weights separate memory again, where they fill a buffer. A larger one has others, too, such
        as a step's parameters."""
        for name in ("weight", "bias"):
            group: list[Any] = [getattr(layer, name, None) for layer in self.projections()]
            if any(type(p) is not nn.Parameter or format_of(p).coded for p in group):
                continue
            joined = join_rows([p.detach() for p in group])
            if joined is not None and joined.untyped_storage().nbytes() == joined.nbytes:
                for p in group:
                    p.data = p.data.clone()

    def one_by_one(self, x: Tensor) -> list[Tensor]:
        """Return the layers' outputs, a product each, where `Stacked` refuses."""
        return [run_linear(layer, x) for layer in self.projections()]

    def as_one(self) -> bool:
        """Return whether the projections are one product; before the first call, whether they will be."""
        stacked: Stacked | None = self.__dict__.get("stacked")
        return all(site_of(layer).why is None for layer in self.projections()) and not (stacked and stacked.fallbacks)

    def rounds(self) -> bool:
        """Return whether only products, which round x under autocast, read it."""
        return self.as_one()

    def product_words(self, together: str) -> str:
        """Describe how the projections are multiplied. A layer that is not plain (a hook, a subclass) is called."""
        return f"{together} as one product" if self.as_one() else "separate projections"


def multiply_by_records(model: nn.Module, everywhere: bool = False) -> Callable[[], None]:
    """Make plain linear layers multiply in their weight's format, which F.linear ignores. Return a function that undoes it.

    Projections of our modules do so without it. everywhere: change those, too, for code that calls them individually, such as
    the forward that a swapped module had before. Undoing keeps the forward of a layer whose weight still has a format: several
    callers may have asked for the same layer.
    """
    stacks = () if everywhere else [module for module in model.modules() if hasattr(module, "stacked")]
    projections = {id(child) for module in stacks for child in module.children()}
    changed = []
    for module in model.modules():
        if type(module) is not nn.Linear or id(module) in projections or format_of(module.weight) is DENSE:
            continue
        if "forward" not in vars(module) or getattr(module.forward, "func", None) is _by_record:
            module.forward = partial(_by_record, module)  # type: ignore[method-assign]
            changed.append(module)

    def undo() -> None:
        for module in changed:
            if format_of(module.weight) is DENSE:
                vars(module).pop("forward", None)

    return undo


def _by_record(layer: Any, input: Tensor) -> Tensor:
    return linear(input, layer.weight, layer.bias)


FORWARDS.add(_by_record)


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """Return one tensor over `parts`: their memory if they are adjacent, else a new buffer that they become slices of."""
    if (joined := join_rows([p.detach() for p in parts])) is not None:
        return joined
    if parts[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise GraphError(
            "fused weights lost their common buffer (the model was moved, copied or loaded since its last call) and cannot get "
            "a new one inside a graph capture: run the model once before capturing it."
        )
    full = torch.cat([p.detach() for p in parts])
    for part, rows in zip(parts, full.split([p.shape[0] for p in parts])):
        part.data = rows
    return full


def _immovable(parts: Sequence[Tensor], before: Tensor | None, others: Iterable[Tensor] | None) -> str | None:
    """Return why these parameters cannot be moved into a buffer, such as another library that manages their memory."""
    if len({(p.dtype, p.device, p.shape[1:]) for p in parts}) > 1:
        return "the weights differ in dtype, device or input width"
    if len({p.data_ptr() for p in parts}) < len(parts):
        return "two of the layers share one parameter, which cannot be in two places of a buffer"
    if join_rows([p.detach() for p in parts]) is not None:
        return None
    for part in parts:
        if hasattr(part, "ds_id"):
            return "the weights are sharded by DeepSpeed"
        if part.device.type == "cpu" and part.is_shared():
            return "the weights are in memory shared between processes"
        home = part.untyped_storage()
        if home.nbytes() != part.nbytes and (before is None or home.data_ptr() != before.untyped_storage().data_ptr()):
            return (
                "the weights are slices of a buffer that something else owns (a wrapper that shards or flattens, or another "
                "layer's buffer, where a weight of it is used here, too)"
            )
    if shares_memory(parts, moving_modules.weights() if others is None else others):
        return (
            "a weight and another layer's are two tensors over the same memory, and stacking would move one of them away; "
            "tie them by giving both layers the one Parameter object"
        )
    return None


def describe(layer: nn.Module) -> str:
    """Describe why a layer cannot be multiplied by its weight alone."""
    kind = f"{type(layer).__module__.split('.')[0]}.{type(layer).__name__}"
    if type(layer) is not nn.Linear:
        return f"a projection is {kind}, not nn.Linear"
    weight = layer._parameters.get("weight")
    if type(weight) is not nn.Parameter:
        return f"a projection's weight is a {type(weight).__name__}, not a plain Parameter"
    return "a projection carries hooks" if hooked(layer) else "a projection's weight is quantised"
