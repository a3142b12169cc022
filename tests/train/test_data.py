"""The data of a run: which tokenizer it takes, and what is said where data, tokenizer and model do not belong together."""

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

from gpubound import trace
from gpubound.data import Corpus, Tokenizer, train_tokenizer
from gpubound.errors import DataError
from gpubound.models import PRESETS, Decoder, save_hf
from gpubound.train.data import check_data, open_data
from gpubound.train.prepare import prepare
from gpubound.train.recipe import Recipe
from gpubound.train.stages import EvalSet, hold_out, stage_of
from tests.messages import message

from .runs import recipe, texts


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
    with pytest.raises(kind) as error:
        opened(*arguments, **changes)
    return str(error.value)


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


def test_each_kind_of_run_has_its_own_rates_and_says_them(corpus, base, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trace, "_printed", set())
    lora = {"lora": {"rank": 2}, "model": str(base)}
    kinds = [({"model": "tiny"}, 3e-3, 0.1), ({"model": str(base)}, 2e-5, 0.0), (lora, 2e-4, 0.0)]
    for changes, lr, weight_decay in kinds:
        made = Recipe(**changes)
        assert (made.lr, made.weight_decay) == (lr, weight_decay) == (made.numbers.lr, made.numbers.weight_decay)
        given = Recipe(**changes, lr=1e-3, weight_decay=0.01)
        assert (given.numbers.lr, given.numbers.weight_decay) == (1e-3, 0.01)
    run = prepare(recipe(corpus, tmp_path / "run", **lora, steps=1), progress=False)
    said = capsys.readouterr().err
    assert "low-rank adapters: lr 0.0002, weight decay 0 (the defaults of low-rank adapters)" in said
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
