"""Drafts from the text and their acceptance: both mirrors, cases worked out by hand, and plain steps as the definition."""

import pytest
import torch
from torch import Tensor

from gpubound import kernels
from gpubound.kernels.ngram_speculation import Chunk, Said
from gpubound.kernels.triton import ngram_speculation as fast
from tests.messages import refusals

from .apart import apart
from .cases import agree, definitions, draw
from .test_sampling import rows_of

reference = definitions("ngram_speculation")

BY = pytest.mark.parametrize("by", [fast, reference], ids=["triton", "reference"])
INT = torch.int32


def ints(device, *values) -> Tensor:
    return torch.tensor(values, device=device, dtype=INT)


def outputs(batch: int, tokens: int, device) -> Chunk:
    return Chunk(*(torch.full((batch, tokens), -9, device=device, dtype=INT) for _ in Chunk._fields))


TEXTS = {  # a text, and the four tokens that its end foretells
    "a period of three": ([5, 6, 7, 5, 6, 7, 5], [6, 7, 5, 6]),
    "the longest match": ([1, 2, 3, 9, 9, 2, 3, 8, 8, 1, 2, 3], [9, 9, 2, 3]),
    "of equal ones the latest": ([2, 3, 4, 4, 4, 2, 3, 6, 6, 7, 2, 3], [6, 6, 7, 2]),
    "one token": ([4, 1, 2, 3, 4], [1, 2, 3, 4]),
    "no match repeats the last": ([1, 2, 3, 4], [4, 4, 4, 4]),
    "a run": ([1, 7, 7], [7, 7, 7, 7]),
    "a row of one": ([3], [3, 3, 3, 3]),
}


@BY
def test_what_a_text_foretells(by, device):
    text = torch.full((len(TEXTS), 14), 9, device=device, dtype=INT)  # nines beyond the end would match
    for row, (tokens, _) in zip(text, TEXTS.values()):
        row[: len(tokens)] = ints(device, *tokens)
    ends = [len(tokens) - 1 for tokens, _ in TEXTS.values()]
    out = outputs(len(TEXTS), 5, device)
    rows = rows_of(len(TEXTS), device, position=ends, alive=[1, 0, 1, 1, 1, 1, 1])
    by.propose(rows, text, out)
    assert dict(zip(TEXTS, out.token[:, 1:].tolist())) == {name: wanted for name, (_, wanted) in TEXTS.items()}
    assert out.token[:, 0].tolist() == [tokens[-1] for tokens, _ in TEXTS.values()]
    assert out.position.tolist() == [[min(end + t, 13) for t in range(5)] for end in ends]
    assert out.alive.tolist() == [[alive] * 5 for alive in (1, 0, 1, 1, 1, 1, 1)]


@pytest.mark.parametrize("words", [2, 5])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_propose_matches(words, tokens, device, monkeypatch):
    """Texts of few words, where matches abound, longer than a tile, with an embedding wider than one."""
    monkeypatch.setattr(fast, "TILE", 32)
    text = torch.randint(words, (4, 100), generator=torch.Generator().manual_seed(words)).to(device, INT)
    rows = rows_of(4, device, position=[0, 31, 64, 98])
    embed, x = draw(device, torch.bfloat16, words, 70), torch.zeros(4 * tokens, 70, device=device)
    _, _, chunk, _, x = agree("propose", rows, text, outputs(4, tokens, device), embed, x)
    assert torch.equal(x, embed[chunk.token.view(-1).long()].float())


def verified(device) -> dict:
    """Six rows of three tokens: all foreseen; none; one, then a stop; dead; not finite at once; not finite after one."""
    chosen = ints(device, [5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7], [-1, 6, 7], [5, -1, 7])
    going = ints(device, [1, 1, 1], [1, 1, 1], [1, 0, 1], [1, 1, 1], [0, 1, 1], [1, 0, 1])
    ran = ints(device, [1, 5, 6], [1, 6, 6], [1, 5, 6], [1, 5, 6], [1, 5, 6], [1, 5, 6])
    chunk, text = Chunk(ran, torch.zeros_like(ran), going), torch.zeros(6, 13, device=device, dtype=INT)
    numbers = torch.arange(18, device=device).view(6, 3) / 8
    return {"chunk": chunk, "chosen": Said(chosen, numbers), "text": text}


