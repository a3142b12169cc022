"""LayerNorm of rows and activations of products in a decoding step: parity, their definitions, refusals."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from gpubound import kernels
from gpubound.kernels.decode_product import EARLY, FENCE, LATE, Norm
from gpubound.kernels.registry import load
from gpubound.kernels.row_ops import ACTIVATED, LayerNorm

from .cases import DTYPES, SOURCES, TOLERANCE, agree, draw, pairwise, same


@pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_layer_norm_of_rows(device, dtype, columns, bias, offset):
    """Values whose mean is far from zero, against torch's LayerNorm in fp64."""
    x = draw(device, torch.float32, 3, columns) + 40
    weight, shift = draw(device, dtype, columns, seed=1), draw(device, dtype, columns, seed=2) if bias else None
    norm = LayerNorm(weight, shift, 1e-2, offset)
    want = F.layer_norm(x.double(), (columns,), weight.double() + offset, None if shift is None else shift.double(), 1e-2)
    *_, out = agree("layer_norm_rows", x, norm, torch.empty(3, columns, device=device, dtype=dtype), limit=2e-5)
    same("rows", out.double(), want, max(2e-5, TOLERANCE[dtype]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATED)
def test_activations(device, dtype, activation):
    x = 3 * draw(device, torch.float32, 2, 700)
    definitions = {
        "silu": x / (1 + (-x).exp()),
        "gelu": x * torch.special.ndtr(x),
        "gelu_tanh": x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
        "relu": x.clamp_min(0),
        "relu2": x.clamp_min(0) ** 2,
    }
    *_, out = agree("activate_rows", x, activation, torch.empty(2, 700, device=device, dtype=dtype))
    same(activation, out.float(), definitions[activation], max(1e-5, TOLERANCE[dtype]))


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_a_nan_stays(device, activation):
    x = torch.tensor([[float("nan"), -1.0]], device=device)
    for source in SOURCES:
        out = load(source, "activate_rows")(x, activation, torch.zeros_like(x))
        assert out[0, 0].isnan() and out[0, 1] == 0


def test_wrong_arguments_are_refused(device):
    x, weight = torch.zeros(2, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(ValueError, match="activation must be one of"):
        kernels.activate_rows(x, "tanh", x.clone())
    with pytest.raises(ValueError, match=r"norm\.bias"):
        kernels.layer_norm_rows(x, LayerNorm(weight, weight[:4].clone(), 1e-5), x.clone())
    with pytest.raises(ValueError, match="x must be"):
        kernels.layer_norm_rows(x.double(), LayerNorm(weight, None, 1e-5), x.clone())


def test_kernels_without_weights_let_their_successor_start_at_once(device, monkeypatch):
    """In a chain whose products do so late; a fence stays one."""
    x, weight, out = (
        draw(device, torch.float32, 1, 64),
        draw(device, torch.float32, 64, seed=1),
        torch.empty(1, 64, device=device),
    )
    calls = {
        "norm_rows": lambda mode: (x, Norm(weight, 1e-5), out, mode),
        "add_norm": lambda mode: (out, Norm(weight, 1e-5), x, mode),
        "layer_norm_rows": lambda mode: (x, LayerNorm(weight, None, 1e-5), out, mode),
        "activate_rows": lambda mode: (x, "silu", out, mode),
    }
    for name, arguments in calls.items():
        module, asked = importlib.import_module(load("triton", name).__module__), []
        monkeypatch.setattr(
            module, "options", lambda warps, mode, asked=asked: asked.append(mode) or {"num_warps": warps, "DEPENDENT": 0}
        )
        for mode in (0, EARLY, LATE, FENCE):
            load("triton", name)(*arguments(mode))
        assert asked == [0, EARLY, EARLY, FENCE], name
