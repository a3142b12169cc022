"""Rows, labels, positions and boundaries against a slow oracle in plain Python, for every way of packing."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from gpubound.data import Corpus
from gpubound.data.packing import IGNORED, PACKED_FIELDS, STREAM_FIELDS, BatchCutter, Order, as_stored, pack_corpus, token_ids
from gpubound.data.shards import DocumentRun

CPU = torch.device("cpu")


def corpus_of(tokens, lengths, *masks):
    """A corpus of one part for each mask, with documents of these lengths in each."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    parts = [DocumentRun(run, offsets, mask) for run, mask in zip(np.split(tokens, len(masks)), masks)]
    return Corpus(parts, int(tokens.max()) + 1, "none", None)


def cutter(corpus, plan, order, fields=None):
    fields = fields or (PACKED_FIELDS if plan.tables else STREAM_FIELDS)
    stored = torch.from_numpy(as_stored(np.concatenate([part.tokens for part in corpus.parts])))
    mask = torch.from_numpy(np.concatenate(corpus.masks())).take if corpus.masked else None
    return BatchCutter(plan, order, fields, CPU, stored.take, mask)


def epoch_of(cut, epoch=0):
    return [cut.cut(cut.rows(torch.tensor(epoch * cut.batches + nth))) for nth in range(cut.batches)]


