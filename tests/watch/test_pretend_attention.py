"""Attention on the pretend device is one op a way, with the values and gradients of torch's own."""

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from gpubound.watch.pretend import simgpu

MASKS = {"bool": torch.arange(30).view(5, 6) % 3 > 0, "float": torch.arange(30.0).view(5, 6) / 30}
CASES = {
    "plain": ({}, None), "causal": ({"is_causal": True}, None), "scaled": ({"scale": 0.3}, None),
    "grouped heads": ({"enable_gqa": True}, None), "a mask": ({}, "bool"), "a bias": ({}, "float"),
}  # fmt: skip


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def computed(device, settings: dict, mask: str | None) -> list[torch.Tensor]:
    """(the output, the gradients of queries, keys, values and of a bias)."""
    torch.manual_seed(0)
    shapes = (2, 4, 5, 8), *((2, 2 if "enable_gqa" in settings else 4, 6, 8) for _ in range(2))
    inputs = [torch.rand(shape).to(device).requires_grad_() for shape in shapes]
    bias = None if mask is None else MASKS[mask].to(device)
    if mask == "float":
        inputs.append(bias := bias.detach().requires_grad_())
    out = functional.scaled_dot_product_attention(*inputs[:3], attn_mask=bias, **settings)
    out.square().sum().backward()
    return [out.detach().cpu(), *(t.grad.cpu() for t in inputs)]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_torch_s(case):
    for wanted, got in zip(computed("cpu", *CASES[case]), computed(simgpu(), *CASES[case]), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_it_is_one_launch_forward_and_one_backward_unless_math_is_asked_for():
    q = torch.rand(1, 2, 4, 8, device=simgpu(), requires_grad=True)
    with Ops() as ops:
        functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    assert sum("attention" in name for name in ops.names) == 2 and "bmm" not in ops.names
    with Ops() as ops, sdpa_kernel(SDPBackend.MATH):
        functional.scaled_dot_product_attention(q, q, q)
    assert "bmm" in ops.names


def test_dropout_drops_the_same_weights_in_backward():
    """Of one key each weight is 1: kept and doubled, or dropped, so that the gradient of the value counts the kept ones."""
    torch.manual_seed(3)
    q, k = torch.rand(1, 64, 8, device=simgpu()), torch.rand(1, 1, 8, device=simgpu())
    v = torch.ones(1, 1, 8, device=simgpu()).requires_grad_()
    out = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    out.sum().backward()
    assert set(out.detach().cpu().flatten().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(v.grad.cpu(), out.detach().cpu().sum(1, keepdim=True))


def test_no_grad_inference_and_autocast_keep_their_dtype():
    q = torch.rand(1, 2, 4, 8, device=simgpu())
    with torch.inference_mode(), torch.autocast("simgpu", dtype=torch.bfloat16):
        assert functional.scaled_dot_product_attention(q, q, q).dtype == torch.bfloat16
    with torch.no_grad():
        assert functional.scaled_dot_product_attention(q, q, q).shape == q.shape
