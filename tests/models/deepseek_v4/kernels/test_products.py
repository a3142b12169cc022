"""Several products in a launch: both mirrors beside fp64, rows alone and together, sentences."""

import pytest
import torch

from gpubound.kernels.decode_product import Norm
from gpubound.kernels.registry import load
from gpubound.models.deepseek_v4 import kernels
from gpubound.models.deepseek_v4.kernels.products import Fp8Blocks, numbers, scales_shape
from tests.kernels.cases import SOURCES, assert_inside, banded, draw
from tests.kernels.test_peer_exchange import mails
from tests.messages import message


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "offset"), [((16, 8, 24), 0.0), ((5,), None), ((16, 8, 8, 40, 3, 1, 2, 16), 1.0)])
def test_products_stand_side_by_side(source, dtype, rows, offset, device):
    x, weights = draw(device, torch.float32, 2, 40), [draw(device, dtype, n, 40, seed=n) for n in rows]
    norm = None if offset is None else Norm(draw(device, torch.float32, 40, seed=1), 1e-2, offset)
    whole, out = banded((2, sum(rows)), device)
    load(source, "norm_products")(x, norm, weights, out)
    assert_inside(whole, out)
    h = x.double()
    if norm is not None:
        h = torch.nn.functional.rms_norm(h, (40,), norm.weight.double() + norm.offset, 1e-2)
    torch.testing.assert_close(out.double(), h @ torch.cat(weights).double().t(), rtol=0, atol=1e-4)


def test_a_row_has_the_same_bits_alone(device):
    x, weights = draw(device, torch.float32, 3, 40), [draw(device, torch.float32, n, 40, seed=n) for n in (16, 8)]
    together = load("triton", "norm_products")(x, None, weights, torch.zeros(3, 24, device=device))
    alone = load("triton", "norm_products")(x[1:2], None, weights, torch.zeros(1, 24, device=device))
    assert together[1:2].equal(alone)


def coded(device, rows, columns, block, seed):
    scale = draw(device, torch.float32, *scales_shape((rows, columns), block), seed=seed + 1).abs() + 0.1
    return Fp8Blocks(draw(device, torch.float32, rows, columns, seed=seed).to(torch.float8_e4m3fn), scale, block)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_product_that_devices_share(source, in_fp8, device):
    """Each has some columns of the weight; what comes of their terms has the same bits everywhere."""
    if in_fp8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("reads no e4m3")
    x, cuts = draw(device, torch.float32, 2, 48), (slice(0, 16), slice(16, 48))
    parts = [
        coded(device, 40, cut.stop - cut.start, (8, 16), 3)
        if in_fp8
        else draw(device, torch.bfloat16, 40, cut.stop - cut.start)
        for cut in cuts
    ]
    devices, want = mails(device, 2, 40), 0.0
    for mail, cut, part in zip(devices, cuts, parts):
        load(source, "send_products")(x[:, cut].contiguous(), part, mail)
        wide = numbers(part, torch.float64) if in_fp8 else part.double()
        want = want + x[:, cut].double() @ wide.t()
    found = [mail.summed(2) for mail in devices]
    assert torch.equal(*found)
    torch.testing.assert_close(found[0].double(), want, rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, check=message("kernels/norm_products:a_product_that_devices_s")):
        kernels.send_products(x[:, :16].contiguous(), parts[0], mails(device, 2, 48)[0])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("columns", [40, 300])
@pytest.mark.parametrize(
    ("in_fp8", "plain", "block"), [((16, 24), (8, 3), (8, 16)), ((128, 256, 64), (), (128, 128)), ((5,), (), (2, 4))]
)
def test_weights_in_fp8_stand_in_front(source, columns, in_fp8, plain, block, device):
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("reads no e4m3")
    x, norm = draw(device, torch.float32, 2, columns), Norm(draw(device, torch.float32, columns, seed=1), 1e-2)
    weights = [coded(device, rows, columns, block, seed=rows) for rows in in_fp8]
    weights += [draw(device, torch.bfloat16, rows, columns, seed=rows) for rows in plain]
    whole, out = banded((2, sum(in_fp8) + sum(plain)), device)
    load(source, "norm_products")(x, norm, weights, out)
    assert_inside(whole, out)
    wide = [w.double() if isinstance(w, torch.Tensor) else numbers(w, torch.float64) for w in weights]
    h = torch.nn.functional.rms_norm(x.double(), (columns,), norm.weight.double(), 1e-2)
    torch.testing.assert_close(out.double(), h @ torch.cat(wide).t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("in_fp8", [False, True])
def test_each_group_of_rows_reads_its_own(source, in_fp8, device):
    x, weight = draw(device, torch.float32, 2, 3, 40), draw(device, torch.float32, 24, 40, seed=1)
    given = coded(device, 24, 40, (4, 16), seed=1) if in_fp8 else weight
    out = load(source, "norm_products")(x, None, [given], torch.zeros(2, 24, device=device))
    wide = numbers(given, torch.float64) if in_fp8 else weight.double()
    want = torch.stack([x[:, g].double() @ wide[8 * g : 8 * g + 8].t() for g in range(3)], 1).flatten(1)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-4)


def test_what_does_not_go_together():
    x, weight, blocks = torch.ones(1, 8), torch.ones(2, 8), coded(torch.device("cpu"), 2, 8, (2, 4), 1)
    for given, named in (
        ([weight] * 9, r"got 9 weights, wanted 1 to 8, of which up to 4 in fp8 \(got 0\)"),
        ([blocks] * 5, r"got 5 weights, wanted 1 to 8, of which up to 4 in fp8 \(got 5\)"),
        ([blocks, blocks._replace(block=(1, 4), scale=torch.ones(2, 2))], r"blocks of \[\(2, 4\), \(1, 4\)\]"),
        ([weight, blocks], "weights in fp8 stand in front of the others"),
        ([blocks._replace(scale=torch.ones(1, 1))], "scale must be"),
    ):
        with pytest.raises(ValueError, match=f"^norm_products: .*{named}"):
            kernels.norm_products(x, None, given)
    with pytest.raises(ValueError, match="norm_products: x has 3 groups, which takes no norm and one weight"):
        kernels.norm_products(torch.ones(1, 3, 8), None, [weight])
