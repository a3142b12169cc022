"""CorpusFeed: resident and streamed batches are the same bits; positions resume; the device's count and the host's agree."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpubound import trace
from gpubound.data import Corpus, batches as serve, feed, train_tokenizer
from gpubound.errors import FallbackError, GraphError
from gpubound.graph import capture
from tests.messages import message, refusal, refusals

from .conftest import TEXTS, Bytes, Counts
from .test_tokenizer import CHAT


def same(a, b):
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def take(served, count):
    return [served.take() for _ in range(count)]


@pytest.mark.parametrize("pack, shuffle", [("stream", True), ("stream", False), ("documents", True), ("examples", True)])
def test_resident_and_streamed_batches_are_the_same(corpus, pack, shuffle):
    options = {"seed": 5, "shuffle": shuffle, "pack": pack}
    resident = corpus.batches(24, 3, "cpu", **options)
    streamed = corpus.batches(24, 3, "cpu", mode="ring", **options)
    assert (resident.mode, streamed.mode) == ("resident", "ring") and len(resident) == len(streamed) > 10
    for _ in range(3):
        pairs = list(zip(resident, streamed, strict=True))
        assert len(pairs) == len(resident) and all(same(a, b) for a, b in pairs)


def test_masked_chats_resident_and_streamed(tmp_path):
    texts = [CHAT, "plain text", [*CHAT, *CHAT[1:]]] * 6
    corpus = Corpus.build(texts, train_tokenizer(["what is new?"], 280), tmp_path / "c", shard_tokens=200, progress=False)
    for pack in ("stream", "examples", "none"):
        both = [corpus.batches(64, 2, "cpu", pack=pack, mode=mode) for mode in ("resident", "ring")]
        batches = list(zip(*both, strict=True))
        assert all(same(a, b) for a, b in batches)
        ignored = sum((a["labels"] == -100).sum().item() for a, _ in batches)
        assert 0 < ignored < sum(a["labels"].numel() for a, _ in batches)


def test_own_labels_are_the_tokens_that_stand_there(tmp_path):
    """A prompt's token is no label, wherever in a row it stands; the next token's mask, a place further on, has no say."""
    corpus = Corpus.build([CHAT] * 9, train_tokenizer(["what is new?"], 280), tmp_path / "c", progress=False)
    for mode in ("resident", "ring"):
        served = list(corpus.batches(7, 1, "cpu", shuffle=False, labels="own", mode=mode))
        ids, labels = (torch.cat([batch[name][0] for batch in served]) for name in ("input_ids", "labels"))
        learnt = torch.from_numpy(corpus.read_mask(np.arange(len(ids)))) == 1
        assert torch.equal(labels, torch.where(learnt, ids, -100)) and 0 < learnt.sum() < len(ids)


@pytest.mark.parametrize("mode, pack", [("resident", "stream"), ("ring", "stream"), ("resident", "examples"), ("ring", "none")])
@pytest.mark.parametrize("at", [0, 1, 17, 70, 100])
def test_resumes_in_the_middle_of_an_epoch(corpus, mode, pack, at):
    def make():
        return corpus.batches(16, 2, "cpu", seed=3, mode=mode, pack=pack)

    whole, first, second = make(), make(), make()
    assert len(whole) < 70
    expected = take(whole, 110)
    take(first, at)
    saved = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(saved)
    assert all(same(a, b) for a, b in zip(take(second, 110 - at), expected[at:], strict=True))


def test_each_epoch_is_a_new_permutation_of_all_examples(corpus):
    served = corpus.batches(40, 1, "cpu", pack="none", fields=("example",), seed=4)
    epochs = [[batch["example"].item() for batch in served] for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(60))] * 3 and len({tuple(epoch) for epoch in epochs}) == 3
    assert (served.packing.rows, served.packing.examples, len(served)) == (60, 60, 60)


def test_a_notice_says_what_became_of_the_examples(corpus, said):
    served = corpus.batches(16, 2, "cpu", pack="examples", overlong="drop")
    assert (served.packing.examples, served.packing.too_long) == (25, 35)
    assert message("data/batches:what_became_of_examples").within(said())


def drawn(feed, rounds, fetch):
    batches = [feed.fetch() if fetch else feed.take() for _ in range(rounds)]
    if fetch:
        feed.fetched(rounds)
    return batches


@pytest.mark.slow
@pytest.mark.parametrize("pack", ["stream", "documents"])
@pytest.mark.parametrize("mode, fetch", [("resident", False), ("resident", True), ("ring", False)])
def test_ranks_share_one_sequence_and_any_number_of_them_goes_on_with_it(corpus, pack, mode, fetch):
    """Beside the sequence of one rank, over three epochs, whose length is no multiple of the ranks'."""

    def make(rank=0, world=1):
        return corpus.batches(9, 1, "cpu", seed=3, mode=mode, pack=pack, rank=rank, world=world)

    length = len(make())
    worlds = [world for world in (2, 3, 4, 5, 7) if length % world]
    expected, found, saved = take(make(), 4 * length), [], None
    while len(found) < 3 * length:
        world = [1, *worlds][len(found) % (1 + len(worlds))]
        feeds = [make(rank, world) for rank in range(world)]
        for of_rank in feeds if saved else ():
            of_rank.load_state_dict(saved)
        turns = zip(*(drawn(feed, 1 + length // 4, fetch) for feed in feeds), strict=True)
        found += [batch for turn in turns for batch in turn]
        states = [json.loads(json.dumps(feed.state_dict())) for feed in feeds]
        saved = states[0]
        assert states == [saved] * world and saved["epoch"] * length + saved["batch"] == len(found)
    assert all(same(a, b) for a, b in zip(found, expected))


def test_a_loop_over_an_epoch_is_as_long_on_every_rank(corpus):
    """Or one of them would wait for the others for ever. The last round may reach into the next epoch: its loop is shorter."""
    length, rounds = len(corpus.batches(16, 2, "cpu")), []
    for rank in range(2):
        feed = corpus.batches(16, 2, "cpu", rank=rank, world=2)
        rounds.append([sum(1 for _ in feed) for _ in range(2)])
    assert rounds == [[length - length // 2, length // 2]] * 2


def test_fetch_draws_the_same_batches_by_the_devices_count(corpus):
    drawn, fetched = corpus.batches(16, 2, "cpu"), corpus.batches(16, 2, "cpu")
    for i in range(2 * len(drawn) + 3):
        assert same(drawn.take(), fetched.fetch()), i
    assert fetched.counter.item() == 2 * len(drawn) + 3 and fetched.counter.dtype is torch.int64
    assert fetched.state_dict()["batch"] == 0, "the host has not been told"
    fetched.fetched(2 * len(drawn) + 3)
    assert fetched.state_dict() == drawn.state_dict() and fetched.state_dict()["epoch"] == 2
    assert same(fetched.take(), drawn.fetch()), "either may follow the other"
    assert fetched.stats().batches == drawn.stats().batches + 1


def test_a_seek_sets_the_device_after_draws_that_are_not_to_count(corpus):
    served, other = corpus.batches(16, 2, "cpu"), corpus.batches(16, 2, "cpu")
    take(other, 5)
    for _ in range(9):
        served.fetch()
    served.load_state_dict(other.state_dict())
    assert same(served.take(), other.take()) and served.counter.item() == 6


def test_fetching_inside_a_captured_function(corpus):
    """On the CPU a capture runs eagerly, behind the same checks: what fetch changes must be found and put back."""
    served, other = corpus.batches(16, 2, "cpu"), corpus.batches(16, 2, "cpu")
    weight = torch.ones(())

    def step():
        return served.fetch()["input_ids"] * weight

    captured = capture(step)
    for _ in range(3):
        assert torch.equal(captured(), other.take()["input_ids"].float())
    served.fetched(3)
    assert served.state_dict() == other.state_dict() and same(served.take(), other.take())


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation._schema.name)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("pack", ["stream", "documents"])
def test_a_fetch_reads_nothing_on_the_host_and_has_no_shape_that_hangs_on_data(corpus, pack):
    served = corpus.batches(16, 2, "cpu", pack=pack)
    with Operations() as operations:
        served.fetch()
    forbidden = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal"}
    assert not forbidden.intersection(operations.names) and len(operations.names) < 120


def test_the_feed_draws_from_a_memory_that_nobody_writes_into(corpus):
    served = corpus.batches(16, 2, "cpu", shuffle=False)
    first = served.take()
    first["input_ids"].zero_()
    first["labels"].zero_()
    served.seek(0)
    assert served.take()["input_ids"].any()


def test_a_resident_step_copies_nothing(corpus):
    with trace.listening(counts := Counts()):
        served = corpus.batches(16, 2, "cpu", pack="documents")
        list(served)
        assert counts["h2d_bytes"] == 0 and served.stats().bytes_copied == 0 and served.stats().hit_rate == 1.0
        streamed = corpus.batches(16, 2, "cpu", mode="ring")
        list(streamed)
    assert counts["h2d_bytes"] == streamed.stats().bytes_copied == len(streamed) * 2 * 2 * 16 * 8


def test_through_the_general_door(corpus):
    served, direct = feed(corpus, "cpu", seq=16, batch_size=2, shuffle=True, seed=1), corpus.batches(16, 2, "cpu", seed=1)
    assert same(served.take(), direct.take()) and served.state_dict() == direct.state_dict()
    assert refusal(ValueError, lambda: feed(corpus, "cpu")) == message("data/batches:through_the_general_door")
    refusals("data/batches:through_the_general_door.2", lambda: feed(corpus, "cpu", seq=8, batch_size=2, bucket="pow2"))


def test_too_large_for_the_budget_or_the_memory_it_streams(corpus, said, monkeypatch):
    served = corpus.batches(16, 2, "cpu", budget="1 kB")
    assert served.mode == "ring"
    assert said() == message("data/batches:too_large_for_the_budget")
    refusals("data/batches:too_large_for_the_budget.2", lambda: corpus.batches(16, 2, "cpu", budget="1 kB", mode="resident"))
    assert refusal(GraphError, served.fetch) == message("data/batches:too_large_for_the_budget.3")

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(serve, "_to_device", full)
    assert same(corpus.batches(16, 2, "cpu").take(), served.take())
    assert said() == message("data/batches:too_large_for_the_budget.4")
    with trace.strict(), pytest.raises(FallbackError):
        corpus.batches(16, 2, "cpu")


def test_sentences(corpus):
    wrong = [
        (0, 2, {}), (10**12, 2, {}), (8, 2.0, {}), (8, 2, {"seed": 1.5}), (8, 2, {"rank": 1}), (8, 2, {"rank": None}),
        (8, 2, {"slots": 0, "mode": "ring"}),
        (8, 2, {"fields": "labels"}), (8, 2, {"pack": "tight"}), (8, 2, {"pack": "pairs"}),
        (8, 2, {"pack": "examples", "overlong": "split"}),
        (8, 2, {"mode": "direct"}), (8, 2, {"labels": "own", "pack": "documents"}),
        (8, 2, {"fields": ("input_ids", "cu_seqlens")}), (500, 4, {}),
    ]  # fmt: skip
    calls = [partial(corpus.batches, seq, micro_batch, "cpu", **options) for seq, micro_batch, options in wrong]
    refusals("data/batches:refused", *calls)


def test_a_position_in_another_corpus_is_refused(corpus, tmp_path):
    other = Corpus.build(TEXTS[:50], Bytes(), tmp_path / "o", progress=False)
    with pytest.raises(ValueError, check=message("data/batches:a_position_in_another_co")):
        other.batches(16, 2, "cpu").load_state_dict(corpus.batches(16, 2, "cpu").state_dict())


def test_a_position_in_a_corpus_of_other_tokens_in_documents_of_the_same_lengths_is_refused(corpus, tmp_path):
    saved = corpus.batches(16, 2, "cpu").state_dict()
    other = Corpus.build([text.upper() for text in TEXTS], Bytes(), tmp_path / "o", shard_tokens=300, progress=False)
    for part in (other, other.split(0.1)[0]):
        state = (corpus if part is other else corpus.split(0.1)[0]).batches(16, 2, "cpu").state_dict()
        with pytest.raises(ValueError, check=message("data/batches:a_position_in_a_corpus_o")):
            part.batches(16, 2, "cpu").load_state_dict(state)
    again = Corpus.build(TEXTS, Bytes(), tmp_path / "a", shard_tokens=300, progress=False)
    again.batches(16, 2, "cpu").load_state_dict(saved)


def test_masks_are_of_the_contents(tmp_path):
    tokenizer = train_tokenizer(["what is new?"], 280)
    some, every = (
        Corpus.build(["plain", CHAT], tokenizer, tmp_path / train_on, train_on=train_on, progress=False)
        for train_on in ("assistant", "all")
    )
    assert some.document(1).tolist() == every.document(1).tolist() and some.contents != every.contents
