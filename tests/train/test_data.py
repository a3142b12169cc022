"""The data of a run: its tokenizer, what is said where data and model do not fit, and its length in epochs."""

import dataclasses
import json
import math
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
import torch

from gpubound.data import Corpus, Tokenizer, train_tokenizer
from gpubound.errors import DataError
from gpubound.models import PRESETS, Decoder, save_hf
from gpubound.train.data import check_data, open_data, source_names
from gpubound.train.prepare import ALLOWED, prepare
from gpubound.train.recipe import PHASED, Recipe
from gpubound.train.stages import EvalSet, Stage, hold_out, hold_out_examples, stage_of
from tests.messages import message, refusal

from .runs import recipe, texts, train


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Two folders with tokenizers of the same size, whose ids mean other tokens."""
    folder = tmp_path_factory.mktemp("tokenizers")
    train_tokenizer(texts(), 300).save(folder / "one")
    train_tokenizer(["nothing like it, " * 40, "whatsoever! " * 30], 300).save(folder / "other")
    return folder


@pytest.fixture
def built(tokenizers, tmp_path):
    """A corpus made with the first of them."""
    Corpus.build(texts(), str(tokenizers / "one"), tmp_path / "built", progress=False)
    return tmp_path / "built"


def opened(data, out, **changes):
    made = recipe("", out, data=(str(data),), **changes)
    check_data(made)
    return open_data(made, out, progress=False)


def refused(*arguments, kind=DataError, **changes):
    return refusal(kind, lambda: opened(*arguments, **changes))


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_text("\n".join(texts()))
    return tmp_path / "book.txt"


def test_a_run_whose_data_has_changed(book, tmp_path):
    """Once something was trained on it, its corpus must not be deleted, as one of Corpus.build's may be."""
    opened(book, tmp_path / "run", vocabulary=300)
    before = book.read_text()
    book.write_text(f"{before} and more")
    corpus = tmp_path / "run" / "corpus"
    said = f"data: {corpus}: holds a corpus of other texts; nothing was overwritten."
    assert refused(book, tmp_path / "run", vocabulary=300) == message("train/data:a_run_whose_data_has_cha", said)
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert refused(book, tmp_path / "run", vocabulary=300) == message("train/data:a_run_whose_data_has_cha.2", said)
    book.write_text(before)
    assert opened(book, tmp_path / "run", vocabulary=300)[0].path == corpus


def hf_folder(path, tokenizer):
    save_hf(Decoder(PRESETS["tiny"]), path)
    Tokenizer.load(tokenizer).save(path)
    return path


def test_a_tokenizer_named_beside_a_corpus_must_be_its_own(built, tokenizers, tmp_path):
    assert opened(built, tmp_path / "run", tokenizer=str(tokenizers / "one"))[0].tokens > 0
    assert refused(built, tmp_path / "run", tokenizer=str(tokenizers / "other")) == (
        message("train/data:a_tokenizer_named_beside", tokenizers / "other", built)
    )
    assert refused(built, tmp_path / "run", tokenizer="/nope", kind=ValueError) == (
        message("train/data:a_tokenizer_named_beside.2")
    )


def test_a_model_must_know_the_ids_of_its_data(built, tokenizers, book, tmp_path):
    own, other = (hf_folder(tmp_path / name, tokenizers / name) for name in ("one", "other"))
    assert opened(built, tmp_path / "run", model=str(own))[0].tokens > 0
    assert opened(book, tmp_path / "run", model=str(other))[0].fingerprint == Tokenizer.load(other).fingerprint
    sentence = refused(built, tmp_path / "run", model=str(other))
    assert sentence.startswith(f"model: {other} has another tokenizer than {built}: token 2") and sentence.endswith(
        f" in the other; build the corpus with the model's own tokenizer (--tokenizer {other})."
    )
    named = refused(book, tmp_path / "new", model=str(other), tokenizer=str(tokenizers / "one"))
    assert named.startswith(f"model: {other} has another tokenizer than {tokenizers / 'one'}: token 2")
    assert not (tmp_path / "new").exists(), "nothing is built for it"


