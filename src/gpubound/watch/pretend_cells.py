"""Recurrent cells of the pretend device: torch has them for GPUs alone, as one op a time step and its backward.

A workspace is what the backward needs, with the columns of CUDA's kernels. All tensors are those of the CPU inside.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _sum(gates: Tensor, hidden: Tensor, first: Tensor | None, second: Tensor | None) -> Tensor:
    gates = gates + hidden
    return gates if first is None or second is None else gates + first + second


def lstm_cell(gates: Tensor, hidden: Tensor, cx: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None):
    i, f, g, o = _sum(gates, hidden, input_bias, hidden_bias).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
):
    i, f, g, o = workspace.chunk(4, 1)
    t = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_c = grad_hy * o * (1 - t * t) + (0 if grad_cy is None else grad_cy)
    parts = (grad_c * g * i * (1 - i), grad_c * cx * f * (1 - f), grad_c * i * (1 - g * g), grad_hy * t * o * (1 - o))
    grad = torch.cat(parts, 1)
    return grad, grad_c * f, grad.sum(0) if has_bias else grad.new_empty(0)


def gru_cell(gates: Tensor, hidden: Tensor, hx: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None):
    gates = gates if input_bias is None else gates + input_bias
    hidden = hidden if hidden_bias is None else hidden + hidden_bias
    (reset, update, new), (hidden_reset, hidden_update, hidden_new) = gates.chunk(3, 1), hidden.chunk(3, 1)
    r, z = (reset + hidden_reset).sigmoid(), (update + hidden_update).sigmoid()
    n = (new + r * hidden_new).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hidden_new], 1)


def gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool):
    r, z, n, hx, hidden_new = workspace.chunk(5, 1)
    grad_z = grad * (hx - n) * z * (1 - z)
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_r = grad_n * hidden_new * r * (1 - r)
    of_input, of_hidden = torch.cat([grad_r, grad_z, grad_n], 1), torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (grad.new_empty(0), grad.new_empty(0))
    return of_input, of_hidden, grad * z, *biases


CELLS = {
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
}
"""By the names of their ops in aten."""
