"""Sparse MLP: a mixture of experts, with the methods of a dense one (layer.py).

Up to GEMV_ROWS rows take three launches that read the chosen experts' weights in place (kernels/experts.py). More rows, and
prompts, are sorted by expert, and `F.grouped_mm` multiplies each expert's group, with offsets that stay on the device. Where it
cannot, more rows take the three launches too, and prompts go through every expert. No expert id is read back to the host.

Legend: N tokens, S experts a token (its slots), E experts in all, I width of an expert.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import (
    add_slots,
    column_down,
    column_gate_up,
    gate_rows,
    norm_product,
    route,
    select_experts,
    swiglu,
)
from ..kernels.experts import chosen_experts, clamped_unit, likeliest
from ..kernels.gated import gated
from ..kernels.packed_weights import Packed
from ..layers.moe import by_group, not_grouped
from ..models.decoding import DenseAndExpertWeights, DenseWeights, ExpertWeights
from .layer import DenseMLP, Part, Workspace, normed

PIECE = 4096  # tokens sorted at a time: their rows are S times in memory
WIDE = 1 << 28  # weights of experts that are dequantised at a time: 512 MB in 16 bits
Mixture = Callable[[Tensor, Tensor, Tensor], Tensor]
"""h (N, hidden), ids and shares (N, S) -> the experts' sum (N, hidden), in fp32"""


