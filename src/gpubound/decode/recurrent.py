"""Layers with a state in the place of attention, with the methods of layer.CachedAttention.

Legend: B rows, T tokens of a prompt, C channels of a convolution.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import delta_step, mamba_step, norm_rows, short_conv
from ..kernels.decode_product import group_normed
from ..kernels.recurrent import chunked_delta_rule, chunked_mamba, delta_inputs, gated_norm, mamba_inputs
from ..models.recurrent import DeltaWeights, MambaWeights, RecurrentWeights, ShortConvWeights
from .kv_cache import write_rows
from .layer import Part, Workspace


class RecurrentLayer(Part):
    """Norm, input products, a recurrence, output."""

    op: str  # of a step's recurrence
    weights: RecurrentWeights

    def __init__(self, weights: RecurrentWeights, number: int, form: Any, workspace: Workspace) -> None:
        super().__init__(weights, number, form, workspace)
        *inputs, output = weights.groups()
        self.inputs = [self.product(form.stacked(*group), *group) for group in inputs]
        self.last = self.product(form.stacked(*output), *output)
        self.state = workspace.cache.states[number]
        widths = [sum(len(layer.weight) for layer in group) for group in inputs]
        self._rows = [workspace.buffer(f"recurrent{at}", workspace.rows, width) for at, width in enumerate(widths)]
        self._mixed = workspace.buffer("recurrent", workspace.rows, weights.width, dtype=workspace.dtype)

    def compute(self, x: Tensor, position: Tensor, mode: int) -> Tensor:
        """Return the input of the last product in a step."""
        h, norm = self.operand(x, mode, self.first)
        rows = [buffer[: len(x)] for buffer in self._rows]
        for at, (product, out) in enumerate(zip(self.inputs, rows)):
            product.norm_product(h, norm, out, mode if at else self.fenced(mode))
        return self.mix(rows, position, mode)

    def gemm_compute(self, x: Tensor, position: Tensor, mode: int) -> Tensor:
        h = self.read(x)
        return self.mix([self.gemm(product, h) for product in self.inputs], position, 0)

    def mix(self, rows: list[Tensor], position: Tensor, mode: int) -> Tensor:
        """Return the input of the last product for rows (B T, ...) of the input products. The state goes on."""
        first, out = self.workspace.cache.first, self._mixed[: len(rows[0])]
        self.recur(rows, position, slice(first, first + len(position)), out, mode)
        return out

    def recur(self, rows: list[Tensor], position: Tensor, mine: slice, out: Tensor, mode: int) -> None:
        """Run the recurrence of a step. mine: the rows of the state"""
        raise NotImplementedError

    def prompt(self, h: Tensor, start: int, end: int) -> Tensor:
        """Return the output for normed h (B, T, hidden) at positions start to end."""
        rows = [row for product in self.inputs for row in self.linear(product, h)]
        return self.linear(self.last, self.recur_prompt(rows, start))[0]

    def recur_prompt(self, rows: list[Tensor], start: int) -> Tensor:
        """Return the input of the last product for rows (B, T, ...) of each input layer, from position `start` on."""
        raise NotImplementedError

    def convolved(self, x: Tensor, start: int) -> Tensor:
        """Return the causal convolution of a prompt's inputs x (B, T, C), which go to the state."""
        cache, w = self.workspace.cache, self.weights
        padded = self.state.extend(x, start, cache.targets, cache.ends)
        return F.conv1d(padded.transpose(1, 2), w.conv[:, None].to(x.dtype), w.conv_bias, groups=len(w.conv)).transpose(1, 2)

    def unpadded(self, start: int, *rows: Tensor) -> Sequence[Tensor]:
        """Return rows (B, T, H, ...) of a prompt's tokens from `start` on, with zeros for padding, which may be NaN."""
        if (ends := self.workspace.cache.ends) is None:
            return rows
        padding = torch.arange(start, start + rows[0].shape[1], device=ends.device) >= ends[:, None]
        return [t.masked_fill(padding.view(*padding.shape, *[1] * (t.dim() - 2)), 0.0) for t in rows]

    def tensors(self) -> list[Tensor]:
        return super().tensors() + self.weights.vectors()

    def ops(self) -> list[tuple[str, str, str]]:
        first = [(f"{self.norm_in_product}inputs", f"{product.prefix}norm_product", "") for product in self.inputs]
        return [*first, ("state", self.op, ""), ("output", f"{self.last.prefix}add_product", "")]


