"""Attention with sinks: the definition by its formula in fp64, and torch's kernels, given another log-sum-exp, against it."""

from itertools import pairwise as neighbours

import pytest
import torch

from gpubound import kernels
from gpubound.kernels.registry import load
from tests.messages import refusals

from .cases import TOLERANCE, draw, pairwise, parity, same

reference = load("reference", "sink_attention")
fast = load("triton", "sink_attention")
BOUNDS = [0, 11, 40, 40, 70, 80]


def arguments(device, dtype, heads=4, kv_heads=2, width=16, tokens=40, keys=40, seed=0):
    q, k, v = (
        draw(device, dtype, 2, n, count, width, seed=seed + i)
        for i, (n, count) in enumerate(((tokens, heads), (keys, kv_heads), (keys, kv_heads)))
    )
    return q, k, v, draw(device, dtype, heads, seed=9) + 1, width**-0.5


def by_token(q, k, v, sinks, scale, window, bounds):
    """The formula, a token and head at a time."""
    rows = []
    for row, queries in enumerate(q):
        for at, token in enumerate(queries):
            last = k.shape[1] - q.shape[1] + at
            first = 0 if window is None else max(0, last + 1 - window)
            if bounds is not None:
                first = max(first, max(b for b in bounds if b <= row * len(queries) + at) - row * len(queries))
            heads = []
            for head, query in enumerate(token):
                kv = head * k.shape[2] // q.shape[2]
                scores = torch.cat([k[row, first : last + 1, kv] @ query * scale, sinks[head : head + 1]])
                heads.append(scores.softmax(0)[:-1] @ v[row, first : last + 1, kv])
            rows.append(torch.stack(heads))
    return torch.stack(rows).view(q.shape)


@pytest.mark.parametrize("source", [fast, reference], ids=["kernel", "definition"])
@pytest.mark.parametrize(
    "heads, kv_heads, tokens, keys, window, bounds",
    [
        (4, 2, 12, 12, None, None),
        (4, 1, 12, 12, 5, None),
        (3, 3, 12, 12, None, [0, 3, 12, 12, 20, 24]),
        (4, 2, 12, 12, 4, [0, 3, 12, 12, 20, 24]),
        (2, 1, 5, 12, 6, None),
        (2, 1, 5, 12, None, None),
    ],
)
def test_outputs_and_gradients_are_the_formulas(source, heads, kv_heads, tokens, keys, window, bounds):
    device = torch.device("cpu")  # whose kernel takes fp64
    given = arguments(device, torch.float64, heads, kv_heads, 8, tokens, keys)
    starts = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    parity(lambda *a: source(*a, window, starts), lambda *a: by_token(*a, window, bounds), given, 1e-9)


@pytest.mark.parametrize("source", [fast, reference], ids=["kernel", "definition"])
def test_gradients_are_those_of_small_differences(source):
    *given, scale = arguments(torch.device("cpu"), torch.float64, 2, 1, 8, 6, 6)
    leaves = [t.requires_grad_() for t in given]
    bounds = torch.tensor([0, 2, 6, 12], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda *t: source(*t, scale, 3, bounds), leaves)


# A kernel rounds its weights, o, o' and dS to 16 bits, each once, where the definition rounds its results alone.
@pairwise
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads, kv_heads, width", [(4, 2, 16), (8, 1, 64), (3, 3, 24)])
@pytest.mark.parametrize("window", [None, 1, 7, 1000])
@pytest.mark.parametrize("packed", [False, True])
def test_the_kernel_agrees_with_the_definition(device, dtype, heads, kv_heads, width, window, packed):
    if packed and device.type == "cuda" and dtype == torch.float32:
        pytest.skip("packed rows in fp32 have no kernel on a GPU")
    bounds = torch.tensor(BOUNDS, device=device, dtype=torch.int32) if packed else None
    given = arguments(device, dtype, heads, kv_heads, width)
    limit = 2e-5 if dtype == torch.float32 else 4 * TOLERANCE[dtype]
    parity(lambda *a: fast(*a, window, bounds), lambda *a: reference(*a, window, bounds), given, limit)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_the_shape_of_gpt_oss(device, window, rows, packed):
    """64 heads and 8 of keys, 64 wide. Through the public function, which dispatches by its self-test."""
    tokens = 1024
    edges = sorted({0, 100, 101, 900, *(tokens * row for row in range(rows + 1))})
    bounds = torch.tensor(edges, device=device, dtype=torch.int32) if packed else None
    q, k, v = (draw(device, torch.bfloat16, rows, tokens, n, 64, seed=n + i) for i, n in enumerate((64, 8, 8)))
    given = q, k, v, draw(device, torch.bfloat16, 64, seed=5) + 1, 0.125
    limit = 4 * TOLERANCE[torch.bfloat16]
    parity(lambda *a: kernels.sink_attention(*a, window, bounds), lambda *a: reference(*a, window, bounds), given, limit)


