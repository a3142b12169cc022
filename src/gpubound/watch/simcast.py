"""Autocast for the pretend device: the same ops in 16 bits, and the same kept in fp32, as CUDA's autocast has for
transformers.
"""

import torch

LOWER = (
    "linear",
    "matmul",
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "conv1d",
    "conv2d",
    "scaled_dot_product_attention",
)
FP32 = (
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "softmax.int",
    "log_softmax.int",
    "cross_entropy_loss",
    "nll_loss",
    "mse_loss",
    "exp",
    "log",
    "pow.Tensor_Scalar",
    "rsqrt",
    "sum",
    "sum.dim_IntList",
    "norm.Scalar",
    "cumsum",
)


def register(library: torch.library.Library) -> list[torch.library.Library]:
    """Make torch.autocast work on the pretend device. Returns what must be kept alive."""
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in LOWER:
        library.impl(name, _casting(name, None), "AutocastPrivateUse1")
    for name in FP32:
        library.impl(name, _casting(name, torch.float32), "AutocastPrivateUse1")
    return [rest]


def _casting(name: str, dtype: torch.dtype | None):
    base, _, overload = name.partition(".")
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))
    op = getattr(getattr(torch.ops.aten, base), overload or "default")

    def kernel(*args, **kwargs):
        to = dtype or torch.get_autocast_dtype("simgpu")

        def cast(value):
            if isinstance(value, torch.Tensor):
                return value.to(to) if value.is_floating_point() and value.dtype != torch.float64 else value
            return value

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

    return kernel
