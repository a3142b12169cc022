"""The adapters of a layer as modules, and all of them in a model.

A layer's adapters are its child `lora`, by name: `model.layers.0.self_attn.q_proj.lora.default.a`. So parameters(), state_dict,
`.to()` and optimizers see them. What multiplies by the layer's weight sees those that are on, through the weight's record
(kernels/tensor_state.py). One that is off or merged is not in the record, so it costs nothing. Before each product the adapters
look whether the record is the one that they left (`follow`): another weight may stand in its place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..kernels.tensor_state import drop_record, made_record, seen
from ..layers.fused_weights import as_torch_has_it
from ..layers.linear_formats import ADAPTERS, Adapter, adapters_of
from .pair import Pair
from .per_row import PerRow


class _Before:
    """A layer's weight before an adapter was merged into it. In a slot, where a graph does not look for what must stand still:
    another step is captured while it is merged, and none reads this."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor | None = None):
        self.weight = weight


class _Hung:
    """Which parts these adapters have put into which weight's record. In a slot, too: a call may have lent other parameters,
    and its graph reads the old ones."""

    __slots__ = ("left", "made_of", "parts", "weight")

    def __init__(self, weight: Any):
        self.weight = weight
        self.parts: tuple[Adapter, ...] = ()
        self.left: tuple[Adapter, ...] = ()  # all that the weight's record had then
        self.made_of: list[tuple[dict[str, Any], str, Tensor]] = []  # where the parts had their parameters from


class Adapters(nn.ModuleDict):
    """The adapters of one layer. `hang` puts those that are on into the record of its weight.

    That is the way of linear layers. Layers of another kind have a class of their own, which says how they add.
    """

    PAIR: ClassVar[type[Pair]] = Pair

    _layer: tuple[nn.Module]
    _hung: _Hung
    routing: Any  # which rows have which of them (rows.py); None: all that are on are added to all rows
    _before: _Before
    written: int  # the weight's version since an adapter was merged into it: merge.py

    def __init__(self, layer: Any):
        super().__init__()
        # not as nn.Module sets attributes, which would register them: the layer is this module's parent
        self.__dict__.update(_layer=(layer,), _hung=_Hung(layer.weight), _before=_Before(), written=0, routing=None)
        self.register_load_state_dict_post_hook(_reload)

    @property
    def layer(self) -> Any:
        return self._layer[0]

    def add_module(self, name: str, module: Any) -> None:
        super().add_module(name, module)
        if isinstance(module, Pair):
            module.belong_to(self)

    def pairs(self) -> Iterator[tuple[str, Pair]]:
        yield from self.items()  # type: ignore[misc]

    @classmethod
    def unfit(cls, layer: Any) -> str | None:
        """Why `layer` cannot be adapted."""
        return None if as_torch_has_it(layer) else "has a forward of its own"

    @classmethod
    def of(cls, layer: Any) -> "Adapters | None":
        """Those that `layer` has."""
        there = layer._modules.get(ADAPTERS)
        return there if isinstance(there, Adapters) else None

    def enter(self) -> None:
        """Become a part of the layer."""
        self.layer.add_module(ADAPTERS, self)

    def leave(self) -> None:
        del self.layer._modules[ADAPTERS]

    @classmethod
    def layer_name(cls, path: str) -> str:
        """The layer's name, of the name that its adapters have as a module."""
        return path.rpartition(".")[0]

    @classmethod
    def filed_under(cls, key: str, layers: Mapping[str, Any]) -> str:
        """Where PEFT's files have the adapter of layers[key], when all of `layers` are adapted."""
        return key

    def on(self) -> list[Pair]:
        """Those that add now."""
        return [pair for _, pair in self.pairs() if pair.adds]

    @property
    def adding(self) -> tuple:
        """What they add now, by which a call that was captured knows itself again."""
        return self.routing, *((pair.adds, pair.alpha, pair.rslora) for _, pair in self.pairs())

    def hang(self) -> None:
        hung = self._hung
        record = made_record(hung.weight)
        others = tuple(adapter for adapter in record.adapters if not adapter.of_layer)
        hung.made_of = [(own._parameters, name, p) for own in self.on() for name, p in own._parameters.items()]  # type: ignore[misc]
        hung.parts = tuple(self._parts())
        for part in hung.parts:
            part.of_layer = True
        record.adapters = hung.left = (*others, *hung.parts)
        drop_record(hung.weight)

    def _parts(self) -> Iterator[Adapter]:
        """Those that are on; in one, by their dropout, those of which each row has its own."""
        names = () if self.routing is None else self.routing.names
        alike: dict[float, list[tuple[int, Any]]] = {}
        weight = seen(self._hung.weight)
        for name, pair in ((name, pair) for name, pair in self.pairs() if pair.adds):
            part = pair.part(weight)
            if name in names:
                alike.setdefault(pair.dropout.p, []).append((names.index(name), part))
            else:
                yield part
        for members in alike.values():
            places, lows = zip(*sorted(members, key=lambda member: member[0]))
            yield PerRow(lows, places, self.routing)

    def route(self, routing: Any) -> None:
        self.__dict__["routing"] = routing
        self.hang()

    def unlike_peft(self) -> str | None:
        """Why PEFT, which reads the same files, does not compute the same."""
        return None

    def unhang(self) -> None:
        hung = self._hung
        record = made_record(hung.weight)
        record.adapters = tuple(adapter for adapter in record.adapters if adapter not in hung.parts)
        drop_record(hung.weight)

    def hang_anew(self) -> None:
        """The layer has another Parameter than the one whose record knows the adapters."""
        self._hang_on(self.layer.weight)

    def follow(self, weight: Tensor) -> None:
        """Before a product of the layer by `weight`: hang on it, and be made of the parameters that are here now.

        Both may be others since: `to_empty` makes new ones, torch.func and FSDP lend some for a call, a hook computes some.
        A weight that two layers have come to share has the adapters of the one that is called.
        """
        hung = self._hung
        if adapters_of(weight) is not hung.left or any(own[name] is not p for own, name, p in hung.made_of):
            self._hang_on(weight)

    def _hang_on(self, weight: Any) -> None:
        self.unhang()
        self.__dict__["_hung"] = _Hung(weight)
        self.hang()

    @property
    def unmerged(self) -> Tensor | None:
        return self._before.weight

    def keep(self, unmerged: Tensor | None) -> None:
        self._before.weight = unmerged

    def __getstate__(self) -> dict[str, Any]:
        weight = self.layer.weight
        if not isinstance(weight, nn.Parameter):  # something computes it: a copy's first call will hang them
            weight = torch.empty(0, device="cpu", dtype=torch.float32)
        return {**self.__dict__, "_hung": _Hung(weight)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy's weight has no record yet."""
        super().__setstate__(state)
        self.written = self._hung.weight._version
        for _, pair in self.pairs():
            pair.belong_to(self)
        self.hang()


class AdaptedForward(partial):
    """What takes the place of a layer's forward while adapters of it add something, as their `adding` tells."""


class ForwardAdapters(Adapters):
    """Of a layer whose products nobody else makes: `adapted` takes its forward's place while some are on."""

    adapted: ClassVar[Callable[..., Tensor]]  # of the layer, and what its forward takes

    @classmethod
    def unfit(cls, layer: Any) -> str | None:
        own = vars(layer).get("forward")
        return None if own is None or getattr(own, "func", None) is cls.adapted else "has a forward of its own"

    def hang(self) -> None:
        self.unhang()
        if self.on():
            self.replace(self.layer)

    @classmethod
    def replace(cls, module: Any) -> None:
        vars(module)["forward"] = AdaptedForward(cls.adapted, module)

    def unhang(self) -> None:
        vars(self.layer).pop("forward", None)


def on(layer: Any) -> list[Pair]:
    return layer._modules[ADAPTERS].on()


def _reload(adapters: Any, keys: Any) -> None:
    """`load_state_dict(assign=True)` puts other parameters in the place of those that the record knows."""
    adapters.hang_anew()


def adapted_layers(model: nn.Module) -> list[tuple[str, Adapters]]:
    """(a layer's name, its adapters) for every layer of `model` that has some."""
    return [(module.layer_name(path), module) for path, module in model.named_modules() if isinstance(module, Adapters)]


def check_module(model: Any, who: str) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"{who}: model must be a torch.nn.Module, got a {type(model).__name__}; pass the model itself.")


