"""Muon over flat buffers (Keller Jordan, 2024): the update of a matrix is its momentum, orthogonalised.

Five Newton-Schulz steps do that, in 16 bits where those are fast: every direction moves by the same amount, however weak its
gradient. Rates of AdamW carry over: an update has the same size (0.2 · √ of the longer side). AdamW updates the other
parameters under the same plan: one norm, one clip, one schedule, one skip.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..device import fast_16bit
from ..distributed import Ranks
from ..layers.embedding_and_head import head_of
from .adamw import AdamW, FlatAdamW
from .adamw8 import AdamW8bit
from .flat_layout import MUON, FlatLayout, FlatSlot, Group, lay_out
from .precision import Precision
from .schedule import is_rate

# The quintic whose slope at zero is steepest: it takes singular values from anywhere below one to between 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class Muon:
    """Muon for matrices, `rest` for other parameters. `takes(name, parameter)` chooses; None: every nn.Linear but the head."""

    lr: float = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    iterations: int = 5
    takes: Callable[[str, Parameter], bool] | None = None
    rest: AdamW = field(default_factory=AdamW)
    whole: ClassVar[str | None] = "Muon makes whole matrices orthogonal"
    by_element: ClassVar[bool] = False

    def __post_init__(self):
        rates = is_rate(self.lr) and is_rate(self.weight_decay)
        if not rates or not 0 <= self.momentum < 1 or self.iterations < 1:
            raise ValueError(
                f"Muon: lr and weight_decay must be finite and not negative, momentum lies from 0 to below 1, "
                f"iterations is at least 1; got {self.lr}, {self.weight_decay}, {self.momentum} and {self.iterations}."
            )
        if not self.rest.lr > 0:
            raise ValueError(f"Muon: rest.lr must be above 0, for one schedule moves both rates, got {self.rest.lr}.")
        if isinstance(self.rest, AdamW8bit):
            raise ValueError("AdamW8bit: got it as the rest of Muon, wanted it by itself; take rest=AdamW(...).")

    def lay_out(self, model: Any, precision: Precision) -> FlatLayout:
        precision.check_rounded("Muon")
        named, takes = list(model.named_parameters()), self.chooser(model)
        layout = lay_out(named, precision.dtype, self.rest.decays, takes, model.named_buffers())
        for slot in layout.slots:
            if takes(slot.name, slot.parameter) and slot.parameter.dim() != 2:
                shape = tuple(slot.parameter.shape)
                raise ValueError(f"Muon: takes {slot.name} of shape {shape}, wanted matrices; leave it to rest.")
        return layout

    def moment_bytes(self, layout: FlatLayout) -> int:
        return self.rest.moment_bytes(layout)

    def flat(self, *rest: Any) -> "FlatAdamW":
        return FlatMuon(self, *rest)

    def chooser(self, model: Any) -> Callable[[str, Parameter], bool]:
        """Return the rule that chooses the parameters of `model` that Muon updates."""
        if self.takes is not None:
            return self.takes
        head = head_of(model)
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} | {id(getattr(head, "weight", None))}
        linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - tables
        return lambda name, parameter: id(parameter) in linear


def count_by_rule(model: Any, optimizer: Any) -> tuple[int, int]:
    """Return the numbers of trained elements that AdamW and Muon update. `model` may be on the meta device."""
    takes = optimizer.chooser(model) if isinstance(optimizer, Muon) else lambda name, parameter: False
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    by_muon = sum(p.numel() for name, p in trained if takes(name, p))
    return sum(p.numel() for _, p in trained) - by_muon, by_muon


class FlatMuon(FlatAdamW):
    """FlatAdamW with Muon's rule for its groups: `m` is their momentum, and they have no `v`."""

    fused_update = False

    def __init__(self, config: Muon, *arguments):
        super().__init__(config.rest, *arguments)
        self.muon, self._ratio = config, config.lr / config.rest.lr
        layout = self.weights.layout
        self._dtype = iteration_dtype(layout.device)
        self._stacks: list[tuple[Group, Tensor, list[FlatSlot]]] = []
        for group, finest in zip(layout.groups, self.weights.finest()):
            slots = layout.slots_of(group) if group.rule == MUON else []
            for shape in dict.fromkeys(slot.parameter.shape for slot in slots):
                self._stacks.append((group, finest, [slot for slot in slots if slot.parameter.shape == shape]))

    def agree(self, ranks: Ranks) -> None:
        """A CPU's dtype is measured, and two busy ranks may measure differently: all use the first rank's."""
        self._dtype = ranks.of_first(self._dtype)

    def carry_out(self, gradient: Tensor, plan: Tensor, report: Tensor) -> None:
        super().carry_out(gradient, plan, report)
        muon, go, lr = self.muon, plan[0] != 0, (report[4] * self._ratio).float()
        for group, finest, slots in self._stacks:
            momenta, weights = [slot.view(self.m) for slot in slots], [slot.view(finest, group.start) for slot in slots]
            g = torch.stack([slot.view(gradient) for slot in slots]) * plan[1]
            m_old, p_old = torch.stack(momenta), torch.stack(weights)
            m = m_old.lerp(g, 1 - muon.momentum)
            u = orthogonal(g.lerp(m, muon.momentum) if muon.nesterov else m, muon.iterations, self._dtype)
            size = 0.2 * max(u.shape[-2:]) ** 0.5
            p = p_old * (1 - lr * muon.weight_decay) - lr * size * u
            torch._foreach_copy_(momenta, list(torch.where(go, m, m_old).unbind()))
            torch._foreach_copy_(weights, list(torch.where(go, p, p_old).unbind()))
        for group, flat, master in self.weights.rounded:
            if group.rule == MUON:
                flat.copy_(master)


def iteration_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of Newton-Schulz steps.

    They run in bf16, which is accurate enough, or in fp32 on a device where bf16 is slower: a CPU without bf16 units trained
    the demo's model at 1.6k tokens/s in bf16 and at 9.2k in fp32.
    """
    return torch.bfloat16 if fast_16bit(device) else torch.float32


def orthogonal(x_KRC: Tensor, iterations: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return approximately the nearest orthogonal matrix to each of K (R rows, C columns), by Newton-Schulz in `dtype`."""
    a, b, c = COEFFICIENTS
    tall = x_KRC.shape[1] > x_KRC.shape[2]
    x = x_KRC.to(dtype or iteration_dtype(x_KRC.device))
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
