"""Muon for the matrices of a model, AdamW for the rest, under one plan: one norm, one clip, one schedule, one skip.

Muon (Keller Jordan, 2024) moves a matrix by its momentum made orthogonal: every direction moves alike, however weak its
gradient. The orthogonal factor comes from five Newton-Schulz steps in 16 bits, for all matrices of one shape at once. It keeps
one moment where AdamW keeps two. Rates carry over: an update has the size that AdamW's would have (0.2 · √ of the longer side).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from .flat_buffers import MUON, FlatSlot, Group
from .optimizer import AdamW, FlatAdamW

# The quintic whose slope at zero is steepest: it takes singular values from anywhere below one to between 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class Muon:
    """The numbers of both. `takes` (name, parameter) -> bool says which matrices; None: every nn.Linear's but the head's."""

    lr: float = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    iterations: int = 5
    takes: Callable[[str, Parameter], bool] | None = None
    rest: AdamW = field(default_factory=AdamW)

    def __post_init__(self):
        rates = 0 <= self.lr < math.inf and 0 <= self.weight_decay < math.inf
        if not rates or not 0 <= self.momentum < 1 or self.iterations < 1:
            raise ValueError(
                f"Muon: lr and weight_decay must be finite and not negative, momentum lies from 0 to below 1, "
                f"iterations is at least 1; got {self.lr}, {self.weight_decay}, {self.momentum} and {self.iterations}."
            )
        if not self.rest.lr > 0:
            raise ValueError(f"Muon: rest.lr must be above 0, for one schedule moves both rates, got {self.rest.lr}.")

    def chooser(self, model: Any) -> Callable[[str, Parameter], bool]:
        """Which parameters of `model` it takes."""
        if self.takes is not None:
            return self.takes
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} | {id(getattr(head, "weight", None))}
        linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - tables
        return lambda name, parameter: id(parameter) in linear


class FlatMuon(FlatAdamW):
    """FlatAdamW with another rule for the groups that Muon takes; `m` is their momentum, and `v` does not reach them."""

    def __init__(self, config: Muon, *arguments):
        super().__init__(config.rest, *arguments)
        self.muon, self._ratio = config, config.lr / config.rest.lr
        weights = self.weights
        self._stacks: list[tuple[Group, Tensor, list[FlatSlot]]] = []
        for group, finest in zip(weights.layout.groups, weights.finest()):
            shapes: dict[torch.Size, list[FlatSlot]] = {}
            for slot in weights.layout.slots_of(group) if group.rule == MUON else ():
                shapes.setdefault(slot.parameter.shape, []).append(slot)
            self._stacks += [(group, finest, slots) for slots in shapes.values()]

    def carry_out(self, gradient: Tensor, plan: Tensor, report: Tensor) -> None:
        super().carry_out(gradient, plan, report)
        lr = (report[4] * self._ratio).float()
        for group, finest, slots in self._stacks:
            self._move(gradient, plan, lr, group, finest, slots)
        for group, flat, master in zip(self.weights.layout.groups, self.weights.flat, self.weights.masters):
            if group.rule == MUON and master is not None:
                flat.copy_(master)

    def _move(self, gradient: Tensor, plan: Tensor, lr: Tensor, group: Group, finest: Tensor, slots: list[FlatSlot]) -> None:
        muon, go = self.muon, plan[0] != 0
        momenta, weights = [slot.view(self.m) for slot in slots], [slot.view(finest, group.start) for slot in slots]
        g = torch.stack([slot.view(gradient) for slot in slots]) * plan[1]
        m_old, p_old = torch.stack(momenta), torch.stack(weights)
        m = m_old.lerp(g, 1 - muon.momentum)
        u = orthogonal(g.lerp(m, muon.momentum) if muon.nesterov else m, muon.iterations)
        size = 0.2 * max(u.shape[-2:]) ** 0.5
        p = p_old * (1 - lr * muon.weight_decay) - lr * size * u
        torch._foreach_copy_(momenta, list(torch.where(go, m, m_old).unbind()))
        torch._foreach_copy_(weights, list(torch.where(go, p, p_old).unbind()))


def orthogonal(x_KRC: Tensor, iterations: int) -> Tensor:
    """The nearest orthogonal matrix to each of K (R rows, C columns), roughly: bf16, by Newton-Schulz."""
    a, b, c = COEFFICIENTS
    tall = x_KRC.shape[1] > x_KRC.shape[2]
    x = x_KRC.bfloat16()
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