@BY
def test_a_row_gets_what_was_foreseen_and_one_more(by, device):
    given, rows = verified(device), rows_of(6, device, position=[10, 9, 8, 7, 6, 5], alive=[1, 1, 1, 0, 1, 1])
    block = torch.full((5, 8), -7, device=device, dtype=INT)
    seen, logprob = torch.zeros(6, 9, device=device, dtype=torch.uint8), torch.zeros(3, 6, device=device)
    by.accept(**given, rows=rows, emitted=Said(block[1:4, :6], logprob), seen=seen)
    assert block[1:4, :6].t().tolist() == [[5, 6, 7], [5, -1, -1], [5, 6, -1], [-1] * 3, [-1] * 3, [5, -1, -1]]
    block[1:4, :6] = -7
    assert (block == -7).all()
    assert rows.token.tolist() == [7, 5, 6, 1, 1, 5]
    assert rows.position.tolist() == [13, 10, 9, 7, 6, 6]
    assert rows.alive.tolist() == [1, 1, 0, 0, 0, 0]
    assert rows.bad.tolist() == [0, 0, 0, 0, 7, 7]
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [[5, 6, 7], [5], [5, 6], [], [], [5]]
    assert [row.nonzero()[:, 0].tolist() for row in given["text"]] == [[11, 12], [10], [9, 10], [], [], [6]]
    assert given["text"][2, 9:11].tolist() == [5, 6] and given["text"][0, 11:].tolist() == [5, 6]
    assert logprob.t()[:3].nan_to_num(-1).tolist() == [[0, 0.125, 0.25], [0.375, -1, -1], [0.75, 0.875, -1]]
    assert logprob.t()[3:].isnan().tolist() == [[True] * 3, [True] * 3, [False, True, True]]


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_accept_matches(tokens, device):
    """Every pattern of right and wrong drafts and of ends comes up among 60 rows."""
    generator = torch.Generator().manual_seed(tokens)
    chosen, chunk = (torch.randint(2, (60, tokens), generator=generator).to(device, INT) for _ in range(2))
    going = torch.randint(4, (60, tokens), generator=generator).clamp(max=1).to(device, INT)
    alive = torch.randint(4, (60,), generator=generator).clamp(max=1).tolist()
    rows = rows_of(60, device, position=[b % 7 for b in range(60)], alive=alive)
    text = torch.full((60, 12), 4, device=device, dtype=INT)
    emitted, seen = torch.zeros(tokens, 60, device=device, dtype=INT), torch.zeros(60, 3, device=device, dtype=torch.uint8)
    numbers, logprob = draw(device, torch.float32, 60, tokens), torch.zeros(tokens, 60, device=device)
    chunks = Chunk(chunk, torch.zeros_like(chunk), going)
    *_, said, _ = agree("accept", chunks, Said(chosen, numbers), rows, text, Said(emitted, logprob), seen)
    for row, column in zip(zip(alive, chosen.tolist(), chunk.tolist(), going.tolist()), said.token.t().tolist()):
        assert column == one_by_one(*row)


def one_by_one(alive: int, chosen: list[int], chunk: list[int], going: list[int]) -> list[int]:
    """What a row emits, said as a loop."""
    found: list[int] = []
    for t, token in enumerate(chosen):
        if alive and (t == 0 or (found[-1] == chunk[t] and going[t - 1])) and len(found) == t:
            found.append(token)
    return found + [-1] * (len(chosen) - len(found))


def test_the_doors(device):
    """Through choice and self-test, a round of both."""
    text, rows = ints(device, [5, 6, 7, 5, 0, 0, 0, 0]), rows_of(1, device, position=[3], token=[5])
    out, emitted = outputs(1, 3, device), torch.zeros(3, 1, device=device, dtype=INT)
    kernels.propose(rows, text, out)
    assert out.token.tolist() == [[5, 6, 7]]
    kernels.accept(out, Said(ints(device, [6, 8, 9])), rows, text, Said(emitted))
    assert emitted.tolist() == [[6], [8], [-1]] and text.tolist() == [[5, 6, 7, 5, 6, 8, 0, 0]]
    assert (rows.token.item(), rows.position.item(), rows.alive.item()) == (8, 5, 1)


def compile_all() -> None:
    """Both kernels with everything and with nothing, and attention of several tokens a row, for compute capability 9.0."""
    import triton

    from . import aot
    from .attention_cases import Case

    triton.runtime.jit.JITFunction.run = aot.compile_instead
    for whole in (True, False):
        rows, text, out = rows_of(2, "cpu"), torch.zeros(2, 4096, dtype=INT), outputs(2, 5, "cpu")
        given = {"embed": torch.zeros(9, 1024, dtype=torch.bfloat16), "x": torch.zeros(10, 1024)} if whole else {}
        fast.propose(rows, text, out, **given, dependent=whole)
        seen, given, kept = (
            (torch.zeros(2, 9, dtype=torch.uint8), torch.zeros(2, 5), torch.zeros(5, 2)) if whole else [None] * 3
        )
        emitted = torch.zeros(5, 4, dtype=INT)[:, :2]
        fast.accept(out, Said(out.token, given), rows, text, Said(emitted, kept), seen, dependent=whole)
    Case("cpu", torch.bfloat16, [3, 9], width=64, tokens=5, normed=True)("triton")
    print(*aot.compiled)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels and run them")
def test_they_compile():
    printed = apart("from tests.kernels.test_ngram_speculation import compile_all; compile_all()")
    assert set(printed.split()) == {"_propose_kernel", "_accept_kernel", "_decode_attention_kernel"}


def test_errors():
    rows, out, text = rows_of(2, "cpu"), outputs(2, 3, "cpu"), torch.zeros(2, 9, dtype=INT)
    chosen, emitted = Said(out.token), torch.zeros(3, 2, dtype=INT)
    refusals(
        "kernels/speculation:errors",
        lambda: kernels.propose(rows, text.long(), out),
        lambda: kernels.propose(rows, text, out._replace(alive=out.alive[:, :2])),
        lambda: kernels.propose(rows, text, out, x=torch.zeros(6, 4)),
        lambda: kernels.propose(rows, text, out, embed=torch.zeros(5, 4), x=torch.zeros(2, 4)),
        lambda: kernels.accept(out, chosen, rows, text, Said(emitted.t())),
        lambda: kernels.accept(out, chosen, rows, text, Said(emitted, emitted.float())),
        lambda: kernels.accept(out._replace(alive=out.alive.bool()), chosen, rows, text, Said(emitted)),
        lambda: kernels.accept(out, chosen, rows._replace(bad=rows.bad[:1]), text, Said(emitted)),
    )