@pytest.mark.parametrize("dtype, top", [(np.uint16, 65_536), (np.uint32, 1_000_000)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_stream_is_cut_end_to_end(dtype, top, masked):
    tokens = np.arange(top - 203, top)
    mask = np.random.default_rng(0).integers(0, 2, 203).astype(np.uint8) if masked else None
    corpus = corpus_of(tokens.astype(dtype), [203], mask)
    cut = cutter(corpus, pack_corpus(corpus, "stream", 10), Order(3, seed=1))
    assert cut.packing.rows == 20 and cut.batches == 6
    assert cut.packing.labels == (200 if mask is None else mask[1:201].sum())
    seen = set()
    for batch in epoch_of(cut):
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist()):
            start = ids[0] - int(tokens[0])
            seen.add(start)
            assert start % 10 == 0 and ids == tokens[start : start + 10].tolist()
            want = [int(tokens[t + 1]) if mask is None or mask[t + 1] else IGNORED for t in range(start, start + 10)]
            assert labels == want
    assert len(seen) == 18, "eighteen rows, each once"


def pieces_of(row):
    """Return the segments of a row as (input ids, labels), and check positions, padding and boundaries."""
    segments, pieces = np.array(row["segment_ids"]), []
    edges = [0, *(np.flatnonzero(np.diff(segments)) + 1), len(segments)]
    for number, (first, end) in enumerate(pairwise(edges)):
        assert row["position_ids"][first:end] == list(range(end - first))
        if segments[first] == -1:
            assert end == len(segments) and set(row["input_ids"][first:]) == {0} and set(row["labels"][first:]) == {IGNORED}
        else:
            assert segments[first] == number
            pieces.append((row["input_ids"][first:end], row["labels"][first:end]))
    cu = row["cu_seqlens"]
    assert cu == edges + [len(segments)] * (len(cu) - len(edges)), "each begin, then the end, repeated"
    return pieces


def expected(offsets, mask, seq, pack, overlong):
    """Return the (first input, number of positions) that a pack uses, in plain Python."""
    for first, end in pairwise(offsets.tolist()):
        if pack == "documents":
            yield from ((at, min(seq, end - 1 - at)) for at in range(first, end - 1, seq))
            continue
        length = min(end - 1 - first, seq)
        at = end - 1 - length if overlong == "truncate_left" else first
        if mask[at + 1 : at + 1 + length].any() and not (overlong == "drop" and end - 1 - first > seq):
            yield at, length


PACKINGS = [
    ("documents", None), ("examples", "truncate"), ("examples", "truncate_left"), ("examples", "drop"), ("none", "truncate"),
    ("none", "drop"),
]  # fmt: skip


@pytest.mark.parametrize("pack, overlong", PACKINGS)
@pytest.mark.parametrize("count, seq", [(4, 8), (40, 16), (200, 7), (12, 4)])
def test_rows_against_an_oracle(pack, overlong, count, seq):
    """Every example that is used is whole, alone in its segment, once in an epoch, and has the labels that its mask gives."""
    rng = np.random.default_rng(count)
    lengths = rng.integers(1, 2 * seq + 1, count)
    tokens = 30_000 + np.arange(2 * lengths.sum())
    masks = [(rng.random(lengths.sum()) < 0.2).astype(np.uint8) for _ in range(2)]
    corpus, mask = corpus_of(tokens.astype(np.uint16), lengths, *masks), np.concatenate(masks)
    plan = pack_corpus(corpus, pack, seq, overlong or "truncate")
    cut, found, valid = cutter(corpus, plan, Order(1, seed=3)), [], 0
    for batch in epoch_of(cut, epoch=2):
        row = {name: value.flatten().tolist() for name, value in batch.items()}
        pieces = pieces_of(row)
        assert 1 <= len(pieces) <= (1 if pack == "none" else seq)
        for ids, labels in pieces:
            at = ids[0] - 30_000
            assert ids == tokens[at : at + len(ids)].tolist()
            assert labels == [int(tokens[t]) if mask[t] else IGNORED for t in range(at + 1, at + 1 + len(ids))]
            found.append((at, len(ids)))
        valid += sum(label != IGNORED for label in row["labels"])
    assert sorted(found) == list(expected(corpus.offsets(), mask, seq, pack, overlong))
    assert (plan.tokens, plan.labels) == (sum(length for _, length in found), valid)
    if pack != "documents":
        dropped = plan.dropped
        assert (plan.examples, plan.examples + dropped) == (len(found), 2 * count)
        offsets = corpus.offsets()
        owners = np.searchsorted(offsets, [at for at, _ in found], side="right")
        assert plan.truncated == (offsets[owners] - offsets[owners - 1] - 1 > seq).sum()


def test_boundaries_of_several_rows_lie_end_to_end():
    corpus = corpus_of(np.arange(24, dtype=np.uint16), [4, 3, 6, 9, 2], None)  # 3, 2, 5, 8 and 1 positions
    cut = cutter(corpus, pack_corpus(corpus, "examples", 8), Order(3, shuffle=False))
    (batch,) = epoch_of(cut)
    flat_segments = torch.cat([batch["segment_ids"] + 10 * torch.arange(3).view(3, 1)]).flatten()
    changes = [0, *(torch.nonzero(flat_segments[1:] != flat_segments[:-1]).flatten() + 1).tolist()]
    cu = batch["cu_seqlens"].tolist()
    assert batch["cu_seqlens"].dtype is torch.int32 and len(cu) == 3 * cut.packing.max_pieces + 1
    assert cu[: len(changes)] == changes and set(cu[len(changes) :]) == {24}
    assert batch["input_ids"][:, 0].tolist() == [0, 4, 13], "rows are in the order of their first document"


def test_pairs_stay_together_and_share_their_fate():
    """Pair 1 is too long, pair 2 has no label in its rejected answer."""
    lengths = [3, 5, 4, 12, 5, 5, 6, 2]
    mask = np.ones(42, np.uint8)
    mask[29:34] = 0
    corpus = corpus_of(np.arange(42, dtype=np.uint16), lengths, mask)
    corpus.group = 2
    plan = pack_corpus(corpus, "pairs", 8, "drop")
    assert (plan.examples, plan.rows, plan.too_long, plan.unlearnable) == (2, 4, 1, 1)
    cut = cutter(corpus, plan, Order(2, seed=1), (*PACKED_FIELDS, "example"))
    found = {(*batch["input_ids"][:, 0].tolist(), *batch["example"].tolist()) for batch in epoch_of(cut)}
    assert found == {(0, 3, 0, 0), (34, 40, 3, 3)}
    assert pack_corpus(corpus, "pairs", 8, "truncate").truncated == 1
    with pytest.raises(ValueError, match="0 rows of 2 tokens, wanted at least micro_batch = 2; take longer rows"):
        corpus.batches(2, 2, "cpu", pack="pairs", overlong="drop")


def test_packing_wastes_little():
    """Lengths as text has them (log-normal, median 200 of 1,024): best fit leaves under 1 % of the places empty."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5.3, 0.9, 20_000), 2, 5000).astype(int)
    corpus = corpus_of(np.zeros(lengths.sum(), np.uint16), lengths, None)
    plan = pack_corpus(corpus, "documents", 1024)
    assert plan.efficiency > 0.99
    assert plan.max_pieces <= 4 * plan.examples / plan.rows, "short documents are spread over the rows"


def test_a_corpus_of_nothing_to_learn_has_no_rows():
    ones, eight = corpus_of(np.zeros(3, np.uint16), [1, 1, 1], None), corpus_of(np.zeros(8, np.uint16), [8], None)
    assert [pack_corpus(ones, pack, 8).rows for pack in ("documents", "examples", "none")] == [0, 0, 0]
    assert (pack_corpus(eight, "stream", 8).rows, pack_corpus(eight, "stream", 7).rows) == (0, 1)


def test_an_epoch_without_shuffling_is_in_order_and_shuffled_ones_differ():
    corpus = corpus_of(np.arange(101, dtype=np.uint16), [101], None)
    plan = pack_corpus(corpus, "stream", 4)
    plain = torch.cat([b["input_ids"] for b in epoch_of(cutter(corpus, plan, Order(5, shuffle=False)), 3)])
    assert torch.equal(plain.flatten(), torch.arange(100))
    cut = cutter(corpus, plan, Order(5, seed=1))
    first, second = (torch.cat([b["input_ids"] for b in epoch_of(cut, epoch)])[:, 0] for epoch in (0, 1))
    assert not torch.equal(first, second) and torch.equal(first.sort().values, second.sort().values)


def test_stored_ids_come_back_whole():
    small, large = np.array([0, 1, 32_767, 32_768, 65_535], np.uint16), np.array([0, 65_536, 2**31 - 1], np.uint32)
    assert token_ids(torch.from_numpy(as_stored(small))).tolist() == small.tolist()
    assert token_ids(torch.from_numpy(as_stored(large))).tolist() == large.tolist()
