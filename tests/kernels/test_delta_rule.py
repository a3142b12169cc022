"""Gated delta rule: kernels and definitions agree, and with the recurrence in fp64."""

import pytest
import torch
import torch.nn.functional as F

from gpubound import kernels
from gpubound.kernels.decode_product import EARLY, FENCE, Norm
from gpubound.kernels.recurrent import DeltaParameters, DeltaShape, chunked_delta_rule

from .cases import agree, assert_chunks_match, draw, pairwise, same


def recurrence(q, k, v, g, beta, S):
    """(outputs, state) of one head of one row, token by token."""
    outputs = []
    for t in range(len(q)):
        S = S * g[t].exp()
        S = S + torch.outer(k[t], beta[t] * (v[t] - S.t() @ k[t]))
        outputs.append(S.t() @ q[t])
    return torch.stack(outputs), S


def layer(x, parameters, shape):
    """(T, H E) of a row's products (T, ...), in fp64, written anew."""
    N, H, D, E, grouped = shape
    conv, a_log, dt, norm = (parameters.conv.double(), parameters.a_log.double(), parameters.dt.double(), parameters.norm)
    share, (x, gates) = H // N, x.double().split([shape.columns - 2 * H, 2 * H], -1)

    def columns(head, kind):
        key = head // share
        if grouped:
            start = key * (2 * D + 2 * share * E)
            at = {"q": 0, "k": D, "v": 2 * D + head % share * E, "z": 2 * D + (share + head % share) * E}[kind]
            return slice(start + at, start + at + (D if kind in "qk" else E))
        at = {"q": key * D, "k": (N + key) * D, "v": 2 * N * D + head * E, "z": 2 * N * D + (H + head) * E}[kind]
        return slice(at, at + (D if kind in "qk" else E))

    def convolved(head, kind):
        key = head // share
        first = {"q": key * D, "k": (N + key) * D, "v": 2 * N * D + head * E}[kind]
        u = x[:, columns(head, kind)]
        taps = conv[first : first + u.shape[1]]
        padded = F.pad(u.t(), (taps.shape[1] - 1, 0))
        return F.silu(sum(taps[:, j : j + 1] * padded[:, j : j + len(x)] for j in range(taps.shape[1]))).t()

    outputs = []
    for head in range(H):
        key, j = head // share, head % share
        b, a = (key * 2 * share + j, key * 2 * share + share + j) if grouped else (head, H + head)
        q, k, v = (convolved(head, kind) for kind in "qkv")
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        g = -a_log[head].exp() * F.softplus(gates[:, a] + dt[head])
        o, _ = recurrence(q / D**0.5, k, v, g, gates[:, b].sigmoid(), x.new_zeros(D, E))
        o = o / (o.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (norm.weight.double() + norm.offset)
        outputs.append(o * F.silu(x[:, columns(head, "z")]))
    return torch.cat(outputs, -1)


def parameters_of(device, dtype, shape, taps):
    return DeltaParameters(
        draw(device, dtype, shape.channels, taps, seed=3), draw(device, dtype, shape.value_heads, seed=4),
        draw(device, dtype, shape.value_heads, seed=5), Norm(draw(device, dtype, shape.value_width, seed=6), 1e-6, 0.0),
    )  # fmt: skip


@pairwise
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("widths", [(16, 16), (8, 24)])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("taps", [2, 4])
def test_steps_are_the_recurrence(device, heads, widths, grouped, taps):
    """Two rows that begin with what others have left, NaN."""
    shape, length = DeltaShape(*heads, *widths, grouped), 5
    x = draw(device, torch.float32, 2, length, shape.columns)
    parameters = parameters_of(device, torch.float32, shape, taps)
    want = torch.stack([layer(row, parameters, shape) for row in x])
    ring = torch.full((2, taps, shape.channels), float("nan"), device=device)
    state = torch.full((2, heads[1], *widths), float("nan"), device=device)
    for t in range(length):
        position = torch.full((2,), t, device=device, dtype=torch.int32)
        out = torch.empty(2, want.shape[-1], device=device)
        got = agree("delta_step", x[:, t].contiguous(), position, ring, state, parameters, shape, out, limit=2e-5)
        ring, state, out = got[2], got[3], got[6]
        same("rows", out.double(), want[:, t], 1e-5)


@pytest.mark.gpu
def test_a_chain_of_launches_reads_what_the_step_before_has_left(device):
    """Position, ring and state are read before the wait; the first product of a step is the fence."""
    shape, steps = DeltaShape(16, 32, 128, 128), 6
    parameters = parameters_of(device, torch.bfloat16, shape, 4)
    weight = draw(device, torch.bfloat16, shape.columns, shape.inner) / 64
    positions = torch.arange(steps, device=device, dtype=torch.int32)[:, None]

    def run(fence, mode):
        ring = torch.zeros(1, 4, shape.channels, device=device)
        state = torch.full((1, *shape.matrix), float("nan"), device=device)
        x = torch.empty(1, shape.columns, device=device)
        outs = draw(device, torch.float32, steps + 1, 1, shape.inner, seed=9)
        for position, before, out in zip(positions, outs, outs[1:]):
            kernels.norm_product(before, None, weight, out=x, dependent=fence)
            kernels.delta_step(x, position, ring, state, parameters, shape, out, mode)
        return outs, state

    # fp32 but for the weights, six times through sums of 4,096 terms
    for got, want in zip(run(FENCE, EARLY), run(0, 0)):
        same("rows", got, want, 1e-4)


def test_a_position_that_does_not_exist_gives_nan_and_changes_nothing(device):
    shape = DeltaShape(1, 2, 8, 8)
    x = draw(device, torch.float32, 2, shape.columns)
    ring, state = torch.ones(2, 4, shape.channels, device=device), torch.ones(2, 2, 8, 8, device=device)
    position, out = torch.tensor([-1, 4], device=device, dtype=torch.int32), torch.zeros(2, 16, device=device)
    kernels.delta_step(x, position, ring, state, parameters_of(device, torch.float32, shape, 4), shape, out)
    assert out[0].isnan().all() and out[1].isfinite().all()
    assert (ring[0] == 1).all() and (state[0] == 1).all() and (state[1] != 1).any() and (ring[1, 0] != 1).all()


def test_wrong_arguments_are_refused(device):
    shape = DeltaShape(1, 2, 8, 8)
    x, position = torch.zeros(1, shape.columns), torch.zeros(1, dtype=torch.int32)
    ring, state, out = torch.zeros(1, 4, shape.channels), torch.zeros(1, 2, 8, 8), torch.zeros(1, 16)
    parameters = parameters_of("cpu", torch.float32, shape, 4)
    with pytest.raises(ValueError, match="got 3 places, wanted 4"):
        kernels.delta_step(x, position, ring[:, :3].contiguous(), state, parameters, shape, out)
    with pytest.raises(ValueError, match="state"):
        kernels.delta_step(x, position, ring, state.double(), parameters, shape, out)
    with pytest.raises(ValueError, match="divide evenly"):
        kernels.delta_step(x, position, ring, state, parameters, DeltaShape(2, 3, 8, 8), out)


@pytest.mark.parametrize("length", [1, 64, 150])
def test_chunks_are_the_recurrence(device, length):
    """In fp64, from a state: outputs, the state after the last token, and gradients."""
    B, H, D, E = 2, 3, 8, 12
    q, k, v = (draw(device, torch.float64, B, length, H, width, seed=at) for at, width in enumerate((D, D, E)))
    k = k / k.norm(dim=-1, keepdim=True)
    g = -draw(device, torch.float64, B, length, H, seed=3).abs()
    beta, state = draw(device, torch.float64, B, length, H, seed=4).sigmoid(), draw(device, torch.float64, B, H, D, E, seed=5)
    assert_chunks_match(chunked_delta_rule, recurrence, [q, k, v, g, beta, state], "qkvgbS")
