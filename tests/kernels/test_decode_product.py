"""The products of a decoding step: parity with the reference, the same bits in any batch, guard bands, sentences."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels import plans
from gpubound.kernels.decode_product import Norm
from gpubound.kernels.plans.types import MatrixPlan
from gpubound.kernels.registry import load
from tests.messages import message, refusals

from .cases import DTYPES, SOURCES, TOLERANCE, agree, draw, pairwise, same

# (hidden, rows of q, of k and v): powers of two, a hidden that is none, one row more than a program takes
SHAPES = [(64, 32, 16), (96, 48, 16), (40, 20, 7)]


def stream(device, rows, width, seed=0):
    return draw(device, torch.float32, rows, width, seed=seed)


TILED = pytest.mark.parametrize("tiled", [False, True])


def product(op, tiled, dtype, *arguments):
    """Compare a product of normed rows with the reference; tiled ones are rounded before they are multiplied, too."""
    limit = max(4 * TOLERANCE[dtype], 1e-5) if tiled else 1e-5
    agree(f"tiled_{op}" if tiled else op, *arguments, limit=limit)


@pairwise
@TILED
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("hidden, q, k", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_q_k_v_agree_with_the_reference(device, tiled, dtype, rows, hidden, q, k, biased):
    x, norm = stream(device, rows, hidden), Norm(draw(device, dtype, hidden, seed=1), 1e-5, float(tiled))
    weights = [draw(device, dtype, n, hidden, seed=2 + i) for i, n in enumerate((q, k, k))]
    biases = [draw(device, dtype, n, seed=5 + i) if biased else None for i, n in enumerate((q, k, k))]
    found = torch.empty(rows, q + 2 * k, device=device), *([] if tiled else [None, None])
    product("norm_product", tiled, dtype, x, norm, *weights, *biases, *found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_one_weight_with_a_bias_agrees_with_the_reference(device, dtype, rows):
    """As in an MLP without a gate."""
    x, weight, bias = stream(device, rows, 96), draw(device, dtype, 160, 96, seed=2), draw(device, dtype, 160, seed=3)
    agree("norm_product", x, None, weight, None, None, bias, None, None, torch.empty(rows, 160, device=device), None, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [64, 100, 257])
def test_the_head_finds_the_greatest_of_each_stretch(device, dtype, vocab):
    x, norm, head = stream(device, 2, 96), Norm(draw(device, dtype, 96, seed=1), 1e-5), draw(device, dtype, vocab, 96, seed=2)
    parts = -(-vocab // 16)
    found = [torch.empty(2, columns, device=device) for columns in (vocab, parts)]
    found += [torch.empty(2, parts, device=device, dtype=torch.int32)]
    *_, logits, best, arg = agree("norm_product", x, norm, head, None, None, None, None, None, *found)
    assert torch.equal(logits.argmax(1), arg.gather(1, best.argmax(1, keepdim=True))[:, 0].long())


@pytest.mark.parametrize(("first", "second"), [(48, 16), (20, 7), (33, 65)])
def test_two_weights_side_by_side(device, first, second):
    x, norm = stream(device, 2, 40), Norm(draw(device, torch.float32, 40, seed=1), 1e-5)
    weights = [draw(device, torch.float32, rows, 40, seed=2 + rows) for rows in (first, second)]
    out = torch.empty(2, first + second, device=device)
    *_, out, _, _ = agree("norm_product", x, norm, *weights, None, None, None, None, out, None, None)
    normed = torch.nn.functional.rms_norm(x.double(), (40,), norm.weight.double(), 1e-5)
    torch.testing.assert_close(out.double(), normed @ torch.cat(weights).double().t(), rtol=0, atol=1e-4)


def test_a_third_weight_without_a_second():
    weight = torch.ones(8, 32)
    refusals(
        "kernels/decode_product:a_third_weight_without_a",
        lambda: kernels.norm_product(torch.ones(1, 32), None, weight, v_weight=weight),
    )


@pytest.mark.parametrize("source", SOURCES)
def test_a_nan_reaches_the_partial_maximum(device, source):
    x, norm = stream(device, 1, 64), Norm(draw(device, torch.float32, 64, seed=1), 1e-5)
    head = draw(device, torch.float32, 48, 64, seed=2)
    head[20, 3] = float("nan")
    best, arg = torch.zeros(1, 3, device=device), torch.zeros(1, 3, device=device, dtype=torch.int32)
    no = [None] * 5
    load(source, "norm_product")(x, norm, head, *no, torch.zeros(1, 48, device=device), best, arg)
    assert best.isnan().tolist() == [[False, True, False]]


@pairwise
@TILED
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 12])
@pytest.mark.parametrize("hidden, width", [(64, 96), (96, 130), (40, 7)])
@pytest.mark.parametrize("biased, activation", [(False, "silu"), (True, "gelu_tanh"), (True, "gelu")])
def test_gate_and_up_agree_with_the_reference(device, tiled, dtype, rows, hidden, width, biased, activation):
    x, norm = stream(device, rows, hidden), Norm(draw(device, dtype, hidden, seed=1), 1e-5)
    gate, up = (draw(device, dtype, width, hidden, seed=2 + i) * hidden**-0.5 for i in range(2))
    biases = [draw(device, dtype, width, seed=4 + i) if biased else None for i in range(2)]
    out = torch.empty(rows, width, device=device, dtype=dtype)
    product("norm_gate_up", tiled, dtype, x, norm, gate, up, *biases, out, 0, activation)


@pairwise
@TILED
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("inner, hidden", [(96, 64), (130, 40), (512, 33)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_residual_product_agrees_with_the_reference(device, tiled, dtype, rows, inner, hidden, biased):
    h, weight = draw(device, dtype, rows, inner), draw(device, dtype, hidden, inner, seed=1)
    bias = draw(device, dtype, hidden, seed=2) if biased else None
    copy = [0, torch.empty(rows, hidden, device=device, dtype=dtype)] if tiled else []
    op = "tiled_add_product" if tiled else "add_product"
    agree(op, h, weight, bias, stream(device, rows, hidden, seed=3), *copy)


@pytest.mark.parametrize("op", ["add_product", "tiled_add_product"])
def test_the_stream_is_written_to_a_second_place(device, op):
    h, weight = draw(device, torch.bfloat16, 3, 40), draw(device, torch.bfloat16, 24, 40, seed=1)
    x, wide = stream(device, 3, 24, seed=3), torch.zeros(3, 80, device=device)
    load("triton", op)(h, weight, None, x, keep=wide[:, 30:54])
    assert torch.equal(wide[:, 30:54], x) and not wide[:, :30].any() and not wide[:, 54:].any()


def test_tiles_that_do_not_divide_the_columns_stay_inside(device, monkeypatch):
    """The last tile of the last row: what lies behind it is NaN, and NaN times a masked zero would show."""
    hidden = 72
    for kind in ("qkv", "gate_up", "add"):
        monkeypatch.setitem(plans.TRIED, ("product", kind, (16, hidden)), MatrixPlan(4, 32, 4))
    x, norm = stream(device, 2, hidden), Norm(draw(device, torch.float16, hidden, seed=1), 1e-5)
    weights, out = [draw(device, torch.float16, 16, hidden, seed=2 + i) for i in range(2)], torch.empty(2, 16, device=device)
    agree("norm_product", x, norm, weights[0], None, None, None, None, None, out, None, None)
    agree("norm_gate_up", x, norm, *weights, None, None, out)
    agree("add_product", x, weights[0], None, torch.zeros(2, 16, device=device))


@pytest.mark.parametrize(("columns", "held"), [(32, 96), (32, 4), (256, 96), (256, 6)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_row_gives_the_same_bits_in_any_batch(device, dtype, columns, held, monkeypatch):
    """One tile a row of the weight, and several; all rows of x at once, or some after the others."""
    monkeypatch.setattr("gpubound.kernels.triton._launch.HELD", held)
    hidden, width, outputs = 128, 16, 24
    for kind, shape in (("qkv", (outputs, hidden)), ("gate_up", (width, hidden)), ("add", (outputs, hidden))):
        monkeypatch.setitem(plans.TRIED, ("product", kind, shape), MatrixPlan(4, min(columns, shape[1]), 4))
    x, norm = stream(device, 8, hidden), Norm(draw(device, dtype, hidden, seed=1), 1e-5)
    q, down = draw(device, dtype, outputs, hidden, seed=2), draw(device, dtype, outputs, hidden, seed=3)
    gate, up = (draw(device, dtype, width, hidden, seed=4 + i) for i in range(2))
    h = draw(device, dtype, 8, hidden, seed=6)

    def results(rows):
        out = torch.zeros(len(rows), outputs, device=device)
        load("triton", "norm_product")(x[rows], norm, q, None, None, None, None, None, out, None, None)
        gated = torch.zeros(len(rows), width, device=device, dtype=dtype)
        load("triton", "norm_gate_up")(x[rows], norm, gate, up, None, None, gated)
        added = torch.zeros(len(rows), outputs, device=device)
        load("triton", "add_product")(h[rows], down, None, added)
        return out, gated, added

    together = results(list(range(8)))
    for rows in ([3], [7, 5, 4]):
        for whole, part in zip(together, results(rows)):
            assert torch.equal(whole[rows], part)


def test_wrong_arguments_are_named(device):
    x, norm, weight = stream(device, 2, 64), Norm(draw(device, torch.float32, 64), 1e-5), draw(device, torch.float32, 32, 64)
    refusals(
        "kernels/decode_product:wrong_arguments_are_named",
        lambda: kernels.norm_product(x.half(), norm, weight),
        lambda: kernels.norm_product(x, norm._replace(weight=norm.weight[:32]), weight),
        lambda: kernels.norm_gate_up(x, norm, weight, weight[:, :32]),
        lambda: kernels.norm_product(x, norm, weight, best=x),
        lambda: kernels.norm_product(x, norm, weight, out=x),
        lambda: kernels.add_product(x, weight[:, :32].contiguous(), None, x),
        lambda: kernels.add_product(x, weight, None, x),
    )


FORMS = [(1.0, True, 0.0, "gelu_tanh"), (0.0, False, 0.7, "silu"), (1.0, True, 0.7, "gelu")]  # offset, normed, cap, activation


@pytest.mark.parametrize("offset, normed, cap, activation", FORMS)
def test_the_forms_of_other_families(device, offset, normed, cap, activation):
    """A gain of 1 + weight, no norm, capped outputs and gelu, beside the same in torch: the definition and the kernel."""
    dtype, rows, hidden = torch.bfloat16, 3, 96
    x, norm = stream(device, rows, hidden), Norm(draw(device, dtype, hidden, seed=1), 1e-5, offset)
    norm.weight[:5] = 3 / 512  # 1 + 3/512 is not a bf16 number
    weight, gate, up = (draw(device, dtype, n, hidden, seed=2 + i) * hidden**-0.5 for i, n in enumerate((48, 40, 40)))
    gain = (norm.weight.float() + offset) * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt() if normed else 1.0
    h, given = x * gain, norm if normed else None
    want = torch.nn.functional.linear(h, weight.float())
    want = torch.tanh(want / cap) * cap if cap else want
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    act = torch.nn.functional.silu if activation == "silu" else lambda g: torch.nn.functional.gelu(g, approximate=approximate)
    gated = act(torch.nn.functional.linear(h, gate.float())) * torch.nn.functional.linear(h, up.float())
    for source in SOURCES:
        out, best = torch.zeros(rows, 48, device=device), torch.zeros(rows, 3, device=device)
        arg = torch.zeros(rows, 3, device=device, dtype=torch.int32)
        no = [None] * 5
        load(source, "norm_product")(x, given, weight, *no, out, best, arg, 0, cap)
        same("product", out, want, 1e-5)
        assert torch.equal(out.argmax(1), arg.gather(1, best.argmax(1, keepdim=True))[:, 0].long())
        out = torch.zeros(rows, 40, device=device, dtype=dtype)
        load(source, "norm_gate_up")(x, given, gate, up, None, None, out, 0, activation)
        same("gated", out.float(), gated, TOLERANCE[dtype])
        if normed:
            out = torch.zeros(rows, hidden, device=device)
            same("rows", load(source, "norm_rows")(x, norm, out), h, 1e-5)


def test_an_unknown_activation_is_named(device):
    x, norm, gate = stream(device, 1, 64), Norm(draw(device, torch.float32, 64), 1e-5), draw(device, torch.float32, 32, 64)
    with pytest.raises(ValueError, check=message("kernels/decode_product:an_unknown_activation_is")):
        kernels.norm_gate_up(x, norm, gate, gate, activation="relu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_normed_rows_agree_with_the_reference(device, dtype):
    norm = Norm(draw(device, dtype, 100, seed=1), 1e-5)
    agree("norm_rows", stream(device, 3, 100), norm, torch.empty(3, 100, device=device, dtype=dtype))


@pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 40])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_before_the_residual_add(device, dtype, hidden, offset):
    """What was normed is zero afterwards, for the next product to be added to."""
    norm, x = Norm(draw(device, dtype, hidden, seed=1), 1e-5, offset), stream(device, 3, hidden)
    y = 5 * stream(device, 3, hidden, seed=2)
    left, _, added = agree("add_norm", y, norm, x)
    assert not left.any()
    normed = y * (y.square().mean(1, keepdim=True) + 1e-5).rsqrt() * (norm.weight.float() + offset)
    same("stream", added, x + normed, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["relu2", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("multiplied", [True, False])
def test_a_product_with_an_activation(device, dtype, activation, multiplied):
    """As an MLP without a gate, or a gate of a layer's own input: beside activate_rows of the product."""
    x, bias = stream(device, 3, 96), draw(device, dtype, 21, seed=3)
    weight = draw(device, dtype, 21, 96, seed=2) * 96**-0.5
    by, out = stream(device, 3, 21, seed=4) if multiplied else None, torch.empty(3, 21, device=device, dtype=dtype)
    no = None, None
    got = agree("norm_product", x, None, weight, *no, bias, *no, out, *no, 0, 0.0, None, activation, by)[8]
    up, want = torch.nn.functional.linear(x, weight.float(), bias.float()), torch.empty_like(out)
    load("reference", "activate_rows")(up, activation, want, 0, by)
    same("activated", got.float(), want.float(), TOLERANCE[dtype])


def test_what_an_activation_needs(device):
    x, weight, best = stream(device, 1, 64), draw(device, torch.float32, 32, 64), torch.zeros(1, 2, device=device)
    refusals(
        "kernels/decode_product:what_an_activation_needs",
        lambda: kernels.norm_product(x, None, weight, activation="selu"),
        lambda: kernels.norm_product(x, None, weight, activation="relu", by=x),
        lambda: kernels.norm_product(x, None, weight, by=torch.zeros(1, 32, device=device)),
        lambda: kernels.norm_product(x, None, weight, best=best, arg=best.int(), activation="relu"),
    )
