"""Several linear layers as one product.

q, k and v read the same x, and so do gate and up: stacked by rows they are one matrix and one product, which reads x once,
fills the GPU better than three small products, and returns one input gradient instead of three to be added.

The stacked matrix is not a parameter. The layers' weights stay the parameters, each a row slice of one buffer, so state_dict,
optimizers and adapters work as before. Moving a parameter's memory (`.to()`, `copy.deepcopy`, `load_state_dict(assign=True)`)
is detected by its address at the next call, and the buffer is filled again. A weight that must not be moved (a sharded one), or
that two layers share, is multiplied separately: a fallback.

To the user two tensors over the same memory are one weight, and moving one of them silently ends that: code that moves weights,
into a stacked or a flat buffer, asks `shares_memory` or `overlapping` first.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack, to_dlpack

from ..errors import GraphError
from ..kernels.accumulate import join_rows
from ..trace import fallback
from ..watch.pretend import PARAMETERS
from .linear_product import FORWARDS, Joined, format_of, linear, multiply

Kernels = tuple[str, tuple[str, ...]]
"""a description of the kernels that a module runs, for a table, and the ops that replace its {}"""


def plain(layer: Any) -> bool:
    """Return whether calling `layer` computes x weightᵀ + bias alone: no subclass, no hook, no parameter of a special kind."""
    if type(layer) is not nn.Linear or type(layer._parameters.get("weight")) not in PARAMETERS:
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
    Those with `in_loop` are served by the loop over a model's blocks (layers/block.py).
    """
    patched = module.__dict__.get("forward")
    if patched is not None and getattr(patched, "func", None) not in FORWARDS:
        return True
    tables = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(tables) and any(
        not (hook in but or hasattr(hook, "in_loop") or getattr(hook, "__module__", "").startswith("transformers.utils."))
        for hooks in tables
        for hook in hooks.values()
    )


class LinearSite(NamedTuple):
    """Weight, bias and adapters of a layer's call, or the reason why the layer must be called."""

    weight: Any = None
    bias: Any = None
    adapters: Sequence[Any] = ()
    why: str | None = None


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


def release_stacks(model: nn.Module) -> None:
    """Release the buffers of stacked weights, which would keep their former memory until the next call."""
    for module in model.modules():
        if isinstance(stacked := vars(module).get("stacked"), Stacked):
            stacked.forget()


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
            if any(type(p) not in PARAMETERS or format_of(p).coded for p in group):
                continue
            joined = join_rows([p.detach() for p in group])
            if joined is not None and joined.untyped_storage().nbytes() == joined.nbytes:
                for p in group:
                    p.data = p.data.clone()

    def one_by_one(self, x: Tensor) -> list[Tensor]:
        """Return the layers' outputs, a product each, where `Stacked` refuses."""
        return [run_linear(layer, x) for layer in self.projections()]

    def products(self, x: Tensor) -> Sequence[Tensor]:
        """Return the layers' outputs, of one product where their weights can be neighbours in memory."""
        joined = self.stacked.joined(self.projections())
        if joined is None:
            return self.one_by_one(x)
        return multiply(x, joined).split([len(weight) for weight in joined.weights], -1)

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
    if type(weight) not in PARAMETERS:
        return f"a projection's weight is a {type(weight).__name__}, not a plain Parameter"
    return "a projection carries hooks" if hooked(layer) else "a projection's weight is quantised"


def overlapping(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """Yield pairs of names of different tensors that share bytes. A tied tensor, listed twice, is one tensor.

    Tensors with gaps are left out, for two may be stored in each other's gaps, and so are subclasses.
    """
    tensors = {id(t): (name, t) for name, t in reversed(list(named))}.values()  # reversed: the first name of each stays
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in tensors if _is_dense(t))
    end, owner = 0, ""
    for begin, stop, name in ranges:
        if begin < end:
            yield owner, name
        if stop > end:
            end, owner = stop, name


def shares_memory(parts: Sequence[Tensor], others: Iterable[Tensor]) -> bool:
    """Return whether a tensor of `others` that is none of `parts` shares bytes with one of them."""
    own = set(map(id, parts))
    ranges = [(p.data_ptr(), p.data_ptr() + p.nbytes) for p in parts if _is_dense(p)]
    rest = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in others if id(t) not in own and _is_dense(t)]
    return any(begin < end and start < stop for begin, stop in ranges for start, end in rest)


def _is_dense(t: Tensor) -> bool:
    if type(t) not in (Tensor, Parameter) or t.layout != torch.strided or not t.numel():
        return False
    return sum((size - 1) * step for size, step in zip(t.shape, t.stride())) + 1 == t.numel()


class MovingModules:
    """The modules of this process that move their own weights: a weight that one of them moves may be another one's, too."""

    def __init__(self) -> None:
        self._modules: WeakSet[nn.Module] = WeakSet()
        self._lock = Lock()

    def add(self, module: nn.Module) -> None:
        with self._lock:
            self._modules.add(module)

    def weights(self) -> list[Tensor]:
        with self._lock:
            modules = list(self._modules)
        return [parameter for module in modules for parameter in module.parameters()]


moving_modules = MovingModules()


@torch.inference_mode(False)  # or tensors that are made inside could not be written outside
def own_storages(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Give each tensor of a state_dict its own storage, over the same memory: a post hook of `module.state_dict()`.

    Writers of files recognise tied weights by their storage: to accelerate all weights in one buffer were copies of the first,
    and it left them out of the file; safetensors' save_model refused them. The tensors stay live: writes are visible in the
    module. Tied ones get one storage.
    """
    aliases: dict[int, Tensor] = {}
    at = prefix.removesuffix(".")
    live = module.named_parameters(at, remove_duplicate=False), module.named_buffers(at, remove_duplicate=False)
    for name, source in chain(*live):
        tensor = state.get(name)
        if tensor is source or type(tensor) is not Tensor or tensor.device.type not in ("cpu", "cuda"):
            continue  # unchanged with keep_vars=True
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            if id(source) not in aliases:
                aliases[id(source)] = _alias(tensor.detach())
            tensor.data = aliases[id(source)]  # detached from the module's tensor, whose version it keeps


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory, with a storage that is no larger. Not every torch's DLPack supports fp8."""
    if tensor.dtype.is_floating_point and tensor.itemsize == 1:
        return from_dlpack(to_dlpack(tensor.view(torch.uint8))).view(tensor.dtype)
    return from_dlpack(to_dlpack(tensor))


def give_own_storages(model: nn.Module) -> None:
    """Register `own_storages` permanently: the weights stay adjacent after the module that moved them was deleted."""
    for module in (model, getattr(model, "_orig_mod", model)):  # torch.compile's wrapper, and the module inside
        if own_storages not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(own_storages)
