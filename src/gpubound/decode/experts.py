"""The body for mixtures of experts: a fused body some of whose layers have experts in their MLP's place.

Up to NARROW rows a sparse MLP is three launches that read the chosen experts' weights where they lie (kernels/experts.py). More
rows, and prompts, are sorted by their experts, and `F.grouped_mm` multiplies each expert's part, with offsets that stay on the
device. Where it cannot, more rows go through the three launches too, and prompts through every expert. Nothing here asks the
device which expert it was.

Legend: N tokens, S experts a token (its slots), E experts in all, I width of an expert.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import add_routed, norm_rows, route, routed_gate_up, swiglu
from ..kernels.experts import likeliest
from .cache import PLAIN, CacheLayout
from .fused import EARLY, EARLY_BYTES, LATE, NARROW, FusedBody
from .judge import Choices
from .live import BoundModel, SparseLayer
from .live_experts import Experts

PIECE = 4096  # tokens sorted at a time: their rows lie S times in memory


class ExpertsBody(FusedBody):
    def __init__(
        self, live: BoundModel, max_batch: int, max_length: int, tokens: int = 1, *, cache: CacheLayout = PLAIN
    ) -> None:
        super().__init__(live, max_batch, max_length, tokens, cache=cache)
        assert live.shape.routing is not None
        self.routing, self.tokens, rows = live.shape.routing, tokens, max_batch * tokens
        self.sparse = [number for number, layer in enumerate(live.layers) if isinstance(layer, SparseLayer)]
        self.ungrouped = not_grouped(live.layers[self.sparse[0]])
        self.captures_prefill = not self.ungrouped  # every expert by itself would be thousands of nodes
        narrow = rows if self.ungrouped else min(rows, NARROW)
        wide: Any = {"device": self.device, "dtype": torch.float32}
        self.scores = torch.zeros(narrow, self.routing.experts, **wide)
        self.scored = torch.zeros(narrow, device=self.device, dtype=torch.int32)
        self.ids = torch.zeros(narrow, self.routing.slots, device=self.device, dtype=torch.int32)
        self.shares = torch.zeros(narrow, self.routing.slots, **wide)
        self.routed = torch.zeros(narrow, self.routing.slots, self.routing.width, device=self.device, dtype=live.dtype)
        self._overheard: Choices | None = None

    @contextmanager
    def overhear(self) -> Iterator[Choices]:
        """The choices for the last row of all steps and prefills meanwhile."""
        self._overheard = found = Choices()
        try:
            yield found
        finally:
            self._overheard = None

    def bytes_a_step(self, live: list[int]) -> int:
        """Of experts as many as different ones are chosen on average, if each is as likely as any: rows share some."""
        layer, r = self.live.layers[self.sparse[0]], self.routing
        one = layer.gate_up[0].nbytes + layer.expert_down[0].nbytes
        different = r.experts * (1 - (1 - r.slots / r.experts) ** (len(live) * self.tokens))
        return super().bytes_a_step(live) + round(len(self.sparse) * different * one)

    def _dependent(self, rows: int) -> int:
        if not self.narrow(rows) or self.device.type != "cuda" or torch.cuda.get_device_capability(self.device) < (9, 0):
            return 0
        gate_up = self.live.layers[self.sparse[0]].gate_up
        return EARLY if self.routing.slots * gate_up[0].nbytes <= EARLY_BYTES else LATE

    def _narrow_mlp(self, number: int, x: Tensor, mode: int) -> None:
        if number not in self.sparse:
            return super()._narrow_mlp(number, x, mode)
        layer, rows, eps = self.live.layers[number], len(x), self.live.shape.eps
        ids, shares, routed = self.ids[:rows], self.shares[:rows], self.routed[:rows]
        scratch = self.scores[:rows], self.scored[:rows]
        route(x, layer.mlp_norm, eps, layer.router, self.routing.normalise, *scratch, ids, shares, mode)
        routed_gate_up(x, layer.mlp_norm, eps, layer.gate_up, ids, routed, mode)
        add_routed(routed, layer.expert_down, ids, shares, x, mode)
        if self._overheard is not None:
            self._overheard.add(number, ids[-1:])

    def _wide_mlp(self, number: int, x: Tensor) -> None:
        if number not in self.sparse:
            return super()._wide_mlp(number, x)
        if self.ungrouped:
            return self._narrow_mlp(number, x, 0)
        layer = self.live.layers[number]
        h = norm_rows(x, layer.mlp_norm, self.live.shape.eps, self.normed[: len(x)])
        ids, shares = self._choose(number, h)
        x += grouped(h, ids, shares, layer)

    def _prompt_mlp(self, number: int, h: Tensor) -> Tensor:
        if number not in self.sparse:
            return super()._prompt_mlp(number, h)
        ids, shares = self._choose(number, h)
        layer, mlp = self.live.layers[number], each_expert if self.ungrouped else grouped
        pieces = zip(*(whole.flatten(0, 1).split(PIECE) for whole in (h, ids, shares)))
        return torch.cat([mlp(x, i, share, layer).to(h.dtype) for x, i, share in pieces]).view_as(h)

    def _choose(self, number: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """Ids (..., S) int64 and shares (..., S) fp32 for h (..., hidden), by scores summed in fp32."""
        router = self.live.layers[number].router
        if h.is_cuda and h.dtype != torch.float32:
            scores = torch.mm(h.flatten(0, -2), router.t(), out_dtype=torch.float32).view(*h.shape[:-1], -1)
        else:
            scores = F.linear(h.float(), router.float())
        ids, shares = likeliest(scores, self.routing.slots, self.routing.normalise)
        if self._overheard is not None:
            self._overheard.add(number, ids[-1:] if ids.dim() == 2 else ids[-1])
        return ids, shares

    def report(self) -> list[tuple[str, str, str]]:
        rows, wide = super().report(), len(self.x) > NARROW
        if self.ungrouped:
            rows.append(("experts of prompts", "every expert for all tokens, by torch", self.ungrouped))
            return [*rows, (f"experts of more than {NARROW} rows", "as of one row", self.ungrouped)] if wide else rows
        return [*rows, (f"experts of prompts{f', more than {NARROW} rows' * wide}", "grouped by expert: F.grouped_mm", "")]

    def _mlp_report(self, kernel: str) -> list[tuple[str, str, str]]:
        sparse, layers = len(self.sparse), len(self.live.layers)
        chosen = f"{self.routing.slots} of {self.routing.experts} experts a row"
        rows = [
            (f"{layers} x output", f"{kernel}: add_product", ""),
            (f"{sparse} x norm, router, choice", f"{kernel}: route", chosen),
            (f"{sparse} x norm, gate, up of experts", f"{kernel}: routed_gate_up", "read where they lie"),
            (f"{sparse} x down of experts", f"{kernel}: add_routed", ""),
        ]
        if layers > sparse:
            rows.append((f"{layers - sparse} x dense MLP", f"{kernel}: norm_gate_up, add_product", ""))
        return rows


def not_grouped(layer: Experts) -> str | None:
    """Why F.grouped_mm cannot take these weights, or only by asking the device for the offsets."""
    weights = layer.gate_up, layer.expert_down
    if any(w.shape[2] * w.element_size() % 16 or w.data_ptr() % 16 for w in weights):
        return "F.grouped_mm wants rows of a multiple of 16 bytes"
    if not layer.gate_up.is_cuda:
        return None
    if layer.gate_up.dtype != torch.bfloat16:
        return f"F.grouped_mm takes bfloat16 on the device, not {str(layer.gate_up.dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(layer.gate_up.device)[0] not in (9, 10):
        return "F.grouped_mm reads its offsets on the host but for compute capability 9 and 10"
    return None


def grouped(h: Tensor, ids: Tensor, shares: Tensor, layer: Experts) -> Tensor:
    """(N, hidden) fp32: Σ share · down(silu(gate) · up) over each token's experts, for h (N, hidden), ids and shares (N, S)."""
    by_expert, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(len(layer.router), device=h.device), right=True, out_int32=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=h.device))
    both = F.grouped_mm(h.index_select(0, order // ids.shape[1]), layer.gate_up.transpose(1, 2), offs=ends)
    y = F.grouped_mm(swiglu(both), layer.expert_down.transpose(1, 2), offs=ends)
    y = y.index_select(0, back).view(*ids.shape, -1)
    return torch.bmm(shares[:, None], y.float())[:, 0]


def each_expert(h: Tensor, ids: Tensor, shares: Tensor, layer: Experts) -> Tensor:
    """The same by every expert for all tokens, of which those that chose it keep the result: E/S times the work."""
    y = torch.zeros(h.shape, device=h.device, dtype=torch.float32)
    for expert, (gate_up, down) in enumerate(zip(layer.gate_up, layer.expert_down)):
        mine = ids == expert
        share = torch.where(mine, shares, 0.0).sum(1, keepdim=True)
        product = F.linear(swiglu(F.linear(h, gate_up)), down)
        y += torch.where(mine.any(1, keepdim=True), product * share, 0.0)
    return y
