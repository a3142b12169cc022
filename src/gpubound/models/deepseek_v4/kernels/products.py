"""Products of a decoding step of DeepSeek-V4: several products of one norm's output, fp8 weights, and the routing of experts.

`norm_product` (decode_product.py) takes up to three weights, a bias and adapters. `norm_products` takes up to MOST weights, in
16 bits, fp32 or fp8, without bias or adapters. fp8 weights are in the published format of DeepSeek's models: e4m3, and a scale
for each block of rows and columns. `choose_experts` also computes the shared expert's activation, and `routed_down` leaves the
chosen experts' results apart, for another op to sum.

Legend: B rows, S experts per row (its slots), E experts in all, I width of the shared expert.

Launch plans of the ops of DeepSeek-V4 (kernels/plans).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.decode_product import WRITTEN, Norm, call_shape, check_stream, draw_stream, rms_normed
from ....kernels.dispatch import implementation, require
from ....kernels.experts import check_down, draw_routes, times
from ....kernels.gated import check_limit, swiglu_reference
from ....kernels.packed_weights import Packed, unpack
from ....kernels.peer_exchange import Mail, check_mail, example_mail
from ....kernels.plans import RULES, Job
from ....kernels.plans.defaults import SEARCHED, Rule, first, width
from ....kernels.plans.types import MatrixPlan, TilePlan
from ....kernels.quantize import has_cores
from ....kernels.quantized_product import draw_packed
from ....kernels.registry import definition, draw, ints, zeros

BLOCK = (128, 128)


class Fp8Blocks(NamedTuple):
    """A (rows, columns) weight. codes: e4m3; scale: fp32 (row blocks, column blocks). The last blocks may be smaller."""

    codes: Tensor
    scale: Tensor
    block: tuple[int, int] = BLOCK
    dtype: torch.dtype = torch.bfloat16  # of the dequantised weight

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


def scales_shape(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def numbers(weight: Fp8Blocks, dtype: torch.dtype | None = None) -> Tensor:
    """Dequantise the weight to `dtype`, by default weight.dtype."""
    rows, columns = weight.shape
    scale = weight.scale.repeat_interleave(weight.block[0], 0)[:rows].repeat_interleave(weight.block[1], 1)[:, :columns]
    return (weight.codes.float() * scale).to(dtype or weight.dtype)


MOST, MOST_CODED = 8, 4  # weights in all, and fp8 weights

Weight = Tensor | Fp8Blocks


def norm_products(x: Tensor, norm: Norm | None, weights: Sequence[Weight], out: Tensor | None = None) -> Tensor:
    """Multiply rms_norm(x), or x if norm is None, by each weight. Write the concatenated products to out (B, rows) fp32.

    x        (B, columns) fp32; or (B, groups, columns) for one grouped weight, each of whose row groups has a separate input
    weights  (rows, columns) each, of one dtype; fp8 weights first
    """
    coded = [weight for weight in weights if isinstance(weight, Fp8Blocks)]
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if not 1 <= len(weights) <= MOST or len(coded) > MOST_CODED:
        raise ValueError(
            f"norm_products: got {len(weights)} weights, wanted 1 to {MOST}, of which up to {MOST_CODED} in fp8 "
            f"(got {len(coded)}); of more, call it again."
        )
    if any(isinstance(weight, Tensor) for weight in weights[: len(coded)]):
        raise ValueError("norm_products: weights in fp8 stand in front of the others; put them there.")
    rows = sum(weight.shape[0] for weight in weights)
    if x.dim() == 3 and (norm is not None or len(weights) > 1 or rows % x.shape[1]):
        raise ValueError(
            f"norm_products: x has {x.shape[1]} groups, which takes no norm and one weight with as many rows for each, got "
            f"{len(weights)} of {rows} rows{' and a norm' if norm is not None else ''}."
        )
    check_stream("norm_products", x if x.dim() != 3 else x.view(-1, x.shape[-1]), norm, *plain)
    for weight in coded:
        _check_coded(weight, x)
    if len({weight.block for weight in coded}) > 1:
        raise ValueError(f"norm_products: weights in fp8 have blocks of {[weight.block for weight in coded]}; wanted one size.")
    if out is None:
        out = torch.empty(len(x), rows, device=x.device, dtype=torch.float32)
    require("norm_products", "out", out, torch.float32, (len(x), rows), x.device, WRITTEN)
    unable = _unread(weights, x)
    key = call_shape(norm) if not coded and x.dim() == 2 else (None if norm is None else norm.offset, bool(coded), bool(plain))
    return implementation("norm_products", plain[0] if plain else x, unable, key)(x, norm, weights, out)


def send_products(x: Tensor, weight: Weight, mail: Mail) -> tuple[Tensor, ...]:
    """Send x weightᵀ, one device's term of a sum, to the inboxes of `mail` (peer_exchange.py). x (B, columns) fp32."""
    plain = [weight] if isinstance(weight, Tensor) else []
    check_stream("send_products", x, None, *plain)
    if isinstance(weight, Fp8Blocks):
        _check_coded(weight, x)
    check_mail("send_products", mail, (len(x), weight.shape[0]), x.device, fills=True)
    return implementation("send_products", plain[0] if plain else x, _unread([weight], x), (not plain,))(x, weight, mail)


