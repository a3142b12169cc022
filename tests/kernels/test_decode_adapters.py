"""Adapters inside the products of a decoding step: parity with plain torch, the same bits in any batch, every step anew."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels import plans
from gpubound.kernels.decode_adapters import EMPTY, EVERY_ADAPTER, NO_ADAPTER, StepAdapter, StepAdapters, emptied, table_of
from gpubound.kernels.decode_product import Norm
from gpubound.kernels.plans.types import MatrixPlan
from gpubound.kernels.registry import load

from .cases import DTYPES, SOURCES, draw, pairwise, same

RANKS = [(4,), (3, 5), (1, 16, 40, 100)]  # of the adapters of a weight; the last are more than a program holds


def adapters_of(device, inputs, outputs, ids, ranks=(4,), dtype=torch.float32, side_by_side=False, bare=()):
    """Adapters with these ranks on each weight but those of `bare`."""
    parts, seed = [], 50
    for number, rows in enumerate(outputs):
        made = []
        whole = draw(device, dtype, rows, sum(ranks), seed=seed).split(ranks, 1)
        for owner, rank in enumerate(ranks if number not in bare else ()):
            seed += 2
            b = whole[owner] if side_by_side else draw(device, dtype, rows, rank, seed=seed)
            made.append(StepAdapter(draw(device, dtype, rank, inputs, seed=seed + 1) * 0.1, b, 0.5 + owner, owner))
        parts.append(tuple(made))
    columns = sum(one.a.shape[0] for part in parts for one in part)
    ids = torch.tensor(ids, dtype=torch.int32, device=device)
    return StepAdapters(tuple(parts), ids, emptied(8, columns, device), torch.zeros(300, dtype=torch.int32, device=device))


def plain(adapters, number, x):
    """Row by row, in fp64."""
    total = []
    for row, own in zip(x.double(), adapters.ids.tolist()):
        added = [
            one.scale * (one.b.double() @ (one.a.double() @ row))
            for one in adapters.parts[number]
            if own in (one.owner, EVERY_ADAPTER)
        ]
        total.append(sum(added, torch.zeros(one_of(adapters, number), dtype=torch.float64, device=x.device)))
    return torch.stack(total)


def one_of(adapters, number):
    return adapters.parts[number][0].b.shape[0] if adapters.parts[number] else 1


def normed(x, norm):
    return torch.nn.functional.rms_norm(x.double(), x.shape[-1:], norm.weight.double(), norm.eps)


@pairwise
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("side_by_side", [False, True])
def test_q_k_v(device, source, dtype, ranks, side_by_side):
    ids = [EVERY_ADAPTER, 0, NO_ADAPTER]
    x, norm = draw(device, torch.float32, 3, 48), Norm(draw(device, dtype, 48, seed=1), 1e-5)
    weights = [draw(device, dtype, n, 48, seed=2 + i) for i, n in enumerate((32, 16, 16))]
    adapters = adapters_of(device, 48, (32, 16, 16), ids, ranks, side_by_side=side_by_side, bare=(1,))
    out = torch.zeros(3, 64, device=device)
    load(source, "norm_product")(x, norm, *weights, None, None, None, out, None, None, 0, 0.0, adapters)
    h = normed(x, norm)
    want = torch.cat([h @ w.double().t() + plain(adapters, i, h) for i, w in enumerate(weights)], 1)
    same("q k v", out.double(), want, 1e-5)


@pairwise
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("bare", [(), (0,)])
def test_gate_and_up(device, source, dtype, ranks, bare):
    ids = [0, EVERY_ADAPTER]
    x, norm = draw(device, torch.float32, 2, 40), Norm(draw(device, torch.float32, 40, seed=1), 1e-5)
    gate, up = (draw(device, dtype, 37, 40, seed=2 + i) * 0.2 for i in range(2))
    adapters = adapters_of(device, 40, (37, 37), ids, ranks, dtype, bare=bare)
    out = torch.zeros(2, 37, device=device, dtype=dtype)
    load(source, "norm_gate_up")(x, norm, gate, up, None, None, out, 0, "silu", adapters)
    h = normed(x, norm)
    both = [h @ w.double().t() + plain(adapters, i, h) for i, w in enumerate((gate, up))]
    same("gated", out.double(), torch.nn.functional.silu(both[0]) * both[1], 1e-5 if dtype == torch.float32 else 1e-2)


@pairwise
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", RANKS)
def test_the_residual_product(device, source, dtype, ranks):
    h, weight, bias = draw(device, dtype, 3, 130), draw(device, dtype, 40, 130, seed=1), draw(device, dtype, 40, seed=2)
    x = draw(device, torch.float32, 3, 40, seed=3)
    adapters = adapters_of(device, 130, (40,), [len(ranks) - 1, NO_ADAPTER, EVERY_ADAPTER], ranks)
    want = x.double() + h.double() @ weight.double().t() + bias.double() + plain(adapters, 0, h)
    load(source, "add_product")(h, weight, bias, x, 0, adapters)
    same("stream", x.double(), want, 1e-5)


HOW = pytest.mark.parametrize("how", ["inside a product", "behind one"])


def product(how, source, x, weight, adapters):
    """x weightᵀ and what the adapters add, or this alone, in the order of launches of a step."""
    y = torch.zeros(len(x), len(weight), device=x.device)
    if how == "behind one":
        return load(source, "add_adapters")(x, adapters, y)[0]
    load(source, "norm_product")(x, None, weight, None, None, None, None, None, y, None, None, 0, 0.0, adapters)
    return y


@HOW
def test_a_row_gets_the_same_bits_alone_and_in_a_batch(how, device):
    x, weight = draw(device, torch.float32, 8, 48), draw(device, torch.float32, 32, 48, seed=2)
    whole = adapters_of(device, 48, (32,), [0, 1, EVERY_ADAPTER, NO_ADAPTER] * 2, (4, 8))
    found = product(how, "triton", x, weight, whole)
    for row in range(8):
        alone = whole._replace(ids=whole.ids[row : row + 1], h=emptied(1, 12, device))
        assert torch.equal(product(how, "triton", x[row : row + 1], weight, alone)[0], found[row])


@pytest.mark.gpu
@pytest.mark.parametrize("warps, ranks", [(4, (64,)), (8, (16,) * 8)])
def test_each_warp_that_holds_a_rank_waits_for_it(warps, ranks):
    """With more threads than ranks several warps hold one. A warp that went on with another's word made NaN of the row."""
    device, half = torch.device("cuda"), torch.bfloat16
    x, weight = draw(device, half, 2, 2048), draw(device, half, 2048, 2048, seed=1)
    adapters = adapters_of(device, 2048, [2048], [EVERY_ADAPTER] * 2, ranks)
    adapters = adapters._replace(table=table_of(adapters.parts))
    results = torch.zeros(500, 2, 2048, device=device)
    with plans.trying(plans.job_of("product", "adapted add", tuple(weight.shape), weight), MatrixPlan(4, 1024, warps)):
        for result in results:
            adapters.h.fill_(EMPTY)
            load("triton", "add_product")(x, weight, None, result, 0, adapters)
    want = x.double() @ weight.double().t() + plain(adapters, 0, x)
    same("y", results[0].double(), want, 1e-4)
    assert torch.equal(results, results[:1].expand_as(results))


