"""Ops that the pretend device has in another way than a CPU: attention, recurrent cells, and autocast to 16 bits.

A GPU has attention as one op forward and one backward; without these torch takes its math form on the pretend device, some
twenty launches that no GPU makes. Of recurrent cells torch has one op a time step, and its backward, for GPUs alone; a
workspace is what the backward needs, with the columns of CUDA's kernels. The tensors of both are those of the CPU inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..device import PRETENDED


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Run scaled_dot_product_attention as torch's op for backends that bring a kernel, unless sdpa_kernel(MATH) forbids it."""
    backends = torch.backends.cuda
    if not (backends.flash_sdp_enabled() or backends.mem_efficient_sdp_enabled() or backends.cudnn_sdp_enabled()):
        math = torch.ops.aten._scaled_dot_product_attention_math
        return math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    fused = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
    return fused(query, key, value, attn_mask, dropout_p, is_causal, False, scale=scale)[0]


def _weights(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Return softmax(scale q k' + bias) in at least fp32; 0 in a row that is masked altogether."""
    scores = scale * query @ key.mT
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if bias is not None:
        scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
    return scores.softmax(-1).nan_to_num(0.0)


def _dropout_factor(weights: Tensor, dropout_p: float, seed: Tensor) -> Tensor | float:
    """Return the factor of each weight after dropout, the same one in backward."""
    if not dropout_p:
        return 1.0
    draw = torch.Generator(weights.device).manual_seed(int(seed))
    uniform = torch.rand(weights.shape, generator=draw, device=weights.device, dtype=torch.float32)
    return (uniform >= dropout_p) / (1 - dropout_p)


def _widened(query: Tensor, *others: Tensor) -> list[Tensor]:
    """Return keys and values in the query's wider type, one head for each of the query's."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[-3] // others[0].shape[-3] if query.dim() > 3 else 1
    return [query.to(dtype), *(t.to(dtype).repeat_interleave(groups, -3) if groups > 1 else t.to(dtype) for t in others)]


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple:  # fmt: skip
    seed = torch.randint(1 << 31, (), device="cpu") if dropout_p else torch.zeros((), dtype=torch.int64, device="cpu")
    q, k, v = _widened(query, key, value)
    weights = _weights(q, k, bias, is_causal, query.shape[-1] ** -0.5 if scale is None else scale)
    out = (weights * _dropout_factor(weights, dropout_p, seed) @ v).to(query.dtype)
    empty, sums = query.new_empty(0), query.new_zeros(query.shape[:-1], dtype=torch.float32)
    return out, sums, empty, empty, query.shape[-2], key.shape[-2], seed, torch.zeros_like(seed), empty


def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, needs: list[bool], out: Tensor, sums: Tensor,
    cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, seed: Tensor,
    offset: Tensor, *, scale: float | None = None,
) -> tuple:  # fmt: skip
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = _widened(query, key, value)
    weights, grad = _weights(q, k, bias, is_causal, scale), grad.to(q.dtype)
    mask = _dropout_factor(weights, dropout_p, seed)
    grad_weights = grad @ v.mT * mask
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True))
    by_head = scale * grad_scores.mT @ q, (weights * mask).mT @ grad  # of keys and values, one for each of the query's heads
    grad_key, grad_value = (
        each.unflatten(-3, (t.shape[-3], -1)).sum(-3) if each.shape != t.shape else each
        for each, t in zip(by_head, (key, value))
    )
    grad_bias = grad_scores.sum_to_size(bias.shape).to(bias.dtype) if bias is not None and needs[3] else query.new_empty(0)
    return (scale * grad_scores @ k).to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_bias


def lstm_cell(gates: Tensor, hidden: Tensor, cx: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None):
    gates = gates + hidden if input_bias is None or hidden_bias is None else gates + hidden + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
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


COMPOSED = {
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
    "_scaled_dot_product_fused_attention_overrideable": attention_forward,
    "_scaled_dot_product_fused_attention_overrideable_backward": attention_backward,
}
"""Ops that a GPU has as one kernel, by their names in aten, and how they are computed on the CPU tensors inside."""


LOWER = (
    "linear", "matmul", "mm", "mv", "addmm", "addmv", "addr", "bmm", "addbmm", "baddbmm", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu",
    "scaled_dot_product_attention",
)  # fmt: skip
FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "group_norm",
    "norm.Scalar", "norm.ScalarOpt_dim", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss",
    "nll_loss2d", "cross_entropy_loss", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "softmax.int", "log_softmax.int",
    "cumsum", "cumprod", "prod", "prod.dim_int", "sum", "sum.dim_IntList", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
)  # fmt: skip
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot", "vdot",
)  # fmt: skip


def autocast(library: torch.library.Library) -> list[torch.library.Library]:
    """Let torch.autocast run ops of the pretend device as CUDA's does: in 16 bits, in fp32, or in their widest dtype. Return
    objects that must stay alive."""
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names in (LOWER, FP32, WIDEST):
        for name in names:
            library.impl(name, _casting(name, names), "AutocastPrivateUse1")
    return [rest]


def aten(name: str) -> torch._ops.OpOverload:
    """Return the op of a name as torch.library has it, such as "arange.start"."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _casting(name: str, names: tuple[str, ...]):
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))
    op = aten(name)

    def is_cast(value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64

    def kernel(*args, **kwargs):
        fp32 = any(is_cast(value) and value.dtype == torch.float32 for value in (*args, *kwargs.values()))
        to = torch.float32 if names is FP32 or (names is WIDEST and fp32) else torch.get_autocast_dtype(PRETENDED)

        def cast(value):
            return value.to(to) if is_cast(value) else value

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

    return kernel
