"""Low-rank adapters: both mirrors agree for any rank, layout and dropout mask; gradients, accumulators, and the forms."""

import pytest
import torch
from torch import Tensor

from gpubound import kernels
from gpubound.kernels import plans
from gpubound.kernels.adapters import adapter_gradients
from gpubound.kernels.lora import Drop, drawn, kept
from gpubound.kernels.plans.kinds import Job, ProductPlan
from gpubound.kernels.record import made_record
from gpubound.kernels.rows import Owners
from gpubound.kernels.triton import lora as fast

from .cases import TOLERANCE, assert_inside, banded, definitions, draw, parity, same
from .test_plans import CHIPS, SHARED

reference = definitions("lora")

FP32, BF16 = torch.float32, torch.bfloat16
# Between the mirrors of a whole layer: h and gh, and fp32 adapters, are rounded to 16 bits on the way.
ROUNDED = {dtype: 3 * tolerance for dtype, tolerance in TOLERANCE.items()}
# (rows, inputs, outputs, ranks): one of each; N < O; N > O; N = O; an odd rank; one over a power of two; more than a tile holds
SHAPES = [(1, 1, 1, 1), (20, 48, 70, 16), (70, 33, 20, 3), (40, 40, 40, 1), (17, 64, 24, 13), (9, 40, 16, 130)]


def dropout(device, p: float = 0.4, seed: int = 11, site: int = 2) -> Drop:
    return Drop(p, torch.tensor([seed], device=device), site)


def arguments(shape, dtype, device, adapter=None) -> tuple[Tensor, ...]:
    """(x, weight, bias, a, b)"""
    rows, inputs, outputs, rank = shape
    sizes = ((rows, inputs), (outputs, inputs), (outputs,), (rank, inputs), (outputs, rank))
    drawn = [draw(device, dtype if i < 3 else adapter or dtype, *size, seed=i) for i, size in enumerate(sizes)]
    return drawn[0], drawn[1] / inputs**0.5, drawn[2], drawn[3] / inputs**0.5, drawn[4] / rank**0.5


# The mask


@pytest.mark.parametrize("seed, site, p", [(0, 0, 0.1), (-(2**63) + 5, 7, 0.5), (2**40 + 1, 2**31 - 1, 0.93)])
def test_kernels_and_definition_drop_the_same_elements(seed, site, p, device):
    rows, columns = 37, 50
    drop = dropout(device, p, seed, site)
    want = kept(drop, rows, columns)
    ones = torch.ones(rows, columns, device=device)
    got = fast.lora_down(ones, torch.eye(columns, device=device), drop=drop)
    assert torch.equal(got != 0, want)
    got = fast.lora_up(torch.zeros_like(ones), ones[:, :1], ones[:1].t()[:, :1], drop)
    assert torch.equal(got != 0, want)
    da = torch.empty_like(ones)
    fast.lora_gradients(ones, torch.eye(rows, device=device), ones, torch.eye(rows, device=device), da, None, drop)
    assert torch.equal(da != 0, want)


def test_the_mask_is_fair():
    """Of a million elements, in whole, by row and by column; between neighbours, seeds and sites as if by chance."""
    p, size = 0.25, 1000
    masks = [kept(Drop(p, torch.tensor([seed]), site), size, size).double() for seed, site in ((1, 0), (2, 0), (1, 1))]
    error = (p * (1 - p)) ** 0.5
    assert abs(masks[0].mean() - (1 - p)) < 5 * error / size
    for along in (0, 1):
        assert 0.9 < masks[0].mean(along).std() * size**0.5 / error < 1.1
    alike = p**2 + (1 - p) ** 2
    for other in (masks[1], masks[2], masks[0].roll(1, 0), masks[0].roll(1, 1)):
        assert abs((masks[0] == other).double().mean() - alike) < 3e-3


