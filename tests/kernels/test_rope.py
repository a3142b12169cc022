"""Rotary embedding: both mirrors agree, the reference is Hugging Face's, views are read in place, errors read as written."""

import pytest
import torch
from torch import Tensor

from gpubound import kernels
from gpubound.kernels import plans
from gpubound.kernels.plans.types import RopePlan
from gpubound.kernels.triton import rope as fast
from tests.messages import refusals

from .cases import TOLERANCE, definitions, draw, no_copies, parity, same

reference = definitions("rope")

FP32 = torch.float32
# batch, tokens, heads, kv_heads, head size, pairs: the smallest, grouped heads, no power of two, a usual one, two partial.
CASES = [
    (1, 1, 1, 1, 2, 1),
    (2, 3, 4, 2, 16, 8),
    (2, 5, 3, 1, 6, 3),
    (1, 2, 6, 2, 64, 32),
    (2, 3, 3, 2, 10, 3),
    (1, 2, 2, 2, 17, 8),
]


def angles(device, *shape: int) -> tuple[Tensor, Tensor]:
    theta = 3 * draw(device, FP32, *shape, seed=7)
    return theta.cos(), theta.sin()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rope_matches(case, dtype, device):
    batch, tokens, heads, kv_heads, size, pairs = case
    q, k = draw(device, dtype, batch, tokens, heads, size), draw(device, dtype, batch, tokens, kv_heads, size, seed=1)
    parity(fast.rope, reference.rope, (q, k, *angles(device, tokens, pairs)), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rope_qkv_matches(case, dtype, device):
    batch, tokens, heads, kv_heads, size, pairs = case
    qkv = draw(device, dtype, batch, tokens, (heads + 2 * kv_heads) * size)
    parity(fast.rope_qkv, reference.rope_qkv, (qkv, *angles(device, tokens, pairs), heads, kv_heads), TOLERANCE[dtype])


@pytest.mark.parametrize("batch", [1, 2])
def test_angles_of_each_sequence(batch, device):
    q, k = draw(device, FP32, 2, 3, 2, 8), draw(device, FP32, 2, 3, 1, 8, seed=1)
    parity(fast.rope, reference.rope, (q, k, *angles(device, batch, 3, 4)), TOLERANCE[FP32])


@pytest.mark.parametrize("tokens", [1, 2])
def test_tiles_of_heads_and_tokens(tokens, device, monkeypatch):
    """Three q heads and two of k and v, two heads a tile, of three tokens: a tile may hold a head and a token that are none."""
    monkeypatch.setitem(plans.TRIED, ("rope", "", (4,)), RopePlan(heads=2, tokens=tokens, warps=1))
    arguments = (draw(device, FP32, 2, 3, 7 * 8), *angles(device, 2, 3, 4), 3, 2)
    parity(fast.rope_qkv, reference.rope_qkv, arguments, TOLERANCE[FP32])
    q, k = draw(device, FP32, 2, 3, 3, 10), draw(device, FP32, 2, 3, 2, 10, seed=1)
    parity(fast.rope, reference.rope, (q, k, *angles(device, 3, 4)), TOLERANCE[FP32])


def test_reference_is_rotate_half(device):
    q, k = draw(device, FP32, 2, 3, 2, 8), draw(device, FP32, 2, 3, 1, 8, seed=1)
    cos, sin = angles(device, 3, 4)
    both_cos, both_sin = (torch.cat([t, t], -1)[None, :, None] for t in (cos, sin))
    for got, x in zip(reference.rope(q, k, cos, sin), (q, k)):
        same("turned", got, x * both_cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * both_sin, TOLERANCE[FP32])


def test_scores_depend_on_distance_alone():
    """What rotary embedding is for: with angles position · frequency, q_t · k_s is a function of t − s."""
    cpu = torch.device("cpu")
    theta = torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    q, k = (draw(cpu, FP32, 6, seed=seed).expand(1, 6, 1, 6) for seed in (0, 1))
    q, k = reference.rope(q, k, theta.cos(), theta.sin())
    scores = q[0, :, 0] @ k[0, :, 0].t()
    for distance in range(-5, 6):
        diagonal = scores.diagonal(distance)
        same(f"distance {distance}", diagonal, diagonal[:1].expand(len(diagonal)), 1e-5)


def test_reference_gradients_in_fp64():
    cpu, double = torch.device("cpu"), torch.float64
    q, k = draw(cpu, double, 1, 2, 2, 6).requires_grad_(), draw(cpu, double, 1, 2, 1, 6, seed=1).requires_grad_()
    cos, sin = (t.double() for t in angles(cpu, 2, 2))
    assert torch.autograd.gradcheck(reference.rope, (q, k, cos, sin))
    qkv = draw(cpu, double, 1, 2, 4 * 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: reference.rope_qkv(x, cos, sin, 2, 1), qkv)


def views(device) -> dict[str, tuple[Tensor, Tensor]]:
    packed = draw(device, FP32, 2, 3, 4, 8)
    by_head = draw(device, FP32, 2, 2, 3, 8, seed=1)
    return {
        "slices of one product": (packed[:, :, :2], packed[:, :, 2:3]),
        "heads before tokens": (by_head.transpose(1, 2), by_head[:, :1].transpose(1, 2)),
        "wider rows": (draw(device, FP32, 2, 3, 2, 12)[..., 2:10], draw(device, FP32, 2, 3, 1, 12)[..., 4:]),
    }


@pytest.mark.parametrize("layout", ["slices of one product", "heads before tokens", "wider rows"])
def test_views_are_read_where_they_lie(layout, device):
    q, k = (x.requires_grad_() for x in views(device)[layout])
    wide_cos, wide_sin = (torch.cat([t, t], -1) for t in angles(device, 3, 4))
    cos, sin = wide_cos[:, :4], wide_sin[:, :4]  # as Hugging Face's tables are cut
    want = reference.rope(q, k, cos, sin)
    upstream = [draw(device, FP32, *x.transpose(1, 2).shape, seed=5).transpose(1, 2) for x in (q, k)]
    want += torch.autograd.grad(want, (q, k), upstream)

    with no_copies():
        got = fast.rope(q, k, cos, sin)
        got += torch.autograd.grad(got, (q, k), upstream)
    for name, a, b in zip(("q", "k", "dq", "dk"), got, want):
        same(name, a, b, TOLERANCE[FP32])


def test_no_dense_last_dimension(device):
    q, k = draw(device, FP32, 1, 2, 8, 2).transpose(2, 3), draw(device, FP32, 1, 2, 8, 1).transpose(2, 3)
    cos, sin = (t.t() for t in angles(device, 4, 2))
    for got, want in zip(fast.rope(q, k, cos, sin), reference.rope(q, k, cos, sin)):
        same("turned", got, want, TOLERANCE[FP32])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, of the branch not taken
def test_v_passes_unchanged(device):
    """Also what no product survives: infinity in v must not meet sin's zero."""
    qkv = draw(device, FP32, 1, 2, 3 * 4)
    qkv[..., 8:] = torch.tensor([float("inf"), -1.5, float("-inf"), 2.0], device=device)
    q, k, v = fast.rope_qkv(qkv, *angles(device, 2, 2), 1, 1)
    assert v.flatten(2).equal(qkv[..., 8:])
    assert q.isfinite().all() and k.isfinite().all()
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()


def test_empty(device):
    q, k = torch.empty(2, 0, 3, 4, device=device, requires_grad=True), torch.empty(2, 0, 1, 4, device=device)
    got, _ = kernels.rope(q, k, *angles(device, 0, 2))
    got.sum().backward()
    assert got.shape == q.grad.shape == (2, 0, 3, 4)
    assert [t.shape for t in kernels.rope_qkv(torch.empty(0, 2, 20), *angles(torch.device("cpu"), 2, 2), 3, 1)] == [
        (0, 2, 3, 4),
        (0, 2, 1, 4),
        (0, 2, 1, 4),
    ]


Q, K, TABLE = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 2, 8), torch.ones(3, 4)


def test_wrong_arguments():
    refusals(
        "kernels/rope:wrong_arguments",
        lambda: kernels.rope(Q[0], K, TABLE, TABLE),
        lambda: kernels.rope(Q, K.half(), TABLE, TABLE),
        lambda: kernels.rope(Q, K, torch.ones(3, 8), torch.ones(3, 8)),
        lambda: kernels.rope(Q, K, TABLE, torch.ones(3, 3)),
        lambda: kernels.rope(Q, K, TABLE.bfloat16(), TABLE.bfloat16()),
        lambda: kernels.rope_qkv(torch.ones(2, 3, 30), TABLE, TABLE, 4, 2),
        lambda: kernels.rope_qkv(torch.ones(2, 3, 32), TABLE, TABLE, 4, 0),
    )
