"""torch.autocast on the pretend device: the ops that CUDA's autocast runs in 16 bits, in fp32, or in their widest dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..device import PRETENDED

NAME = PRETENDED
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
    """Make torch.autocast work on the pretend device. Return objects that must stay alive."""
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, dtype_of in ((LOWER, _chosen), (FP32, _fp32), (WIDEST, _widest)):
        for name in names:
            library.impl(name, _casting(name, dtype_of), "AutocastPrivateUse1")
    return [rest]


def _casting(name: str, dtype_of: Callable[[list[torch.Tensor]], torch.dtype]):
    base, _, overload = name.partition(".")
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))
    op = getattr(getattr(torch.ops.aten, base), overload or "default")

    def kernel(*args, **kwargs):
        to = dtype_of([value for value in (*args, *kwargs.values()) if _is_castable(value)])

        def cast(value):
            return value.to(to) if _is_castable(value) else value

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

    return kernel


def _is_castable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _chosen(floats: list[torch.Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype(NAME)


def _fp32(floats: list[torch.Tensor]) -> torch.dtype:
    return torch.float32


def _widest(floats: list[torch.Tensor]) -> torch.dtype:
    return torch.float32 if any(tensor.dtype == torch.float32 for tensor in floats) else torch.get_autocast_dtype(NAME)
