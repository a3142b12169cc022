"""The frozen product with a low-rank adapter in it: each of its forms, and its plans."""

import pytest
import torch

from gpubound.kernels import plans
from gpubound.kernels.lora import OwnRanks
from gpubound.kernels.plans.types import Job, ProductPlan
from gpubound.kernels.triton import lora as fast

from .cases import TOLERANCE, draw, pairwise, same
from .lora_cases import BF16, FP32, arguments, dropout, reference
from .test_plans import CHIPS, SHARED


@pairwise
@pytest.mark.parametrize("described", [True, False], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rank", [1, 16, 24, 136])
def test_forms_of_the_product(rank, dtype, described, device):
    """As it stands and transposed, with and without bias; 40 rows and 72 or 48 columns end within a tile."""
    if described and dtype == FP32 and device.type == "cuda":
        pytest.skip("fp32 takes no form of the kernel on a GPU")
    x, weight, bias, a, b = arguments((40, 48, 72, rank), dtype, device)
    h, g = draw(device, dtype, 40, rank, seed=7), draw(device, dtype, 40, 72, seed=8)
    got = fast._product(x, weight, bias, h, b, described)
    same("y", got, reference.lora_product(x, weight, bias, h, b), TOLERANCE[dtype])
    got = fast._product(g, weight.t(), None, h, a.t(), described)
    same("dx", got, reference.lora_product(g, weight.t(), None, h, a.t()), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("rank", [4, 8, 12, 24])
def test_blocks_of_h_that_begin_between_16_bytes(rank, dtype, device):
    """An H200 stopped with "an illegal instruction" where its copy engine was to take h from the middle of 16 bytes: gate and
    up of rank 4 in bf16, whose b in fp32 it took, too."""
    if dtype == FP32 and device.type == "cuda":
        pytest.skip("fp32 takes no form of the kernel on a GPU")
    blocks = [128, 128]
    x, weight, bias, _, b = arguments((40, 64, 256, rank), dtype, device)
    h = draw(device, dtype, 40, 2 * rank, seed=7)
    for kept in (b, b.float()):
        got = fast._product(x, weight, bias, h, kept, True, blocks)
        same("y", got, reference.lora_product(x, weight, bias, h, kept, None, blocks), TOLERANCE[dtype])


@pytest.mark.parametrize("described", [True, False], ids=["descriptors", "pointers"])
def test_a_product_of_many_tiles(described, device, monkeypatch):
    """More tiles than programs, nine bands of them, and a tile that is stored in two parts."""
    if device.type == "cuda":
        pytest.skip("plans for the GPU are tested with their own sizes")
    monkeypatch.setattr(fast, "_fp32_precision", lambda: "ieee")
    for rows, outputs, plan in ((150, 40, ProductPlan(16, 16, 16, 4, 3)), (20, 72, ProductPlan(16, 32, 32, 4, 3, 2))):
        x, weight, bias, _, b = arguments((rows, 48, outputs, 8), FP32, device)
        h = draw(device, FP32, rows, 8, seed=7)
        with plans.trying(plans.job_of("lora", "described" if described else "pointers", (256, outputs, 16), x), plan):
            got = fast._product(x, weight, bias, h, b, described)
        same("y", got, reference.lora_product(x, weight, bias, h, b), TOLERANCE[FP32])


@pytest.mark.parametrize("described", [True, False], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_a_tile_takes_the_ranks_of_its_rows_adapter_alone(ids, described, device):
    """Of weights multiplied as one, forward and back. Beside them h holds what would show; nobody has the adapters -1 and 9."""
    dtype, tokens, ranks, count = FP32 if device.type == "cpu" else BF16, 64, 16, 2
    ids = torch.tensor([[0, 1, -1, 1, 9], [7] * 5], device=device, dtype=ids).t()[:, 0]  # not side by side in memory
    rows, blocks = OwnRanks(ids, ranks, count), [64, 16, 16]
    x, weight, bias, a, _ = arguments((5 * tokens, 48, 96, 3 * ranks * count), dtype, device)
    b, g = draw(device, dtype, 96, ranks * count, seed=5), draw(device, dtype, 5 * tokens, 96, seed=8)
    h = draw(device, dtype, 5 * tokens, 3 * ranks * count, seed=7)
    asked = ids.repeat_interleave(tokens)[:, None]
    h = torch.where((asked >= 0) & (asked < count), h, 0.0)
    kept = torch.where(asked == torch.arange(3 * ranks * count, device=device) // ranks % count, h, 0.0)
    got = fast._product(x, weight, bias, h, b, described, blocks, own=fast._fit(rows, 5 * tokens))
    same("y", got, reference.lora_product(x, weight, bias, kept, b, None, blocks), TOLERANCE[dtype])
    got = fast._product(g, weight.t(), None, h, a.t(), described, own=fast._fit(rows, 5 * tokens))
    same("dx", got, reference.lora_product(g, weight.t(), None, kept, a.t()), TOLERANCE[dtype])
    assert fast._fit(rows, 5 * 40) is None  # a tile would span two rows of the batch
    assert fast._fit(rows._replace(ranks=24), 5 * tokens) is None


def test_the_form_follows_the_tensors(device, monkeypatch):
    x, weight = draw(device, BF16, 8, 64), draw(device, BF16, 24, 64)
    monkeypatch.setattr(fast, "job_of", lambda *_: Job("lora", "", (), 2, CHIPS[90]))
    transposed = weight.t().contiguous().t()
    assert [fast._way(x, w, 64, None) for w in (weight, transposed, transposed[:8])] == ["described"] * 3
    assert (
        fast._way(x[:, 1:], weight[:, 1:], 8, None)
        == fast._way(x, weight[:9], 8, None)
        == fast._way(x, weight, 65, None)
        == "pointers"
    )
    assert fast._way(x, weight, 8, dropout(device)) is None  # cuBLAS, then `up`, which drops
    monkeypatch.setattr(fast, "job_of", lambda *_: Job("lora", "", (), 2, CHIPS[80]))
    assert fast._way(x, weight, 8, None) == "pointers"


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(
    "way, columns", [("down", 4096), ("up", 4096), ("gradients", 8192), ("described", 4096), ("pointers", 4096)]
)
def test_every_plan_fits_every_gpu(way, columns, capability):
    for rank in (16, 32, 64, 128):
        for bytes_ in (2, 4):
            job = Job("lora", way, (8192, columns, rank), bytes_, CHIPS[capability])
            assert plans.fits(job, plans.plan_for(job)), job
