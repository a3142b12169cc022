"""Adapters of experts, as transformers keeps them: the weights of all experts of a layer in two parameters, gate_up_proj and
down_proj. Each expert has a pair of its own, and the products of all are grouped, as the experts' own are.

The experts' forward adds them, in torch's grouped products. There is no dropout, as in PEFT, whose files have no place for it.

Legend: E experts, K inputs, O outputs, R ranks, S slots (a token and one of its experts); a (E, R, K), b (E, O, R).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.accumulate import widened
from ..kernels.grouped_linear import by_group
from ..layers.linear_formats import ADAPTERS
from .pair import Pair
from .pairs import ForwardAdapters

PROJECTIONS = ("gate_up_proj", "down_proj")
ALIGN = 8  # numbers: grouped products of 16 bits want rows that begin at multiples of 16 bytes


class ExpertStack(NamedTuple):
    """One parameter of a module of experts, (E, O, K): what is adapted."""

    module: Any
    name: str

    @property
    def weight(self) -> Tensor:
        return self.module._parameters[self.name]

    @property
    def training(self) -> bool:
        return self.module.training


def expert_stacks(key: str, module: nn.Module) -> dict[str, ExpertStack]:
    """Those of `module` by their parameters' names, none where it is no module of experts."""
    there = getattr(module, "_parameters", {})
    if not all(isinstance(there.get(name), Tensor) and there[name].dim() == 3 for name in PROJECTIONS):
        return {}
    return {f"{key}.{name}": ExpertStack(module, name) for name in PROJECTIONS}


class ExpertPair(Pair):
    DROPS = False

    @staticmethod
    def shapes(weight: Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        experts, outputs, inputs = weight.shape
        return (experts, rank, inputs), (experts, outputs, rank)

    @staticmethod
    def most_rank(weight: Tensor) -> int:
        return min(weight.shape[1:])

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    def begin(self, init: bool | str, weight: Tensor) -> None:
        """PEFT draws both as the matrices of its files, which have the ranks of all experts side by side."""
        experts, rank, inputs = self.a.shape
        nn.init.normal_(self.a, std=1 / rank) if init == "gaussian" else _uniform(self.a, inputs)
        _uniform(self.b, experts * rank) if init is False else nn.init.zeros_(self.b)

    def added(self, weight: Tensor) -> Tensor:
        return self.scale * (self.b.to(weight.dtype) @ self.a.to(weight.dtype))

    def filed(self, half: str) -> Tensor:
        """A (E R, K), and B (O, R E), in which a rank has the experts side by side."""
        value = super().filed(half)
        return value.flatten(0, 1) if half == "lora_A.weight" else value.permute(1, 2, 0).flatten(1)

    def take(self, half: str, value: Tensor) -> None:
        experts, rank, _ = self.a.shape
        if half == "lora_A.weight":
            super().take(half, value.unflatten(0, (experts, rank)))
        else:
            super().take(half, value.unflatten(1, (rank, experts)).permute(2, 0, 1))


def _uniform(t: Tensor, inputs: int) -> None:
    nn.init.uniform_(t, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs))


class ExpertAdapters(ForwardAdapters):
    """The adapters of one parameter of a module of experts: that module's child, such as `gate_up_proj_lora`."""

    PAIR = ExpertPair

    @classmethod
    def of(cls, layer: ExpertStack) -> Any:
        return layer.module._modules.get(_child(layer.name))

    def enter(self) -> None:
        self.layer.module.add_module(_child(self.layer.name), self)

    def leave(self) -> None:
        del self.layer.module._modules[_child(self.layer.name)]

    @classmethod
    def layer_name(cls, path: str) -> str:
        return path.removesuffix(_child(""))

    @classmethod
    def filed_under(cls, key: str, layers: Mapping[str, Any]) -> str:
        """PEFT puts a wrapper around the module for each of its parameters, the first one innermost."""
        path, _, name = key.rpartition(".")
        order = list(layers[key].module._parameters)
        around = [other for other in order[order.index(name) + 1 :] if f"{path}.{other}" in layers]
        return path + ".base_layer" * len(around)

    @classmethod
    def unfit(cls, layer: ExpertStack) -> str | None:
        module = layer.module
        if not (getattr(module, "has_gate", True) and hasattr(module, "num_experts") and hasattr(module, "act_fn")):
            return "belongs to no experts as transformers has them"
        for word in ("is_transposed", "has_bias", "has_post_expert_norm", "_is_expert_parallel"):
            if getattr(module, word, False):
                return f"belongs to experts of another form ({word.strip('_')})"
        return super().unfit(module)

    def hang(self) -> None:
        self.unhang()
        children = vars(self.layer.module).get("_modules", {})  # a copy's are not there yet
        if self.on() or any(child.on() for child in children.values() if isinstance(child, ExpertAdapters)):
            self.replace(self.layer.module)

    def unhang(self) -> None:
        vars(self.layer.module).pop("forward", None)

    @staticmethod
    def adapted(layer: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As transformers' grouped form: slots in the order of their experts, two grouped products, and back."""
        tokens, slots = top_k_index.shape
        order, back, ends = by_group(top_k_index, layer.num_experts)
        gate_up = _grouped(layer, "gate_up_proj", hidden_states[order // slots], ends)
        y = _grouped(layer, "down_proj", _gated(layer, gate_up), ends) * top_k_weights.flatten()[order, None]
        return y[back].view(tokens, slots, -1).sum(1).to(hidden_states.dtype)


def _child(name: str) -> str:
    return f"{name}_{ADAPTERS}"


def _gated(experts: Any, gate_up: Tensor) -> Tensor:
    if hasattr(experts, "_apply_gate"):
        return experts._apply_gate(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return experts.act_fn(gate) * up


def _grouped(experts: Any, name: str, x: Tensor, ends: Tensor) -> Tensor:
    weight = experts._parameters[name]
    x = x.to(weight.dtype)  # autocast does not know grouped products
    y = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    adapters = experts._modules.get(_child(name))
    for pair in () if adapters is None else adapters.on():
        short = -pair.rank % ALIGN
        a = F.pad(widened(pair.a, x.dtype), (0, 0, 0, short))
        b = F.pad(widened(pair.b, x.dtype), (0, short))
        h = pair.scale * F.grouped_mm(x, a.transpose(1, 2), offs=ends)
        y = y + F.grouped_mm(h, b.transpose(1, 2), offs=ends)
    return y
