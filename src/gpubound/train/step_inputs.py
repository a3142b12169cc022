"""Checks before each step: of the model's current state, and of the micro-batches, which every rank counts.

ModelGuard checks that the model has the parameters that the step trains, and the forward that it captured.

A step's buffers and graphs hold the parameters of the time when the step was made: one that is frozen later would still be
updated, one that is unfrozen, replaced or added would not. A graph replays one forward: in one mode, with one set of hooks and
adapters.

Comparing everything took 0.35 ms a step at 291 parameters. So a step compares lists that are made in C (identities of modules
and parameters, modes, sizes of dicts), and names and hooks only if one of them differs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle

from ..data import Feed
from ..data.leaves import flatten, name as leaf_name
from ..distributed import Ranks
from ..distributed.ranks import Poll
from ..errors import RankError
from ..layers.quantized_base import OnlyCodes
from ..lora.layers import adapted_layers, adding, merged_and_trained, trains, wrappers
from ..trace import fallback, notice

MOST_SIGNATURES = 1000  # that are remembered: a hook registered before each step makes one a step
TRAINS = attrgetter("requires_grad")
MODE = attrgetter("training")
ACTIVE, DISABLED, MERGED = attrgetter("_active_adapter"), attrgetter("_disable_adapters"), attrgetter("merged_adapters")
SCALING = attrgetter("scaling")
ROUTING, FORWARD = methodcaller("get", "routing"), methodcaller("get", "forward")  # of a module's attributes
MODULE_HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PARAMETER_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
GLOBAL_HOOKS = [
    nn_module._global_forward_hooks,
    nn_module._global_forward_pre_hooks,
    nn_module._global_backward_hooks,
    nn_module._global_backward_pre_hooks,
]


class ModelGuard:
    """The parameters and modules of a model as they were when a TrainStep was made.

    signature  a number for the present modules, modes, hooks and adapters. Equal states have equal numbers, so that a graph
               that was captured before an eval() serves again after train()
    """

    signature: int

    def __init__(self, model: nn.Module):
        self._model = model
        self._numbers: dict[tuple, int] = {}
        self._next = count()
        self._structures = 0  # how often modules or their forwards were replaced
        self._scan()
        self._report_codes()

    def check_unmerged(self) -> None:
        """Raise ValueError where a trained adapter is merged. Called before a batch is drawn: a refused step loses none."""
        if not any(map(MERGED, self._layers)):
            return
        for name, layer, trained in self._adapted:
            if trained and layer.merged_adapters and ("unmerged" not in vars(layer) or merged_and_trained(layer)):
                raise ValueError(
                    f"step: {name} has adapters that train, and {', '.join(map(repr, layer.merged_adapters))} merged into its "
                    f"weight, where no gradient reaches them; call gb.lora.unmerge or PEFT's unmerge_adapter() first, or "
                    f"close() this step."
                )

    def check(self) -> int:
        """Return the signature; raise ValueError where a trained parameter was replaced, frozen, removed or added."""
        objects = list(chain.from_iterable(self._identities))
        if (
            len(objects) != len(self._objects)
            or not all(map(is_, objects, self._objects))
            or self._settings() != self._settings_before
        ):
            self._compare_all()
        return self.signature

    def _settings(self) -> tuple:
        """Return the values that a step compares besides the identities of modules and parameters."""
        return (
            RemovableHandle.next_id,  # grows with each hook that is registered in this process
            sum(map(len, self._hook_dicts)),
            sum(map(len, self._registries)),
            list(map(TRAINS, self._parameters)),
            list(map(MODE, self._with_mode)),
            list(map(len, self._attributes)),  # a forward that is set on a module is one more attribute
            list(map(DISABLED, self._switched)),
            list(map(tuple, map(ACTIVE, self._switched))),
            list(map(tuple, map(MERGED, self._layers))),
            list(map(dict, map(SCALING, self._scaled))),
            list(map(ROUTING, map(vars, self._layers))),
            list(map(FORWARD, self._with_forward)),
        )

    def _scan(self) -> None:
        """Save the present parameters and modules."""
        modules = list(self._model.named_modules())
        self._registries = [registry for _, m in modules for registry in (m._modules, m._parameters)]
        live = [registry.values() for registry in self._registries if isinstance(registry, dict) and registry]
        # TorchScript's registries are C++ objects, whose values() is not a live view: it is called each time.
        scripted = [_Values(registry) for registry in self._registries if not isinstance(registry, dict)]
        self._identities: list[Iterable[Any]] = [*live, *scripted]  # an empty registry is compared by its length
        self._objects = list(chain.from_iterable(self._identities))
        self._attributes = [vars(m) for _, m in modules]
        self._with_mode = [m for _, m in modules if hasattr(m, "training")]  # torch.compile's wrapper has no mode
        self._with_forward = [attributes for attributes in self._attributes if "forward" in attributes]
        self._named = [
            (f"{name}.{key}".strip("."), module, key, p, p is not None and p.requires_grad)
            for name, module in modules
            for key, p in module._parameters.items()
        ]
        self._parameters = [p for *_, p, _ in self._named if p is not None]
        self._trained = [p for *_, p, trained in self._named if trained]
        self._tree = [(m, list(m._modules.items()), len(m._parameters), vars(m).get("forward")) for _, m in modules]
        self._adapted = [(name, layer, trains(layer)) for name, layer in adapted_layers(self._model)]
        self._layers = [layer for _, layer, _ in self._adapted]
        self._switched = [*self._layers, *(wrapper for _, wrapper in wrappers(self._model))]
        self._scaled = [layer for layer in self._layers if hasattr(layer, "scaling")]
        self._note()

    def _note(self) -> None:
        """Set the signature and the values that a step compares."""
        dicts = [
            *GLOBAL_HOOKS,
            *chain.from_iterable(map(MODULE_HOOKS, self._attributes)),
            *chain.from_iterable(map(PARAMETER_HOOKS, self._trained)),
        ]
        self._hook_dicts = list(filter(None, dicts))  # next_id shows a new hook in an empty one
        added = tuple(map(adding, self._switched))
        hooks = frozenset(chain.from_iterable(self._hook_dicts))  # by torch's ids, which are never reused
        key = self._structures, tuple(map(MODE, self._with_mode)), hooks, added
        if key not in self._numbers:
            if len(self._numbers) >= MOST_SIGNATURES:
                self._numbers.clear()
            self._numbers[key] = next(self._next)
        self.signature = self._numbers[key]
        self._settings_before = self._settings()

    def _compare_all(self) -> None:
        """After a difference: raise ValueError if it is a trained parameter, else save the present model."""
        self._check_parameters()
        tree = self._tree
        if any(
            list(m._modules.items()) != children or len(m._parameters) != count or vars(m).get("forward") is not forward
            for m, children, count, forward in tree
        ):
            self._check_tree()
            self._scan()
            same = len(tree) == len(self._tree) and all(
                now is then and children == children_then and count == count_then and forward is forward_then
                for (then, children_then, count_then, forward_then), (now, children, count, forward) in zip(tree, self._tree)
            )
            self._structures += not same  # other modules, children or forwards
        self._note()

    def _check_parameters(self) -> None:
        for name, module, key, parameter, trained in self._named:
            registry = module._parameters
            now = registry.get(key) if isinstance(registry, dict) else dict(registry).get(key)  # TorchScript's has no get()
            if now is not parameter:
                what, fix = "replaced by another Parameter", "copy new values into it in place"
            elif now is not None and now.requires_grad is not trained:
                what, fix = "frozen" if trained else "unfrozen", f"set requires_grad back to {trained}"
            else:
                continue
            raise ValueError(
                f"parameters: {name} was {what} since this TrainStep was made, which trains the parameters it found then; "
                f"{fix}, or close() this step and make a new one."
            )

    def _check_tree(self) -> None:
        """Raise ValueError if a trained parameter was removed, or another one that trains was added."""
        known, present = {id(parameter) for *_, parameter, _ in self._named}, {id(p) for p in self._model.parameters()}
        if gone := next((name for name, *_, p, trained in self._named if trained and id(p) not in present), None):
            raise ValueError(
                f"parameters: {gone} was taken out of the model since this TrainStep was made, which trains the parameters it "
                f"found then; put it back, or close() this step and make a new one."
            )
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise ValueError(
                    f"parameters: {name} was added since this TrainStep was made, which trains the parameters it found then; "
                    f"freeze it with requires_grad_(False), or close() this step and make a new one."
                )

    def _report_codes(self) -> None:
        """Report quantised weights of a model that trains more than adapters: they are no parameters, and are not trained."""
        quantised = [name for name, module in self._model.named_modules() if isinstance(module, OnlyCodes)]
        added = {id(p) for layer in self._layers for p in layer.parameters()}
        if quantised and any(p.requires_grad and id(p) not in added for p in self._model.parameters()):
            others = f" and {len(quantised) - 1} more layers" if len(quantised) > 1 else ""
            fallback(
                "train: weights in codes",
                f"those of {quantised[0]}{others} are no parameters, so they stay as they are and the rest of the model "
                f"trains; to train all of it, load it with codes=False",
            )


class _Values:
    """The values of a TorchScript registry, read at each iteration."""

    def __init__(self, registry: Any):
        self._registry = registry

    def __iter__(self) -> Iterator[Any]:
        return iter(self._registry.values())


def gather(batches: Any, accumulate: int) -> list[Any]:
    """Return the next step's micro-batches: a list, one batch, or up to `accumulate` from a feed or iterator."""
    if isinstance(batches, list):
        if not 1 <= len(batches) <= accumulate:
            raise ValueError(
                f"step: got a list of {len(batches)} micro-batches, wanted 1 to accumulate={accumulate}; "
                f"a list always holds micro-batches, one batch goes in as a tensor, a tuple or a dict."
            )
        return batches
    if isinstance(batches, Tensor | tuple | Mapping):
        return [batches]
    if isinstance(batches, Feed):
        return [batches.take() for _ in range(accumulate)]
    if isinstance(batches, Iterator):
        return list(islice(batches, accumulate))
    raise ValueError(
        f"step: got a {type(batches).__name__}, wanted a list of micro-batches, one batch (a tensor, tuple or dict), a feed, "
        f"or an iterator over batches; pass gpubound.feed(source), or keep an iter(source)."
    )