@HOW
def test_products_in_turn_empty_what_the_one_before_has_used(how, device):
    """So a step finds no number of the step before: here the second round is of another x, with the addresses kept."""
    weight = draw(device, torch.float32, 32, 48, seed=2)
    first, second = (adapters_of(device, 48, (32,), [0, 0], (rank,)) for rank in (4, 70))
    first, second = first._replace(before=second.h), second._replace(before=first.h)
    turns = [one._replace(table=table_of(one.parts)) for one in (first, second)]
    for round_ in range(2):
        x = draw(device, torch.float32, 2, 48, seed=round_)
        for one, other in (turns, reversed(turns)):
            want = plain(one, 0, x) + (x.double() @ weight.double().t() if how == "inside a product" else 0)
            same("y", product(how, "triton", x, weight, one).double(), want, 1e-5)
            assert (other.h == EMPTY).all() and not (one.h[:2] == EMPTY).any()


def test_trained_adapters_are_read_where_they_lie(device):
    x, weight = draw(device, torch.float32, 1, 48), draw(device, torch.float32, 32, 48, seed=2)
    adapters = adapters_of(device, 48, (32,), [0])
    adapters = adapters._replace(table=table_of(adapters.parts))
    adapters.parts[0][0].b.mul_(2)
    out = kernels.norm_product(x, None, weight, adapters=adapters)
    same("y", out.double(), x.double() @ weight.double().t() + plain(adapters, 0, x), 1e-5)


