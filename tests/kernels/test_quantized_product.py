"""Packed weights and the products over them: what rounding costs, parity, the same bits in any batch, bands, sentences."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels import packed_weights as packing, plans
from gpubound.kernels.decode_product import Norm
from gpubound.kernels.packed_weights import E2M1, KINDS, TABLE, Packed, pack, pack_fp4, pack_gate_up, pack_stacked, unpack
from gpubound.kernels.plans.types import MatrixPlan
from gpubound.kernels.quantized_product import draw_packed
from gpubound.kernels.registry import load
from tests.messages import message, refusals

from .cases import DTYPES, SOURCES, agree, draw, pairwise, same

# The kernel rounds x times its gain to 16 bits of the largest of 16 or 32 columns (_packed.py), of normal numbers 2.1 times
# their spread, of products of two 4 times: errors of 4 / 32,512 / √12 = 3.6e-5 of the spread, of a single sum some times that.
# Levels from 0 cancel against their offsets, which costs eight bits of fp32's 24. Other kinds are multiplied in fp32.
PARITY = dict.fromkeys(TABLE, 1e-4) | {"fp8": 2e-6, "fp4": 2e-6, "nf4": 3e-5, "fp8_rows": 3e-5, "fp8_blocks": 3e-5}
ROUNDED = (*KINDS, "fp4")  # kinds that a decoding step also multiplies experts by


def weight(device, kind: str, rows: int, columns: int, seed: int = 1) -> Packed:
    """Normal numbers, packed; of a kind that `pack` does not make, any codes. Its columns may be fewer."""
    if kind in KINDS:
        return pack(draw(device, torch.float32, rows, columns, seed=seed), kind)
    packed = draw_packed(torch.Generator().manual_seed(seed), rows, columns, kind)
    extra = None if packed.extra is None else packed.extra.to(device)
    return packed._replace(words=packed.words.to(device), scale=packed.scale.to(device), extra=extra)


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
@pytest.mark.parametrize("kind", TABLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch, columns, rows", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_products_agree_with_the_reference(device, kind, dtype, batch, columns, rows, biased):
    packed, bias = weight(device, kind, rows, columns), draw(device, torch.float16, rows, seed=3) if biased else None
    columns = packed.columns
    x, norm = draw(device, torch.float32, batch, columns), Norm(draw(device, dtype, columns, seed=2), 1e-5)
    found = [torch.empty(batch, width, device=device) for width in (rows, -(-rows // 16))]
    found += [torch.empty(found[1].shape, device=device, dtype=torch.int32)]
    agree("quantized_norm_product", x, norm, packed, bias, *found, limit=PARITY[kind])
    gated, h = torch.empty(batch, rows // 2, device=device, dtype=dtype), draw(device, dtype, batch, columns)
    agree("quantized_norm_gate_up", x * 0.1, norm, packed, bias, gated, 0, "silu", biased, limit=2 * PARITY[kind])
    agree("quantized_add_product", h, packed, bias, torch.ones(batch, rows, device=device), limit=PARITY[kind])


@pairwise
@pytest.mark.parametrize("kind", TABLE)
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.float16, 5e-4)])
@pytest.mark.parametrize("batch, columns, rows", [(1, 128, 32), (5, 200, 38), (19, 1088, 16), (70, 256, 18), (33, 72, 34)])
@pytest.mark.parametrize("turns, add, sort", [(1, False, False), (2, False, False), (1, True, False), (1, True, True)])
def test_many_rows_are_multiplied_together(device, kind, dtype, limit, batch, columns, rows, turns, add, sort):
    """As unpacked weights are, and as in fp64. In 16 bits a weight may be rounded to either side."""
    packed = (sorted_weight if sort else weight)(device, kind, rows, columns)
    x, bias = draw(device, dtype, batch, packed.columns), None if sort else draw(device, dtype, rows, seed=3)
    before = draw(device, torch.float32, batch, rows, seed=4)
    out = agree("quantized_matmul", x, packed, bias, before.clone(), turns, add, limit=limit)[3]
    values = unpack(packed).double().unflatten(0, (-1, turns)).transpose(0, 1).flatten(0, 1)
    wanted = x.double() @ values.t() + (0 if bias is None else bias.double()) + (before.double() if add else 0)
    same("product", out.double(), wanted, limit)


@pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_unpacking_agrees_with_the_reference(device, kind, turns, dtype):
    """Exactly: a level times its scale is one product, rounded once."""
    agree("dequantize", weight(device, kind, 18, 200), torch.empty(18, 200, device=device, dtype=dtype), turns, limit=0)


def sorted_weight(device, kind: str, rows: int, columns: int) -> Packed:
    packed = weight(device, kind, rows, columns)
    return packed._replace(order=torch.randperm(packed.columns, generator=torch.Generator().manual_seed(2)).int().to(device))


@pairwise
@pytest.mark.parametrize("kind", ["int4", "uint4_32", "int8"])
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch, columns, rows", [(1, 256, 32), (3, 200, 18)])
def test_products_of_sorted_columns(device, kind, offset, dtype, batch, columns, rows):
    """Against each packed column moved to its own place in fp64, with a norm, without, and with a gain of 1 + weight."""
    packed = sorted_weight(device, kind, rows, columns)
    values = torch.empty(rows, columns, device=device, dtype=torch.float64)
    for column, here in enumerate(unpack(packed._replace(order=None)).double().unbind(1)):
        values[:, packed.order[column]] = here
    assert torch.equal(unpack(packed).double(), values)
    x, h = draw(device, torch.float32, batch, columns), draw(device, dtype, batch, columns)
    norm = None if offset is None else Norm(draw(device, dtype, columns, seed=2), 1e-5, offset)
    gain = 1.0 if norm is None else (norm.weight.double() + norm.offset) / (x.double().square().mean(1, True) + 1e-5).sqrt()
    out, added, unpacked = (torch.empty(count, rows, device=device) for count in (batch, batch, rows))
    out = agree("quantized_norm_product", x, norm, packed, None, out, None, None, limit=PARITY[kind])[4]
    same("product", out.double(), x.double() * gain @ values.t(), PARITY[kind])
    both = torch.empty(batch, rows // 2, device=device, dtype=dtype)
    agree("quantized_norm_gate_up", x * 0.1, norm, packed, None, both, limit=2 * PARITY[kind])
    added = agree("quantized_add_product", h, packed, None, added.zero_(), limit=PARITY[kind])[3]
    same("added", added.double(), h.double() @ values.t(), PARITY[kind])
    unpacked = agree("dequantize", packed, torch.empty(rows, columns, device=device), 1, limit=1e-7)[1]
    same("weight", unpacked.double(), values, 1e-7)


def test_inputs_of_sorted_columns_are_rounded_as_they_are_multiplied(device):
    packed, x = sorted_weight(device, "int4", 8, 256), draw(device, torch.float32, 2, 256)
    x[:, 7] = 1e4
    rounded = packing.round_inputs(x, "int4", packed.order)
    order = packed.order.long()
    assert torch.equal(rounded[:, order], packing.round_inputs(x[:, order].contiguous(), "int4"))
    wanted = rounded.double() @ unpack(packed).double().t()
    for got in products(device, x, packed):
        assert ((got - wanted).norm() / wanted.norm()).item() < 5e-6


@pytest.mark.parametrize("kind", ROUNDED)
def test_several_tiles_and_those_that_do_not_divide_a_row(device, kind, monkeypatch):
    columns = 544 if kind == "fp4" else 520  # five groups: 80 words of int4 and fp4, 160 of the others
    for use in ("qkv", "gate_up", "add"):
        monkeypatch.setitem(plans.TRIED, ("packed_product", f"{kind} {use}", (20, columns)), MatrixPlan(8, 32, 1))
    x, norm = draw(device, torch.float32, 2, columns), Norm(draw(device, torch.float32, columns, seed=2), 1e-5)
    packed, out = weight(device, kind, 20, columns), torch.empty(2, 20, device=device)
    agree("quantized_norm_product", x, norm, packed, None, out, None, None, limit=PARITY[kind])
    agree("quantized_add_product", x, packed, None, torch.zeros_like(out), limit=PARITY[kind])
    agree("quantized_norm_gate_up", x * 0.1, norm, packed, None, torch.empty(2, 10, device=device), limit=2 * PARITY[kind])


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
        load("triton", "quantized_norm_product")(x[rows], norm, packed, None, out, None, None)
        load("triton", "quantized_norm_product")(x[rows], norm, packed, None, logits, best, arg)
        load("triton", "quantized_norm_gate_up")(x[rows], norm, packed, None, gated)
        load("triton", "quantized_add_product")(h[rows], packed, None, added)
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
    load("triton", "quantized_norm_product")(x, norm, pack(values, "int4"), None, out, best, arg)
    assert best.isnan().tolist() == [[False, True, False]]


OF_LEVELS = [kind for kind in TABLE if TABLE[kind].values == "level"]


def products(device, x, packed):
    """x times a packed weight, by the products with a norm, which divides by nothing here, and without."""
    norm = Norm(torch.ones(x.shape[1], device=device), 0.0)
    out, added = (torch.zeros(len(x), packed.rows, device=device) for _ in range(2))
    load("triton", "quantized_norm_product")(x, norm, packed, None, out, None, None)
    load("triton", "quantized_add_product")(x, packed, None, added)
    return out * x.double().square().mean(1, keepdim=True).sqrt(), added


@pytest.mark.parametrize("kind", OF_LEVELS)
def test_an_outlier_costs_the_columns_of_its_thread_alone(device, kind):
    """Rounded to 16 bits of an x of 1e4, no normal one would keep three digits."""
    x, exact = draw(device, torch.float32, 3, 512), draw(device, torch.float32, 8, 512, seed=1)
    x[0, 5], x[1], x[2] = 1e4, x[1] * 1e-12, 1e12 * x[2]
    packed = weight(device, kind, 8, 512)
    if kind in KINDS:
        exact[:, :128] = 0.0  # the outlier's own columns
        packed = pack(exact, kind)
    wanted = x.double() @ unpack(packed).double().t()
    for got in products(device, x, packed):
        assert ((got - wanted).norm(dim=1) <= 1e-4 * wanted.norm(dim=1)).all()


@pytest.mark.parametrize("kind", OF_LEVELS)
def test_the_rounding_of_inputs_is_what_kernels_and_definition_differ_by(device, kind):
    """2e-5 of products of two normal numbers. Beyond it a GPU's quotients of two ulp choose another integer for one x in 1,000,
    which is a tenth of that, and fp32's sums are 1e-7."""
    packed = weight(device, kind, 32, 328)
    x = draw(device, torch.float32, 2, 328) * draw(device, torch.float32, 2, 328, seed=4)
    exact, rounded = (t.double() @ unpack(packed).double().t() for t in (x, packing.round_inputs(x, kind)))
    for got in products(device, x, packed):
        near, far = (((got - wanted).norm() / wanted.norm()).item() for wanted in (rounded, exact))
        assert near < 5e-6 < 1e-5 < far < 4e-5


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("kind", OF_LEVELS)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_an_x_that_is_not_finite_reaches_every_sum(device, kind, broken):
    x = draw(device, torch.float32, 2, 256)
    x[1, 77] = broken
    packed = weight(device, kind, 8, 256)
    for got in products(device, x, packed):
        assert got[0].isfinite().all() and not got[1].isfinite().any()


