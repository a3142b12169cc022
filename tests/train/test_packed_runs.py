"""Runs on chats as whole examples: what is in a row, what is learnt, and a resumed one."""

import json
import math
from functools import partial

import pytest

from gpubound import trace
from gpubound.data import train_tokenizer
from gpubound.errors import DataError, FallbackError
from gpubound.train.objectives import Objective
from gpubound.train.prepare import check_launch, prepare
from gpubound.train.recipe import Recipe
from gpubound.train.stages import lengths_of
from tests.messages import refusal

from .runs import CHATS, assert_same, recipe, texts, train


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    train_tokenizer(texts(), 300).save(folder / "tokenizer")
    return folder


def of_chats(chats, out, **changes):
    options = {"data": (str(chats / "chats.jsonl"),), "tokenizer": str(chats / "tokenizer"), "seq": 256, "accumulate": 1}
    return recipe("", out, **options | {"micro_batch": 2, "steps": 3} | changes)


def examples_of(batch, tokenizer) -> list[tuple[str, str]]:
    """(text, learnt text) of each example in the rows of a batch."""
    found = []
    for ids, labels, segments in zip(batch["input_ids"], batch["labels"], batch.get("segment_ids", 0 * batch["labels"])):
        for number in range(int(segments.max()) + 1):
            here = segments == number
            learnt = labels[here]
            found.append((tokenizer.decode(ids[here].tolist()), tokenizer.decode(learnt[learnt >= 0].tolist())))
    return found


@pytest.mark.parametrize("pack, train_on", [("auto", "assistant"), ("none", "assistant"), ("examples", "all")])
def test_every_example_in_a_row_is_whole(chats, tmp_path, pack, train_on):
    """Each has its prompt from the beginning, and of it the answer alone is learnt, or all."""
    run = prepare(of_chats(chats, tmp_path, pack=pack, train_on=train_on), progress=False)
    assert run.stage.recipe.pack == ("examples" if pack == "auto" else pack)
    batch, whole = run.feed.take(), {chat[0]["content"]: chat[1]["content"] for chat in CHATS}
    found = examples_of(batch, run.tokenizer)
    assert len(found) > 2 if pack != "none" else len(found) == 2
    for text, learnt in found:
        (question,) = [question for question in whole if question in text]
        assert whole[question] in text and whole[question] in learnt and (question in learnt) == (train_on == "all")


@pytest.mark.slow
def test_epochs_of_packed_rows_and_what_they_are_evaluated_on(chats, tmp_path):
    run, records = train(of_chats(chats, tmp_path, steps=None, epochs=2.0, eval_every=2))
    (held_out,) = run.stage.eval_sets
    assert held_out.corpus.documents == 8 and run.stage.training.documents == 52
    assert run.finished and run.done == math.ceil(2 * len(run.feed)) and math.isfinite(records[-1]["held_out"])
    assert held_out.batches * held_out.micro_batch == held_out.rows, "all of a small set"


def test_a_named_template_is_that_of_the_run(chats, tmp_path):
    run = prepare(of_chats(chats, tmp_path, chat_template="zephyr"), progress=False)
    ((text, learnt), *_) = examples_of(run.feed.take(), run.tokenizer)
    assert "<|user|>" in text and "it is" in learnt


def test_texts_are_a_stream(corpus, tmp_path):
    run = prepare(recipe(corpus, tmp_path), progress=False)
    assert run.stage.recipe.pack == "stream" and run.feed.take().keys() == {"input_ids", "labels"}


def test_a_model_that_cannot_keep_examples_apart_gets_one_a_row(chats, tmp_path):
    """With a fallback that is counted; what was asked for explicitly is refused."""
    recurrent = partial(of_chats, chats, tmp_path, model="richards-tiny+rg_lru")
    trace.fallbacks.clear()
    run = prepare(recurrent(), progress=False)
    assert run.stage.recipe.pack == "none" and run.feed.take().keys() == {"input_ids", "labels"}
    ((what, why),) = trace.fallbacks
    assert what == "packed rows" and "rg_lru" in why
    for pack in ("examples", "documents"):
        assert "rg_lru" in refusal(ValueError, lambda pack=pack: prepare(recurrent(pack=pack), progress=False))
    with trace.strict(), pytest.raises(FallbackError, match="packed rows"):
        prepare(recurrent(), progress=False)


def of_several_lengths(folder) -> str:
    lines = [{"prompt": texts()[n % 12][: 20 + 5 * n], "completion": " the end"} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder / "rows.jsonl")


