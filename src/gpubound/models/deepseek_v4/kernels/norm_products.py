"""Several products of one norm's output in one launch, for a step of few rows: the projections of DeepSeek-V4's attention.

`norm_product` (decode_product.py) takes up to three weights, a bias and adapters. `norm_products` takes up to MOST weights, in
16 bits, fp32 or fp8 with a scale per block, without bias or adapters.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ....kernels.checks import require
from ....kernels.decode_product import WRITTEN, Norm, check_stream, draw_stream, form, rms_normed
from ....kernels.dispatch import implementation
from ....kernels.peer_exchange import Mail, check_mail, example_mail
from ....kernels.quantize import has_cores
from ....kernels.registry import definition, draw, zeros
from .fp8_blocks import Fp8Blocks, numbers, scales_shape

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
    given = form(norm) if not coded and x.dim() == 2 else (None if norm is None else norm.offset, bool(coded), bool(plain))
    return implementation("norm_products", plain[0] if plain else x, unable, given)(x, norm, weights, out)


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


def _example(g: torch.Generator, offset: float | None = 0.0, coded: bool = False, plain: bool = True) -> tuple:
    x, norm = draw_stream(g, 48, 0.0 if offset is None else offset)
    weights: list[Weight] = [_draw_coded(g, rows) for rows in (48, 16)] if coded else []
    weights += [draw(g, rows, 48) for rows in (32, 16, 8, 7, 16)] if plain else []
    return x, None if offset is None else norm, weights, zeros(2, sum(weight.shape[0] for weight in weights))


def _draw_coded(g: torch.Generator, rows: int) -> Fp8Blocks:
    codes = draw(g, rows, 48).detach().to(torch.float8_e4m3fn)
    return Fp8Blocks(codes, draw(g, *scales_shape((rows, 48), (32, 16))).detach().abs() + 0.1, (32, 16), torch.float32)


@definition(_example)
@torch.no_grad()
def norm_products_reference(x: Tensor, norm: Norm | None, weights: Sequence[Weight], out: Tensor) -> Tensor:
    wide = [weight if isinstance(weight, Tensor) else numbers(weight, x.dtype) for weight in weights]
    if x.dim() == 3:
        groups = wide[0].to(x.dtype).unflatten(0, (x.shape[1], -1))
        return out.copy_(torch.einsum("bgk,grk->bgr", x, groups).flatten(1))
    normed = rms_normed(x, norm)
    return out.copy_(torch.cat([normed @ weight.to(x.dtype).t() for weight in wide], -1))


@definition(
    lambda g, coded=False: (
        draw_stream(g, 48, 0.0)[0],
        _draw_coded(g, 40) if coded else draw(g, 40, 48),
        example_mail(g, 2, 2, 40),
    )
)
@torch.no_grad()
def send_products_reference(x: Tensor, weight: Weight, mail: Mail) -> tuple[Tensor, ...]:
    wide = numbers(weight, x.dtype) if isinstance(weight, Fp8Blocks) else weight.to(x.dtype)
    mail.post((x @ wide.t()).float())
    return mail.boxes