def _unread(weights: Sequence[Weight], x: Tensor) -> str | None:
    if any(isinstance(weight, Fp8Blocks) for weight in weights) and x.is_cuda and not has_cores(x.device):
        return "this GPU reads no e4m3, which needs compute capability 8.9"
    return None


def _check_coded(weight: Fp8Blocks, x: Tensor) -> None:
    wanted = "outputs", x.shape[-1]
    require("norm_products", "codes", weight.codes, torch.float8_e4m3fn, wanted, x.device, "all weights have x's width")
    shape = scales_shape(weight.shape, weight.block)
    require("norm_products", "scale", weight.scale, torch.float32, shape, x.device, "it has a number for each block")


def _example(g, offset=0.0, coded=False, plain=True):
    x, norm = draw_stream(g, 48, 0.0 if offset is None else offset)
    weights: list[Weight] = [_draw_coded(g, rows) for rows in (48, 16)] if coded else []
    weights += [draw(g, rows, 48) for rows in (32, 16, 8, 7, 16)] if plain else []
    return x, None if offset is None else norm, weights, zeros(2, sum(weight.shape[0] for weight in weights))


def _draw_coded(g, rows):
    codes = draw(g, rows, 48).detach().to(torch.float8_e4m3fn)
    return Fp8Blocks(codes, draw(g, *scales_shape((rows, 48), (32, 16))).detach().abs() + 0.1, (32, 16), torch.float32)


@definition(_example)
def norm_products_reference(x, norm, weights, out):
    matrices = [weight if isinstance(weight, Tensor) else numbers(weight, x.dtype) for weight in weights]
    if x.dim() == 3:
        groups = matrices[0].to(x.dtype).unflatten(0, (x.shape[1], -1))
        return out.copy_(torch.einsum("bgk,grk->bgr", x, groups).flatten(1))
    normed = rms_normed(x, norm)
    return out.copy_(torch.cat([normed @ weight.to(x.dtype).t() for weight in matrices], -1))


@definition(
    lambda g, coded=False: (
        draw_stream(g, 48, 0.0)[0],
        _draw_coded(g, 40) if coded else draw(g, 40, 48),
        example_mail(g, 2, 2, 40),
    )
)
def send_products_reference(x, weight, mail):
    matrix = numbers(weight, x.dtype) if isinstance(weight, Fp8Blocks) else weight.to(x.dtype)
    mail.post((x @ matrix.t()).float())
    return mail.boxes


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