class ShortConv(RecurrentLayer):
    op = "short_conv"
    weights: ShortConvWeights

    def recur(self, rows: list[Tensor], position: Tensor, mine: slice, out: Tensor, mode: int) -> None:
        short_conv(rows[0], position, self.state.ring[mine], self.weights.conv, self.weights.conv_bias, out, mode)

    def recur_prompt(self, rows: list[Tensor], start: int) -> Tensor:
        gate, output_gate, value = rows[0].chunk(3, -1)
        return output_gate * self.convolved(gate * value, start)


class GatedDelta(RecurrentLayer):
    op = "delta_step"
    weights: DeltaWeights

    def recur(self, rows: list[Tensor], position: Tensor, mine: slice, out: Tensor, mode: int) -> None:
        x, w, state = rows[0] if len(rows) == 1 else torch.cat(rows, -1), self.weights, self.state
        delta_step(x, position, state.ring[mine], state.matrix[mine], w.parameters(), w.shape, out, mode)

    def recur_prompt(self, rows: list[Tensor], start: int) -> Tensor:
        w, state, cache = self.weights, self.state, self.workspace.cache
        q, k, v, z, b, a = w.shape.parts(torch.cat(rows, -1))
        x = F.silu(self.convolved(torch.cat([q, k, v], -1), start))
        q, k, v, g, beta = delta_inputs(x, b, a, w.parameters(), w.shape)
        k, v, g, beta = self.unpadded(start, k, v, g, beta)
        o, matrix = chunked_delta_rule(
            q, k, v, g, beta, state.matrix_before(start, len(q), cache.targets), x.dtype == torch.float32
        )
        write_rows(state.matrix, matrix, cache.targets)
        return gated_norm(o, z, w.head_norm).flatten(2).to(x.dtype)


class Mamba(RecurrentLayer):
    op = "mamba_step"
    weights: MambaWeights

    def __init__(self, weights: MambaWeights, number: int, form: Any, workspace: Workspace) -> None:
        super().__init__(weights, number, form, workspace)
        self._gated = workspace.buffer("mamba", workspace.rows, weights.shape.inner)

    def recur(self, rows: list[Tensor], position: Tensor, mine: slice, out: Tensor, mode: int) -> None:
        w, state = self.weights, self.state
        gated = out if w.head_norm is None else self._gated[: len(out)]
        mamba_step(rows[0], position, state.ring[mine], state.matrix[mine], w.parameters(), w.shape, gated, mode)
        if w.head_norm is not None:
            norm_rows(gated, w.head_norm, out, mode, groups=w.norm_groups)

    def recur_prompt(self, rows: list[Tensor], start: int) -> Tensor:
        w, state, targets = self.weights, self.state, self.workspace.cache.targets
        z, x, dt = w.shape.parts(rows[0])
        x = F.silu(self.convolved(x, start))
        v, b, c, g, skipped = mamba_inputs(x, dt, w.parameters(), w.shape)
        v, b, g = self.unpadded(start, v, b, g)
        y, matrix = chunked_mamba(v, b, c, g, state.matrix_before(start, len(v), targets), x.dtype == torch.float32)
        write_rows(state.matrix, matrix, targets)
        y = w.shape.gated((y + skipped).flatten(2), z)
        return (y if w.head_norm is None else group_normed(y, w.head_norm, w.norm_groups)).to(x.dtype)

    def ops(self) -> list[tuple[str, str, str]]:
        rows = super().ops()
        norm = [] if self.weights.head_norm is None else [("norm of heads", "norm_rows", "")]
        return [*rows[:-1], *norm, rows[-1]]
