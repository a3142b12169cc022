"""Hyper-connections (hyper_connections.py) of a decoding step of few tokens: three ops instead of `hc_pre` and `hc_post`.

`hc_sums` computes partial sums over slices of the streams: products with the weight of a part (attention or MLP), and squares.
`hc_read` computes u from the sums. `hc_write` computes post and comb from the sums, adds the part's output to the streams, and
computes the next part's sums, in one launch.

Only `hc_write` needs comb, so its Sinkhorn iterations do not delay the part. With PDL (dependent_launch.py), `hc_write`
computes comb while the part still runs, if the GPU has free multiprocessors, and loads the sums before its wait: a fence
(triton/_pdl.py) is required between the launch that wrote the sums and `hc_write`.

Legend: N tokens, S streams, D width, P products of a part, Z slices of D.
"""

import torch
from torch import Tensor

from ....kernels.checks import require
from ....kernels.decode_product import WRITTEN
from ....kernels.dispatch import implementation
from ....kernels.peer_exchange import Mail, check_mail, example_mail
from ....kernels.plans.types import power_of_two
from ....kernels.registry import definition, draw
from .hyper_connections import STREAMS
from .sinkhorn import check_rounds, sinkhorn_reference

PIECES = 64  # approximate programs per token. Each computes comb redundantly


