"""Both shuffles are bijections for every size, differ by seed and epoch, and mix; what is held out is from all over."""

import math

import numpy as np
import pytest
import torch

from gpubound.data import Corpus
from gpubound.data.corpus import MAX_RUNS, choose, split_tail
from gpubound.data.source import EPOCHS, KEYS, Scatter, mix, order, signed
from tests.messages import message, refusal

from .conftest import TEXTS, Bytes

ALL = (1 << 64) - 1


@pytest.mark.parametrize("sizes", [range(1, 130), [997, 1024, 65_537, 250_001]], ids=["small", "large"])
def test_one_to_one(sizes):
    for n in sizes:
        scatter = Scatter(n, seed=n)
        for epoch in (0, 1, 4095, 100_000):
            rows = scatter(torch.arange(n), torch.tensor(epoch))
            assert torch.equal(rows.sort().values, torch.arange(n)), (n, epoch)
        assert torch.equal(order(n, n, 3).sort().values, torch.arange(n))


def oracle(n: int, seed: int, epoch: int, place: int) -> int:
    """Scatter in plain integers, one place at a time."""
    golden, word = 0x9E3779B97F4A7C15, mix(seed)

    def key(k):
        z = (golden * (epoch % EPOCHS * KEYS + k + 1) + word) & ALL
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & ALL
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & ALL
        return signed(z ^ (z >> 31))

    def noise(salt, x):
        z = (salt + x * golden) & ALL
        return signed(z * z & ALL) >> 33

    columns = max(min(2, n), math.isqrt(n))
    lines = n // columns
    for k in range(0, KEYS, 3):
        turned = (place + key(k) % n) % n
        line, column = divmod(turned, columns)
        column = (column + noise(key(k + 1), line)) % columns
        line = (line + noise(key(k + 2), column)) % lines
        place = column + line * columns if turned < columns * lines else turned
    return place


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100, 1009])
def test_scatter_against_plain_integers(n):
    scatter = Scatter(n, seed=5)
    for epoch in (0, 3, 5000):
        got = scatter(torch.arange(n), torch.tensor(epoch)).tolist()
        assert got == [oracle(n, 5, epoch, place) for place in range(n)]


def test_every_place_draws_every_row_alike():
    """Over 4,096 epochs the count of (place, row) is chi-squared with (n - 1)² degrees of freedom; 5 standard deviations are
    allowed."""
    for n in (5, 12, 50):
        rows = Scatter(n, seed=1)(torch.arange(n).expand(EPOCHS, n), torch.arange(EPOCHS))
        counts = torch.stack([torch.bincount(rows[:, place], minlength=n) for place in range(n)]).double()
        chi, freedom = ((counts - EPOCHS / n) ** 2 / (EPOCHS / n)).sum().item(), (n - 1) ** 2
        assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom), n


def texts_of(corpus):
    return [bytes(corpus.document(i)[:-1].tolist()).decode() for i in range(corpus.documents)]


@pytest.fixture
def numbered(tmp_path):
    """60 documents that all differ, in several shards."""
    return Corpus.build([f"{i:03d}" * (1 + i % 7) for i in range(60)], Bytes(), tmp_path / "c", shard_tokens=90, progress=False)


def test_a_split_is_by_documents_from_all_over(numbered):
    whole, (train, held_out) = texts_of(numbered), numbered.split(0.1)
    assert (train.documents, held_out.documents) == (54, 6) and train.tokens + held_out.tokens == numbered.tokens
    assert sorted(texts_of(train) + texts_of(held_out)) == whole, "each document whole, and on one side"
    assert texts_of(train) == sorted(texts_of(train)) and texts_of(held_out) == sorted(texts_of(held_out)), "in order"
    places = [whole.index(text) for text in texts_of(held_out)]
    assert places == [14, 25, 26, 35, 44, 49], "always the same ones, on every machine"
    assert len({numbered.identity(), train.identity(), held_out.identity()}) == 3
    assert np.array_equal(train.read(np.arange(train.tokens)), np.concatenate([train.document(i) for i in range(54)]))


def test_the_seed_draws_others(numbered):
    assert (
        texts_of(numbered.split(0.1)[1]) == texts_of(numbered.split(0.1, seed=0)[1]) != texts_of(numbered.split(0.1, seed=1)[1])
    )


@pytest.mark.parametrize("documents, count", [(2, 1), (300, 256), (300, 257), (1000, 999), (100_000, 2_000), (99_991, 5_003)])
def test_as_many_as_asked_in_a_few_hundred_runs(documents, count):
    chosen = choose(documents, count, 0)
    begins = np.flatnonzero(np.diff(chosen, prepend=False) & chosen)
    assert len(chosen) == documents and chosen.sum() == count and 1 <= len(begins) <= MAX_RUNS
    if documents > 10_000:
        quarters = np.histogram(np.flatnonzero(chosen), bins=4, range=(0, documents))[0]
        assert len(begins) > 200 and quarters.min() > 0.15 * count, "no quarter of the corpus is left out"


def test_a_corpus_that_grows_keeps_what_was_held_out():
    """Otherwise a model that learnt the old corpus would be judged by documents it has seen."""
    before, after = (set(np.flatnonzero(choose(n, n // 10, 0))) for n in (200, 220))
    assert len(before & after) >= 16


def test_masks_go_with_their_tokens(tmp_path):
    from gpubound.data import train_tokenizer

    from .test_tokenizer import CHAT

    corpus = Corpus.build([CHAT, "plain"] * 5, train_tokenizer(["what is new?"], 280), tmp_path / "c", progress=False)
    train, held_out = corpus.split(0.3)
    spans, whole = corpus.offsets(), corpus.read_mask(np.arange(corpus.tokens))
    chosen = choose(10, 3, 0)
    for part, side in ((train, ~chosen), (held_out, chosen)):
        want = np.concatenate([whole[spans[i] : spans[i + 1]] for i in np.flatnonzero(side)])
        assert np.array_equal(part.read_mask(np.arange(part.tokens)), want) and 0 < want.sum() < len(want)


def test_the_end_of_the_corpus_where_documents_are_few(tmp_path):
    corpus = Corpus.build(TEXTS[:3], Bytes(), tmp_path / "c", progress=False)
    train, held_out = split_tail(corpus, 0.2)
    whole = corpus.read(np.arange(corpus.tokens))
    assert held_out.tokens == int(0.2 * corpus.tokens)
    assert np.array_equal(np.concatenate([part.tokens for part in (*train.parts, *held_out.parts)]), whole)
    assert (train.documents, held_out.documents) == (3, 1) and held_out.offsets().tolist() == [0, held_out.tokens]


def test_sentences(numbered):
    for fraction in (0.001, 0.999):
        said = refusal(ValueError, lambda f=fraction: numbered.split(f))
        assert said == message("data/split:sentences", fraction, round(60 * fraction))
    for fraction in (0, 1, -0.1, 1.5, float("nan")):
        assert refusal(ValueError, lambda f=fraction: numbered.split(f)) == message("data/split:sentences.2", repr(fraction))