@HOW
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("half", ["a", "b"])
def test_an_adapter_that_has_diverged_spoils_no_row_of_another(how, source, half, device):
    x, weight = draw(device, torch.float32, 3, 48), draw(device, torch.float32, 32, 48, seed=2)
    adapters = adapters_of(device, 48, (32,), [0, 1, NO_ADAPTER], (4, 8))
    getattr(adapters.parts[0][1], half).fill_(float("nan"))
    assert product(how, source, x, weight, adapters).isnan().any(1).tolist() == [False, True, False]


@pairwise
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("outputs", [(40,), (37, 37), (130, 16, 16)])
def test_behind_products_of_many_rows(device, source, dtype, ranks, outputs):
    ids = [EVERY_ADAPTER, 0, NO_ADAPTER, len(ranks) - 1, 0]
    x, adapters = draw(device, dtype, 5, 48), adapters_of(device, 48, outputs, ids, ranks, bare=(1,))
    products = [draw(device, torch.float32, 5, count, seed=9 + n) for n, count in enumerate(outputs)]
    want = [one.double() + plain(adapters, n, x) for n, one in enumerate(products)]
    load(source, "add_adapters")(x, adapters, *products)
    for found, wanted in zip(products, want):
        same("y", found.double(), wanted, 1e-5)


@pytest.mark.parametrize("source", SOURCES)
def test_behind_products_whose_rows_lie_apart(device, source):
    """The halves of one matrix, in 16 bits."""
    both, x = draw(device, torch.float16, 4, 64, seed=3), draw(device, torch.float16, 4, 48)
    adapters = adapters_of(device, 48, (24, 24), [0, 1, EVERY_ADAPTER, NO_ADAPTER], (4, 8), torch.float16)
    want = [one.double() + plain(adapters, n, x) for n, one in enumerate((both[:, :24], both[:, 32:56]))]
    beside = both[:, 24:32].clone()
    load(source, "add_adapters")(x, adapters, both[:, :24], both[:, 32:56])
    same("first", both[:, :24].double(), want[0], 2e-3)
    same("second", both[:, 32:56].double(), want[1], 2e-3)
    assert torch.equal(both[:, 24:32], beside)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            lambda y: y[:1],
            r"a product of x must be torch.float32 \(2, 32\) with dense rows on cpu, got torch.float32 \(1, 32\)",
        ),
        (lambda y: torch.zeros(32, 2).t(), r"with dense rows on cpu, got torch.float32 \(2, 32\)"),
        (lambda y: y[:, :8], r"an adapter must have a \(4, 48\) with dense rows and b \(8, 4\)"),
    ],
)
def test_products_that_do_not_fit(wrong, message):
    adapters = adapters_of(torch.device("cpu"), 48, (32,), [0, 0])
    with pytest.raises(ValueError, match=message):
        kernels.add_adapters(torch.zeros(2, 48), adapters, wrong(torch.zeros(2, 32)))