def stretch(width: int) -> int:
    """Return the columns of each stream in a slice."""
    return max(16, power_of_two(-(-width // PIECES)))


def sums_shape(tokens: int, width: int, products: int) -> tuple[int, int, int]:
    """Return (Z, N, P + 1 rounded up to a power of two): the squares follow the products."""
    return -(-width // stretch(width)), tokens, power_of_two(products + 1)


def hc_sums(x: Tensor, weight: Tensor, sums: Tensor | None = None) -> Tensor:
    """Compute sums (Z, N, ·) fp32 of the streams x (N, S, D) fp32, for a part with weight (P, S D)."""
    _check("hc_sums", x)
    require("hc_sums", "weight", weight, None, ("products", x.shape[1] * x.shape[2]), x.device, "a row is a product")
    sums = _room("hc_sums", "sums", sums, x, sums_shape(len(x), x.shape[2], len(weight)))
    return implementation("hc_sums", x, _unable(x), (x.shape[1],))(x, weight, sums)


@definition(lambda g, streams=4: _example(g, streams)[:3])
@torch.no_grad()
def hc_sums_reference(x: Tensor, weight: Tensor, sums: Tensor) -> Tensor:
    rows = weight.to(x.dtype).unflatten(1, x.shape[1:])
    sums.zero_()
    for piece, (of_x, of_w) in enumerate(zip(x.split(stretch(x.shape[2]), 2), rows.split(stretch(x.shape[2]), 2))):
        sums[piece, :, : len(weight)] = torch.einsum("nsd,psd->np", of_x, of_w)
        sums[piece, :, len(weight)] = of_x.square().sum((1, 2))
    return sums


def hc_read(
    x: Tensor, sums: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float, u: Tensor | None = None
) -> Tensor:
    """Compute u (N, D) fp32, as `hc_pre` does. scale (3,), base (P,)."""
    _check_sums("hc_read", x, sums, scale, base)
    u = _room("hc_read", "u", u, x, (len(x), x.shape[2]))
    return implementation("hc_read", x, _unable(x), (x.shape[1],))(x, sums, scale, base, eps, norm_eps, u)


@definition(lambda g, streams=4: _read(g, streams))
@torch.no_grad()
def hc_read_reference(x: Tensor, sums: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float, u: Tensor) -> Tensor:
    z, S = _products(x, sums, len(base), norm_eps), x.shape[1]
    pre = torch.sigmoid(z[:, :S] * scale[0] + base[:S]) + eps
    return u.copy_((pre[..., None] * x).sum(1))


def hc_write(
    x: Tensor, y: Tensor | Mail, sums: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float, rounds: int,
    more: Tensor | None = None, weight: Tensor | None = None, out: Tensor | None = None,
    following: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute X' (N, S, D) fp32, as `hc_post` does for the part's output y, and the next part's sums of X'.

    y       (N, D) fp32; or a peer exchange (peer_exchange.py) whose sum is y. Its values may still be in flight
    more    (N, some, D) fp32: terms that are added to y in order. None with a peer exchange, whose senders add them
    weight  the next part's; None: no sums
    """
    _check_sums("hc_write", x, sums, scale, base)
    if isinstance(y, Mail):
        check_mail("hc_write", y, (len(x), x.shape[2]), x.device, takes=True)
        if more is not None:
            raise ValueError("hc_write: got y by mail and more beside it; pass more to send_words, whose sum then comes.")
    else:
        require("hc_write", "y", y, torch.float32, (len(x), x.shape[2]), x.device, "a part gives as much as it reads")
    if more is not None:
        require("hc_write", "more", more, torch.float32, (len(x), "some", x.shape[2]), x.device, "it is added to y")
    check_rounds("hc_write", rounds)
    out = _room("hc_write", "out", out, x, tuple(x.shape))
    if weight is not None:
        require("hc_write", "weight", weight, None, ("products", x.shape[1] * x.shape[2]), x.device, "a row is a product")
        following = _room("hc_write", "following", following, x, sums_shape(len(x), x.shape[2], len(weight)))
    form = x.shape[1], weight is not None, 0 if more is None else more.shape[1], isinstance(y, Mail)
    kernel = implementation("hc_write", x, _unable(x), form)
    return kernel(x, y, sums, scale, base, eps, norm_eps, rounds, more, weight, out, following)


@definition(lambda g, streams=4, followed=True, some=0, mailed=False: _write(g, streams, followed, some, mailed))
@torch.no_grad()
def hc_write_reference(
    x: Tensor, y: Tensor | Mail, sums: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float, rounds: int,
    more: Tensor | None, weight: Tensor | None, out: Tensor, following: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    y = y.summed(len(x)) if isinstance(y, Mail) else y
    if more is not None:
        y = y + more.sum(1)
    z, S = _products(x, sums, len(base), norm_eps), x.shape[1]
    post = 2 * torch.sigmoid(z[:, S : 2 * S] * scale[1] + base[S : 2 * S])
    comb = sinkhorn_reference((z[:, 2 * S :] * scale[2] + base[2 * S :]).unflatten(1, (S, S)), rounds, eps)
    out.copy_(post[..., None] * y[:, None] + comb.transpose(1, 2) @ x)
    if weight is not None and following is not None:
        hc_sums_reference(out, weight, following)
    return out, following


def _products(x: Tensor, sums: Tensor, count: int, norm_eps: float) -> Tensor:
    whole = sums.sum(0)
    return whole[:, :count] * torch.rsqrt(whole[:, count : count + 1] / (x.shape[1] * x.shape[2]) + norm_eps)


def _room(op: str, name: str, given: Tensor | None, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    if given is None:
        return torch.empty(shape, device=x.device, dtype=torch.float32)
    require(op, name, given, torch.float32, shape, x.device, WRITTEN)
    return given


def _check(op: str, x: Tensor) -> None:
    require(op, "x", x, torch.float32, ("tokens", "streams", "width"), x.device, "a step's streams are fp32")


def _check_sums(op: str, x: Tensor, sums: Tensor, scale: Tensor, base: Tensor) -> None:
    _check(op, x)
    products = (2 + x.shape[1]) * x.shape[1]
    require(
        op, "sums", sums, torch.float32, sums_shape(len(x), x.shape[2], products), x.device, "hc_sums or hc_write makes them"
    )
    require(op, "scale", scale, None, (3,), x.device, "of pre, post and comb")
    require(op, "base", base, None, (products,), x.device, "one for each product")


def _unable(x: Tensor) -> str | None:
    return None if x.shape[1] in STREAMS else f"its kernel mixes 1, 2, 4 or 8 streams, not {x.shape[1]}"


def _example(g: torch.Generator, streams: int) -> tuple:
    x, products = draw(g, 3, streams, 40).detach(), (2 + streams) * streams
    weight = draw(g, products, 40 * streams).detach()
    sums = torch.zeros(sums_shape(3, 40, products), device="cpu", dtype=torch.float32)
    return x, weight, sums, draw(g, 3).detach(), draw(g, products).detach()


def _read(g: torch.Generator, streams: int) -> tuple:
    x, weight, sums, scale, base = _example(g, streams)
    u = torch.zeros(3, 40, device="cpu", dtype=torch.float32)
    return x, hc_sums_reference(x, weight, sums), scale, base, 1e-6, 1e-6, u


def _write(g: torch.Generator, streams: int, followed: bool, some: int, mailed: bool) -> tuple:
    x, sums, scale, base, eps, norm_eps, u = _read(g, streams)
    following = torch.zeros_like(sums) if followed else None
    weight = draw(g, len(base), 40 * streams).detach() if followed else None
    more = draw(g, 3, some, 40).detach() if some else None
    y = example_mail(g, 1, 3, 40, own=-1, rows=3) if mailed else u + 1
    return x, y, sums, scale, base, eps, norm_eps, 20, more, weight, torch.zeros_like(x), following