def test_more_tokens_than_the_models_own_are_no_other_tokenizer(tokenizers):
    one = Tokenizer.load(tokenizers / "one")
    more = Tokenizer.load(tokenizers / "one")
    more.inner.add_special_tokens(["<|image|>"])
    assert one.difference(more) is None is more.difference(one)
    number, mine, theirs = one.difference(Tokenizer.load(tokenizers / "other"))
    assert one.inner.id_to_token(number) == mine != theirs


def test_a_swapped_tokenizer_is_refused(built, tokenizers, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizers / "other" / name, built / name)
    assert refused(built, tmp_path / "run").startswith(f"{built}: its tokenizer.json is not the tokenizer that its tokens were")


def test_phases_share_the_tokenizer_of_a_built_corpus(built, book, tokenizers, tmp_path):
    phases = ({"name": "a", "data": (str(book),)}, {"name": "b", "data": (str(built),)})
    texts_first, corpus = opened(book, tmp_path / "run", phases=phases)
    assert texts_first.fingerprint == corpus.fingerprint == Tokenizer.load(built).fingerprint
    strange = Corpus.build(texts(), str(tokenizers / "other"), tmp_path / "strange", progress=False).path
    phases = ({"name": "a", "data": (str(strange),)}, {"name": "b", "data": (str(built),)})
    assert refused(book, tmp_path / "run", phases=phases) == message("train/data:phases_share_the_tokeniz", strange, built)


def test_the_key_of_the_text(tmp_path, built, book):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"body": text, "text": "x"}) + "\n" for text in texts()))
    (corpus,) = opened(rows, tmp_path / "run", text_key="body", vocabulary=300)
    assert corpus.tokenizer().decode(corpus.document(3)[:-1]) == texts()[3]
    for data in (built, "stdlib"):
        assert refused(data, tmp_path / "no", text_key="body", kind=ValueError) == (
            message("train/data:the_key_of_the_text", data)
        )
    assert refused(book, tmp_path / "no", text_key="body", kind=ValueError).endswith("which has no rows; leave it out.")
    phases = ({"name": "a", "data": (str(rows),)}, {"name": "b", "data": (str(built),)})
    assert len(opened(rows, tmp_path / "two", text_key="body", phases=phases)) == 2


def test_what_is_no_data(tmp_path, built):
    made = recipe("", tmp_path, data=(str(built), "stdlib"))
    with pytest.raises(ValueError, check=message("train/data:what_is_no_data", built)):
        check_data(made)
    with pytest.raises(ValueError, check=message("train/data:what_is_no_data.2")):
        check_data(recipe("", tmp_path, data=("stdlib", "torch-source", "stdlib")))
    os.mkfifo(tmp_path / "pipe.txt")
    assert refused(tmp_path / "pipe.txt", tmp_path / "run") == message("train/data:what_is_no_data.3", tmp_path / "pipe.txt")


def test_two_runs_in_one_folder_train_one_tokenizer(book, tmp_path, monkeypatch):
    """The second waits before it trains a tokenizer, not after, and then finds the first one's."""
    trained, both = [], threading.Barrier(2)

    def slowly(*arguments):
        trained.append(1)
        time.sleep(0.2)  # time for the other to train one as well, if nothing held it back
        return train_tokenizer(*arguments)

    def run():
        both.wait()
        return opened(book, tmp_path / "run", vocabulary=300)[0].fingerprint

    monkeypatch.setattr("gpubound.train.data.train_tokenizer", slowly)
    with ThreadPoolExecutor(2) as pool:
        first, second = [work.result() for work in (pool.submit(run), pool.submit(run))]
    assert first == second and len(trained) == 1


def chats(folder, count: int) -> str:
    """A set of `count` short chats, as someone tries a first fine-tuning with."""
    rows = [
        [{"role": "user", "content": f"what is {n} plus 1?"}, {"role": "assistant", "content": f"it is {n + 1}."}]
        for n in range(count)
    ]
    path = folder / f"chats-{count}.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in rows))
    return str(path)


