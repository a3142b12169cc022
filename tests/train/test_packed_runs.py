"""Runs on chats as whole examples: what is in a row, what is learnt, and a resumed one."""

import json
import math
from functools import partial

import pytest

from gpubound.data import train_tokenizer
from gpubound.errors import DataError
from gpubound.train.objectives import Objective
from gpubound.train.prepare import prepare
from gpubound.train.recipe import Recipe
from gpubound.train.stages import lengths_of
from tests.messages import refusal

from .runs import CHATS, assert_same, build_corpus, recipe, texts, train


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


def test_epochs_of_packed_rows_and_what_they_are_evaluated_on(chats, tmp_path):
    run, records = train(of_chats(chats, tmp_path, steps=None, epochs=2.0, eval_every=2))
    (held_out,) = run.stage.eval_sets
    assert held_out.corpus.documents == 8 and run.stage.training.documents == 52
    assert run.finished and run.done == math.ceil(2 * len(run.feed)) and math.isfinite(records[-1]["held_out"])
    assert held_out.batches * held_out.micro_batch == held_out.rows, "all of a small set"


def test_stopped_in_the_middle_of_an_epoch(chats, tmp_path):
    common = {"steps": None, "epochs": 2.0, "seq": 128, "micro_batch": 4, "train_on": "last", "overlong": "drop"}
    whole, _ = train(of_chats(chats, tmp_path / "whole", **common))
    assert len(whole.feed) >= 4
    train(of_chats(chats, tmp_path / "halved", **common), until=len(whole.feed) + 2)
    second, _ = train(of_chats(chats, tmp_path / "halved", **common), resume=True)
    assert_same(second, whole)


def test_a_named_template_is_that_of_the_run(chats, tmp_path):
    run = prepare(of_chats(chats, tmp_path, chat_template="zephyr"), progress=False)
    ((text, learnt), *_) = examples_of(run.feed.take(), run.tokenizer)
    assert "<|user|>" in text and "it is" in learnt


def test_texts_are_a_stream(tmp_path):
    run = prepare(recipe(build_corpus(tmp_path / "corpus"), tmp_path / "run"), progress=False)
    assert run.stage.recipe.pack == "stream" and run.feed.take().keys() == {"input_ids", "labels"}


def test_what_does_not_fit_is_refused(chats, tmp_path, monkeypatch):
    def refused(kind=ValueError, out=tmp_path, **changes):
        return refusal(kind, lambda: prepare(of_chats(chats, out, **changes), progress=False))

    assert "chat_template" in refused(chat_template="nowhere.jinja")
    assert "alpacca" in refused(format="alpacca")
    assert "validation" in refused(DataError, data=(str(few(chats)),), out=tmp_path / "few")
    monkeypatch.setattr(Objective, "pack", "pairs")
    assert "'pairs'" in refused(pack="examples") and "preferences" in refused()


def few(chats):
    (chats / "few.jsonl").write_text(json.dumps({"messages": CHATS[0]}) + "\n")
    return chats / "few.jsonl"


def test_default_rows_are_as_long_as_long_examples(chats, tmp_path, capsys):
    """With as many tokens in a micro-batch; --seq and --micro-batch are left as they are."""
    (tmp_path / "long.jsonl").write_text(
        "".join(json.dumps({"prompt": texts()[n][:800], "completion": " the end"}) + "\n" for n in range(10))
    )
    long = {"model": "tiny", "data": (str(tmp_path / "long.jsonl"),), "tokenizer": str(chats / "tokenizer"), "device": "cpu"}
    recipe = partial(Recipe, **long, validation=0.0, steps=1)
    stage = prepare(recipe(out=str(tmp_path / "run")), progress=False).stage
    assert stage.recipe.seq == 1024 and stage.recipe.micro_batch == 4 and "longer than 512" in capsys.readouterr().err
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