def test_weights_that_share_an_x_are_one(device):
    q, k, v = (draw(device, torch.float32, rows, 128, seed=rows) for rows in (8, 4, 2))
    assert torch.equal(unpack(pack_stacked([q, k, v], "int8")), unpack(pack(torch.cat([q, k, v]), "int8")))
    gate, up = draw(device, torch.float32, 4, 128), draw(device, torch.float32, 4, 128, seed=1)
    both = pack_gate_up(gate, up, "int8")
    apart = kernels.dequantize(both, torch.empty(8, 128, device=device), turns=2)
    assert torch.equal(apart, torch.cat([unpack(pack(gate, "int8")), unpack(pack(up, "int8"))]))


def test_wrong_arguments_are_named(device):
    x, norm, packed = (
        draw(device, torch.float32, 2, 128),
        Norm(draw(device, torch.float32, 128), 1e-5),
        weight(device, "int4", 33, 128),
    )
    refusals(
        "kernels/quantized_product:wrong_arguments_are_named",
        lambda: pack(x, "int3"),
        lambda: pack(x[0], "int4"),
        lambda: kernels.norm_product(x.half(), norm, packed),
        lambda: kernels.norm_product(x, norm._replace(weight=norm.weight[:32]), packed),
        lambda: kernels.norm_product(x[:, :64].contiguous(), norm._replace(weight=norm.weight[:64]), packed),
        lambda: kernels.norm_product(x, norm, packed, best=x),
        lambda: kernels.norm_product(x, norm, packed, best=x[:, :4], arg=x[:, :4].int()),
        lambda: kernels.quantized_norm_gate_up(x, norm, packed),
        lambda: kernels.add_product(x[:, :64], packed, None, x),
        lambda: kernels.add_product(x, packed, None, x),
        lambda: kernels.dequantize(packed, torch.zeros(33, 128, device=device), turns=2),
        lambda: kernels.dequantize(packed, x),
        lambda: kernels.quantized_matmul(x, packed, add=True),
        lambda: kernels.quantized_matmul(x.t(), packed),
    )


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
    empty = torch.empty(rows, 40, device=device)
    out = agree("quantized_norm_product", x, norm, head, None, empty, None, None, 0, cap, limit=PARITY[kind])[4]
    same("product", out, want, PARITY[kind])
    empty = torch.empty(rows, 24, device=device)
    out = agree("quantized_norm_gate_up", x, norm, both, None, empty, 0, activation, limit=2 * PARITY[kind])[4]
    same("gated", out, gated, 2 * PARITY[kind])