def defaults(corpus, tmp_path, **changes) -> Recipe:
    """A recipe that says nothing of rows, batches and what is held out."""
    return Recipe(
        **{"model": "tiny", "tokenizer": str(corpus), "device": "cpu", "out": str(tmp_path / "run"), "steps": 1} | changes
    )


@pytest.mark.slow
@pytest.mark.parametrize("count, seq, micro_batch", [(300, 512, 8), (144, 512, 8), (40, 128, 8), (12, 64, 5)])
def test_the_defaults_fit_a_small_set_of_chats(corpus, tmp_path, capsys, count, seq, micro_batch):
    run = prepare(defaults(corpus, tmp_path, data=(chats(tmp_path, count),)), progress=False)
    stage, said = run.stage, capsys.readouterr().err
    rows = stage.feed(torch.device("cpu")).packing.rows
    assert rows >= stage.recipe.micro_batch >= 1
    held_out = stage.eval_sets[0].corpus
    assert held_out.tokens <= 0.25 * (stage.training.tokens + held_out.tokens)
    assert (stage.recipe.seq, stage.recipe.micro_batch) == (seq, micro_batch)
    assert ("micro_batch" in said) == ((seq, micro_batch) != (512, 8))
    assert ("are held out" in said) == (count < 300) and "0 examples longer" not in said
    assert held_out.documents == min(8, round(0.2 * count)) and f"{count - held_out.documents} examples in {rows} rows" in said
    records = []
    run.go(records.append)
    assert math.isfinite(records[-1]["held_out"]) and run.finished
    again = prepare(defaults(corpus, tmp_path, data=(chats(tmp_path, count),)), resume=True, progress=False)
    assert again.done == 1 and again.stage.recipe == stage.recipe, "the same set fits in the same way"


def test_a_model_folder_needs_data_and_a_preset_does_not(base, tmp_path):
    assert Recipe(model="tiny").data == ("stdlib",)
    with pytest.raises(ValueError) as error:
        prepare(Recipe(model=str(base), out=str(tmp_path / "run"), device="cpu"), progress=False)
    assert "data" in str(error.value) and str(base) in str(error.value)
    assert not (tmp_path / "run").exists(), "nothing was tokenised"


def test_each_kind_of_run_has_its_own_rates_and_says_them(corpus, base, tmp_path, said):
    lora = {"lora": {"rank": 2}, "model": str(base)}
    kinds = [({"model": "tiny"}, 3e-3, 0.1), ({"model": str(base)}, 2e-5, 0.0), (lora, 2e-4, 0.0)]
    for changes, lr, weight_decay in kinds:
        made = Recipe(**changes)
        assert (made.lr, made.weight_decay) == (lr, weight_decay) == (made.numbers.lr, made.numbers.weight_decay)
        given = Recipe(**changes, lr=1e-3, weight_decay=0.01)
        assert (given.numbers.lr, given.numbers.weight_decay) == (1e-3, 0.01)
    run = prepare(recipe(corpus, tmp_path / "run", **lora, steps=1), progress=False)
    assert "low-rank adapters: lr 0.0002, weight decay 0 (the defaults of low-rank adapters)" in said()
    assert run.step.lr == 2e-4