@pytest.mark.slow
def test_rows_of_several_lengths(chats, tmp_path, said):
    """An epoch has every example once; a resumed run goes on in its middle."""
    common = {"data": (of_several_lengths(tmp_path),), "pack": "none", "buckets": 3, "steps": None, "epochs": 2.0}
    whole, _ = train(of_chats(chats, tmp_path / "whole", **common))
    parts = whole.feed.packing.parts
    assert len(parts) == 3 and whole.steps == 2 * sum(part.rows // 2 for part in parts) == 2 * len(whole.feed)
    padded = Recipe(**vars(whole.recipe) | {"out": str(tmp_path / "padded"), "buckets": 0})
    assert whole.stage.packing.efficiency > 1.5 * prepare(padded, progress=False).stage.packing.efficiency
    assert {each.recipe.buckets for each in whole.stage.eval_sets} == {0} and said().count(" rows of ") > 3
    train(of_chats(chats, tmp_path / "halved", **common), until=len(whole.feed) + 3)
    second, _ = train(of_chats(chats, tmp_path / "halved", **common), resume=True)
    assert_same(second, whole)
    assert "buckets" in refusal(ValueError, lambda: prepare(of_chats(chats, tmp_path / "no", buckets=2), progress=False))
    wide = of_chats(chats, tmp_path / "wide", **common | {"accumulate": 50})
    assert "accumulate = 50" in refusal(DataError, lambda: prepare(wide, progress=False))
    of_ranks = of_chats(chats, tmp_path / "no", pack="none", buckets=2, accumulate=3)
    assert "2 ranks" in refusal(ValueError, lambda: check_launch(of_ranks, resume=False, processes=2))


@pytest.mark.gpu
def test_each_length_of_rows_is_captured_once(chats, tmp_path):
    common = {"data": (of_several_lengths(tmp_path),), "pack": "none", "buckets": 3, "steps": None, "epochs": 2.0}
    run, records = train(of_chats(chats, tmp_path / "run", **common, device="cuda", graph="require"))
    assert len(run.feed.packing.parts) == 3 and len(run.step.captured) == 3 + 1  # and the update
    assert not any(record.get("syncs") for record in records)


@pytest.mark.parametrize("pack, seq", [("none", 64), ("examples", 512)])
def test_default_rows_are_no_longer_than_the_longest_example(chats, tmp_path, pack, seq):
    run = prepare(of_chats(chats, tmp_path, seq=512, pack=pack, validation=0.0), progress=False)
    assert run.stage.recipe.seq == seq and not run.feed.packing.truncated


def test_what_does_not_fit_is_refused(chats, tmp_path, monkeypatch):
    def refused(kind=ValueError, out=tmp_path, **changes):
        return refusal(kind, lambda: prepare(of_chats(chats, out, **changes), progress=False))

    assert "chat_template" in refused(chat_template="nowhere.jinja")
    assert "alpacca" in refused(format="alpacca")
    assert "validation" in refused(DataError, data=(str(few(chats)),), out=tmp_path / "few")
    monkeypatch.setattr(Objective, "kind", "preferences")
    assert "preferences" in refused()


def few(chats):
    (chats / "few.jsonl").write_text(json.dumps({"messages": CHATS[0]}) + "\n")
    return chats / "few.jsonl"


def test_default_rows_are_as_long_as_long_examples(chats, tmp_path, said):
    """With as many tokens in a micro-batch; --seq and --micro-batch are left as they are."""
    (tmp_path / "long.jsonl").write_text(
        "".join(json.dumps({"prompt": texts()[n][:800], "completion": " the end"}) + "\n" for n in range(10))
    )
    long = {"model": "tiny", "data": (str(tmp_path / "long.jsonl"),), "tokenizer": str(chats / "tokenizer"), "device": "cpu"}
    recipe = partial(Recipe, **long, validation=0.0, steps=1)
    stage = prepare(recipe(out=str(tmp_path / "run")), progress=False).stage
    assert stage.recipe.seq == 1024 and stage.recipe.micro_batch == 4 and "longer than 512" in said()
    given = prepare(recipe(out=str(tmp_path / "given"), seq=256, micro_batch=2, overlong="truncate_left"), progress=False)
    assert (given.stage.recipe.seq, given.stage.recipe.micro_batch) == (256, 2) and given.feed.packing.truncated == 10


@pytest.mark.parametrize("pack", ["examples", "none", "stream"])
def test_the_work_of_packed_rows_is_that_of_their_tokens(chats, tmp_path, pack):
    """Padding is none, and attention goes over an example."""
    stage = prepare(of_chats(chats, tmp_path, pack=pack, validation=0.0), progress=False).stage
    corpus = stage.training
    lengths = [len(corpus.document(number)) - 1 for number in range(corpus.documents)]
    if pack == "stream":
        lengths = [256] * stage.packing.rows
    assert sorted(lengths_of(stage.packing)) == sorted(lengths)
    assert stage.attended == pytest.approx(sum(n * n for n in lengths) / sum(lengths))
    assert stage.tokens_per_step == pytest.approx(2 * sum(lengths) / stage.packing.rows)
