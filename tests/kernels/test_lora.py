"""The parts of a low-rank adapter: both mirrors agree for any rank and dropout mask, by row and by block."""

import pytest
import torch

from gpubound import kernels, trace
from gpubound.errors import FallbackError
from gpubound.kernels import plans
from gpubound.kernels.lora import Drop, Owners, OwnRanks, adapter_gradients, drawn, dropped
from gpubound.kernels.plans.types import Job, ProductPlan
from gpubound.kernels.registry import OPS
from gpubound.kernels.triton import lora as fast
from gpubound.kernels.triton.lora import _product
from tests.messages import message

from .cases import TOLERANCE, agree, draw, pairwise, same
from .lora_cases import FP32, ROUNDED, SHAPES, arguments, dropout, reference, routed
from .test_plans import CHIPS


@pairwise
@pytest.mark.parametrize("dropping", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_down_and_up(shape, dtype, dropping, device):
    x, _, _, a, b = arguments(shape, dtype, device, FP32)
    a, b = a.to(dtype).float(), b.to(dtype).float()  # both mirrors then multiply the same numbers
    drop = dropout(device) if dropping else None
    agree("lora_down", x, a, 1.7, drop, limit=TOLERANCE[FP32])
    y, h = draw(device, dtype, x.shape[0], b.shape[0], seed=9), reference.lora_down(x, a, 1.7, drop)
    agree("lora_up", y, h, b, drop, limit=TOLERANCE[FP32])


@pairwise
@pytest.mark.parametrize("dropping", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens, ranks", [(1, (3, 0, 5)), (7, (3, 1)), (4, (100, 30)), (40, (8, 8))], ids=str)
def test_rows_have_adapters_of_their_own(tokens, ranks, dtype, dropping, device):
    rows = routed(device, ranks=ranks, dtype=torch.int64 if tokens == 7 else torch.int32)
    x, _, _, a, _ = arguments((5 * tokens, 33, 8, sum(ranks)), dtype, device)
    agree("lora_down", x, a, 1.7, dropout(device) if dropping else None, None, rows, limit=TOLERANCE[FP32])


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


@pairwise
@pytest.mark.parametrize("begins", [(True, True), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape, dtype, begins, device):
    rows, inputs, outputs, rank = shape
    sizes = ((rows, inputs), (rows, rank), (rows, outputs), (rows, rank))
    given = [draw(device, dtype, *size, seed=i) for i, size in enumerate(sizes)]
    outs = [draw(device, FP32, *size, seed=5) for size in ((rank, inputs), (outputs, rank))]
    for drop in (None, dropout(device)):  # of 16-bit factors fp32 sums
        agree("lora_gradients", *given, *outs, drop, begins, limit=TOLERANCE[FP32] if dtype == FP32 else 1e-4)


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


@pairwise
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
            got = _product(x, weight, bias, h, b, described, blocks)
            same("product", got, product.to(dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("blocks", [(), (16, 16, 16, 16), (32, 16), (24, 40), (64, 0)], ids=str)
def test_blocks_that_no_op_takes(blocks, device):
    y, h, b = (torch.zeros(*size, device=device) for size in ((4, 64), (4, 8), (64, 4)))
    with pytest.raises(ValueError, check=message("kernels/lora:blocks_that_no_op_takes")):
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


def test_sums_are_shared_where_columns_are_few():
    """Fewer tiles than an H200's 132 multiprocessors."""
    for columns, splits in ((1536, 4), (4096, 4), (8192, 1)):
        plan = plans.plan_for(Job("lora", "gradients", (8192, columns, 16), 2, CHIPS[90]))
        assert (plan.rows, plan.splits) == (64, splits)


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


def test_accumulators_of_several_adapters_that_are_not_adjacent_are_counted():
    def parameter(*shape, main):
        made = torch.nn.Parameter(torch.ones(shape))
        made.main_grad = main
        return made

    a_sums, b_sums = torch.zeros(2, 2, 8), torch.zeros(2, 64, 2)
    x, gh, g, h = torch.ones(3, 8), torch.ones(3, 4), torch.ones(3, 128), torch.ones(3, 4)
    b = [parameter(64, 2, main=main) for main in b_sums]
    with trace.strict():
        adapter_gradients([parameter(2, 8, main=main) for main in a_sums], b, x, gh, g, h, wanted=[True] * 4)
        apart = [parameter(2, 8, main=torch.zeros(2, 8)) for _ in range(2)]
        with pytest.raises(FallbackError, match="not adjacent"):
            adapter_gradients(apart, b, x, gh, g, h, wanted=[True] * 4)
    adapter_gradients(apart, b, x, gh, g, h, wanted=[True] * 4)
    for p in apart:
        torch.testing.assert_close(p.main_grad, a_sums[0])


def test_the_parts_are_the_gradients_of_the_whole():
    """The definitions in fp64, put together as a linear layer's backward does, next to autograd through the formula."""
    x, weight, bias, a, b = (t.requires_grad_() for t in arguments((6, 5, 7, 3), torch.float64, torch.device("cpu")))
    drop, g = dropout(x.device), draw(x.device, torch.float64, 6, 7, seed=9)
    y = x @ weight.t() + bias + 1.7 * dropped(x, drop) @ a.t() @ b.t()
    dx, da, db = torch.autograd.grad(y, (x, a, b), g)
    x, weight, bias, a, b = (t.detach() for t in (x, weight, bias, a, b))
    h, gh = reference.lora_down(x, a, 1.7, drop), reference.lora_down(g, b.t(), 1.7)
    torch.testing.assert_close(reference.lora_product(x, weight, bias, h, b), y)
    torch.testing.assert_close(reference.lora_up(torch.nn.functional.linear(x, weight, bias), h, b), y)
    torch.testing.assert_close(reference.lora_product(g, weight.t(), None, gh, a.t(), drop), dx)
    got = adapter_gradients([a], [b], x, gh, g, h, drop)
    torch.testing.assert_close(got, [da, db])


def test_one_accumulator_alone(device):
    """A gradient that is added to a main_grad next to one that autograd gets."""
    a, b = (torch.nn.Parameter(torch.ones(*size, device=device)) for size in ((4, 20), (30, 4)))
    a.main_grad = torch.ones_like(a)
    x, gh, g, h = (draw(device, FP32, 9, n, seed=n) for n in (20, 4, 30, 4))
    da, db = adapter_gradients([a], [b], x, gh, g, h)
    assert da is None
    same("a", a.main_grad - 1, gh.t() @ x, 1e-5)
    same("b", db, g.t() @ h, 1e-5)


def test_wrong_arguments():
    x, a, b = torch.ones(4, 6), torch.ones(2, 6), torch.ones(5, 2)
    own = OwnRanks(torch.zeros(2, dtype=torch.int32), 3, 2)
    cases = {
        "probability .* got 1.5": lambda: drawn(1.5, x.device),
        r"h must .* \(4, 3\), got torch.float32 \(4, 2\)": lambda: kernels.lora_product(
            x, torch.ones(5, 6), None, torch.ones(4, 2), torch.ones(5, 3)
        ),
        r"matrix, got torch.float32 \(2, 2, 6\)": lambda: kernels.lora_down(torch.ones(2, 2, 6), a),
        r"got strides \(0, 1\)": lambda: kernels.lora_up(torch.ones(5).expand(4, 5), torch.ones(4, 2), b),
        r"batch of 4 tokens, got torch.int32 \(3,\)": lambda: kernels.lora_down(x, a, rows=routed(x.device, (0, 0, 0), (2,))),
        "2 adapters of 3 ranks": lambda: kernels.lora_product(x, torch.ones(5, 6), None, torch.ones(4, 2), b, rows=own),
        r"torch.int64 \(1,\), got torch.int64 \(2,\)": lambda: kernels.lora_down(x, a, 1.0, Drop(0.5, torch.tensor([1, 2]))),
    }
    for facts, call in cases.items():
        with pytest.raises(ValueError, match=facts):
            call()


# On the GPU

LARGE = [(2048, 768, 768, 16), (2048, 1024, 1024, 32), (4096, 4096, 4096, 16), (1000, 2048, 520, 64), (777, 333, 1001, 5)]


@pytest.mark.gpu
@pytest.mark.parametrize("dropping", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_real_sizes_on_the_gpu(shape, dropping, device):
    """A layer by its parts, as linear products put them together."""

    def layer(ops, x, weight, bias, a, b, g):
        drop = dropout(device) if dropping else None
        h, gh = ops.lora_down(x, a, 1.7, drop), ops.lora_down(g, b.t(), 1.7)
        sums = torch.empty(a.shape, device=device), torch.empty(b.shape, device=device)
        ops.lora_gradients(x, gh, g, h, *sums, drop)
        return ops.lora_product(x, weight, bias, h, b), ops.lora_product(g, weight.t(), None, gh, a.t(), drop), *sums

    for dtype in (torch.float16, torch.bfloat16):
        given = *arguments(shape, dtype, device), draw(device, dtype, shape[0], shape[2], seed=9)
        for name, got, want in zip(("y", "dx", "da", "db"), layer(fast, *given), layer(reference, *given)):
            same(name, got, want, ROUNDED[dtype])
        assert all(one.equal(other) for one, other in zip(layer(fast, *given), layer(fast, *given)))


@pytest.mark.parametrize("along", [True, False], ids=["b", "a transposed"])
def test_the_self_test_of_up_has_the_strides_of_its_caller(along, monkeypatch):
    """A stride of 1 is a constant of the compiled kernel: dx of a quantised base compiled one that no self-test had begun."""
    shapes = []
    monkeypatch.setattr(kernels.lora, "implementation", lambda op, x, why, shape: shapes.append(shape) or (lambda y, *_: y))
    kernels.lora.lora_up(torch.zeros(4, 48), torch.ones(4, 5), torch.ones(48, 5) if along else torch.ones(5, 48).t())
    b = OPS["lora_up"].example(torch.Generator().manual_seed(0), *shapes[0])[2]
    assert b.shape == (48, 5) and b.stride() == ((5, 1) if along else (1, 48))