@definition(lambda g, gated=False: _choice_example(g, gated))
def choose_experts_reference(logits, correction, table, token, scale, ids, shares, gated=None):
    scores = F.softplus(logits).sqrt()
    if table is not None and token is not None:
        chosen_ids = table.index_select(0, token)
    else:
        assert correction is not None
        ranked = scores + correction.to(scores.dtype)
        ranked = ranked.masked_fill(ranked.isnan(), float("inf"))
        chosen_ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : ids.shape[1]]
    chosen = scores.gather(-1, chosen_ids)
    outputs = ids.copy_(chosen_ids), shares.copy_(chosen / (chosen.sum(-1, keepdim=True) + LEAST) * scale)
    if gated is None:
        return outputs
    return *outputs, gated.out.copy_(swiglu_reference(gated.gate, gated.up, gated.limit))


def _choice_example(generator, gated):
    arguments = (
        draw(generator, 3, 7).detach(),
        draw(generator, 7).detach(),
        None,
        None,
        1.5,
        ints(*[0] * 9).view(3, 3),
        zeros(3, 3),
    )
    if not gated:
        return arguments
    return *arguments, Gated(draw(generator, 3, 20).detach(), draw(generator, 3, 20).detach(), 0.8, zeros(3, 20))


def routed_down(h: Tensor, down: Tensor | Packed, ids: Tensor, weights: Tensor, out: Tensor, dependent: int = 0) -> Tensor:
    """out (B, S, hidden, fp32) = weight · h downᵀ of each slot: as `add_routed`, for another op to sum in their order.

    A program has one slot, so that none waits for an expert's weights S times. With `dependent` as there.
    """
    outputs = check_down("routed_down", h, down, ids, weights, out)
    require("routed_down", "out", out, torch.float32, (*ids.shape, outputs), out.device, WRITTEN)
    if isinstance(down, Packed):
        return implementation("quantized_routed_down", h, None, (down.kind,))(h, down, ids, weights, out, dependent)
    return implementation("routed_down", down)(h, down, ids, weights, out, dependent)


@definition(lambda g: (draw(g, 2, 3, 40), draw(g, 5, 48, 40), *draw_routes(), zeros(2, 3, 48)))
def routed_down_reference(h, down, ids, weights, out, dependent=0):
    products = [times(down, ids[:, slot], h[:, slot].to(out.dtype)) for slot in range(ids.shape[1])]
    return out.copy_(torch.stack(products, 1).mul_(weights[..., None]))


@definition(
    lambda g, kind="int8": (draw(g, 2, 3, 96), draw_packed(g, 5 * 48, 96, kind), *draw_routes(), zeros(2, 3, 48)),
    variant_of="routed_down",
)
def quantized_routed_down_reference(h, down, ids, weights, out, dependent=0):
    return routed_down_reference(h, unpack(down).unflatten(0, (-1, out.shape[2])), ids, weights, out)


def hyper_connections(job: Job) -> MatrixPlan:
    """shape: tokens, up to a power of two, and the numbers of one. rows: tokens of a program, which walks along columns."""
    if job.way == "few":
        return MatrixPlan(1, 128, 4)
    return MatrixPlan(64, 64, 4) if job.shape[0] > 2048 else MatrixPlan(16, 64, 4)


RULES.update(
    {
        "compress": Rule(TilePlan, lambda job: TilePlan(4096, 4), first(1)),
        "hc_mix": Rule(TilePlan, lambda job: TilePlan(2048 if job.way == "read" else 1024, 4), first(0)),
        "hc_pre": Rule(MatrixPlan, hyper_connections, first(2)),
        "index_scores": Rule(TilePlan, lambda job: TilePlan(64, 4), first(2)),
        "index_topk": Rule(TilePlan, lambda job: TilePlan(8192, 16), width),  # 16 numbers a thread: 32 spill
        "sparse_attention": Rule(
            MatrixPlan, lambda job: MatrixPlan(16, 32 if job.bytes == 2 else 16, 8), first(2)
        ),  # heads, keys
        "turn_heads": Rule(TilePlan, lambda job: TilePlan(job.shape[0], 4), first(1)),
    }
)
SEARCHED[90] |= {("sparse_attention", "", (16, 512), 2): (16, 16, 8)}
