"""Low-rank adapters on the layers of a model, in place: added, listed, switched off, removed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..device import without_autocast
from ..kernels.tensor_state import seen
from ..layers.fused_weights import multiply_by_records
from ..layers.linear_formats import shape_of
from .adapter import pack_adapters
from .base import check, check_no_step, kind_of, quantize_base
from .pair import Pair, is_number
from .pairs import Adapters, check_module, check_not_chosen, check_not_merged, check_outside, pairs
from .targets import DORA, KINDS, by, chosen, layers_of

INITS = (True, False, "gaussian", "orthogonal")


@torch.inference_mode(False)  # an adapter made inside could not be trained
def add(
    model: nn.Module,
    rank: int,
    alpha: float | None = None,
    targets: str | Sequence[str] = "all-linear",
    dropout: float = 0.0,
    rslora: bool = False,
    dora: bool = False,
    init: bool | str = True,
    name: str = "default",
    base: str | None = None,
) -> list[str]:
    """Give layers of `model` a low-rank adapter each, and freeze all other parameters. Returns the layers' names.

    alpha    the scale's numerator: y += alpha / rank · dropout(x) aᵀ bᵀ. None: as large as the rank
    targets  "all-linear": every nn.Linear but the head; "all-linear-and-conv": every nn.Conv2d, too; the ends of names
             ("q_proj"); or a regular expression of whole names
    rslora   alpha / √rank instead
    dora     rows of the adapted weight get lengths of their own, which train, too (dora.py): for nn.Linear
    init     True: a at random, b zero, as in PEFT; "gaussian": a normal with deviation 1 / rank; False: b at random, too;
             "orthogonal": both at random, and b a zero, for nn.Linear of an even rank
    name     several adapters may lie on one layer under different names; all that are on are added
    base     "nf4", "int8" or "fp8": what `quantize_base` then puts the frozen weights into

    Adapters are in fp32 over 16-bit weights, so that any optimizer keeps their small updates.
    """
    check_module(model, "lora.add")
    if init not in INITS:
        raise ValueError(f"lora.add: init must be True, False, 'gaussian' or 'orthogonal', got {init!r}.")
    if base is not None:
        check(model, kind_of(base, "lora.add: base"))
    if alpha == 0:  # a file's adapter may have it: it is read, and adds nothing
        raise ValueError(
            "lora.add: alpha must not be 0, the scale's numerator: the adapters would add nothing and learn nothing."
        )
    alpha = rank if alpha is None else alpha
    layers = chosen(model, targets, rank)
    odd = isinstance(rank, int) and rank % 2
    if init == "orthogonal" and (other := [key for key, layer in layers.items() if odd or not isinstance(layer, nn.Linear)]):
        raise ValueError(f"lora.add: init 'orthogonal' is for nn.Linear of an even rank, got rank {rank} of {other[0]}.")
    options = {key: AdapterOptions(layer, rank, alpha, dropout, rslora, dora) for key, layer in layers.items()}
    made = attach(model, options, name, "lora.add")
    if base is not None:
        quantize_base(model, base)
    for key, own in made.items():
        with without_autocast(own.a.device):  # it would round what begins orthogonal, and the lengths of rows
            own.begin(init, layers[key].weight)
    return list(layers)


class AdapterOptions(NamedTuple):
    """How one layer is to be adapted."""

    layer: Any
    rank: int
    alpha: float
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False

    @property
    def pair(self) -> type[Pair]:
        return DORA[type(self.layer)] if self.dora else KINDS[type(self.layer)].PAIR

    def check(self, key: str, name: str, who: str) -> None:
        kind = KINDS[type(self.layer)]
        if self.dora and type(self.layer) not in DORA:
            raise ValueError(f"{who}: dora is for nn.Linear, and {key} is none; adapt it in a call of its own.")
        most = self.pair.most_rank(self.layer.weight)
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or not 1 <= self.rank <= most:
            raise ValueError(
                f"{who}: rank must be an integer from 1 to {most} for {key}, whose weight is "
                f"{by(shape_of(self.layer.weight))}, got {self.rank!r}."
            )
        if not is_number(self.alpha):
            raise ValueError(f"{who}: alpha must be a finite number, got {self.alpha!r}.")
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ValueError(f"{who}: dropout must be from 0 up to, not including, 1, got {self.dropout!r}.")
        if self.dropout and not self.pair.DROPS:
            raise ValueError(f"{who}: {key} takes no dropout, got {self.dropout}; adapt experts in a call of their own.")
        there = kind.of(self.layer) or kind(self.layer)
        if name not in there and hasattr(there, name):
            raise ValueError(f"{who}: torch's modules have an attribute named {name!r}; give the adapter another name.")
        if self.dora and there.unmerged is not None:
            raise ValueError(
                f"{who}: another adapter is merged into {key}, over whose weight DoRA would begin; call gb.lora.unmerge first."
            )
        if name in there:
            raise ValueError(
                f"{who}: {key} already has an adapter named {name!r}; give another name, or call gb.lora.remove first."
            )


def attach(model: nn.Module, options: dict[str, AdapterOptions], name: str, who: str) -> dict[str, Pair]:
    """Adapters without values yet, by their layers' names. Everything is checked before anything is changed."""
    if not isinstance(name, str) or not name or "." in name:
        raise ValueError(f"{who}: name must be a word without dots, got {name!r}.")
    check_no_step(model, who)
    _check_apart(model, list(options), [found.layer for found in options.values()], who)
    check_outside({key.rpartition(".")[0]: p for key, p in model.named_parameters()}, who)  # frozen gains are kept, too
    for key, found in options.items():
        found.check(key, name, who)
    ours = {id(p) for p in parameters(model)}
    for parameter in model.parameters():
        if id(parameter) not in ours:
            parameter.requires_grad_(False)
    made: dict[str, Pair] = {}
    for key, found in options.items():
        kind = KINDS[type(found.layer)]
        if (adapters := kind.of(found.layer)) is None:
            adapters = kind(found.layer)
            adapters.enter()
        made[key] = own = found.pair(seen(found.layer.weight), *found[1:5])
        own.train(found.layer.training)
        adapters[name] = own
        adapters.hang()
    pack_adapters(model)
    multiply_by_records(model, everywhere=True)
    return made


