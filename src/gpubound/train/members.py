"""Which parameters a step trains, and that a model has no others by now. And how it is called by now: what its adapters add,
in which modes its modules are, which hooks they carry."""

from collections.abc import Callable
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from ..layers.frozen import OnlyCodes
from ..lora import peft_layers
from ..lora.pair import Pair
from ..lora.pairs import AdaptedForward, Adapters
from ..trace import fallback

ON_MODULE = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ON_PARAMETER = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
EVERYWHERE = [  # of register_module_forward_hook and its kin
    nn_module._global_forward_hooks,
    nn_module._global_forward_pre_hooks,
    nn_module._global_backward_hooks,
    nn_module._global_backward_pre_hooks,
]


class Called(NamedTuple):
    """How a model is called, which a captured step has baked in. By what each adapter adds: switched or merged, it is another
    step. By modes and hooks, whose numbers are never given out twice; and by how often the model was another one."""

    changes: int
    modes: tuple
    hooks: frozenset[int]
    adding: tuple

    def may_come_back(self, now: "Called") -> bool:
        """Whether a model that is called like `now` may ever be called like this again."""
        return self.changes == now.changes and self.hooks <= now.hooks


class Members:
    """Which parameters a model had, and which of them trained, when the layout was made: at the same moment as this.

    The flat buffers and a captured step know of no others: what is frozen later would go on moving, what is unfrozen,
    replaced or added would stay still.
    """

    def __init__(self, model: nn.Module):
        self._model, self._changes = model, 0
        self._look()
        self._tell_codes()

    def _look(self) -> None:
        modules = list(self._model.named_modules())
        self._tree = [
            (_children(m), dict(m._modules), m._parameters, len(m._parameters), vars(m), vars(m).get("forward"))
            for _, m in modules
        ]
        self._scripted = [m for _, m in modules if isinstance(m, torch.jit.ScriptModule)]
        self._own = [vars(m) for _, m in modules]
        self._members = [
            (f"{name}.{key}".strip("."), _reader(module._parameters), key, p, p is not None and p.requires_grad)
            for name, module in modules
            for key, p in module._parameters.items()
        ]
        self._trained = [p for *_, p, trains in self._members if trains]
        self._adapters = [
            (name, m) for name, m in modules if isinstance(m, Pair) and any(p.requires_grad for p in m.parameters())
        ]
        self._ours = [m for _, m in modules if isinstance(m, Adapters)]
        self._theirs = [(name, m, peft_layers.trains(m)) for name, m in modules if peft_layers.of_peft(m)]

    def _tell_codes(self) -> None:
        """A model that trains by more than adapters is thought to train as a whole; what lies in codes does not."""
        coded = [name for name, module in self._model.named_modules() if isinstance(module, OnlyCodes)]
        adapters = [*(m for _, m in self._adapters), *(m for _, m, _ in self._theirs)]
        added = {id(p) for module in adapters for p in module.parameters()}
        if coded and any(p.requires_grad and id(p) not in added for p in self._model.parameters()):
            others = f" and {len(coded) - 1} more layers" if len(coded) > 1 else ""
            fallback(
                "train: weights in codes",
                f"those of {coded[0]}{others} are no parameters, so they stay as they are and the rest of the model trains; "
                f"to train all of it, load it with codes=False",
            )

    def called(self) -> Called:
        """How the model is called now."""
        adding = *(m.adding for m in self._ours), *(peft_layers.adding(m) for _, m, _ in self._theirs)
        modes = [own.get("training") for own in self._own]  # torch.compile's wrapper has none of its own
        modes += [module.training for module in self._scripted]  # and TorchScript's is not there
        return Called(self._changes, tuple(modes), self._hooks(), adding)

    def _hooks(self) -> frozenset[int]:
        """torch's numbers of all hooks on the modules and on what trains. In C: there are thousands of places to look at."""
        of_modules = chain.from_iterable(map(ON_MODULE, self._own))
        of_parameters = chain.from_iterable(map(ON_PARAMETER, self._trained))
        return frozenset(chain.from_iterable(filter(None, chain(EVERYWHERE, of_modules, of_parameters))))

    def check_unmerged(self) -> None:
        """That the products of each adapter that trains are there. Before a batch is drawn: a refused step loses none."""
        if name := next((name for name, adapter in self._adapters if adapter.merged), None):
            raise ValueError(
                f"step: {name} trains, and is merged into its weight, where no gradient reaches it; call gb.lora.unmerge "
                f"first, or close() this step if it was merged for good."
            )
        for name, layer, trains in self._theirs:
            if trains and layer.merged:
                raise ValueError(
                    f"step: {name} has adapters of PEFT's that train, and {', '.join(map(repr, layer.merged_adapters))} merged "
                    f"into its weight, where PEFT leaves the others out and no gradient comes; call unmerge_adapter() "
                    f"first, or close() this step."
                )

    def check(self) -> None:
        for name, read, key, parameter, trains in self._members:
            now = read(key)
            if now is not parameter:
                what, mend = "replaced by another Parameter", "copy new values into it in place"
            elif now is not None and now.requires_grad is not trains:
                what, mend = "frozen" if trains else "unfrozen", f"set requires_grad back to {trains}"
            else:
                continue
            raise ValueError(
                f"parameters: {name} was {what} since this TrainStep was made, which trains the parameters it found then; "
                f"{mend}, or close() this step and make a new one."
            )
        if any(
            children != were or len(parameters) != count or own.get("forward") is not forward
            for children, were, parameters, count, own, forward in self._tree
        ):
            self._check_tree()

    def _check_tree(self) -> None:
        """The modules are others now: is there one among them that is to be trained, and are all there that were trained?"""
        known, there = {id(parameter) for *_, parameter, _ in self._members}, {id(p) for p in self._model.parameters()}
        if gone := next((name for name, *_, p, trains in self._members if trains and id(p) not in there), None):
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
        before = self._tree
        self._look()
        self._changes += not _alike(before, self._tree)


def _children(module: nn.Module) -> Any:
    """Where its modules are. A scripted one's cannot be others, and its wrapper around them equals no dict."""
    return module._modules if isinstance(module._modules, dict) else dict(module._modules)


def _reader(home: Any) -> Callable[[str], Any]:
    """What reads a parameter in a module's registry; a scripted module's knows no get()."""
    return home.get if isinstance(home, dict) else lambda key: dict(home).get(key)


def _alike(before: list[tuple], after: list[tuple]) -> bool:
    """Whether these are the same modules, which call each other in the same way."""
    return len(before) == len(after) and all(
        own is own_then and children == those_then and count == count_then and _one_call(forward, then)
        for (_, those_then, _, count_then, own_then, then), (_, children, _, count, own, forward) in zip(before, after)
    )


def _one_call(*forwards: Any) -> bool:
    """Whether two forwards that were set on a module are one. An adapted layer's comes and goes with what its adapters add, by
    which a step is known anyway."""
    one, other = (None if isinstance(forward, AdaptedForward) else forward for forward in forwards)
    return one is other
