"""Rows added at ids that repeat: both mirrors agree, the sums are autograd's, other rows are let alone, errors read so."""

import pytest
import torch
import torch.nn.functional as F

from gpubound import kernels
from gpubound.kernels.triton import row_ops as fast
from tests.messages import refusals

from .cases import TOLERANCE, definitions, draw, pairwise, same

reference = definitions("row_ops")

IDS = {
    "all apart": [4, 0, 2, 1],
    "runs of 3 and 2": [2, 5, 2, 5, 2],
    "one": [6],
    "a run of two tiles and one": [3] * 17 + [1],
    "as wide as two tiles": [0] * 16,
}


@pairwise
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("cols", [1, 63, 64, 1030])
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_matches(ids, cols, dtype, device):
    """The sums are in fp32 both times, so that every dtype of rows has fp32's tolerance."""
    ids, rows, table = (
        torch.tensor(ids, device=device),
        draw(device, dtype, len(ids), cols),
        draw(device, torch.float32, 7, cols),
    )
    got, want = (mirror.add_rows(table.clone(), ids, rows, -1) for mirror in (fast, reference))
    same("table", got, want, 2e-6)
    untouched = [i for i in range(7) if i not in ids.tolist()]
    assert torch.equal(got[untouched], table[untouched])


@pytest.mark.parametrize("padding", [None, 0, 3])
def test_it_is_the_gradient_of_a_lookup(padding, device):
    ids = torch.randint(9, (4, 13), generator=torch.Generator().manual_seed(0)).to(device)
    table, g = draw(device, torch.float32, 9, 20).requires_grad_(), draw(device, torch.float32, 4, 13, 20, seed=1)
    want = torch.autograd.grad(F.embedding(ids, table, padding_idx=padding), table, g)[0]
    got = kernels.add_rows(torch.zeros_like(table), ids, g, -1 if padding is None else padding)
    same("gradient", got, want, 2e-6)


def test_the_same_bits_in_every_run(device):
    """500 rows on 3 ids: atomics would add them in another order each time."""
    ids = torch.randint(3, (500,), generator=torch.Generator().manual_seed(0)).to(device)
    rows = draw(device, torch.bfloat16, 500, 40)
    first, *others = [kernels.add_rows(torch.zeros(3, 40, device=device), ids, rows) for _ in range(4)]
    assert all(torch.equal(first, other) for other in others)


def test_rows_with_gaps_and_no_rows(device):
    wide, ids = draw(device, torch.float32, 6, 90), torch.tensor([1, 0, 1, 1, 0, 2], device=device)
    got, want = (m.add_rows(torch.zeros(3, 40, device=device), ids, wide[:, 7:47], -1) for m in (fast, reference))
    same("table", got, want, 2e-6)
    table = torch.ones(3, 40, device=device)
    assert kernels.add_rows(table, ids[:0], wide[:0, :40]) is table and table.eq(1).all()


UNKNOWN = {
    "too large, and -2": [6, -2],
    "2^32 + 1, which is 1 in 32 bits": [2**32 + 1, 1],
    "beside the first row's own": [0, 0, 5, 2],
    "the smallest of all": [-(2**63), 4],
}


@pytest.mark.parametrize("ids", UNKNOWN.values(), ids=UNKNOWN)
def test_an_id_that_the_table_does_not_have_makes_its_first_row_nan(ids, device):
    """And nothing else: the tables lie in the middle of a buffer, whose other rows stay as they are."""
    for mirror in (fast, reference):
        buffer = torch.zeros(9, 3, device=device)
        mirror.add_rows(buffer[2:7], torch.tensor(ids, device=device), torch.ones(len(ids), 3, device=device), -1)
        want = torch.zeros(9, 3, device=device)
        for i in ids:
            want[2 + i if 0 <= i < 5 else 2] += 1 if 0 <= i < 5 else torch.nan
        assert torch.equal(buffer.nan_to_num(nan=99), want.nan_to_num(nan=99)), mirror


@pytest.mark.parametrize("without", [-1, 3, 77])
def test_rows_left_out(without, device):
    """Whether the table has that id or not."""
    ids = torch.tensor([0, without, 2, without, 0], device=device)
    for mirror in (fast, reference):
        got = mirror.add_rows(torch.zeros(5, 3, device=device), ids, torch.ones(5, 3, device=device), without)
        assert got[:, 0].tolist() == [2, 0, 1, 0, 0], mirror


def test_wrong_arguments():
    table, row, one = torch.zeros(3, 4), torch.ones(1, 4), torch.tensor([1])
    refusals(
        "kernels/add_rows:wrong",
        lambda: kernels.add_rows(table, torch.ones(1, dtype=torch.uint16), row),
        lambda: kernels.add_rows(table[:0], torch.zeros(1, dtype=torch.int64), row),
        lambda: kernels.add_rows(table.bfloat16(), one, row),
        lambda: kernels.add_rows(table, torch.tensor([1, 2]), row),
        lambda: kernels.add_rows(table, torch.ones(1), row),
    )