class MicroBatch:
    """One micro-batch, flattened into its tensors and constants, and checked.

    signature  its shapes, dtypes and constants
    key        the model's signature (ModelGuard.signature) and this one's: what one graph serves
    """

    def __init__(self, batch: Any, device: torch.device, model: int):
        self.tree, self.model, self.tensors = flatten(batch), model, list[Tensor]()
        leaves, signature = self.tree.leaves, list[tuple]()
        for index, (path, leaf) in enumerate(zip(self.tree.paths, leaves)):
            if not isinstance(leaf, Tensor):
                try:
                    hash(leaf)
                except TypeError:
                    raise ValueError(
                        f"step: {leaf_name(path)} is a {type(leaf).__name__}, wanted tensors, numbers, strings and the like; "
                        f"it could not be told whether it changed since the step was captured."
                    ) from None
                signature.append((path, leaf))
                continue
            if leaf.device != device:
                raise ValueError(
                    f"step: {leaf_name(path)} is on {leaf.device}, the model on {device}; a copy here would make the device "
                    f"wait: draw the batches from gpubound.feed(source), which copies ahead."
                )
            signature.append((path, leaf.shape, leaf.dtype))
            if leaf.is_inference():  # backward may not save it
                leaves[index] = leaf.clone()
            self.tensors.append(leaves[index])
        self.signature = tuple(signature)
        self.key = model, self.signature

    def whole(self, tensors: Sequence[Tensor] | None = None) -> Any:
        """Return the batch as it was given, with its own tensors or these."""
        if tensors is None:
            return self.tree.rebuild(self.tree.leaves)
        rest = iter(tensors)
        return self.tree.rebuild([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.tree.leaves])


