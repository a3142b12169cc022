"""Mamba-2: kernels and definitions agree, and with the recurrence in fp64."""

import pytest
import torch
import torch.nn.functional as F

from gpubound import kernels
from gpubound.kernels.decode_product import Norm
from gpubound.kernels.recurrent import MambaParameters, MambaShape, chunked_mamba
from gpubound.kernels.triton import recurrent as fast

from .cases import agree, assert_chunks_match, draw, pairwise, same


def recurrence(x, b, c, g, S):
    """(outputs, state) of one head of one row, token by token; x is times dt."""
    outputs = []
    for t in range(len(x)):
        S = S * g[t].exp() + torch.outer(x[t], b[t])
        outputs.append(S @ c[t])
    return torch.stack(outputs), S


def layer(row, parameters, shape):
    """(T, H P) of a row's product (T, columns), in fp64, written anew."""
    H, P, G, N, least, gate, rate, scale = shape
    conv, bias, a_log, dt_bias, skip = (None if t is None else t.double() for t in parameters)
    z, row, dt = row.double().tensor_split([H * P, H * P + shape.channels], -1)
    padded = F.pad(row.t(), (conv.shape[1] - 1, 0))
    u = sum(conv[:, j : j + 1] * padded[:, j : j + len(row)] for j in range(conv.shape[1])).t()
    u = F.silu(u if bias is None else u + bias)
    outputs = []
    for h in range(H):
        group = h * G // H
        x, step = u[:, h * P : (h + 1) * P], F.softplus(rate * dt[:, h] + dt_bias[h]).clamp(min=least)[:, None]
        b, c = (u[:, H * P + (at * G + group) * N :][:, :N] for at in range(2))
        y, _ = recurrence(step * x, b, c, -a_log[h].exp() * step[:, 0], x.new_zeros(P, N))
        outputs.append(scale * (y + skip[h] * x) * F.silu(gate * z[:, h * P : (h + 1) * P]))
    return torch.cat(outputs, -1)


@pairwise
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("widths", [(8, 16), (24, 8)])
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("factors", [(), (0.5, 0.7, 1.3, 1.1)])
@pytest.mark.parametrize("matrix", [8192, 16])
def test_steps_are_the_recurrence(device, heads, widths, taps, bias, factors, matrix, monkeypatch):
    """Two rows that begin with what others have left, NaN. matrix: numbers of a head's matrix that a program takes"""
    monkeypatch.setattr(fast, "MATRIX", matrix)
    (H, G), (P, N), length = heads, widths, 5
    shape = MambaShape(H, P, G, N, *factors)
    x = draw(device, torch.float32, 2, length, shape.columns)
    parameters = MambaParameters(
        draw(device, torch.float32, shape.channels, taps, seed=3),
        draw(device, torch.float32, shape.channels, seed=7) if bias else None,
        *(draw(device, torch.float32, H, seed=seed) for seed in (4, 5, 6)),
    )
    want = torch.stack([layer(row, parameters, shape) for row in x])
    ring = torch.full((2, taps, shape.channels), float("nan"), device=device)
    state = torch.full((2, H, P, N), float("nan"), device=device)
    for t in range(length):
        position = torch.full((2,), t, device=device, dtype=torch.int32)
        out = torch.empty(2, H * P, device=device)
        got = agree("mamba_step", x[:, t].contiguous(), position, ring, state, parameters, shape, out, limit=2e-5)
        ring, state, out = got[2], got[3], got[6]
        same("rows", out.double(), want[:, t], 1e-5)


def test_a_product_in_16_bits_meets_parameters_in_fp32(device):
    """Falcon-H1's taps are fp32, with its factors in them, whatever the dtype of the model."""
    shape = MambaShape(4, 8, 2, 16)
    taps = draw(device, torch.float32, shape.channels, 4, seed=3)
    parameters = MambaParameters(taps, None, *(draw(device, torch.float32, 4, seed=seed) for seed in (4, 5, 6)))
    x, position = draw(device, torch.bfloat16, 2, shape.columns), torch.tensor([0, 3], device=device, dtype=torch.int32)
    ring, state = draw(device, torch.bfloat16, 2, 4, shape.channels), draw(device, torch.float32, 2, 4, 8, 16)
    results = [
        kernels.mamba_step(rows, position, ring.clone(), state.clone(), parameters, shape, torch.empty(2, 32, device=device))
        for rows in (x, x.float())
    ]
    for got, want in zip(*results):
        same("out, ring, state", got, want, 1e-6)


@pytest.mark.parametrize("length", [1, 64, 150])
def test_chunks_are_the_recurrence(device, length):
    """In fp64, from a state: outputs, the state after the last token, and gradients."""
    B, H, P, N = 2, 3, 8, 12
    v, b, c = (draw(device, torch.float64, B, length, H, width, seed=at) for at, width in enumerate((P, N, N)))
    g, state = -draw(device, torch.float64, B, length, H, seed=3).abs(), draw(device, torch.float64, B, H, P, N, seed=5)
    assert_chunks_match(chunked_mamba, recurrence, [v, b, c, g, state], "vbcgS")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 3])
def test_norms_of_groups(device, dtype, groups):
    x, norm = draw(device, torch.float32, 3, 96) + 3, Norm(draw(device, dtype, 96, seed=1), 1e-2)
    parts = x.double().view(3, groups, -1)
    want = (parts / (parts.square().mean(-1, keepdim=True) + 1e-2).sqrt()).flatten(1) * norm.weight.double()
    out = agree("norm_rows", x, norm, torch.empty(3, 96, device=device, dtype=dtype), 0, None, groups)[2]
    same("rows", out.double(), want, 1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_wrong_arguments_are_refused(device):
    shape = MambaShape(2, 8, 1, 8)
    x, position, out = torch.zeros(1, shape.columns), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 16)
    ring, state, vector = torch.zeros(1, 4, shape.channels), torch.zeros(1, 2, 8, 8), torch.zeros(2)
    parameters = MambaParameters(torch.zeros(shape.channels, 4), None, vector, vector, vector)
    with pytest.raises(ValueError, match="got 3 places, wanted 4"):
        kernels.mamba_step(x, position, ring[:, :3].contiguous(), state, parameters, shape, out)
    with pytest.raises(ValueError, match="state"):
        kernels.mamba_step(x, position, ring, state.double(), parameters, shape, out)
    with pytest.raises(ValueError, match="got 3 for 16 columns"):
        kernels.norm_rows(out, Norm(torch.ones(16), 1e-5), out.clone(), groups=3)
