"""Several products in a launch: both mirrors beside fp64, rows alone and together, sentences."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels.decode_product import Norm

from .cases import assert_inside, banded, draw
from .test_experts import SOURCES, run


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "offset"), [((16, 8, 24), 0.0), ((5,), None), ((16, 8, 8, 40, 3, 1, 2, 16), 1.0)])
def test_products_stand_side_by_side(source, dtype, rows, offset, device):
    x, weights = draw(device, torch.float32, 2, 40), [draw(device, dtype, n, 40, seed=n) for n in rows]
    norm = None if offset is None else Norm(draw(device, torch.float32, 40, seed=1), 1e-2, offset)
    whole, out = banded((2, sum(rows)), device)
    run(source, "norm_products", x, norm, weights, out)
    assert_inside(whole, out)
    h = x.double()
    if norm is not None:
        h = torch.nn.functional.rms_norm(h, (40,), norm.weight.double() + norm.offset, 1e-2)
    torch.testing.assert_close(out.double(), h @ torch.cat(weights).double().t(), rtol=0, atol=1e-4)


def test_a_row_has_the_same_bits_alone(device):
    x, weights = draw(device, torch.float32, 3, 40), [draw(device, torch.float32, n, 40, seed=n) for n in (16, 8)]
    together = run("triton", "norm_products", x, None, weights, torch.zeros(3, 24, device=device))
    alone = run("triton", "norm_products", x[1:2], None, weights, torch.zeros(1, 24, device=device))
    assert together[1:2].equal(alone)


def test_too_many_weights():
    with pytest.raises(ValueError) as error:
        kernels.norm_products(torch.ones(1, 8), None, [torch.ones(2, 8)] * 9)
    assert str(error.value) == "norm_products: got 9 weights, wanted 1 to 8; of more, call it again."