LEVELS = torch.tensor([*E2M1, *(-x for x in E2M1)])
COLUMNS = [32, 224, 256]  # part of a group, groups cut short, whole ones


def drawn(rows: int, columns: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    return codes, torch.randint(120, 127, (rows, columns // 32), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("columns", COLUMNS)
def test_packing_keeps_every_number(device, columns):
    codes, scales = drawn(6, columns)
    numbers = LEVELS[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    wanted = numbers * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    packed = pack_fp4(codes.to(device), scales.to(device).view(torch.float8_e8m0fnu))
    assert torch.equal(unpack(packed).cpu(), wanted)
    assert packed.nbytes == 6 * -(-columns // 128) * (64 + 4), "4.25 bits a number, in groups of 128"


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_unpacking_gives_every_code_of_every_scale_exactly(device, source, dtype):
    """Beside fp64: the smallest scale and the largest, and the one that is no number."""
    scales = torch.tensor([0, 1, 2, 103, 126, 127, 128, 140, 254, 255], dtype=torch.uint8)[:, None].expand(-1, 2)
    codes = torch.tensor([low | high << 4 for low, high in zip(range(16), reversed(range(16)))] * 2, dtype=torch.uint8)
    packed = pack_fp4(codes.expand(10, -1).contiguous().to(device), scales.contiguous().to(device))
    out = load(source, "dequantize")(packed, torch.zeros(10, 64, device=device, dtype=dtype), 1)
    exact = LEVELS.double()[torch.stack([codes & 15, codes >> 4], -1).flatten().long()] * torch.exp2(
        scales[:, :1].double() - 127
    )
    exact[-1] = torch.nan
    assert torch.equal(out.cpu().nan_to_num(7.5), exact.float().to(dtype).nan_to_num(7.5))


def test_wrong_codes_are_named(device):
    codes, scales = (t.to(device) for t in drawn(4, 64))
    refusals("kernels/packed_fp4:wrong_codes_are_named", lambda: pack_fp4(codes, scales[:, :1]))
    packed = pack_fp4(codes, scales)
    with pytest.raises(ValueError, check=message("kernels/packed_fp4:wrong_codes_are_named.2")):
        kernels.dequantize(packed._replace(scale=packed.scale.float()), torch.zeros(4, 64, device=device))