def test_a_seed_is_drawn_for_each_call(device):
    torch.manual_seed(0)
    first, second = drawn(0.5, device), drawn(0.5, device)
    assert drawn(0, device) is None
    assert first.seed.device == torch.zeros(1, device=device).device and not torch.equal(first.seed, second.seed)
    x, weight, _, a, b = arguments((6, 40, 8, 4), FP32, device)
    torch.manual_seed(1)
    one, two = (kernels.lora_linear(x, weight, None, a, b, 1.0, 0.5) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(one, kernels.lora_linear(x, weight, None, a, b, 1.0, 0.5)) and not torch.equal(one, two)


# Each op


@pytest.mark.parametrize("dropping", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_down_and_up(shape, dtype, dropping, device):
    x, _, _, a, b = arguments(shape, dtype, device, FP32)
    a, b = a.to(dtype).float(), b.to(dtype).float()  # both mirrors then multiply the same numbers
    drop = dropout(device) if dropping else None
    want = reference.lora_down(x, a, 1.7, drop)
    same("h", fast.lora_down(x, a, 1.7, drop), want, TOLERANCE[dtype])
    y = draw(device, dtype, x.shape[0], b.shape[0], seed=9)
    same("y", fast.lora_up(y.clone(), want, b, drop), reference.lora_up(y.clone(), want, b, drop), TOLERANCE[dtype])


def routed(device, ids=(1, -1, 0, 9, 1), ranks=(3, 0, 5), dtype=torch.int32) -> Owners:
    """Adapters of these ranks, of which nobody has the second; row 3 asks for one that is not there."""
    owner = [adapter for adapter, rank in enumerate(ranks) for _ in range(rank)]
    scales = draw(device, FP32, len(owner), seed=8)
    return Owners(torch.tensor(ids, device=device, dtype=dtype), torch.tensor(owner, device=device, dtype=torch.int32), scales)


@pytest.mark.parametrize("dropping", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens, ranks", [(1, (3, 0, 5)), (7, (3, 1)), (4, (100, 30)), (40, (8, 8))], ids=str)
def test_rows_have_adapters_of_their_own(tokens, ranks, dtype, dropping, device):
    rows = routed(device, ranks=ranks, dtype=torch.int64 if tokens == 7 else torch.int32)
    x, _, _, a, _ = arguments((5 * tokens, 33, 8, sum(ranks)), dtype, device)
    drop = dropout(device) if dropping else None
    want = reference.lora_down(x, a, 1.7, drop, None, rows)
    same("h", fast.lora_down(x, a, 1.7, drop, None, rows), want, TOLERANCE[dtype])


def test_rows_one_adapter_at_a_time(device):
    """Beside one call for each adapter and its rows alone, with its scale; ids may have gaps in memory."""
    ranks, ids = (3, 2, 5), torch.tensor([[2, 0, -1, 1, 9, 2]] * 2, device=device).t()[:, 0]
    rows = routed(device, ranks=ranks)
    rows = Owners(ids, rows.owner, torch.tensor([0.5, 2.0, 1.5], device=device)[rows.owner.long()])
    x, _, _, a, _ = arguments((24, 20, 8, 10), FP32, device)
    want = torch.zeros(6, 4, 10, device=device)
    for adapter, (own, scale, start) in enumerate(zip(a.split(ranks), (0.5, 2.0, 1.5), (0, 3, 5))):
        for row in (ids == adapter).nonzero()[:, 0].tolist():
            want[row, :, start : start + ranks[adapter]] = 3 * scale * x.view(6, 4, 20)[row] @ own.t()
    same("h", kernels.lora_down(x, a, 3.0, None, None, rows), want.view(24, 10), 1e-5)


def test_a_row_sees_nothing_of_the_others(device):
    """What is not a number in one row's x or in another adapter's a stays there."""
    rows = routed(device, ids=(0, 1), ranks=(2, 2))
    x, _, _, a, _ = arguments((6, 20, 8, 4), FP32, device)
    want = kernels.lora_down(x, a, 1.0, None, None, rows)
    x[3:], a[2:] = float("nan"), float("nan")
    assert torch.equal(kernels.lora_down(x, a, 1.0, None, None, rows)[:3], want[:3])
    assert kernels.lora_down(x[:0], a, 1.0, None, None, Owners(rows.ids[:0], *rows[1:])).shape == (0, 4)


@pytest.mark.parametrize("begins", [(True, True), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape, dtype, begins, device):
    rows, inputs, outputs, rank = shape
    sizes = ((rows, inputs), (rows, rank), (rows, outputs), (rows, rank))
    given = [draw(device, dtype, *size, seed=i) for i, size in enumerate(sizes)]
    for drop in (None, dropout(device)):
        outs = [[draw(device, FP32, *size, seed=5) for size in ((rank, inputs), (outputs, rank))] for _ in range(2)]
        fast.lora_gradients(*given, *outs[0], drop, begins)
        reference.lora_gradients(*given, *outs[1], drop, begins)
        for name, got, want in zip(("da", "db"), *outs):
            same(name, got, want, TOLERANCE[FP32] if dtype == FP32 else 1e-4)  # 16-bit factors, fp32 sums


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("splits", [2, 4, 8])
def test_programs_that_share_a_sum(splits, begins, device):
    """37 rows are not so many times sixteen: some of the programs have none. What they count with is zero again."""
    rows, rank = 37, 5
    given = [draw(device, FP32, rows, n, seed=n) for n in (50, rank, 70, rank)]
    arrivals = torch.zeros(64, dtype=torch.int32, device=device)
    job = plans.job_of("lora", "gradients", (256, 120, 16), given[0])
    outs = [[draw(device, FP32, *size, seed=5) for size in ((rank, 50), (70, rank))] for _ in range(3)]
    with plans.trying(job, ProductPlan(16, 16, 16, 4, 1, 1, splits)):
        for out in outs[:2]:
            fast.lora_gradients(*given, *out, begins=(begins, begins), arrivals=arrivals)
            assert not arrivals.any()
    reference.lora_gradients(*given, *outs[2], begins=(begins, begins))
    for name, got, again, want in zip(("da", "db"), *outs):
        same(name, got, want, TOLERANCE[FP32])
        assert torch.equal(got, again)


BLOCKED = [(64, 64), (128, 32, 32), (32, 16, 16), (16, 64)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rank", [3, 16])
@pytest.mark.parametrize("blocks", BLOCKED, ids=str)
def test_blocks_are_a_block_diagonal_b(blocks, rank, dtype, device):
    """Of the definitions and of the kernels, beside dense products with torch.block_diag."""
    rows, inputs, outputs, ranks = 40, 48, sum(blocks), rank * len(blocks)
    x, weight, bias, *_ = arguments((rows, inputs, outputs, ranks), dtype, device)
    each = [draw(device, dtype, size, rank, seed=i) for i, size in enumerate(blocks)]
    b, whole = torch.cat(each), torch.block_diag(*each)
    g, h = draw(device, dtype, rows, outputs, seed=8), draw(device, dtype, rows, ranks, seed=9)
    wide = [t.double() for t in (x, weight, bias, g, h, whole)]
    product = wide[0] @ wide[1].t() + wide[2] + wide[4] @ wide[5].t()
    db = wide[3].t() @ wide[4]
    db = torch.cat([part.split(rank, 1)[i] for i, part in enumerate(db.split(list(blocks)))])
    for ops in (reference, fast):
        same("h", ops.lora_down(g, b.t(), 1.7, blocks=blocks), (1.7 * wide[3] @ wide[5]).to(dtype), TOLERANCE[dtype])
        same("up", ops.lora_up(g.clone(), h, b, blocks=blocks), (wide[3] + wide[4] @ wide[5].t()).to(dtype), TOLERANCE[dtype])
        same("y", ops.lora_product(x, weight, bias, h, b, blocks=blocks), product.to(dtype), TOLERANCE[dtype])
        outs = torch.empty(ranks, inputs, device=device), torch.empty(outputs, rank, device=device)
        ops.lora_gradients(x, h, g, h, *outs, blocks=blocks)
        tolerance = TOLERANCE[FP32] if dtype == FP32 else 1e-4
        same("da", outs[0], (wide[4].t() @ wide[0]).float(), tolerance)
        same("db", outs[1], db.float(), tolerance)
    if dtype != FP32 or device.type != "cuda":
        for described in (True, False):
            got = fast._product(x, weight, bias, h, b, described, blocks)
            same("product", got, product.to(dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("blocks", [(), (16, 16, 16, 16), (32, 16), (24, 40), (64, 0)], ids=str)
def test_blocks_that_no_op_takes(blocks, device):
    y, h, b = (torch.zeros(*size, device=device) for size in ((4, 64), (4, 8), (64, 4)))
    with pytest.raises(ValueError, match="blocks must be one to 3 multiples of 16 that add up to 64"):
        kernels.lora_up(y, h, b, blocks=blocks)


@pytest.mark.parametrize("alone", [0, 1])
def test_one_gradient_alone(alone, device):
    x, gh, g, h = (draw(device, FP32, 9, n, seed=n) for n in (20, 3, 30, 4))
    outs = [torch.empty(4, 20, device=device), torch.empty(30, 4, device=device)]
    outs[1 - alone] = None
    gh = draw(device, FP32, 9, 4, seed=3)
    got = fast.lora_gradients(x, gh, g, h, *outs)
    want = [gh.t() @ x, g.t() @ h][alone]
    assert got[1 - alone] is None
    same("gradient", got[alone], want, TOLERANCE[FP32])


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


def test_sums_are_shared_where_columns_are_few():
    """Fewer tiles than an H200's 132 multiprocessors."""
    for columns, splits in ((1536, 4), (4096, 4), (8192, 1)):
        plan = plans.plan_for(Job("lora", "gradients", (8192, columns, 16), 2, CHIPS[90]))
        assert (plan.rows, plan.splits) == (64, splits)


def test_stores_stay_inside(device):
    rows, inputs, outputs, rank = 37, 50, 21, 5
    x, _, _, a, b = arguments((rows, inputs, outputs, rank), FP32, device)
    h, g = draw(device, FP32, rows, rank), draw(device, FP32, rows, outputs)
    bands = [banded(size, device) for size in ((rows, rank), (rows, outputs), (rank, inputs), (outputs, rank))]
    out, y, da, db = (inside for _, inside in bands)
    fast.lora_down(x, a, out=out)
    fast.lora_up(y.fill_(1.0), h, b)
    fast.lora_gradients(x, h, g, h, da, db)
    for whole, inside in bands:
        assert_inside(whole, inside)


def test_parts_of_wider_tensors(device):
    """As several adapters of one input have them: columns of y, of h and of gh, and gradients of rows of a stack."""
    x, y, h = draw(device, FP32, 9, 40), draw(device, FP32, 9, 60), torch.zeros(9, 12, device=device)
    a, b = draw(device, FP32, 4, 40, seed=3), draw(device, FP32, 20, 4, seed=4)
    part = kernels.lora_down(x, a, 0.5, None, h[:, 4:8])
    same("h", part, 0.5 * x @ a.t(), TOLERANCE[FP32])
    assert not h[:, :4].any() and not h[:, 8:].any()
    want = y.clone()
    want[:, 20:40] += part @ b.t()
    kernels.lora_up(y[:, 20:40], part, b)
    same("y", y, want, TOLERANCE[FP32])
    stack = torch.zeros(12, 40, device=device)
    kernels.lora_gradients(x, part, y[:, 20:40], part, stack[4:8], None)
    same("da", stack[4:8], part.t() @ x, TOLERANCE[FP32])


# The whole layer


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_matches(shape, dtype, device):
    parity(fast.lora_linear, reference.lora_linear, (*arguments(shape, dtype, device), 1.7, None), ROUNDED[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_layer_with_dropout_matches(shape, dtype, device):
    parity(fast.lora_linear, reference.lora_linear, (*arguments(shape, dtype, device), 0.3, dropout(device)), ROUNDED[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_fp32_adapters_under_16_bits(dtype, device):
    given = arguments((20, 48, 24, 4), dtype, device, FP32)
    parity(fast.lora_linear, reference.lora_linear, (*given, 2.0, None), ROUNDED[dtype])


def layouts(x: Tensor) -> dict[str, Tensor]:
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], device=x.device, dtype=x.dtype)
    wide[..., ::2] = x
    return {"3-D": x.view(2, -1, x.shape[-1]), "strided": wide[..., ::2], "transposed": x.t().contiguous().t()}


@pytest.mark.parametrize("layout", ["3-D", "strided", "transposed"])
def test_layouts_of_x_and_g(layout, device):
    x, weight, bias, a, b = arguments((10, 48, 24, 5), FP32, device)
    x = layouts(x)[layout].requires_grad_()
    g = layouts(draw(device, FP32, 10, 24, seed=9))[layout]
    leaves = [x, a.requires_grad_(), b.requires_grad_()]
    got, want = (
        [y, *torch.autograd.grad(y, leaves, g)]
        for y in (op(x, weight, bias, a, b, 1.7, None) for op in (fast.lora_linear, reference.lora_linear))
    )
    for i, (one, other) in enumerate(zip(got, want)):
        same(f"tensor {i}", one, other, ROUNDED[FP32])


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)], ids=str)
def test_only_what_is_needed(needs, device):
    x, weight, bias, a, b = arguments((10, 48, 24, 5), FP32, device)
    leaves = [t.requires_grad_() for t, need in zip((x, a, b), needs) if need]
    got, want = (
        torch.autograd.grad(op(x, weight, bias, a, b, 1.7).square().sum(), leaves)
        for op in (fast.lora_linear, reference.lora_linear)
    )
    for i, (one, other) in enumerate(zip(got, want)):
        same(f"gradient {i}", one, other, 1e-5)


@pytest.mark.parametrize("dropping", [False, True], ids=["", "dropout"])
def test_reference_by_numbers_in_fp64(dropping):
    cpu = torch.device("cpu")
    given = [t.requires_grad_() for t in arguments((6, 5, 7, 3), torch.float64, cpu)]
    drop = dropout(cpu) if dropping else None
    assert torch.autograd.gradcheck(lambda *t: reference.lora_linear(*t, 1.7, drop), given)


def test_the_parts_are_the_gradients_of_the_whole():
    """The definitions of the parts in fp64, put together as the backward does, beside autograd through the whole."""
    x, weight, bias, a, b = (t.requires_grad_() for t in arguments((6, 5, 7, 3), torch.float64, torch.device("cpu")))
    drop, g = dropout(x.device), draw(x.device, torch.float64, 6, 7, seed=9)
    y = reference.lora_linear(x, weight, bias, a, b, 1.7, drop)
    dx, da, db = torch.autograd.grad(y, (x, a, b), g)
    x, weight, bias, a, b = (t.detach() for t in (x, weight, bias, a, b))
    h, gh = reference.lora_down(x, a, 1.7, drop), reference.lora_down(g, b.t(), 1.7)
    torch.testing.assert_close(reference.lora_product(x, weight, bias, h, b), y)
    torch.testing.assert_close(reference.lora_up(torch.nn.functional.linear(x, weight, bias), h, b), y)
    torch.testing.assert_close(reference.lora_product(g, weight.t(), None, gh, a.t(), drop), dx)
    got = adapter_gradients([a], [b], x, gh, g, h, drop)
    torch.testing.assert_close(got, [da, db])


# Where gradients go


def parameters(device, dtype=FP32) -> tuple[Tensor, ...]:
    x, weight, _, a, b = arguments((24, 48, 40, 6), dtype, device)
    return x, weight, torch.nn.Parameter(a), torch.nn.Parameter(b)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_micro_batches_are_one_batch(dtype, device):
    """Of unequal sizes, in fp32 accumulators, the first of which begins the sum over what was there."""
    x, weight, a, b = parameters(device, dtype)
    g = draw(device, dtype, 24, 40, seed=9)
    whole = torch.autograd.grad(reference.lora_linear(x.float(), weight.float(), None, a, b, 1.7), (a, b), g.float())
    for p in (a, b):
        p.main_grad = torch.full(p.shape, 1e9, device=device)
        made_record(p).opening = False
    for start, stop in ((0, 9), (9, 10), (10, 24)):
        kernels.lora_linear(x[start:stop], weight, None, a, b, 1.7).backward(g[start:stop])
    assert a.grad is None and b.grad is None
    for name, p, want in zip("ab", (a, b), whole):
        same(name, p.main_grad.to(dtype), want, ROUNDED[dtype])


def test_one_accumulator_alone(device):
    """A gradient that is delivered beside one that autograd gets."""
    x, weight, a, b = parameters(device)
    a.main_grad = torch.ones_like(a)
    kernels.lora_linear(x, weight, None, a, b).square().sum().backward()
    want = torch.autograd.grad(reference.lora_linear(x, weight, None, a, b).square().sum(), (a, b))
    assert a.grad is None
    same("a", a.main_grad - 1, want[0], 1e-5)
    same("b", b.grad, want[1], 1e-5)


def test_a_weight_that_trains_too(device):
    x, weight, a, b = parameters(device)
    weight = torch.nn.Parameter(weight)
    weight.main_grad = torch.zeros_like(weight)
    kernels.lora_linear(x, weight, None, a, b).square().sum().backward()
    (want,) = torch.autograd.grad(reference.lora_linear(x, weight, None, a, b).square().sum(), weight)
    same("weight", weight.main_grad, want, 1e-5)


def test_a_parameter_changed_before_backward_is_seen(device):
    x, weight, a, b = parameters(device)
    y = kernels.lora_linear(x, weight, None, a, b)
    with torch.no_grad():
        b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_under_activation_checkpointing(device):
    """The second forward draws the first one's seed."""
    x, weight, a, b = parameters(device)

    def run(x: Tensor) -> Tensor:
        return kernels.lora_linear(x, weight, None, a, b, 1.0, 0.5)

    found = []
    for wrapped in (run, lambda x: torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)):
        torch.manual_seed(3)
        found.append(torch.autograd.grad(wrapped(x).square().sum(), (a, b)))
    for one, other in zip(*found):
        same("gradient", one, other, 1e-6)


def test_autocast(device):
    x, weight, a, b = parameters(device)
    with torch.autocast(device.type, BF16):
        y = kernels.lora_linear(x, weight, None, a, b)
    assert y.dtype == BF16
    same("y", y, reference.lora_linear(x, weight, None, a, b).to(BF16), ROUNDED[BF16])


def test_no_rows(device):
    x, weight, a, b = parameters(device)
    y = kernels.lora_linear(x[:0], weight, None, a, b)
    y.sum().backward()
    assert y.shape == (0, 40) and not a.grad.any() and not b.grad.any()


def test_wrong_arguments():
    x, weight, a, b = torch.ones(4, 6), torch.ones(5, 6), torch.ones(2, 6), torch.ones(5, 2)
    cases = {
        "lora: dropout must be a probability from 0 up to, not including, 1, got 1.5; 0 drops nothing.": lambda: (
            kernels.lora_linear(x, weight, None, a, b, 1.0, 1.5)
        ),
        "lora_linear: b must be a floating-point tensor (5, 2), got torch.float32 (5, 3); its sizes follow from the first "
        "argument and the rank.": lambda: kernels.lora_linear(x, weight, None, a, torch.ones(5, 3)),
        "lora_down: its first argument must be a floating-point matrix, got torch.float32 (2, 2, 6); reshape it.": lambda: (
            kernels.lora_down(torch.ones(2, 2, 6), a)
        ),
        "lora_up: y is written, so its rows must be dense and apart, got strides (0, 1); pass a contiguous one.": lambda: (
            kernels.lora_up(torch.ones(5).expand(4, 5), torch.ones(4, 2), b)
        ),
        "lora_down: rows.ids must be int32 or int64 (B,), one for each row of a batch of 4 tokens, got torch.int32 (3,); all "
        "rows have the same number of tokens.": lambda: kernels.lora_down(x, a, rows=routed(x.device, (0, 0, 0), (2,))),
        "lora_down: drop.seed must be a contiguous torch.int64 (1,), got torch.int64 (2,); make it once, and write each "
        "step's seed into it.": lambda: kernels.lora_down(x, a, 1.0, Drop(0.5, torch.tensor([1, 2]))),
    }
    for sentence, call in cases.items():
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == sentence


# On the GPU

LARGE = [(2048, 768, 768, 16), (2048, 1024, 1024, 32), (4096, 4096, 4096, 16), (1000, 2048, 520, 64), (777, 333, 1001, 5)]


@pytest.mark.gpu
@pytest.mark.parametrize("dropping", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_real_sizes_on_the_gpu(shape, dropping, device):
    drop = dropout(device) if dropping else None
    for dtype in (torch.float16, BF16):
        parity(fast.lora_linear, reference.lora_linear, (*arguments(shape, dtype, device), 1.7, drop), ROUNDED[dtype])


@pytest.mark.gpu
def test_the_same_bits_in_every_run(device):
    given = [t.requires_grad_() for t in arguments((4096, 2048, 2048, 16), BF16, device)]

    def run() -> list[Tensor]:
        y = kernels.lora_linear(*given, 1.7)
        return [y.detach(), *torch.autograd.grad(y, given, y.detach())]

    want = run()
    for _ in range(5):
        assert all(one.equal(other) for one, other in zip(run(), want))


@pytest.mark.gpu
def test_each_replay_has_another_mask(device):
    x, weight, _, a, b = arguments((64, 256, 256, 8), BF16, device)

    def run() -> Tensor:
        return kernels.lora_linear(x, weight, None, a, b, 1.0, 0.5)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not first.equal(y)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2048, 768, 768, 16), (4096, 4096, 4096, 16)], ids=str)
def test_a_captured_step_has_the_bits_of_an_eager_one(shape, device):
    """Kernels overlap there by programmatic edges; each replay finds the h of its own x."""
    x, weight, _, a, b = (t.requires_grad_(i != 1) for i, t in enumerate(arguments(shape, BF16, device)))

    def run() -> list[Tensor]:
        y = kernels.lora_linear(x, weight, None, a, b, 1.7)
        return [y.detach(), *torch.autograd.grad(y, (x, a, b), y.detach())]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for factor in (1.0, -0.5, 3.0):
        with torch.no_grad():
            x.mul_(factor)
        graph.replay()
        assert all(one.equal(other) for one, other in zip(captured, run()))