def test_an_evaluation_takes_as_many_tokens_whatever_the_micro_batch(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("gpubound.train.stages.EVALUATION_TOKENS", 256)
    whole = Corpus.open(corpus)
    for rows, batches in ((1, 8), (2, 4), (4, 4)):
        (rows_of_it,) = stage_of("", recipe(corpus, tmp_path, micro_batch=rows, validation=0.1), whole).eval_sets
        assert rows_of_it.batches == batches
        assert len(list(islice(rows_of_it.feed(torch.device("cpu")), rows_of_it.batches))) == batches


@pytest.mark.parametrize("micro_batch, size, batches", [(1, 1, 22), (8, 7, 3), (6, 3, 7), (32, 22, 1)])
def test_a_small_held_out_set_is_evaluated_as_a_whole(corpus, tmp_path, micro_batch, size, batches):
    """But for the rows that batches of one size leave out, as few as possible; or as many batches as eval_batches says."""
    whole = Corpus.open(corpus)
    small = hold_out(whole, 0.1, 32)[1]
    assert (small.tokens - 1) // 32 == 22
    rows = EvalSet("", small, recipe(corpus, tmp_path, micro_batch=micro_batch, pack="stream"))
    assert (rows.micro_batch, rows.batches) == (size, batches)
    assert EvalSet("", small, recipe(corpus, tmp_path, micro_batch=micro_batch, pack="stream", eval_batches=1)).batches == 1


def test_one_example_at_least_is_trained_on(tmp_path):
    """99 % of 30 examples is all of them."""
    few = Corpus.build([f"number {n}" for n in range(30)], train_tokenizer(["number"], 262), tmp_path / "few", progress=False)
    training, held_out = hold_out_examples(few, recipe("data", tmp_path, validation=0.99))
    assert (training.documents, held_out.documents) == (1, 29)


def test_held_out_rows_without_labels_are_refused(tmp_path, monkeypatch):
    """Their loss is nan. Only the rows that an evaluation reads count."""
    long_question = [[{"role": "user", "content": "why? " * 50}, {"role": "assistant", "content": "because " * 9}]]
    tokenizer = train_tokenizer(texts(), 300)
    held_out = Corpus.build(long_question, tokenizer, tmp_path / "held_out", progress=False)
    rows = EvalSet("", held_out, recipe("data", tmp_path, seq=8, micro_batch=1, pack="stream"))
    rows.check("")
    monkeypatch.setattr("gpubound.train.stages.EVALUATION_TOKENS", 64)
    with pytest.raises(DataError, match=r"^validation: .* 64 tokens of an evaluation hold none to learn"):
        rows.check("")


def in_epochs(corpus, out, epochs, **changes):
    return recipe(corpus, out, steps=None, epochs=epochs, **{"micro_batch": 16, "accumulate": 1} | changes)


@pytest.mark.slow
def test_epochs_visit_every_row_in_another_order(corpus, tmp_path):
    """Every row of a batch is a row of the corpus: two epochs of the rows that fill batches, each row once an epoch."""
    run, records = train(in_epochs(corpus, tmp_path, 2.0))
    batches = len(run.feed)
    assert run.finished and run.done == run.steps == 2 * batches == len(records)
    run.feed.seek(0)
    drawn = [[tuple(row) for row in run.feed.take()["input_ids"].tolist()] for _ in range(run.done)]
    first, second = ([row for batch in half for row in batch] for half in (drawn[:batches], drawn[batches:]))
    rows = (run.stage.training.tokens - 1) // 32
    assert len(set(first)) == len(set(second)) == 16 * batches and first != second
    assert len({*first, *second}) <= rows < 16 * (batches + 1)


@pytest.mark.parametrize("epochs, accumulate", [(1.0, 3), (0.5, 1), (3.0, 2)])
def test_steps_of_epochs(corpus, tmp_path, epochs, accumulate):
    run = prepare(in_epochs(corpus, tmp_path, epochs, accumulate=accumulate), progress=False)
    assert run.steps == math.ceil(epochs * len(run.feed) / accumulate)
    assert run.stage.recipe.rates.steps == run.steps


@pytest.mark.slow
def test_more_epochs_extend_a_run_and_a_finished_one_says_so(corpus, tmp_path, capsys):
    first, _ = train(in_epochs(corpus, tmp_path, 0.5))
    again = prepare(in_epochs(corpus, tmp_path, 0.5), resume=True, progress=False)
    assert again.finished and "nothing to do" in capsys.readouterr().err
    longer, records = train(in_epochs(corpus, tmp_path, 1.0), resume=True)
    assert longer.finished and longer.done == len(longer.feed) and records[0]["step"] == first.done + 1


def test_phases_in_epochs_and_in_steps(corpus, tmp_path):
    phases = ({"name": "a", "epochs": 0.5}, {"name": "b", "steps": 2})
    run = prepare(in_epochs(corpus, tmp_path, 3.0, phases=phases), progress=False)
    assert [stage.steps for stage in run.stages] == [math.ceil(0.5 * len(run.feed)), 2]


# What is evaluated


@pytest.fixture
def files(tmp_path):
    for name, part in (("train", texts()[:8]), ("code", texts()[8:10]), ("prose", ["The rain falls on the plain. " * 20])):
        (tmp_path / f"{name}.txt").write_text("\n".join(part))
    return tmp_path


@pytest.mark.slow
def test_every_source_of_eval_data_has_its_loss(files):
    paths = tuple(str(files / f"{name}.txt") for name in ("code", "prose"))
    run, records = train(recipe(files / "train.txt", files / "run", vocabulary=300, eval_data=paths, eval_every=2, steps=4))
    last = records[-1]
    assert last["held_out"] == pytest.approx((last["held_out/code"] + last["held_out/prose"]) / 2)
    assert last["held_out/code"] != last["held_out/prose"]
    assert run.evaluations.keys() == {2, 4} and run.evaluations[4] == last["held_out"]
    assert run.stage.training.tokens == Corpus.open(files / "run" / "corpus").tokens, "nothing is held out of data"
    again, _ = train(run.recipe, resume=True)
    assert again.evaluations == run.evaluations


@pytest.mark.slow
def test_sources_with_weights(files, capsys):
    """An epoch has their documents so often; each source has a loss of documents that are not trained on."""
    for name, count in (("a", 24), ("b", 40)):
        rows = [
            json.dumps({"text": f"{name} {number} " + text[:150]}) + "\n" for number, text in zip(range(count), texts(count))
        ]
        (files / f"{name}.jsonl").write_text("".join(rows))
    changes = {"data": tuple(str(files / f"{name}.jsonl") for name in "ab"), "data_weights": (2.5, 0.5), "vocabulary": 300}
    run, records = train(recipe("", files / "run", **changes, validation=0.2, steps=None, epochs=1.0, evals_per_epoch=2.0))
    a, b = (sum(part.source == number for part in run.stage.training.parts) for number in (0, 1))
    assert a and b and run.stage.training.documents == pytest.approx(0.8 * (2.5 * 24 + 0.5 * 40), abs=6)
    kept = {
        each.name: {each.corpus.document(n).tobytes() for n in range(each.corpus.documents)} for each in run.stage.eval_sets
    }
    trained = {run.stage.training.document(n).tobytes() for n in range(run.stage.training.documents)}
    assert kept.keys() == {"a", "b"} and not trained & (kept["a"] | kept["b"]) and len(kept["a"] | kept["b"]) == 13
    evaluated = [record for record in records if "held_out" in record]
    assert [record["step"] for record in evaluated] == [math.ceil(run.steps / 2), run.steps]
    for record in evaluated:
        assert record["held_out"] == pytest.approx((record["held_out/a"] + record["held_out/b"]) / 2)
    from_here = {"data": tuple(map(os.path.relpath, run.recipe.data)), "data_weights": (3.0, 3.0)}
    again = prepare(dataclasses.replace(run.recipe, **from_here), resume=True, allow=["data"], progress=False)
    assert len(again.feed) > 0 and again.changes[0].startswith(f"from step {run.done + 1} on data_weights was")


def test_sources_that_are_refused(files, corpus):
    def refused(**changes):
        return refusal(ValueError, lambda: check_data(recipe("", files / "run", **changes)))

    twice = (str(files / "code.txt"),) * 2
    assert "each once" in refused(data=twice, data_weights=(1.0, 1.0)) and "stdlib" in refused(
        data=("stdlib",), data_weights=(2.0,)
    )
    assert str(corpus) in refused(data=(str(corpus),), data_weights=(2.0,))
    assert source_names(["x/a.jsonl", "y/b.jsonl"]) == ["a", "b"] and source_names([]) == []
    assert source_names(["x/a.jsonl", "y/a.jsonl", "z/b.jsonl"]) == ["x-a.jsonl", "y-a.jsonl", "z-b.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize("per_epoch, steps", [(1.0, [7, 14, 18]), (0.5, [14, 18]), (3.0, [3, 5, 7, 9, 12, 14, 16, 18])])
def test_evaluations_and_checkpoints_by_epoch(corpus, tmp_path, monkeypatch, per_epoch, steps):
    """Of an epoch of 20 micro-batches and steps of three: at the first step that completes each part, and at the end."""
    monkeypatch.setattr(Stage, "steps_per_epoch", 20 / 3)
    run = prepare(recipe(corpus, tmp_path, steps=18, evals_per_epoch=per_epoch), progress=False)
    at = []
    monkeypatch.setattr(run, "validate", lambda: at.append(run.done) or {"held_out": 1.0})
    run.go(lambda record: None)
    assert at == steps


def test_one_source_of_eval_data(files):
    changes = {"vocabulary": 300, "eval_data": (str(files / "prose.txt"),), "steps": 2}
    _, records = train(recipe(files / "train.txt", files / "run", **changes))
    assert math.isfinite(records[-1]["held_out"]) and not any("/" in key for key in records[-1])


def test_eval_data_that_is_refused(files, corpus):
    def refused(kind=ValueError, **changes):
        return refusal(kind, lambda: prepare(recipe(files / "train.txt", files / "run", vocabulary=300, **changes)))

    assert "nowhere.txt" in refused(eval_data=("nowhere.txt",))
    assert "train.txt" in refused(eval_data=(str(files / "train.txt"),))
    assert "tokenizer" in refused(DataError, eval_data=(str(corpus),))


def test_validation_can_be_switched_off(corpus, tmp_path):
    run, records = train(recipe(corpus, tmp_path, validation=0.0, steps=2))
    assert run.finished and run.best is None and "held_out" not in records[-1]
    assert run.stage.training.tokens == Corpus.open(corpus).tokens
    with run.best_weights() as step:
        assert step == 2


# What a resumed run may change


@pytest.mark.slow
def test_the_rate_changes_on_the_way_where_it_is_allowed(corpus, tmp_path, capsys):
    train(recipe(corpus, tmp_path, schedule="constant"), until=6)
    lower = recipe(corpus, tmp_path, schedule="constant", lr=1e-4)
    assert "allow: [lr]" in refusal(ValueError, lambda: prepare(lower, resume=True, progress=False))
    run = prepare(lower, resume=True, progress=False, allow=["lr"])
    records = []
    run.go(records.append)
    assert [record["lr"] for record in records] == pytest.approx([1e-4] * 6) and run.changes == [
        "from step 7 on lr was 0.003, is 0.0001"
    ]
    assert run.changes[0] in capsys.readouterr().err
    again = prepare(lower, resume=True, progress=False)
    assert again.changes == run.changes, "a later start needs no permission for it"


@pytest.mark.slow
def test_rows_change_on_the_way_where_it_is_allowed(corpus, tmp_path):
    train(recipe(corpus, tmp_path), until=6)
    longer = recipe(corpus, tmp_path, seq=64, micro_batch=2)
    assert "allow: [seq, batch]" in refusal(ValueError, lambda: prepare(longer, resume=True, progress=False, allow=["lr"]))
    run = prepare(longer, resume=True, progress=False, allow=["seq", "batch"])
    assert (run.feed.epoch, run.feed.batch) == (0, 0) and run.done == 6
    run.go(lambda record: None)
    assert run.finished and run.feed.batch == 12


def test_what_may_be_allowed():
    assert {key for keys in ALLOWED.values() for key in keys} <= set(PHASED)


def test_an_unknown_permission_is_refused(corpus, tmp_path):
    made = recipe(corpus, tmp_path)
    assert "'model'" in refusal(ValueError, lambda: prepare(made, resume=True, progress=False, allow=["model"]))
