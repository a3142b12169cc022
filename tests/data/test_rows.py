"""Rows, labels, positions and boundaries against a slow oracle in plain Python, for both ways of packing."""

from collections import Counter

import numpy as np
import pytest
import torch

from gpubound.data.rows import (
    FIELDS,
    IGNORED,
    STREAM_FIELDS,
    BatchCutter,
    Order,
    as_stored,
    pack_documents,
    pack_stream,
    token_ids,
)

CPU = torch.device("cpu")
PAD = 7


def lengths_of(seed, count, longest):
    return np.random.default_rng(seed).integers(1, longest + 1, count)


def stored(lengths, top):
    """Tokens that tell where they are from, ending at `top` - 1, and their documents' offsets."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return np.arange(top - offsets[-1], top), offsets


def cutter(tokens, plan, order, fields=None, mask=None, dtype=np.uint16):
    fields = fields or (FIELDS if plan.tables else STREAM_FIELDS)
    held = torch.from_numpy(as_stored(tokens.astype(dtype)))
    return BatchCutter(plan, order, fields, PAD, CPU, held.take, torch.from_numpy(mask).take if mask is not None else None)


def epoch_of(cut, epoch=0):
    return [cut.cut(cut.rows(torch.tensor(epoch * cut.batches + nth))) for nth in range(cut.batches)]


@pytest.mark.parametrize("dtype, top", [(np.uint16, 65_536), (np.uint32, 1_000_000)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_stream_is_cut_end_to_end(dtype, top, masked):
    tokens, _ = stored([203], top)
    mask = np.random.default_rng(0).integers(0, 2, 203).astype(np.uint8) if masked else None
    cut = cutter(tokens, pack_stream(203, 10), Order(3, seed=1, shuffle=True), ("input_ids", "labels", "valid"), mask, dtype)
    assert cut.packing.rows == 20 and cut.batches == 6
    seen = set()
    for batch in epoch_of(cut):
        valid = 0
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist()):
            start = ids[0] - int(tokens[0])
            seen.add(start)
            assert start % 10 == 0 and ids == tokens[start : start + 10].tolist()
            want = [int(tokens[t + 1]) if mask is None or mask[t + 1] else IGNORED for t in range(start, start + 10)]
            assert labels == want
            valid += sum(label != IGNORED for label in want)
        assert batch["valid"].item() == valid
    assert len(seen) == 18, "eighteen rows, each once"


@pytest.mark.parametrize("count, seq, most", [(1, 8, 8), (40, 16, 16), (60, 16, 3), (200, 7, 7), (30, 50, 50), (12, 4, 1)])
def test_packed_documents_against_an_oracle(count, seq, most):
    lengths = lengths_of(count, count, 2 * seq)
    tokens, offsets = stored(lengths, 65_536)
    mask = np.random.default_rng(1).integers(0, 2, len(tokens)).astype(np.uint8)
    plan = pack_documents(offsets, seq, most)
    if plan.rows == 0:
        return
    cut = cutter(tokens, plan, Order(1, shuffle=True), mask=mask)
    base, learnt = int(tokens[0]), Counter()
    document_of = np.repeat(np.arange(count), lengths)
    for batch in epoch_of(cut):
        row = {name: value[0].tolist() for name, value in batch.items() if name not in ("cu_seqlens", "valid")}
        boundaries, place, pieces = [], 0, 0
        while place < seq:
            boundaries.append(place)
            if row["segment_ids"][place] == -1:
                rest = seq - place
                assert row["input_ids"][place:] == [PAD] * rest and row["labels"][place:] == [IGNORED] * rest
                assert row["position_ids"][place:] == list(range(rest)) and row["segment_ids"][place:] == [-1] * rest
                break
            end = place
            while end < seq and row["segment_ids"][end] == pieces:
                end += 1
            token = row["input_ids"][place] - base
            assert row["input_ids"][place:end] == tokens[token : token + end - place].tolist()
            assert row["position_ids"][place:end] == list(range(end - place))
            assert document_of[token] == document_of[token + end - place], "a label from another document"
            assert row["labels"][place:end] == [
                int(tokens[t + 1]) if mask[t + 1] else IGNORED for t in range(token, token + end - place)
            ]
            learnt.update(range(token + 1, token + 1 + end - place))
            pieces, place = pieces + 1, end
        assert pieces <= most
        cu = batch["cu_seqlens"].tolist()
        assert len(cu) == plan.max_pieces + 1 and cu == boundaries + [seq] * (len(cu) - len(boundaries))
        assert batch["valid"].item() == sum(label != IGNORED for label in row["labels"])
    firsts = set(offsets[:-1].tolist())
    assert learnt == Counter({t: 1 for t in range(len(tokens)) if t not in firsts}), "every token but the first of each, once"


def test_boundaries_of_several_rows_lie_end_to_end():
    tokens, offsets = stored([4, 3, 6, 9, 2], 1000)  # 3, 2, 5, 8 and 1 places
    cut = cutter(tokens, pack_documents(offsets, 8, 8), Order(3, shuffle=False))
    (batch,) = epoch_of(cut)
    flat_segments = torch.cat([batch["segment_ids"] + 10 * torch.arange(3).view(3, 1)]).flatten()
    changes = [0, *(torch.nonzero(flat_segments[1:] != flat_segments[:-1]).flatten() + 1).tolist()]
    cu = batch["cu_seqlens"].tolist()
    assert batch["cu_seqlens"].dtype is torch.int32 and len(cu) == 3 * cut.packing.max_pieces + 1
    assert cu[: len(changes)] == changes and set(cu[len(changes) :]) == {24}


def test_packing_wastes_little():
    """Lengths as text has them (log-normal, median 200 of 1,024): best fit leaves under 1 % of the places empty."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5.3, 0.9, 20_000), 2, 5000).astype(int)
    plan = pack_documents(np.concatenate([[0], np.cumsum(lengths)]), 1024, 1024)
    assert 0 <= 1 - (lengths - 1).sum() / (plan.rows * 1024) < 0.01


def test_a_corpus_of_nothing_to_learn_has_no_rows():
    assert pack_documents(np.array([0, 1, 2, 3]), 8, 8).rows == 0 and pack_stream(8, 8).rows == 0
    assert pack_stream(9, 8).rows == 1


def test_an_epoch_without_shuffling_is_in_order_and_shuffled_ones_differ():
    tokens, _ = stored([101], 5000)
    plan = pack_stream(101, 4)
    plain = torch.cat([b["input_ids"] for b in epoch_of(cutter(tokens, plan, Order(5, shuffle=False)), 3)])
    assert torch.equal(plain.flatten(), torch.from_numpy(tokens[:100]))
    cut = cutter(tokens, plan, Order(5, seed=1))
    first, second = (torch.cat([b["input_ids"] for b in epoch_of(cut, epoch)])[:, 0] for epoch in (0, 1))
    assert not torch.equal(first, second) and torch.equal(first.sort().values, second.sort().values)


def test_stored_ids_come_back_whole():
    small, large = np.array([0, 1, 32_767, 32_768, 65_535], np.uint16), np.array([0, 65_536, 2**31 - 1], np.uint32)
    assert token_ids(torch.from_numpy(as_stored(small))).tolist() == small.tolist()
    assert token_ids(torch.from_numpy(as_stored(large))).tolist() == large.tolist()
