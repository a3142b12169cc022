"""DeepSeek-V4's expert routing in a decoding step, with the shared expert's activation in the same launch.

Legend: B rows, S experts per row (its slots), E experts in all, I width of the shared expert.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.checks import require
from ....kernels.decode_product import WRITTEN
from ....kernels.dispatch import implementation
from ....kernels.gated import check_limit, swiglu_reference
from ....kernels.registry import definition, draw, ints, zeros

LEAST = 1e-20  # added to a sum of shares


class Gated(NamedTuple):
    """Shared expert's activation, out (B, I) = silu(gate) · up, as in `swiglu`. It does not depend on the routing."""

    gate: Tensor  # (B, I) fp32; rows may be strided
    up: Tensor
    limit: float
    out: Tensor  # (B, I) fp32


def choose_experts(
    logits: Tensor, correction: Tensor | None, table: Tensor | None, token: Tensor | None, scale: float, ids: Tensor,
    shares: Tensor, gated: Gated | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Choose S experts for each row by scores √softplus(logit). Return (ids, shares), and gated.out if `gated` is passed.

    The experts are those with the largest score + correction, ties going to the lowest id, or those that `table` has for the
    row's token. The shares are the experts' scores, without the correction, over their sum, times scale. A NaN counts as
    infinite, and all shares of its row are NaN.

    logits      (B, E) fp32
    correction  (E,), or None with a table
    table       (vocabulary, S) int64, with token (B,) int64
    ids         (B, S) int32
    shares      (B, S) fp32
    """
    rows, slots = len(logits), ids.shape[-1]
    require("choose_experts", "logits", logits, torch.float32, ("rows", "experts"), logits.device, "a product gives them")
    if (correction is None) == (table is None) or (table is None) != (token is None):
        raise ValueError("choose_experts: pass correction, or table and token: experts are chosen by scores or by the token.")
    if not 0 < slots <= logits.shape[1]:
        raise ValueError(f"choose_experts: ids has {slots} slots a row, wanted 1 to {logits.shape[1]}, the number of experts.")
    if correction is not None:
        require("choose_experts", "correction", correction, None, logits.shape[1:], logits.device, "it is added to scores")
    if table is not None and token is not None:
        require("choose_experts", "table", table, torch.int64, ("tokens", slots), logits.device, "it names a token's experts")
        require("choose_experts", "token", token, torch.int64, (rows,), logits.device, "it finds them in the table")
    require("choose_experts", "ids", ids, torch.int32, (rows, slots), logits.device, WRITTEN)
    require("choose_experts", "shares", shares, torch.float32, (rows, slots), logits.device, WRITTEN)
    if gated is not None:
        _check_gated(gated, rows, logits.device)
    kernel = implementation("choose_experts", logits, None, (gated is not None,))
    return kernel(logits, correction, table, token, scale, ids, shares, gated)


def _check_gated(gated: Gated, rows: int, device: torch.device) -> None:
    gate, up, limit, out = gated
    require("choose_experts", "gated.out", out, torch.float32, (rows, "width"), device, WRITTEN)
    for name, t in (("gated.gate", gate), ("gated.up", up)):
        if t.shape != out.shape or t.dtype != torch.float32 or t.device != device or t.stride(1) != 1:
            raise ValueError(
                f"choose_experts: {name} must be a torch.float32 {tuple(out.shape)} on {device} whose rows are contiguous, "
                f"got {t.dtype} {tuple(t.shape)} on {t.device} with strides {t.stride()}."
            )
    check_limit("choose_experts", limit)


@definition(lambda g, gated=False: _example(g, gated))
@torch.no_grad()
def choose_experts_reference(
    logits: Tensor, correction: Tensor | None, table: Tensor | None, token: Tensor | None, scale: float, ids: Tensor,
    shares: Tensor, gated: Gated | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    scores = F.softplus(logits).sqrt()
    if table is not None and token is not None:
        found = table.index_select(0, token)
    else:
        assert correction is not None
        ranked = scores + correction.to(scores.dtype)
        ranked = ranked.masked_fill(ranked.isnan(), float("inf"))
        found = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : ids.shape[1]]
    chosen = scores.gather(-1, found)
    given = ids.copy_(found), shares.copy_(chosen / (chosen.sum(-1, keepdim=True) + LEAST) * scale)
    if gated is None:
        return given
    return *given, gated.out.copy_(swiglu_reference(gated.gate, gated.up, gated.limit))


def _example(generator: torch.Generator, gated: bool) -> tuple:
    given = draw(generator, 3, 7).detach(), draw(generator, 7).detach(), None, None, 1.5, ints(*[0] * 9).view(3, 3), zeros(3, 3)
    if not gated:
        return given
    return *given, Gated(draw(generator, 3, 20).detach(), draw(generator, 3, 20).detach(), 0.8, zeros(3, 20))