def _check_apart(model: nn.Module, names: Sequence[str], chosen: Sequence[Any], who: str) -> None:
    """What is added to a weight's products, or merged into it, shows wherever the weight is used."""
    weights, first = {id(layer.weight) for layer in chosen}, dict[int, str]()
    for key, layer in layers_of(model).items():
        other = first.setdefault(id(layer.weight), key)
        if other != key and id(layer.weight) in weights:
            ends = sorted({name.rpartition(".")[2] for name in names if name not in (other, key)})
            others = f", or give targets={ends}" if ends else ""
            raise ValueError(
                f"{who}: {other} and {key} share one weight, so an adapter of one would change both; untie them{others}."
            )


def parameters(model: nn.Module, name: str | None = None) -> list[nn.Parameter]:
    """The parameters of the adapters, or of those called `name`: what an optimizer is given."""
    return [p for _, _, own in pairs(model, name, "lora.parameters") for p in own.parameters()]


def remove(model: nn.Module, name: str | None = None) -> None:
    """Take adapters out, or those called `name`. What `add` froze stays frozen."""
    found = pairs(model, name, "lora.remove", some=True)
    check_no_step(model, "lora.remove")
    check_not_chosen(found, "lora.remove")
    check_not_merged(found, "lora.remove")
    take_out(model, found)


def take_out(model: nn.Module, found: Sequence[tuple[str, Adapters, Pair]]) -> None:
    undo = multiply_by_records(model, everywhere=True)
    for _, adapters, own in found:
        del adapters[next(word for word, there in adapters.items() if there is own)]
        adapters.hang()
        if not adapters:
            adapters.leave()
    undo()


class disable:
    """Switch adapters off, or those called `name`: until `enable`, or to the end of a `with` block.

    A graph that was captured before goes on as it was captured.
    """

    def __init__(self, model: nn.Module, name: str | None = None):
        found = [one for one in pairs(model, name, "lora.disable") if one[2].on]
        check_not_merged(found, "lora.disable")
        self._were_on = [(adapters, own) for _, adapters, own in found]
        _switch(self._were_on, False)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        _switch(self._were_on, True)


def enable(model: nn.Module, name: str | None = None) -> None:
    """Switch adapters on again, or those called `name`."""
    _switch([(adapters, own) for _, adapters, own in pairs(model, name, "lora.enable")], True)


def _switch(found: Sequence[tuple[Adapters, Pair]], on: bool) -> None:
    for adapters, own in found:
        own.on = on
        if adapters:  # else all of them were taken out meanwhile, and the layer may have others
            adapters.hang()
