"""Weights in fp4 as models are published: exact in their packing, and every product over them, of whole weights and experts."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels import plans
from gpubound.kernels.decode_product import Norm
from gpubound.kernels.packed_weights import E2M1, Packed, pack_fp4, unpack
from gpubound.kernels.plans.types import MatrixPlan
from gpubound.kernels.registry import load
from tests.messages import message

from .cases import TOLERANCE, assert_inside, banded, draw, same
from .test_compiles import compile_apart
from .test_experts import some_ids

LEVELS = torch.tensor([*E2M1, *(-x for x in E2M1)])
PARITY = 2e-6  # kernel and reference sum the same numbers in fp32
COLUMNS = [32, 224, 256]  # part of a group, groups cut short, whole ones


def drawn(rows: int, columns: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    return codes, torch.randint(120, 127, (rows, columns // 32), generator=generator, dtype=torch.uint8)


def weight(device, rows: int, columns: int, seed: int = 1) -> Packed:
    return pack_fp4(*(t.to(device) for t in drawn(rows, columns, seed)))


def run(source: str, op: str, *arguments, **named):
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
    out = run(source, "dequantize", packed, torch.zeros(10, 64, device=device, dtype=dtype), 1)
    exact = LEVELS.double()[torch.stack([codes & 15, codes >> 4], -1).flatten().long()] * torch.exp2(
        scales[:, :1].double() - 127
    )
    exact[-1] = torch.nan
    assert torch.equal(out.cpu().nan_to_num(7.5), exact.float().to(dtype).nan_to_num(7.5))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_products_agree_with_the_reference(device, columns, batch):
    x, norm = draw(device, torch.float32, batch, columns), Norm(draw(device, torch.bfloat16, columns, seed=2), 1e-5)
    packed, rows, results = weight(device, 38, columns), 38, []
    for source in ("triton", "reference"):
        whole, out = banded((batch, rows), device)
        gated = torch.zeros(batch, rows // 2, device=device)
        run(source, "quantized_norm_product", x, norm, packed, None, out, None, None)
        run(source, "quantized_norm_gate_up", x, norm, packed, None, gated)
        added = run(source, "quantized_add_product", x, packed, None, torch.ones(batch, rows, device=device))
        assert_inside(whole, out)
        results.append((out, gated, added))
    for name, limit, *pair in zip(("product", "gated", "stream"), (PARITY, 2 * PARITY, PARITY), *results):
        same(name, *pair, limit)


def test_several_tiles_and_those_that_do_not_divide_a_row(device, monkeypatch):
    monkeypatch.setitem(plans.TRIED, ("packed_product", "fp4 qkv", (20, 544)), MatrixPlan(8, 32, 1))
    x, packed, results = draw(device, torch.float32, 2, 544), weight(device, 20, 544), []
    for source in ("triton", "reference"):
        results.append(
            run(source, "quantized_norm_product", x, None, packed, None, torch.zeros(2, 20, device=device), None, None)[0]
        )
    same("product", *results, PARITY)


@pytest.mark.parametrize("limit", [float("inf"), 0.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_agree_with_the_reference_and_a_row_has_its_bits_in_any_batch(device, dtype, limit):
    rows, slots, count, hidden, width = 3, 2, 3, 96, 32
    x, norm = draw(device, torch.float32, rows, hidden), Norm(draw(device, dtype, hidden, seed=2), 1e-5)
    gate_up, down = weight(device, count * 2 * width, hidden), weight(device, count * hidden, width, seed=4)
    ids, shares = some_ids(device, rows, slots, count), draw(device, torch.float32, rows, slots, seed=5).softmax(-1)

    def mlp(source: str, of: slice) -> tuple[torch.Tensor, torch.Tensor]:
        stream, (whole, gated) = x[of].clone(), banded((len(x[of]), slots, width), device, dtype)
        run(source, "quantized_routed_gate_up", stream, norm, gate_up, ids[of], gated, 0, limit)
        assert_inside(whole, gated)
        return gated.clone(), run(source, "quantized_add_routed", gated, down, ids[of], shares[of], stream)

    ours, wanted = mlp("triton", slice(None)), mlp("reference", slice(None))
    same("gated", ours[0], wanted[0], max(TOLERANCE[dtype], 2 * PARITY))
    same("stream", ours[1], wanted[1], max(TOLERANCE[dtype], 2 * PARITY))
    assert limit > 1 or (wanted[0].float().abs() >= 0.08).any(), "some reach the limit"
    for row in range(rows):
        assert torch.equal(mlp("triton", slice(row, row + 1))[1][0], ours[1][row])


OURS = """
from gpubound.kernels.registry import OPS

for op in ("dequantize", "quantized_routed_gate_up"):
    OPS[op] = OPS[op]._replace(example=lambda g, example=OPS[op].example: example(g, "fp4"))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels and run them")
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
