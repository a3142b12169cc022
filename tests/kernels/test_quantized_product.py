"""Packed weights and the products over them: what rounding costs, parity, the same bits in any batch, bands, sentences."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels import packed_weights as packing, plans
from gpubound.kernels.decode_product import Norm
from gpubound.kernels.packed_weights import E2M1, KINDS, Packed, pack, pack_fp4, pack_gate_up, pack_stacked, unpack
from gpubound.kernels.plans.types import MatrixPlan
from gpubound.kernels.registry import load
from tests.messages import message

from .cases import TOLERANCE, assert_inside, banded, draw, pairwise, same
from .test_compiles import compile_apart
from .test_experts import some_ids

# Kernel and reference sum the same numbers in fp32, the kernel with 2^e beside each (packed.py): 256 beside int4's levels of
# spread 4.6 costs six bits of fp32's 24, int8's of spread 40 three.
PARITY = {"int8": 5e-6, "int4": 3e-5, "fp8": 2e-6}


def run(source: str, op: str, *arguments):
    return load(source, op)(*arguments)


def weight(device, kind: str, rows: int, columns: int, seed: int = 1) -> Packed:
    return pack(draw(device, torch.float32, rows, columns, seed=seed), kind)


@pytest.mark.parametrize("kind, error, bytes_a_weight", [("int8", 0.0075, 1.016), ("int4", 0.11, 0.516), ("fp8", 0.03, 1.0)])
def test_rounding_costs_what_its_bits_allow(device, kind, error, bytes_a_weight):
    """Of normal weights; each within half a step of its group."""
    exact = draw(device, torch.float32, 40, 1024)
    rounded = pack(exact, kind)
    difference = (unpack(rounded) - exact).abs()
    assert error / 2 < (difference.norm() / exact.norm()).item() < error
    assert rounded.nbytes / exact.numel() == pytest.approx(bytes_a_weight, abs=0.004)
    if kind == "int8":
        groups = exact.view(40, 8, 128).abs().amax(2, keepdim=True)
        assert (difference.view(40, 8, 128) <= groups / 127 * 0.51).all()


@pytest.mark.parametrize("kind", KINDS)
def test_packing_keeps_levels_columns_and_rows(device, kind):
    """Numbers that are levels of their group come back as they were; columns beyond a group's end are not made up."""
    generator = torch.Generator().manual_seed(0)
    for columns in (1, 127, 128, 300):
        if kind == "fp8":
            exact = torch.randn(6, columns, generator=generator).clamp(-400, 400).to(torch.float8_e4m3fn).float()
            exact[:, 0] = 448.0  # so that the scale is one
        else:
            zero = packing.ZERO[kind]
            exact = torch.randint(1 - zero, zero, (6, columns), generator=generator).float() * 0.25
            exact[:, ::128] = -packing.LEVELS[kind] * 0.25
        assert torch.equal(unpack(pack(exact.to(device), kind)).cpu(), exact)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_nan_stay(device, kind):
    values = draw(device, torch.float32, 3, 256)
    values[0] = 0
    values[1, 5] = float("nan")
    found = unpack(pack(values, kind))
    assert (found[0] == 0).all() and found[1].isnan().any() and found[2].isfinite().all()


def test_many_rows_are_rounded_a_part_at_a_time(device, monkeypatch):
    values = draw(device, torch.float32, 37, 200)
    whole = pack(values, "int4")
    monkeypatch.setattr(packing, "CHUNK", 1000)
    assert torch.equal(whole.words, pack(values, "int4").words)


# (rows of x, columns, rows of the weight): one group, groups cut short, a weight no program divides
SHAPES = [(1, 128, 32), (2, 200, 38), (3, 72, 16), (8, 256, 18)]


@pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch, columns, rows", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_agrees_with_the_reference(device, kind, batch, columns, rows, biased):
    x, norm = draw(device, torch.float32, batch, columns), Norm(draw(device, torch.bfloat16, columns, seed=2), 1e-5)
    bias = draw(device, torch.float16, rows, seed=3) if biased else None
    parts = -(-rows // 16)
    results = []
    for source in ("triton", "reference"):
        whole, out = banded((batch, rows), device)
        best, arg = torch.zeros(batch, parts, device=device), torch.zeros(batch, parts, device=device, dtype=torch.int32)
        run(source, "quantized_norm_product", x, norm, weight(device, kind, rows, columns), bias, out, best, arg)
        assert_inside(whole, out)
        results.append((out, best, arg))
    (out, best, arg), (want, want_best, want_arg) = results
    same("product", out, want, PARITY[kind])
    same("best", best, want_best, PARITY[kind])
    assert torch.equal(arg, want_arg)


@pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch, columns, rows", SHAPES[1:3])
def test_gate_and_up_agree_with_the_reference(device, kind, dtype, batch, columns, rows):
    x, weights, bias = (
        draw(device, torch.float32, *shape, seed=i) for i, shape in enumerate(((batch, columns), (columns,), (rows,)))
    )
    norm = Norm(weights, 1e-5)
    gate_up = pack(draw(device, torch.float32, rows, columns, seed=4) * columns**-0.5, kind)
    results = []
    for source in ("triton", "reference"):
        whole, out = banded((batch, rows // 2), device, dtype)
        run(source, "quantized_norm_gate_up", x, norm, gate_up, bias, out)
        assert_inside(whole, out)
        results.append(out)
    same("gated", *results, max(TOLERANCE[dtype], 2 * PARITY[kind]))


@pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch, columns, rows", SHAPES[:2])
def test_the_residual_product_agrees_with_the_reference(device, kind, dtype, batch, columns, rows):
    h, bias = draw(device, dtype, batch, columns), draw(device, dtype, rows, seed=2)
    results = []
    for source in ("triton", "reference"):
        whole, x = banded((batch, rows), device)
        x.copy_(draw(device, torch.float32, batch, rows, seed=3))
        run(source, "quantized_add_product", h, weight(device, kind, rows, columns), bias, x)
        assert_inside(whole, x)
        results.append(x)
    same("stream", *results, PARITY[kind])


@pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_unpacking_agrees_with_the_reference(device, kind, turns, dtype):
    """Exactly: a level times its scale is one product, rounded once."""
    results = []
    for source in ("triton", "reference"):
        whole, out = banded((18, 200), device, dtype)
        run(source, "dequantize", weight(device, kind, 18, 200), out, turns)
        assert_inside(whole, out)
        results.append(out)
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_several_tiles_and_those_that_do_not_divide_a_row(device, kind, monkeypatch):
    columns = 520  # five groups: 80 words of int4, 160 of the others
    for use, rows in (("qkv", 20), ("gate_up", 20), ("add", 20)):
        monkeypatch.setitem(plans.TRIED, ("packed_product", f"{kind} {use}", (rows, columns)), MatrixPlan(8, 32, 1))
    x, norm = draw(device, torch.float32, 2, columns), Norm(draw(device, torch.float32, columns, seed=2), 1e-5)
    results = []
    for source in ("triton", "reference"):
        out, added, gated = (torch.zeros(2, n, device=device) for n in (20, 20, 10))
        packed = weight(device, kind, 20, columns)
        run(source, "quantized_norm_product", x, norm, packed, None, out, None, None)
        run(source, "quantized_add_product", x, packed, None, added)
        run(source, "quantized_norm_gate_up", x * 0.1, norm, packed, None, gated)
        results.append(torch.cat([out, added, gated], 1))
    same("products", *results, 2 * PARITY[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gives_the_same_bits_in_any_batch(device, kind):
    """Alone, in a pair, in an odd batch and an even one; there and in the head."""
    columns = 512
    x, norm = draw(device, torch.float32, 4, columns), Norm(draw(device, torch.float32, columns, seed=2), 1e-5)
    packed, h = weight(device, kind, 16, columns), draw(device, torch.bfloat16, 4, columns, seed=5)

    def results(rows):
        count = len(rows)
        out, logits, added = (torch.zeros(count, 16, device=device) for _ in range(3))
        best, arg = torch.zeros(count, 1, device=device), torch.zeros(count, 1, device=device, dtype=torch.int32)
        gated = torch.zeros(count, 8, device=device)
        run("triton", "quantized_norm_product", x[rows], norm, packed, None, out, None, None)
        run("triton", "quantized_norm_product", x[rows], norm, packed, None, logits, best, arg)
        run("triton", "quantized_norm_gate_up", x[rows], norm, packed, None, gated)
        run("triton", "quantized_add_product", h[rows], packed, None, added)
        return out, logits, best, gated, added

    together = results([0, 1, 2, 3])
    for rows in ([2], [3, 1], [1, 2, 0]):
        for whole, part in zip(together, results(rows)):
            assert torch.equal(whole[rows], part)


def test_a_nan_reaches_the_partial_maximum(device):
    x, norm = draw(device, torch.float32, 1, 128), Norm(torch.ones(128, device=device), 1e-5)
    values = draw(device, torch.float32, 48, 128, seed=2)
    values[20, 3] = float("nan")
    best, arg = torch.zeros(1, 3, device=device), torch.zeros(1, 3, device=device, dtype=torch.int32)
    out = torch.zeros(1, 48, device=device)
    run("triton", "quantized_norm_product", x, norm, pack(values, "int4"), None, out, best, arg)
    assert best.isnan().tolist() == [[False, True, False]]


def test_weights_that_share_an_x_are_one(device):
    q, k, v = (draw(device, torch.float32, rows, 128, seed=rows) for rows in (8, 4, 2))
    assert torch.equal(unpack(pack_stacked([q, k, v], "int8")), unpack(pack(torch.cat([q, k, v]), "int8")))
    gate, up = draw(device, torch.float32, 4, 128), draw(device, torch.float32, 4, 128, seed=1)
    both = pack_gate_up(gate, up, "int8")
    apart = kernels.dequantize(both, torch.empty(8, 128, device=device), turns=2)
    assert torch.equal(apart, torch.cat([unpack(pack(gate, "int8")), unpack(pack(up, "int8"))]))


OTHERS = """
import torch
from gpubound.kernels.decode_product import Norm, draw_stream
from gpubound.kernels.registry import OPS, draw
from gpubound.kernels.quantized_product import draw_packed

def give(op, example):
    OPS[op] = OPS[op]._replace(example=example)

kind = {kind!r}
give("quantized_norm_product", lambda g: (
    *draw_stream(g, 256), draw_packed(g, 40, 256, kind), None, torch.zeros(2, 40), None, None))
give("quantized_norm_gate_up", lambda g: (
    draw(g, 3, 256).detach(), Norm(draw(g, 256), 1e-6), draw_packed(g, 40, 256, kind), None, torch.zeros(3, 20)))
give("quantized_add_product", lambda g: (
    draw(g, 1, 9000), draw_packed(g, 40, 9000, kind), None, torch.zeros(1, 40)))
give("dequantize", lambda g: (draw_packed(g, 40, 256, kind), torch.zeros(40, 256), 1))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels and run them")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_compiles(kind):
    ops = ("quantized_norm_product", "quantized_norm_gate_up", "quantized_add_product", "dequantize")
    outcomes = compile_apart(*ops, before=OTHERS.format(kind=kind))
    assert all(outcome.endswith("_kernel") for outcome in outcomes.values()), outcomes


def test_wrong_arguments_are_named(device):
    x, norm, packed = (
        draw(device, torch.float32, 2, 128),
        Norm(draw(device, torch.float32, 128), 1e-5),
        weight(device, "int4", 33, 128),
    )
    for call, sentence in (
        (lambda: pack(x, "int3"), message("kernels/quantized_product:wrong_arguments_are_named")),
        (lambda: pack(x[0], "int4"), message("kernels/quantized_product:wrong_arguments_are_named.2")),
        (
            lambda: kernels.quantized_norm_product(x.half(), norm, packed),
            message("kernels/quantized_product:wrong_arguments_are_named.3"),
        ),
        (
            lambda: kernels.quantized_norm_product(x, norm._replace(weight=norm.weight[:32]), packed),
            message("kernels/quantized_product:wrong_arguments_are_named.4"),
        ),
        (
            lambda: kernels.quantized_norm_product(x[:, :64].contiguous(), norm._replace(weight=norm.weight[:64]), packed),
            message("kernels/quantized_product:wrong_arguments_are_named.5"),
        ),
        (
            lambda: kernels.quantized_norm_product(x, norm, packed, best=x),
            message("kernels/quantized_product:wrong_arguments_are_named.6"),
        ),
        (
            lambda: kernels.quantized_norm_product(x, norm, packed, best=x[:, :4], arg=x[:, :4].int()),
            message("kernels/quantized_product:wrong_arguments_are_named.7"),
        ),
        (
            lambda: kernels.quantized_norm_gate_up(x, norm, packed),
            message("kernels/quantized_product:wrong_arguments_are_named.8"),
        ),
        (
            lambda: kernels.quantized_add_product(x[:, :64], packed, None, x),
            message("kernels/quantized_product:wrong_arguments_are_named.9"),
        ),
        (
            lambda: kernels.quantized_add_product(x, packed, None, x),
            message("kernels/quantized_product:wrong_arguments_are_named.10"),
        ),
        (
            lambda: kernels.dequantize(packed, torch.zeros(33, 128, device=device), turns=2),
            message("kernels/quantized_product:wrong_arguments_are_named.11"),
        ),
        (lambda: kernels.dequantize(packed, x), message("kernels/quantized_product:wrong_arguments_are_named.12")),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == sentence


@pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("offset, normed, cap, activation", [(1.0, True, 0.7, "gelu_tanh"), (0.0, False, 0.0, "gelu")])
def test_the_forms_of_other_families(device, kind, rows, offset, normed, cap, activation):
    """Of a gain of 1 + weight, no norm, capped outputs and gelu: what decode_product's kernels make of the same numbers."""
    x, norm = (
        draw(device, torch.float32, rows, 150),
        Norm(draw(device, torch.float16, 150, seed=1), 1e-5, offset) if normed else None,
    )
    head, both = (pack(draw(device, torch.float32, n, 150, seed=n) * 150**-0.5, kind) for n in (40, 48))
    gate, up = unpack(both).unflatten(0, (-1, 2)).unbind(1)
    want = kernels.norm_product(x, norm, unpack(head), cap=cap)
    gated = kernels.norm_gate_up(x, norm, gate.contiguous(), up.contiguous(), activation=activation)
    for source in ("triton", "reference"):
        out = torch.zeros(rows, 40, device=device)
        run(source, "quantized_norm_product", x, norm, head, None, out, None, None, 0, cap)
        same("product", out, want, PARITY[kind])
        out = torch.zeros(rows, 24, device=device)
        run(source, "quantized_norm_gate_up", x, norm, both, None, out, 0, activation)
        same("gated", out, gated, 2 * PARITY[kind])


LEVELS = torch.tensor([*E2M1, *(-x for x in E2M1)])
FP4_PARITY = 2e-6  # kernel and reference sum the same numbers in fp32
COLUMNS = [32, 224, 256]  # part of a group, groups cut short, whole ones


def drawn(rows: int, columns: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    return codes, torch.randint(120, 127, (rows, columns // 32), generator=generator, dtype=torch.uint8)


def weight_fp4(device, rows: int, columns: int, seed: int = 1) -> Packed:
    return pack_fp4(*(t.to(device) for t in drawn(rows, columns, seed)))


def run_fp4(source: str, op: str, *arguments, **named):
    return load(source, op)(*arguments, **named)


@pytest.mark.parametrize("columns", COLUMNS)
def test_packing_keeps_every_number(device, columns):
    codes, scales = drawn(6, columns)
    numbers = LEVELS[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    wanted = numbers * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    packed = pack_fp4(codes.to(device), scales.to(device).view(torch.float8_e8m0fnu))
    assert torch.equal(unpack(packed).cpu(), wanted)
    assert packed.nbytes == 6 * -(-columns // 128) * (64 + 4), "4.25 bits a number, in groups of 128"


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("source", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_unpacking_gives_every_code_of_every_scale_exactly(device, source, dtype):
    """Beside fp64: the smallest scale and the largest, and the one that is no number."""
    scales = torch.tensor([0, 1, 2, 103, 126, 127, 128, 140, 254, 255], dtype=torch.uint8)[:, None].expand(-1, 2)
    codes = torch.tensor([low | high << 4 for low, high in zip(range(16), reversed(range(16)))] * 2, dtype=torch.uint8)
    packed = pack_fp4(codes.expand(10, -1).contiguous().to(device), scales.contiguous().to(device))
    out = run_fp4(source, "dequantize", packed, torch.zeros(10, 64, device=device, dtype=dtype), 1)
    exact = LEVELS.double()[torch.stack([codes & 15, codes >> 4], -1).flatten().long()] * torch.exp2(
        scales[:, :1].double() - 127
    )
    exact[-1] = torch.nan
    assert torch.equal(out.cpu().nan_to_num(7.5), exact.float().to(dtype).nan_to_num(7.5))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_products_agree_with_the_reference(device, columns, batch):
    x, norm = draw(device, torch.float32, batch, columns), Norm(draw(device, torch.bfloat16, columns, seed=2), 1e-5)
    packed, rows, results = weight_fp4(device, 38, columns), 38, []
    for source in ("triton", "reference"):
        whole, out = banded((batch, rows), device)
        gated = torch.zeros(batch, rows // 2, device=device)
        run_fp4(source, "quantized_norm_product", x, norm, packed, None, out, None, None)
        run_fp4(source, "quantized_norm_gate_up", x, norm, packed, None, gated)
        added = run_fp4(source, "quantized_add_product", x, packed, None, torch.ones(batch, rows, device=device))
        assert_inside(whole, out)
        results.append((out, gated, added))
    for name, limit, *pair in zip(("product", "gated", "stream"), (FP4_PARITY, 2 * FP4_PARITY, FP4_PARITY), *results):
        same(name, *pair, limit)


def test_several_tiles_and_those_that_do_not_divide_a_row_fp4(device, monkeypatch):
    monkeypatch.setitem(plans.TRIED, ("packed_product", "fp4 qkv", (20, 544)), MatrixPlan(8, 32, 1))
    x, packed, results = draw(device, torch.float32, 2, 544), weight_fp4(device, 20, 544), []
    for source in ("triton", "reference"):
        results.append(
            run_fp4(source, "quantized_norm_product", x, None, packed, None, torch.zeros(2, 20, device=device), None, None)[0]
        )
    same("product", *results, FP4_PARITY)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [float("inf"), 0.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_agree_with_the_reference_and_a_row_has_its_bits_in_any_batch(device, dtype, limit):
    rows, slots, count, hidden, width = 3, 2, 3, 96, 32
    x, norm = draw(device, torch.float32, rows, hidden), Norm(draw(device, dtype, hidden, seed=2), 1e-5)
    gate_up, down = weight_fp4(device, count * 2 * width, hidden), weight_fp4(device, count * hidden, width, seed=4)
    ids, shares = some_ids(device, rows, slots, count), draw(device, torch.float32, rows, slots, seed=5).softmax(-1)

    def mlp(source: str, of: slice) -> tuple[torch.Tensor, torch.Tensor]:
        stream, (whole, gated) = x[of].clone(), banded((len(x[of]), slots, width), device, dtype)
        run_fp4(source, "quantized_routed_gate_up", stream, norm, gate_up, ids[of], gated, 0, limit)
        assert_inside(whole, gated)
        return gated.clone(), run_fp4(source, "quantized_add_routed", gated, down, ids[of], shares[of], stream)

    ours, wanted = mlp("triton", slice(None)), mlp("reference", slice(None))
    same("gated", ours[0], wanted[0], max(TOLERANCE[dtype], 2 * FP4_PARITY))
    same("stream", ours[1], wanted[1], max(TOLERANCE[dtype], 2 * FP4_PARITY))
    assert limit > 1 or (wanted[0].float().abs() >= 0.08).any(), "some reach the limit"
    for row in range(rows):
        assert torch.equal(mlp("triton", slice(row, row + 1))[1][0], ours[1][row])


OURS = """
from gpubound.kernels.registry import OPS

for op in ("dequantize", "quantized_routed_gate_up"):
    OPS[op] = OPS[op]._replace(example=lambda g, example=OPS[op].example: example(g, "fp4"))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels and run_fp4 them")
def test_they_compile():
    ops = "dequantize", "quantized_routed_gate_up"
    outcomes = compile_apart(*ops, before=OURS)
    assert all(outcome.endswith("_kernel") for outcome in outcomes.values()), outcomes


def test_wrong_codes_are_named(device):
    codes, scales = (t.to(device) for t in drawn(4, 64))
    with pytest.raises(ValueError) as error:
        pack_fp4(codes, scales[:, :1])
    assert str(error.value) == message("kernels/packed_fp4:wrong_codes_are_named")
    packed = pack_fp4(codes, scales)
    with pytest.raises(ValueError, check=message("kernels/packed_fp4:wrong_codes_are_named.2")):
        kernels.dequantize(packed._replace(scale=packed.scale.float()), torch.zeros(4, 64, device=device))
