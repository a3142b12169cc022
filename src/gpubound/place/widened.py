"""The original model in fp32, without a copy of it: the truth that two 16-bit runs are compared with.

The weights of linear layers and embeddings, nearly all of a language model, stay in 16 bits. Inside, `F.linear` and
`F.embedding` widen CHUNK bytes of them at a time, in forward and again in backward, and keep of their gradients only the
elements that are compared. Everything else, such as norms and experts, is cast for the duration.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..kernels.dispatch import SIXTEEN_BITS

ELEMENTS = 4096  # of each tensor of a whole model that are compared, so that two runs need no memory for two models
CHUNK = 1 << 28  # bytes of fp32 weights that exist at a time
SAMPLED = "sampled_gradient"  # attribute of a parameter that is streamed


def sample(t: Tensor) -> Tensor:
    """Return up to ELEMENTS elements of `t`, evenly spaced, in fp32 or wider."""
    flat = (t.to_dense() if t.is_sparse else t).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS].to(torch.promote_types(t.dtype, torch.float32))


@contextmanager
def in_fp32(model: nn.Module, streamed: bool = True) -> Iterator[None]:
    """Compute in fp32 inside. Parameters stay the same objects; those that were cast get their memory back.

    streamed  False: cast the weights of linear layers and embeddings, too, for a model that does not call them by F.linear
              and F.embedding
    """
    weights = dict[int, Tensor]()
    for m in model.modules() if streamed else ():
        if isinstance(m, nn.Linear | nn.Embedding) and m.weight.dtype in SIXTEEN_BITS and not getattr(m, "max_norm", None):
            weights[id(m.weight)] = m.weight
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.dtype in SIXTEEN_BITS and id(t) not in weights]
    before = [t.data for t in tensors]
    try:
        for t in tensors:
            t.data = t.data.float()
        for weight in weights.values():
            weight.__dict__[SAMPLED] = None
        with _Widening():
            yield
    finally:
        for t, data in zip(tensors, before):
            t.data = data
        for weight in weights.values():
            del weight.__dict__[SAMPLED]


def take_sampled(parameter: Tensor) -> Tensor | None:
    """Return the sample of the parameter's gradient in the last backward, and begin a new one; None if it is not streamed."""
    part = parameter.__dict__.get(SAMPLED)
    if part is not None:
        parameter.__dict__[SAMPLED] = None
    return part


def is_streamed(parameter: Tensor) -> bool:
    return SAMPLED in parameter.__dict__


class _Widening(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is F.linear and is_streamed(args[1]):
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            y = _WidenedLinear.apply(args[0].float(), args[1])
            return y if bias is None else y + bias.float()
        if function is F.embedding and is_streamed(args[1]):
            return _WidenedRows.apply(args[0], args[1], args[2] if len(args) > 2 else (kwargs or {}).get("padding_idx"))
        return function(*args, **(kwargs or {}))


class _WidenedLinear(torch.autograd.Function):
    """x Wᵀ, by rows of W."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return torch.cat([x @ rows.float().t() for rows in _chunks(weight)], -1)

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        (x,), weight = ctx.saved_tensors, ctx.weight
        dx, parts, begin = torch.zeros_like(x), list[Tensor](), 0
        flat_x, step = x.reshape(-1, x.shape[-1]), max(1, weight.numel() // ELEMENTS)
        for rows in _chunks(weight):
            own = g[..., begin : begin + len(rows)]
            dx += own @ rows.float()
            dweight = (own.reshape(-1, len(rows)).t() @ flat_x).flatten()
            parts.append(dweight[-begin * weight.shape[1] % step :: step].clone())  # every step-th element of all of W
            begin += len(rows)
        _add(weight, torch.cat(parts)[:ELEMENTS])
        return dx, None


class _WidenedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.ids, ctx.weight, ctx.padding = ids, weight, padding
        return weight[ids].float()

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        weight, ids = ctx.weight, ctx.ids.flatten()
        width, step = weight.shape[1], max(1, weight.numel() // ELEMENTS)
        element = torch.arange(0, weight.numel(), step, device=ids.device)[:ELEMENTS]
        row = element // width
        own = (ids[:, None] == row) & (row != (-1 if ctx.padding is None else ctx.padding))  # tokens, elements
        _add(weight, torch.where(own, g.reshape(-1, width)[:, element % width], 0.0).sum(0))
        return None, None, None


def _chunks(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.detach().split(max(1, CHUNK // (4 * weight.shape[1])))


def _add(weight: Tensor, part: Tensor) -> None:
    before = weight.__dict__[SAMPLED]  # of the same weight elsewhere, as where the head is the embedding
    weight.__dict__[SAMPLED] = part if before is None else before + part
