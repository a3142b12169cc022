"""Rows of several lengths: every example once an epoch, in a row that it fits, with as little padding as possible."""

from itertools import combinations

import numpy as np
import pytest

from gpubound.data import Corpus
from gpubound.data.packing import pack_buckets, row_lengths
from gpubound.data.shards import DocumentRun
from gpubound.errors import GraphError
from tests.messages import message, refusal


def corpus_of(lengths, pairs=False):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    run, kind = DocumentRun(np.arange(offsets[-1], dtype=np.uint32), offsets, None), "preferences" if pairs else "texts"
    return Corpus([run], 1 << 20, "none", None, kind=kind)


LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 1, 301), 2, 129).astype(int)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_lengths_leave_the_least_padding(count):
    """Of all choices, for rows of up to 80 in steps of 8."""
    longest = np.random.default_rng(count).integers(1, 74, 50)
    steps = range(8, 81, 8)
    costs = [
        sum(min(length for length in lengths if length >= n) for n in longest)
        for k in range(1, count + 1)
        for lengths in combinations(steps, k)
        if lengths[-1] >= longest.max()
    ]
    chosen = row_lengths(longest, 80, count)
    assert len(chosen) <= count and list(chosen) == sorted(set(chosen))
    assert sum(min(length for length in chosen if length >= n) for n in longest) == min(costs)


@pytest.mark.parametrize("mode", ["resident", "ring"])
@pytest.mark.parametrize("pack", ["none", "pairs"])
def test_every_example_is_in_a_row_that_it_fits(pack, mode):
    lengths = LENGTHS[:300]
    corpus, group = corpus_of(lengths, pairs=pack == "pairs"), 2 if pack == "pairs" else 1
    served = corpus.batches(128, 4, "cpu", pack=pack, buckets=3, seed=1, mode=mode, fields=("input_ids", "labels", "example"))
    sizes = [part.seq for part in served.packing.parts]
    assert 2 <= len(sizes) <= 3 and served.packing.rows == 300
    orders, starts = [], corpus.offsets()
    for _ in range(2):
        seen = []
        for batch in served:
            assert batch["input_ids"].shape == batch["labels"].shape == (4, batch["input_ids"].shape[1])
            width = batch["input_ids"].shape[1]
            for row, number in enumerate(batch["example"].tolist()):
                document = group * number + row % group
                kept = min(lengths[document] - 1, width)
                ids, labels = batch["input_ids"][row].tolist(), batch["labels"][row].tolist()
                first = int(starts[document])
                assert width in sizes and (kept == lengths[document] - 1 or width == 128)
                assert ids == [*range(first, first + kept)] + [0] * (width - kept)
                assert labels == [*range(first + 1, first + 1 + kept)] + [-100] * (width - kept)
                seen.append(document)
        assert len(seen) == len(set(seen)) == len(served) * 4 > 300 - 4 * group
        orders.append(seen)
    assert orders[0] != orders[1]
    assert served.packing.efficiency > 1.5 * corpus.batches(128, 4, "cpu", pack=pack).packing.efficiency


def test_it_continues_in_the_middle_of_an_epoch():
    def make():
        return corpus_of(LENGTHS).batches(128, 3, "cpu", pack="none", buckets=(16, 40, 128), seed=4)

    whole, first, second = make(), make(), make()
    expected = [whole.take()["input_ids"].tolist() for _ in range(2 * len(whole) + 5)]
    for at in (7, len(whole) + 3):
        first.seek(0)
        for _ in range(at):
            first.take()
        second.load_state_dict(first.state_dict())
        assert [second.take()["input_ids"].tolist() for _ in range(9)] == expected[at : at + 9]
    plain = corpus_of(LENGTHS).batches(128, 3, "cpu", pack="none", seed=4)
    assert "buckets" in refusal(ValueError, lambda: plain.load_state_dict(first.state_dict()))


@pytest.mark.parametrize("mode", ["resident", "ring"])
def test_ranks_share_steps_of_one_length(mode):
    """Any number of ranks makes the steps of one rank, in two epochs, and each rank can resume."""

    def feed(rank=0, world=1):
        options = {"buckets": (16, 40, 128), "accumulate": 4, "seed": 4, "mode": mode, "rank": rank, "world": world}
        return corpus_of(LENGTHS).batches(128, 3, "cpu", pack="none", fields=("input_ids", "example"), **options)

    alone = feed()
    batches = [alone.take() for _ in range(2 * len(alone))]
    widths = [batch["input_ids"].shape[1] for batch in batches]
    assert len(alone) % 4 == 0 and all(len(set(widths[at : at + 4])) == 1 for at in range(0, len(widths), 4))
    assert {*widths} == {16, 40, 128} and widths[: len(alone)] != widths[len(alone) :]
    for epoch in (batches[: len(alone)], batches[len(alone) :]):
        seen = [number for batch in epoch for number in batch["example"].tolist()]
        assert len(seen) == len(set(seen)) == 3 * len(alone) > len(LENGTHS) - 12
    for world in (2, 4):
        for rank in range(world):
            one, resumed = feed(rank, world), feed(rank, world)
            assert len(one) == len(alone)
            taken = [one.take() for _ in range(5)]
            resumed.load_state_dict(one.state_dict())
            taken += [resumed.take() for _ in range(len(batches) // world - 5)]
            assert all(got["input_ids"].equal(want["input_ids"]) for got, want in zip(taken, batches[rank::world], strict=True))
    other = corpus_of(LENGTHS).batches(128, 3, "cpu", pack="none", buckets=(16, 40, 128), accumulate=2, seed=4)
    assert "accumulate" in refusal(ValueError, lambda: other.load_state_dict(alone.state_dict()))


def test_examples_that_do_not_fill_a_batch_are_in_longer_rows():
    packing = pack_buckets(corpus_of([5] * 7 + [20] * 6 + [60]), "none", 64, "truncate", (8, 32, 64), 4)
    assert [(part.seq, part.rows) for part in packing.parts] == [(8, 4), (64, 10)], "one long example alone makes no batch"
    assert packing.positions == 4 * 8 + 10 * 64 and packing.tokens == 7 * 4 + 6 * 19 + 59
    assert str(packing).startswith("14 examples in 4 rows of 8 and 10 rows of 64: ")


def test_refusals():
    corpus = corpus_of(LENGTHS)
    for buckets in (0, (), (64, 32), (16, 64), "pow2", True, (0, 128)):
        assert refusal(ValueError, lambda b=buckets: corpus.batches(128, 3, "cpu", pack="none", buckets=b)).startswith(
            f"batches: buckets: got {buckets!r} with pack='none', wanted a number of lengths"
        )
    of_one = {"pack": "examples", "buckets": 2}
    assert "batches: buckets: got 2" in refusal(ValueError, lambda: corpus.batches(128, 3, "cpu", **of_one))
    for accumulate in (1, 3, 0, 2.0):
        options = {"pack": "none", "buckets": 2, "world": 2, "accumulate": accumulate}
        refused = refusal(ValueError, lambda o=options: corpus.batches(128, 3, "cpu", **o))
        assert f"accumulate: got {accumulate!r} for 2 ranks" in refused
    assert "accumulate = 200" in refusal(
        ValueError, lambda: corpus.batches(128, 3, "cpu", pack="none", buckets=2, accumulate=200)
    )
    fetch = corpus.batches(128, 3, "cpu", pack="none", buckets=2).fetch
    assert refusal(GraphError, fetch) == message("data/buckets:fetch_has_one_shape")
