"""Inputs of a draft head: both mirrors, and cases worked out by hand."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels.decode_product import Norm
from gpubound.kernels.draft_inputs import Reads
from gpubound.kernels.ngram_speculation import Chunk
from gpubound.kernels.registry import load
from tests.messages import refusals

from .cases import agree, draw
from .test_ngram_speculation import INT, ints, outputs
from .test_sampling import rows_of

ROWS = 3


def reads(device, words: int, hidden: int, dtype=torch.bfloat16) -> Reads:
    norms = [Norm(draw(device, dtype, hidden), eps, offset) for eps, offset in ((1e-5, 0.0), (1e-3, 1.0))]
    return Reads(draw(device, dtype, words, hidden), *norms)


def zeros(device, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, device=device)


@pytest.mark.parametrize("tokens", [2, 5])
@pytest.mark.parametrize("hidden", [40, 64])
def test_begin_draft_matches(tokens, hidden, device):
    """Entries at the beginning, in the middle and beyond the end of a text; all, some and none accepted."""
    text = torch.randint(23, (ROWS, 20), generator=torch.Generator().manual_seed(1)).to(device, INT)
    rows = rows_of(ROWS, device, position=[1, 9, 19], alive=[1, 0, 1])
    first = ints(device, 0, 9 - tokens, 17)
    place, last = torch.zeros(ROWS, tokens, device=device, dtype=INT), torch.zeros(ROWS, device=device, dtype=torch.int64)
    x, embed = draw(device, torch.float32, ROWS * tokens, hidden), draw(device, torch.bfloat16, 23, 24)
    both, to = zeros(device, ROWS * tokens, 2 * hidden), zeros(device, ROWS * tokens, 24)
    chunk = outputs(ROWS, tokens, device)
    arguments = rows, text, first, x, reads(device, 23, hidden), chunk, place, last, both
    *_, chunk, place, last, both, _, to, _ = agree("begin_draft", *arguments, embed, to, 0)
    assert last.tolist() == [0, tokens + tokens - 1, 2 * tokens + min(1, tokens - 1)]
    assert place[2].tolist() == [min(17 + t, 19) for t in range(tokens)]
    assert chunk.token[:, 0].tolist() == rows.token.tolist() and chunk.alive[:, -1].tolist() == [1, 0, 1]
    assert torch.equal(to.view(ROWS, tokens, -1)[:, 0], embed[rows.token.long()].float())
    agree("begin_draft", *arguments, None, None, 0)


@pytest.mark.parametrize("at", [1, 2])
def test_extend_draft_matches(at, device, monkeypatch):
    """Maxima in several tiles, two equal ones, and a row without any; with a table of tokens, and at the last place."""
    monkeypatch.setattr("gpubound.kernels.triton.draft_inputs.PARTS", 16)
    best, arg = draw(device, torch.float32, ROWS, 50), torch.arange(50, device=device, dtype=INT).repeat(ROWS, 1)
    best[0, 7] = best[0, 33] = 9.0
    best[1, 20] = float("nan")
    targets, token = 2 * torch.arange(50, device=device), ints(device, 4, 5, 6)
    x, embed = draw(device, torch.float32, ROWS, 40), draw(device, torch.bfloat16, 100, 24)
    given = x, reads(device, 100, 40), outputs(ROWS, 3, device), at
    to = zeros(device, ROWS * 3, 24)
    _, _, _, found, _, _, chunk, *_ = agree(
        "extend_draft", best, arg, targets, token, *given, zeros(device, ROWS, 80), embed, to, 0
    )
    assert found.tolist() == [14, 5, 2 * int(best[2].argmax())] == chunk.token[:, at].tolist()
    *_, chunk, _, _, _, _, _ = agree("extend_draft", None, None, targets, token, *given, None, None, None, 0)
    assert chunk.token[:, at].tolist() == [4, 5, 6]


@pytest.mark.parametrize("tokens", [1, 3])
def test_keep_stream_matches(tokens, device):
    x, wide = draw(device, torch.float32, 2 * tokens, 40), draw(device, torch.float32, 2 * tokens, 100)
    position = torch.arange(2 * tokens, device=device, dtype=INT).view(2, tokens)
    _, kept, _, _, _, first = agree("keep_stream", x, torch.empty_like(x), 0, None, position, ints(device, 7, 7), limit=0)
    assert torch.equal(kept, x) and first.tolist() == [0, tokens]
    load("triton", "keep_stream")(x, wide[:, 60:])
    assert torch.equal(wide[:, 60:], x) and not torch.equal(wide[:, :40], x)
    index = torch.tensor([2 * tokens - 1, 0, 0], device=device)
    _, kept, *_ = agree("keep_stream", x, draw(device, torch.float32, 3, 40), 0, index, limit=0)
    assert torch.equal(kept, x[index])


def test_the_doors(device):
    """Through choice and self-test: the token's row of the table, normed, beside the feature."""
    chunk, both, token = outputs(1, 2, device), zeros(device, 1, 4), ints(device, 0)
    norm = Norm(torch.ones(2, device=device), 0.0)
    table = torch.tensor([[0.0, 1.0], [3.0, 3.0]], device=device)
    best, arg, targets = zeros(device, 1, 1), ints(device, [0]), torch.tensor([1], device=device)
    x, text = torch.tensor([[0.0, 5.0]], device=device), ints(device, [0, 1, 0, 0])
    kernels.extend_draft(best, arg, targets, token, x, Reads(table, norm, norm), chunk, 1, both)
    torch.testing.assert_close(both, torch.tensor([[1.0, 1.0, 0.0, 2**0.5]], device=device))
    assert chunk.token[0, 1] == token == 1
    place, last = torch.zeros(1, 2, device=device, dtype=INT), torch.zeros(1, device=device, dtype=torch.int64)
    rows, both = rows_of(1, device, position=[1], token=[1]), zeros(device, 2, 4)
    kernels.begin_draft(rows, text, ints(device, 0), x.repeat(2, 1), Reads(table, norm, norm), chunk, place, last, both)
    torch.testing.assert_close(both[:, :2], torch.tensor([[1.0, 1.0], [0.0, 2**0.5]], device=device))
    assert (chunk.token[0, 0], place.tolist(), last.item()) == (1, [[0, 1]], 0)
    kernels.keep_stream(x.repeat(2, 1), both[:, 2:])
    assert both[:, 2:].tolist() == [[0.0, 5.0]] * 2


def test_errors():
    rows, chunk, text = rows_of(2, "cpu"), outputs(2, 3, "cpu"), torch.zeros(2, 9, dtype=INT)
    place, last, first = torch.zeros(2, 3, dtype=INT), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=INT)
    read, x, both = reads("cpu", 7, 4), zeros("cpu", 6, 4), zeros("cpu", 6, 8)
    token, targets = torch.zeros(2, dtype=INT), torch.zeros(5, dtype=torch.int64)
    refusals(
        "kernels/draft_inputs:errors",
        lambda: kernels.begin_draft(rows, text, first, x[:5], read, chunk, place, last, both),
        lambda: kernels.begin_draft(rows, text, first, x, read, chunk, place, last.int(), both),
        lambda: kernels.begin_draft(rows, text, first, x, read, Chunk(*chunk[:2], place[:, :2]), place, last, both),
        lambda: kernels.extend_draft(None, None, targets, token, x[:2], read, chunk, 0, both[:2]),
        lambda: kernels.extend_draft(zeros("cpu", 2, 4), None, targets, token, x[:2], read, chunk, 3, None),
        lambda: kernels.extend_draft(None, None, targets, token, x[:2], read, chunk, 1, both),
        lambda: kernels.keep_stream(x, both),
    )