class MicroBatchCounts:
    """The number of micro-batches of each rank in a step, where the data of one rank may end before the others'.

    Replicas wait for each other only in sums; a rank without a micro-batch takes part in these with zeros. Ranks of a sharded
    model also gather weights in each micro-batch, and those of some losses what the others have computed, so all need the same
    number. Their hosts exchange the numbers in the background, and only a rank with fewer than `accumulate` waits for them.
    """

    def __init__(self, ranks: Ranks, accumulate: int, why_equal: str | None):
        """why_equal: the reason why all ranks need the same number, if they do"""
        self.ranks, self.accumulate, self.why_equal = ranks, accumulate, why_equal
        self._steps = 0  # that have begun
        self._reported_idle = False
        self._poll = Poll(ranks)

    def begins(self, count: int) -> bool:
        """Return whether a step begins, with `count` micro-batches of this rank. Raise RankError if the counts forbid it."""
        if self.ranks.world == 1:
            return count > 0
        self.ranks.check_joined()
        begins = True
        if not self._steps:
            begins = self._check(self.ranks.gather(count))  # the first step makes ranks wait for each other anyway
        elif self.why_equal:
            self._poll.begin(count)
            begins = count == self.accumulate or self._check([int(each) for each in self._poll.finish()])
        self._steps += begins
        return begins

    def report_idle(self) -> None:
        """Print once that the other ranks continue without this one's data."""
        if not self._reported_idle:
            notice(
                f"train: the data of rank {self.ranks.rank} ended before step {self._steps}, and others have more; it adds "
                f"nothing to their steps. Give all ranks as many micro-batches to have all of them work."
            )
        self._reported_idle = True

    def _check(self, counts: list[int]) -> bool:
        """Return whether any rank has a micro-batch."""
        most, least = max(counts), min(counts)
        if self.why_equal and most != least:
            wanted = f"as many on every rank, because {self.why_equal}"
        elif most and not least:
            wanted = "one at least on every rank in the first step, which they prepare together"
        else:
            return most > 0

        def described(count: int) -> str:
            return "1 micro-batch" if count == 1 else f"{count or 'no'} micro-batches"

        raise RankError(
            f"step {self._steps + 1}: the data of rank {counts.index(least)} ended: it has {described(least)}, and rank "
            f"{counts.index(most)} has {described(most)}; wanted {wanted}. Give all ranks iterators of one length, or a "
            f"gpubound.feed(source), which does not end."
        )
