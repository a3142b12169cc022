"""Sparse MLP: a mixture of experts, with the methods of a dense one (layer.py).

Up to GEMV_ROWS rows take three launches that read the chosen experts' weights in place (kernels/experts.py). More rows, and
prompts, are sorted by expert, and `F.grouped_mm` multiplies each expert's group, with offsets that stay on the device. Where it
cannot, more rows take the three launches too, and prompts go through every expert. No expert id is read back to the host.

Legend: N tokens, S experts a token (its slots), E experts in all, I width of an expert.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import route, swiglu
from ..kernels.experts import likeliest
from ..kernels.grouped_linear import by_group, not_grouped
from ..models.decoding import ExpertWeights
from .layer import Part, Workspace

PIECE = 4096  # tokens sorted at a time: their rows are S times in memory


class MoELayer(Part):
    """Norm, router, choice, gate and up of the chosen experts, their down."""

    def __init__(self, weights: ExpertWeights, number: int, form: Any, workspace: Workspace) -> None:
        super().__init__(weights, number, form, workspace)
        self.experts = form.experts(weights.gate_up, weights.down)
        self.count = len(weights.router.weight)
        self.ungrouped = not_grouped(weights.gate_up, weights.down)
        self.captures_prompts = not self.ungrouped  # every expert separately would be thousands of nodes
        self.routes_all = bool(self.ungrouped) or not self.experts.grouped_steps
        rows, slots, width = workspace.rows, weights.slots, weights.gate_up.shape[1] // 2
        self._scores = workspace.buffer("scores", rows, self.count)
        self._scored = workspace.buffer("scored", rows, dtype=torch.int32)
        self._ids = workspace.buffer("ids", rows, slots, dtype=torch.int32)
        self._shares = workspace.buffer("shares", rows, slots)
        self._routed = workspace.buffer("routed", rows, slots, width, dtype=workspace.dtype)
        self.gate_up_bytes = slots * self.experts.gate_up_bytes

    def step(self, x: Tensor, mode: int) -> None:
        w, rows = self.weights, len(x)
        ids, shares, routed = self._ids[:rows], self._shares[:rows], self._routed[:rows]
        scratch = self._scores[:rows], self._scored[:rows]
        route(x, w.norm, w.router.weight, w.normalise, *scratch, ids, shares, mode)
        self.experts.routed_gate_up(x, w.norm, ids, routed, mode)
        self.experts.add_routed(routed, ids, shares, self.target(x), mode)
        self.finish(x, mode)
        if self.workspace.routing_trace is not None:
            self.workspace.routing_trace.add(self.number, ids[-1:])

    def gemm_step(self, x: Tensor, mode: int) -> None:
        if self.routes_all:
            return self.step(x, 0)
        h, to = self.read(x, mode), self.target(x)
        to += grouped(h, *self._choose(h), *self.experts.matrices())
        self.finish(x, mode)

    def prompt(self, h: Tensor) -> Tensor:
        ids, shares = self._choose(h)
        mlp, stacks = each_expert if self.ungrouped else grouped, self.experts.matrices()
        pieces = zip(*(t.flatten(0, 1).split(PIECE) for t in (h, ids, shares)))
        return torch.cat([mlp(x, i, share, *stacks).to(h.dtype) for x, i, share in pieces]).view_as(h)

    def _choose(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Ids (..., S) int64 and shares (..., S) fp32 for h (..., hidden), by scores summed in fp32."""
        router = self.weights.router.weight
        if h.is_cuda and h.dtype != torch.float32:
            scores = torch.mm(h.flatten(0, -2), router.t(), out_dtype=torch.float32).view(*h.shape[:-1], -1)
        else:
            scores = F.linear(h.float(), router.float())
        ids, shares = likeliest(scores, self.weights.slots, self.weights.normalise)
        if self.workspace.routing_trace is not None:
            self.workspace.routing_trace.add(self.number, ids[-1:] if ids.dim() == 2 else ids[-1])
        return ids, shares

    def exact(self) -> ExpertWeights:
        gate_up, down = self.experts.exact()
        return replace(self.weights, gate_up=gate_up, down=down)

    def tensors(self) -> list[Tensor]:
        return self.weights.tensors()

    def chosen_bytes(self, tokens: int) -> float:
        """Return the bytes of the experts that differ on average, if all are equally likely: tokens share some."""
        different = self.count * (1 - (1 - self.weights.slots / self.count) ** tokens)
        return different * self.experts.nbytes

    def ops(self) -> list[tuple[str, str, str]]:
        prefix = self.form.prefix
        return [
            ("norm, router, choice", "route", f"{self.weights.slots} of {self.count} experts a row"),
            ("norm, gate, up of experts", f"{prefix}routed_gate_up", "read where they lie"),
            ("down of experts", f"{prefix}add_routed", ""),
        ]

    def report_gemm(self, gemm: bool) -> list[tuple[str, str, str]]:
        """Return the table's rows for prompts and, with `gemm`, for more than GEMV_ROWS rows."""
        if self.ungrouped:
            prompts = ("experts of prompts", "every expert for all tokens, by torch", self.ungrouped)
        else:
            both = gemm and not self.routes_all
            prompts = (f"experts of prompts{', more rows' * both}", "grouped by expert: F.grouped_mm", "")
        why = self.ungrouped or "a row reads its experts' packed weights alone"
        return [prompts, ("experts of more rows", "as of one row", why)] if gemm and self.routes_all else [prompts]


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