class MoELayer(Part):
    """Norm, router, choice, gate and up of the chosen experts, their down."""

    def __init__(self, weights: Any, number: int, form: Any, workspace: Workspace) -> None:
        super().__init__(weights, number, form, workspace)
        rows, slots = workspace.rows, weights.slots
        self.count = len(weights.router.weight)
        self.ungrouped = self._not_grouped()
        self.captures_prompts = not self.ungrouped  # every expert separately would be thousands of nodes
        self._scores = workspace.buffer("scores", rows, self.count)
        self._scored = workspace.buffer("scored", rows, dtype=torch.int32)
        self._ids = workspace.buffer("ids", rows, slots, dtype=torch.int32)
        self._shares = workspace.buffer("shares", rows, slots)
        self._spare: Any = workspace.buffer("spare", rows, 2, self.count) if weights.routing is not None else None
        self.shared: SharedExpert | None = None
        self._read_experts()

    def _not_grouped(self) -> str | None:
        return not_grouped(self.weights.gate_up, self.weights.down)

    def _read_experts(self) -> None:
        w, workspace, width = self.weights, self.workspace, self.weights.gate_up.shape[1] // 2
        self.experts = self.form.experts(w.gate_up, w.down)
        self.routes_all = bool(self.ungrouped) or not self.experts.grouped_steps
        self._routed = workspace.buffer("routed", workspace.rows, w.slots, width, dtype=workspace.dtype)
        if w.shared is not None:
            self.shared = SharedExpert(w, self.number, self.form, workspace)
        self.expert_bytes = self.experts.nbytes
        self.gate_up_bytes = w.slots * self.experts.gate_up_bytes + (self.shared.gate_up_bytes if self.shared else 0)

    def step(self, x: Tensor, mode: int) -> None:
        w, to = self.weights, self.target(x)
        also = None if self.shared is None else self.shared.compute(x, mode)
        ids, shares = self._route(x, mode)
        routed = self._routed[: len(x)]
        self.experts.routed_gate_up(x, w.norm, w.activation, ids, routed, mode)
        self.experts.add_routed(routed, ids, shares, to, mode)
        if self.shared is not None and also is not None:
            self.shared.last.add_product(also, to, mode)
        self._end_step(x, ids, mode)

    def _route(self, x: Tensor, mode: int) -> tuple[Tensor, Tensor]:
        """Return ids and shares (B, S) of a step's experts."""
        w, rows = self.weights, len(x)
        scores, ids, shares = self._scores[:rows], self._ids[:rows], self._shares[:rows]
        norm = w.router_norm or w.norm
        if w.routing is None:
            route(x, norm, w.router.weight, w.normalise, scores, self._scored[:rows], ids, shares, mode)
            if w.factors is not None:
                shares *= w.factors[ids]
        else:
            norm_product(x, norm, w.router.weight, bias=w.router.bias, out=scores, dependent=mode)
            select_experts(scores, w.routing, self._spare[:rows], ids, shares, mode)
        return ids, shares

    def _end_step(self, x: Tensor, ids: Tensor, mode: int) -> None:
        self.finish(x, mode)
        if self.workspace.routing_trace is not None:
            self.workspace.routing_trace.add(self.number, ids[-1:])

    def gemm_step(self, x: Tensor, mode: int) -> None:
        if self.routes_all:
            return self.step(x, 0)
        h, to = self.read(x), self.target(x)
        to += self.mixture()(h, *self._choose(self._router_input(x, h)))
        if self.shared is not None:
            to += self.shared.prompt(h)
        self.finish(x, mode)

    def _router_input(self, x: Tensor, h: Tensor) -> Tensor:
        """Return what the router reads for the stream x and its norm h."""
        norm = self.weights.router_norm
        return h if norm is None else normed(x.to(h.dtype), norm)

    def prompt(self, h: Tensor, x: Tensor | None = None) -> Tensor:
        """Return the experts' output for normed h (B, T, hidden). x: the stream, for a router with a separate norm"""
        mixture = self.mixture()
        pieces = zip(*(t.flatten(0, 1).split(PIECE) for t in (h, *self._choose(h if x is None else self._router_input(x, h)))))
        y = torch.cat([mixture(*piece).to(h.dtype) for piece in pieces]).view_as(h)
        return y if self.shared is None else y + self.shared.prompt(h)

    def mixture(self) -> Mixture:
        mlp, (gate_up, down) = each_expert if self.ungrouped else grouped, self.experts.matrices()
        unit = swiglu if self.weights.activation == "silu" else partial(gated, self.weights.activation)
        return lambda h, ids, shares: mlp(h, ids, shares, gate_up, down, unit)

    def _choose(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Ids (..., S) int64 and shares (..., S) fp32 for h (..., hidden), by scores summed in fp32."""
        w = self.weights
        if h.is_cuda and h.dtype != torch.float32:
            scores = torch.mm(h.flatten(0, -2), w.router.weight.t(), out_dtype=torch.float32).view(*h.shape[:-1], -1)
        else:
            scores = F.linear(h.float(), w.router.weight.float())
        if w.router.bias is not None:
            scores = scores + w.router.bias.float()
        if w.routing is None:
            ids, shares = likeliest(scores, w.slots, w.normalise)
        else:
            ids, shares = chosen_experts(scores, w.slots, w.routing)
        if self.workspace.routing_trace is not None:
            self.workspace.routing_trace.add(self.number, ids[-1:] if ids.dim() == 2 else ids[-1])
        return ids, shares if w.factors is None else shares * w.factors.float()[ids]

    def exact(self) -> Any:
        gate_up, down = self.experts.exact()
        shared = None if self.shared is None else self.shared.exact()
        return replace(self.weights, gate_up=gate_up, down=down, shared=shared)

    def tensors(self) -> list[Tensor]:
        w = self.weights
        shared = [] if self.shared is None else [t for product in self.shared.products for t in product.tensors()]
        return [*w.norms(), *w.router.tensors(), *shared, *([] if w.shared_gate is None else [w.shared_gate])]

    def chosen_bytes(self, tokens: int) -> float:
        """Return the bytes of the experts that differ on average, if all are equally likely: tokens share some."""
        different = self.count * (1 - (1 - self.weights.slots / self.count) ** tokens)
        return different * self.expert_bytes

    def ops(self) -> list[tuple[str, str, str]]:
        prefix = self.form.prefix
        what = f"{self.weights.slots} of {self.count} experts a row"
        router = [("norm, router, choice", "route", what)]
        if self.weights.routing is not None:
            router = [("norm, router", "norm_product", ""), ("choice", "select_experts", what)]
        shared = (
            [] if self.shared is None else [(f"{part} of the shared expert", op, why) for part, op, why in self.shared.ops()]
        )
        return [
            *router,
            ("norm, gate, up of experts", f"{prefix}routed_gate_up", "read where they lie"),
            ("down of experts", f"{prefix}add_routed", ""),
            *shared,
        ]

    def report_gemm(self, gemm: bool) -> list[tuple[str, str, str]]:
        if self.ungrouped:
            prompts = ("experts of prompts", "every expert for all tokens, by torch", self.ungrouped)
        else:
            both = gemm and not self.routes_all
            prompts = (f"experts of prompts{', more rows' * both}", "grouped by expert: F.grouped_mm", "")
        why = self.ungrouped or "a row reads its experts' packed weights alone"
        return [prompts, ("experts of more rows", "as of one row", why)] if gemm and self.routes_all else [prompts]


class DenseAndExperts(Part):
    """A dense MLP and experts of the same stream, whose normed outputs are summed, normed and added to the stream."""

    def __init__(self, weights: DenseAndExpertWeights, number: int, form: Any, workspace: Workspace) -> None:
        super().__init__(weights, number, form, workspace)
        self._sum = workspace.buffer("both", workspace.rows, workspace.shape.hidden)
        self.both = DenseMLP(weights.dense, number, form, workspace), MoELayer(weights.experts, number, form, workspace)
        for part in self.both:
            part.output = self._sum
        dense, experts = self.both
        self.captures_prompts, self.gate_up_bytes = experts.captures_prompts, max(part.gate_up_bytes for part in self.both)
        self.products = dense.products

    def step(self, x: Tensor, mode: int) -> None:  # type: ignore[override]
        for part in self.both:
            part.step(x, mode)
        self.finish(x, mode)

    def gemm_step(self, x: Tensor, mode: int) -> None:  # type: ignore[override]
        for part in self.both:
            part.gemm_step(x, mode)
        self.finish(x, mode)

    def prompt(self, x: Tensor) -> Tensor:
        """Return the sum of both outputs for the stream x (B, T, hidden)."""
        dense, experts = self.both
        y = normed(dense.prompt(normed(x, dense.weights.norm)), dense.weights.post_norm)
        return y + normed(experts.prompt(normed(x, experts.weights.norm), x), experts.weights.post_norm)

    def exact(self) -> DenseAndExpertWeights:
        dense, experts = (part.exact() for part in self.both)
        return replace(self.weights, dense=dense, experts=experts)

    def tensors(self) -> list[Tensor]:
        return [self.weights.post_norm.weight, *(t for part in self.both for t in part.tensors())]

    def chosen_bytes(self, tokens: int) -> float:
        return self.both[1].chosen_bytes(tokens)

    def report(self) -> list[tuple[str, str, str]]:
        last = ("norm, residual add of both", f"{self.workspace.kernels}: add_norm", "")
        return [*(row for part in self.both for row in part.report()), last]

    def report_gemm(self, gemm: bool) -> list[tuple[str, str, str]]:
        return self.both[1].report_gemm(gemm)


class ColumnMoELayer(MoELayer):
    """A mixture whose experts have biases and a clamped unit, and weights stored by column, or packed by row.

    A step reads packed weights as they are. Prompts dequantise those of some experts at a time, into memory of all layers.
    """

    def _not_grouped(self) -> str | None:
        w = self.weights
        self.coded = isinstance(w.gate_up, Packed)
        if not self.coded:
            return super()._not_grouped()
        self._packed = [(packed, packed.rows // self.count) for packed in (w.gate_up, w.down)]
        self._at_once = max(1, min(self.count, WIDE // sum(packed.columns * rows for packed, rows in self._packed)))
        self._scratch = [
            self.form.scratch(self._at_once * rows, packed.columns, packed.device).view(self._at_once, rows, packed.columns)
            for packed, rows in self._packed
        ]
        return not_grouped(*self._scratch)

    def _read_experts(self) -> None:
        w, workspace, rows = self.weights, self.workspace, self.workspace.rows
        self.routes_all = bool(self.ungrouped) or self.coded
        self._units = workspace.buffer("units", rows, w.slots, w.down.shape[1], dtype=workspace.dtype)
        self._slots = workspace.buffer("slots", rows, w.slots, workspace.shape.hidden)
        self.expert_bytes = (w.gate_up.nbytes + w.down.nbytes) // self.count
        self.gate_up_bytes = w.slots * w.gate_up.nbytes // self.count

    def step(self, x: Tensor, mode: int) -> None:
        w, units, y = self.weights, self._units[: len(x)], self._slots[: len(x)]
        ids, shares = self._route(x, mode)
        column_gate_up(x, w.norm, w.gate_up, w.gate_up_bias, ids, units, w.alpha, w.limit, mode)
        column_down(units, w.down, w.down_bias, ids, y, mode)
        add_slots(y, shares, self.target(x), mode)
        self._end_step(x, ids, mode)

    def mixture(self) -> Mixture:
        return self._mixed

    def _stacks(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the first expert of each part, and the part's gate_up and down, stored by column. Parts share their memory."""
        if not self.coded:
            yield 0, self.weights.gate_up, self.weights.down
            return
        for first in range(0, self.count, self._at_once):
            last = min(first + self._at_once, self.count)
            stacks = [stack[: last - first] for stack in self._scratch]
            for (packed, rows), stack in zip(self._packed, stacks):
                self.form.unpack(packed.part(slice(first * rows, last * rows)), stack.flatten(0, 1))
            gate_up, down = (stack.transpose(1, 2) for stack in stacks)
            yield first, gate_up, down

    def _mixed(self, h: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """Return the experts' sum (N, hidden) fp32 for h (N, hidden)."""
        parts = [self._mixed_part(h, ids, shares, *part) for part in self._stacks()]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _mixed_part(self, h: Tensor, ids: Tensor, shares: Tensor, first: int, gate_up: Tensor, down: Tensor) -> Tensor:
        """Return the sum (N, hidden) fp32 of the experts from `first` on that gate_up and down hold."""
        w, some = self.weights, len(gate_up) < self.count
        if self.ungrouped:
            total = torch.zeros(h.shape, device=h.device, dtype=torch.float32)
            for number, (own_gate_up, own_down) in enumerate(zip(gate_up, down), first):
                mine = ids == number
                unit = clamped_unit(h @ own_gate_up + w.gate_up_bias[number], w.alpha, w.limit)
                y = (unit @ own_down + w.down_bias[number]) * torch.where(mine, shares, 0.0).sum(1, keepdim=True)
                total += torch.where(mine.any(1, keepdim=True), y, 0.0)
            return total
        mine = (ids >= first) & (ids < first + len(gate_up))
        order, back, ends = by_group(torch.where(mine, ids - first, len(gate_up)) if some else ids, len(gate_up))
        expert = ids.flatten().index_select(0, order)
        both = F.grouped_mm(h.index_select(0, order // ids.shape[1]), gate_up, offs=ends)  # not of experts in other parts
        unit = clamped_unit(both + w.gate_up_bias.index_select(0, expert), w.alpha, w.limit)
        y = F.grouped_mm(unit, down, offs=ends) + w.down_bias.index_select(0, expert)
        y = y.index_select(0, back).view(*ids.shape, -1)
        return torch.bmm(shares[:, None], (torch.where(mine[..., None], y, 0.0) if some else y).float())[:, 0]

    def exact(self) -> Any:
        return self.weights

    def ops(self) -> list[tuple[str, str, str]]:
        prefix, source = ("quantized_", "the model's own codes") if self.coded else ("", "read where they lie")
        return [
            ("norm, router", "norm_product", ""),
            ("choice", "select_experts", f"{self.weights.slots} of {self.count} experts a row"),
            ("norm, gate, up of experts", f"{prefix}column_gate_up", source),
            ("down of experts", f"{prefix}column_down, add_slots", ""),
        ]


class SharedExpert(DenseMLP):
    """An expert of every token, which reads the stream by the norm of the others, and may have a gate."""

    def __init__(self, weights: ExpertWeights, number: int, form: Any, workspace: Workspace) -> None:
        assert weights.shared is not None
        super().__init__(replace(weights.shared, norm=weights.norm), number, form, workspace)
        self.gate = weights.shared_gate

    def compute(self, x: Tensor, mode: int) -> Tensor:
        h = super().compute(x, mode)
        return h if self.gate is None else gate_rows(x, self.weights.norm, self.gate, h, mode)

    def prompt(self, h: Tensor) -> Tensor:
        y = super().prompt(h)
        return y if self.gate is None else y * F.linear(h, self.gate).sigmoid()

    def exact(self) -> DenseWeights:
        return replace(super().exact(), norm=None)


def grouped(
    h: Tensor, ids: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor, gated: Callable[[Tensor], Tensor] = swiglu,
    some: bool = False,
) -> Tensor:  # fmt: skip
    """Return (N, hidden) fp32: Σ share · down(silu(gate) · up) over each token's experts, for h (N, hidden), ids and shares
    (N, S).

    gated  computes silu(gate) · up of [gate | up], or a family's replacement
    some   omit ids without an expert here from the sum
    """
    if some:
        mine = (ids >= 0) & (ids < len(gate_up))
        ids = torch.where(mine, ids, len(gate_up))  # sorted last, and not computed
    order, back, ends = by_group(ids, len(gate_up))
    both = F.grouped_mm(h.index_select(0, order // ids.shape[1]), gate_up.transpose(1, 2), offs=ends)
    y = F.grouped_mm(gated(both), down.transpose(1, 2), offs=ends)
    y = y.index_select(0, back).view(*ids.shape, -1)
    if some:
        y = torch.where(mine[..., None], y, 0.0)
    return torch.bmm(shares[:, None], y.float())[:, 0]


def each_expert(
    h: Tensor, ids: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor, gated: Callable[[Tensor], Tensor] = swiglu
) -> Tensor:
    """Return what `grouped` does, by every expert for all tokens, masked by the routing: E/S times the work."""
    y = torch.zeros(h.shape, device=h.device, dtype=torch.float32)
    for expert, (own_gate_up, own_down) in enumerate(zip(gate_up, down)):
        mine = ids == expert
        share = torch.where(mine, shares, 0.0).sum(1, keepdim=True)
        product = F.linear(gated(F.linear(h, own_gate_up)), own_down)
        y += torch.where(mine.any(1, keepdim=True), product * share, 0.0)
    return y