def pairs(model: nn.Module, name: str | None, who: str, some: bool = False) -> list[tuple[str, Adapters, Pair]]:
    """Return (a layer's name, its adapters, the one called `name`), of all names where that is None.

    some: raise ValueError if there is none at all
    """
    check_module(model, who)
    layers = adapted_layers(model)
    found = [(key, adapters, own) for key, adapters in layers for word, own in adapters.pairs() if name in (None, word)]
    if name is not None and not found:
        there = sorted({word for _, adapters in layers for word in adapters})
        raise ValueError(f"{who}: the model has no adapter named {name!r}, {_has(there)}.")
    if some and not found:
        raise ValueError(f"{who}: the model has no adapter; call gb.lora.add first.")
    return found


def check_not_chosen(found: Sequence[tuple[str, Adapters, Pair]], who: str) -> None:
    """That no row of a batch chooses from these (rows.py): what is done to them would be for some rows alone."""
    if key := next((key for key, adapters, _ in found if adapters.routing is not None), None):
        raise ValueError(
            f"{who}: rows of a batch choose from the adapters of {key}; call close() of what gb.lora.rows returned first."
        )


def check_not_merged(found: Sequence[tuple[str, Adapters, Pair]], who: str) -> None:
    """That none of these is a part of its weight now, where nothing that is done to the adapter shows."""
    if key := next((key for key, _, own in found if own.merged), None):
        raise ValueError(f"{who}: the adapter of {key} is merged into its weight; call gb.lora.unmerge first.")


def check_outside(weights: Mapping[str, Tensor], who: str) -> None:
    """That these weights of layers may be written, and kept for a backward."""
    if inside := [key for key, weight in weights.items() if weight.is_inference()]:
        raise ValueError(
            f"{who}: {inside[0]} was made inside torch.inference_mode(), and its weight cannot be written; "
            f"make or load the model outside of it."
        )


def check_values(weights: Mapping[str, Tensor], who: str) -> None:
    """That they have values, too: what is copied onto the meta device is lost without a word."""
    check_outside(weights, who)
    if key := next((key for key, weight in weights.items() if weight.is_meta), None):
        raise ValueError(f"{who}: {key} is on the meta device, without values; load the model's weights first.")


def _has(words: Sequence[str]) -> str:
    return f"only {', '.join(map(repr, words))}" if words else "nor any other; call gb.lora.add first"