@pytest.mark.parametrize("source", [fast, reference], ids=["kernel", "definition"])
@pytest.mark.parametrize("window", [None, 7])
def test_sequences_of_packed_rows_are_those_alone(device, source, window):
    """In 16 bits on a GPU, where the kernel of packed rows is. A sequence alone has other blocks of keys, so other rounding."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    limit = 2 * TOLERANCE[dtype] if dtype == torch.bfloat16 else 2e-6
    q, k, v, sinks, scale = arguments(device, dtype)
    packed = source(q, k, v, sinks, scale, window, torch.tensor(BOUNDS, device=device, dtype=torch.int32)).flatten(0, 1)
    for begin, end in neighbours(BOUNDS):
        if begin < end:
            alone = (t.flatten(0, 1)[None, begin:end] for t in (q, k, v))
            same(f"{begin} to {end}", packed[begin:end], source(*alone, sinks, scale, window)[0], limit)


@pytest.mark.parametrize("source", [fast, reference], ids=["kernel", "definition"])
def test_a_sink_far_above_and_far_below_all_scores(device, source):
    """All weight is the sink's, or none: neither is NaN, and the gradients of the second are those of plain attention."""
    q, k, v, _, scale = arguments(device, torch.float32)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    sinks = torch.tensor([300.0, 300.0, -300.0, -300.0], device=device, requires_grad=True)
    y = source(q, k, v, sinks, scale)
    assert y[:, :, :2].abs().max() == 0
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))), is_causal=True, scale=scale
    ).transpose(1, 2)
    same("y", y[:, :, 2:], plain[:, :, 2:], 1e-5)
    got = torch.autograd.grad(y.square().sum(), (q, k, v, sinks))
    want = torch.autograd.grad(plain[:, :, 2:].square().sum(), (q, k, v))
    for name, a, b in zip("qkv", got, want):
        same(f"gradient of {name}", a, b, 1e-4)
    assert got[3].isfinite().all()


def test_the_cpu_takes_torchs_kernel():
    """With its gradients; a transform, for which it has no rule, the definition."""
    q, k, v, sinks, scale = arguments(torch.device("cpu"), torch.float32)
    leaves = [t.requires_grad_() for t in (q, k, v, sinks)]
    y = kernels.sink_attention(*leaves, scale, 7)
    assert y.grad_fn.name() == "_SinkAttentionBackward"
    parity(lambda *a: kernels.sink_attention(*a, scale, 7), lambda *a: reference(*a, scale, 7), tuple(leaves), 2e-5)
    one = torch.func.vmap(lambda q: kernels.sink_attention(q, k, v, sinks, scale, 7))(torch.stack([q, 2 * q]))
    same("of a batch", one[0], y, 2e-6)


def test_autocast_computes_in_its_dtype(device):
    q, k, v, sinks, scale = arguments(device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        y = kernels.sink_attention(q, k, v, sinks, scale, 7)
    want = reference(*(t.bfloat16() for t in (q, k, v)), sinks, scale, 7)
    same("y", y, want, 2 * TOLERANCE[torch.bfloat16])


def test_wrong_arguments():
    q, k, v, sinks, scale = arguments("cpu", torch.float32)
    short = k[:, :9], v[:, :9]
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    refusals(
        "kernels/sink_attention:wrong_arguments",
        lambda: kernels.sink_attention(q, *short, sinks, scale),
        lambda: kernels.sink_attention(q, k, v.half(), sinks, scale),
        lambda: kernels.sink_attention(q[:, :, :3], k, v, sinks, scale),
        lambda: kernels.sink_attention(q, k, v, sinks[:2], scale),
        lambda: kernels.sink_attention(q, k, v, sinks, scale, 0),
        lambda: kernels.sink_attention(q, k, v, sinks, scale, None, bounds.long()),
        lambda: kernels.sink_attention(q[:, :9], k, v, sinks, scale, None, bounds),
    )
