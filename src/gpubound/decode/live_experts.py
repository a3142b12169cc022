"""The sparse layers of a mixture of experts as decoding reads them: Qwen3-MoE's and Mixtral's, by their homes and names.

A sparse block has a router (`gate`) and its experts' weights stacked in two parameters. Qwen3-MoE may have dense layers
between; Mixtral has none, and always divides the shares of the chosen experts by their sum.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

FAMILIES = {"qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}


@dataclass(frozen=True)
class Experts:
    """The weights of a sparse MLP: E experts of width I, of which a row is given `slots`."""

    router: Tensor  # (E, hidden)
    gate_up: Tensor  # (E, 2 I, hidden)
    expert_down: Tensor  # (E, hidden, I)


class Routing(NamedTuple):
    """What all sparse layers of a model have in common."""

    experts: int
    slots: int
    width: int
    normalise: bool


def known_as(module: nn.Module) -> str | None:
    """'ForCausalLM', 'SparseMoeBlock', 'Experts', ... for a module of these families, else None."""
    kind = type(module)
    for family, prefix in FAMILIES.items():
        if kind.__module__ == f"transformers.models.{family}.modeling_{family}":
            return kind.__name__.removeprefix(prefix)
    return None


def sparse_mlps(model: Any) -> dict[int, Any]:
    """The sparse blocks of a causal language model, by the numbers of their layers."""
    return {number: block.mlp for number, block in enumerate(model.model.layers) if is_sparse(block.mlp)}


def is_sparse(mlp: nn.Module) -> bool:
    return known_as(mlp) == "SparseMoeBlock"


def routing(model: Any) -> Routing | None:
    """None for a model whose layers are all dense."""
    first = next(iter(sparse_mlps(model).values()), None)
    if first is None:
        return None
    experts, hidden_twice, _ = first.experts.gate_up_proj.shape
    normalise = bool(getattr(first.gate, "norm_topk_prob", True))
    return Routing(experts, int(first.gate.top_k), hidden_twice // 2, normalise)


def read(block: Any) -> Experts:
    """The weights of a sparse block."""
    stacks = block.experts._parameters
    return Experts(block.gate._parameters["weight"], stacks["gate_up_proj"], stacks["down_proj"])


def unreadable(model: Any) -> str | None:
    """Why the kernels may not read the experts, where they may not."""
    for number, block in sparse_mlps(model).items():
        name = f"model.layers.{number}.mlp"
        for part, kind, names in (("gate", "TopKRouter", {"weight"}), ("experts", "Experts", {"gate_up_proj", "down_proj"})):
            module = getattr(block, part)
            if known_as(module) != kind or set(module._parameters) != names:
                return f"{name}.{part}: {type(module).__name__}, not the family's own"
            if module._forward_hooks or module._forward_pre_hooks:
                return f"{name}.{part}: it carries hooks"
        if getattr(block.experts, "_is_expert_parallel", False):
            return f"{name}.experts: shared out among several devices"
    if len({(*block.experts.gate_up_proj.shape, block.gate.top_k) for block in sparse_mlps(model).values()}) > 1:
        return "its sparse layers differ in experts or width"
    return None
