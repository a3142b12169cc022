"""Under autocast an op of the pretend device has the dtype that it has on CUDA."""

import torch
from torch.nn import functional as F

from gpubound.watch.pretend import FP32, LOWER, WIDEST, simgpu


def test_cuda_s_autocast_has_these_ops_too():
    """A build for the CPU has CUDA's table. cross_entropy_loss is made of two ops that are in it."""
    for name in {*LOWER, *FP32, *WIDEST} - {"cross_entropy_loss"}:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA"), name


def test_products_losses_and_mixed_dtypes():
    device = simgpu()
    image, weight = torch.rand(1, 2, 4, 4, device=device), torch.rand(2, 3, 2, 2, device=device, requires_grad=True)
    with torch.autocast("simgpu", dtype=torch.bfloat16):
        half = F.conv2d(image, torch.rand(2, 2, 1, 1, device=device))
        up = F.conv_transpose2d(half, weight, stride=2)
        assert half.dtype == up.dtype == torch.bfloat16 and up.shape == (1, 3, 8, 8)
        assert F.smooth_l1_loss(up, torch.zeros_like(up)).dtype == F.interpolate(up, scale_factor=2).dtype == torch.float32
        assert torch.addcmul(image, half, half).dtype == torch.float32
        assert torch.addcmul(half, half, half).dtype == torch.bfloat16
        up.float().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
