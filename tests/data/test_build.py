"""Building: what lands on the disk, after being killed, and everything that must not be overwritten."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpubound.data import Corpus, build as build_module, train_tokenizer
from gpubound.data.shards import CLAIM, MANIFEST, write_shard
from gpubound.data.texts import Texts
from gpubound.errors import DataError
from gpubound.trace import notice
from tests.messages import message, refusal

from .conftest import TEXTS, Bytes
from .test_tokenizer import CHAT


def contents(path):
    return {file.name: file.read_bytes() for file in sorted(path.glob("*.gbt"))}


def build(path, texts=TEXTS, tokenizer=None, **options):
    return Corpus.build(texts, tokenizer or Bytes(), path, **{"shard_tokens": 300, "progress": False} | options)


def refused(*args, kind=DataError, **options):
    return refusal(kind, lambda: build(*args, **options))


def test_every_document_is_there_in_order_and_whole(corpus):
    assert corpus.documents == 60 and len(corpus.parts) > 2 and corpus.dtype == np.uint16
    assert [bytes(corpus.document(i)[:-1].tolist()).decode() for i in range(60)] == TEXTS
    assert all(corpus.document(i)[-1] == 256 for i in range(60))
    assert corpus.tokens == sum(map(len, TEXTS)) + 60 and corpus.offsets()[-1] == corpus.tokens
    assert str(corpus) == message("data/build:every_document_is_there", f"{corpus.tokens:,}")
    for number in (60, -1, -61):
        with pytest.raises(IndexError, check=message("data/build:every_document_is_there.2", number)):
            corpus.document(number)


def test_opened_again_it_is_the_same(corpus):
    again, everything = Corpus.open(corpus.path), np.arange(corpus.tokens)
    assert again.identity() == corpus.identity() and np.array_equal(again.read(everything), corpus.read(everything))


def test_the_vocabulary_chooses_the_dtype(tmp_path):
    class Wide(Bytes):
        vocab_size, fingerprint = 70_000, "wide"

        def encode_batch(self, texts):
            return [[60_000 + byte * 9 for byte in text.encode()] for text in texts]

    wide = build(tmp_path / "wide", ["ab" * 20], Wide())
    assert wide.dtype == np.uint32 and wide.document(0)[1] == 60_000 + 98 * 9


def test_chats_are_stored_with_their_masks_and_texts_without(tmp_path):
    tokenizer = train_tokenizer(["what is new? nothing is new"], 280)
    mixed = build(tmp_path / "c", ["plain text", CHAT, "more"], tokenizer, shard_tokens=10**6)
    assert mixed.masked and mixed.documents == 3
    mask = mixed.read_mask(np.arange(mixed.tokens))
    spans = mixed.offsets()
    assert mask[: spans[1]].all() and mask[spans[2] :].all(), "all of a plain text is learnt"
    chat, learnt = mixed.document(1), mask[spans[1] : spans[2]] == 1
    assert tokenizer.decode(chat[learnt]) == "nothing is new<|end|>now is now<|end|>" and chat[-1] == tokenizer.eos
    apart = build(tmp_path / "d", ["plain text", CHAT, "more"], tokenizer, shard_tokens=1)
    assert [part.mask is None for part in apart.parts] == [True, False, True]
    assert np.array_equal(apart.read_mask(np.arange(apart.tokens)), mask)
    assert refused(tmp_path / "e", [CHAT], kind=ValueError) == message("data/build:chats_are_stored_with_th")


SLOW = """
import sys, time
sys.path.insert(0, {tests!r})
from conftest import TEXTS, Bytes
from gpubound.data import Corpus
from gpubound.data import build
build.BATCH_TEXTS = 1
def slowly():
    for text in TEXTS:
        time.sleep(0.02)
        yield text
Corpus.build(slowly(), Bytes(), {path!r}, shard_tokens=300, progress=False)
"""


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_at_the_last_whole_shard(corpus, tmp_path, said):
    path = tmp_path / "killed"
    script = SLOW.format(tests=os.path.dirname(__file__), path=str(path))
    child = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 60
    while len(list(path.glob("*.gbt"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    whole = contents(path)
    assert 2 <= len(whole) < len(contents(corpus.path)) and not (path / MANIFEST).exists()
    assert refusal(DataError, lambda: Corpus.open(path)) == message("data/build:killed_in_the_middle_it", path, len(whole))
    (path / "shard-00002.gbt.123.partial").write_bytes(b"half")
    done = build(path, iter(TEXTS))
    assert message("data/build:killed_in_the_middle_it.2", path, len(whole)).within(said())
    assert contents(path) == contents(corpus.path) and done.identity() == corpus.identity()
    assert not list(path.glob("*.partial")) and not (path / CLAIM).exists()


def interrupted(path):
    def texts():
        yield from TEXTS[:40]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(path, texts())


def test_an_interrupted_build_is_not_finished_with_other_texts_or_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "BATCH_TEXTS", 1)
    interrupted(tmp_path)
    before = contents(tmp_path)
    changed = "the texts have changed since the interrupted build; build to another path, or delete that one."
    assert refused(tmp_path, ["x", *TEXTS[1:]]) == f"{tmp_path}: {changed}"
    assert refused(tmp_path, TEXTS[:5]) == f"{tmp_path}: {changed}"
    assert refused(tmp_path, shard_tokens=200) == message("data/build:an_interrupted_build_is", tmp_path)
    assert contents(tmp_path) == before and before


def test_two_builds_of_one_corpus_at_once(corpus, tmp_path, said, monkeypatch):
    """The second waits for the first, and takes what it has built."""
    path, begun, waits, go_on = tmp_path / "c", threading.Event(), threading.Event(), threading.Event()

    def slowly():
        yield from TEXTS[:30]
        begun.set()
        assert go_on.wait(60)
        yield from TEXTS[30:]

    def heard(text):
        notice(text)
        if "another process is building" in text:
            waits.set()

    # Not read from stderr in a loop: pytest loses a line that one thread prints while another takes the lines before it.
    monkeypatch.setattr(build_module, "notice", heard)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(build, path, slowly())
        assert begun.wait(60)
        second = pool.submit(build, path, list(TEXTS))
        assert waits.wait(60) and not first.done() and not second.done()
        go_on.set()
        assert first.result().identity() == second.result().identity() == corpus.identity()
    assert "holds this corpus already" in said() and contents(path) == contents(corpus.path)


def test_killed_while_it_claimed_the_folder(corpus, tmp_path):
    path = tmp_path / "killed"
    path.mkdir()
    (path / f"{CLAIM}.123.partial").write_text("{")
    assert build(path).identity() == corpus.identity()


def test_a_shard_that_is_gone_from_an_interrupted_build(tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "BATCH_TEXTS", 1)
    interrupted(tmp_path)
    (tmp_path / "shard-00000.gbt").unlink()
    assert "holds shard-00001.gbt, wanted shard-00000.gbt there" in refused(tmp_path)


def test_a_finished_corpus_is_left_as_it_is(corpus, said):
    before, stamps = contents(corpus.path), [file.stat().st_mtime_ns for file in corpus.path.glob("*.gbt")]
    build(corpus.path, iter(TEXTS))
    assert said() == message("data/build:a_finished_corpus_is_lef", corpus.path)
    other = "holds a corpus of other texts; nothing was overwritten; build to another path, or delete that one."
    assert refused(corpus.path, [*TEXTS, "one more"]) == refused(corpus.path, TEXTS[:-1]) == f"{corpus.path}: {other}"

    class Other(Bytes):
        fingerprint = "other"

    assert refused(corpus.path, tokenizer=Other()) == message("data/build:a_finished_corpus_is_lef.2", corpus.path)
    assert contents(corpus.path) == before and stamps == [file.stat().st_mtime_ns for file in corpus.path.glob("*.gbt")]


def test_files_that_have_not_changed_are_not_read_again(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text " * 10)
    build(tmp_path / "c", tmp_path / "a.txt")
    monkeypatch.setattr(Texts, "__iter__", lambda _: pytest.fail("read again"))
    assert build(tmp_path / "c", tmp_path / "a.txt").documents == 1


def test_a_folder_of_someone_else_is_not_touched(tmp_path):
    (tmp_path / "thesis.doc").write_text("years of work")
    assert refused(tmp_path) == message("data/build:a_folder_of_someone_else", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.doc"]
    assert refusal(DataError, lambda: Corpus.open(tmp_path)) == message("data/build:a_folder_of_someone_else.2", tmp_path)


def test_damage_is_named_when_it_is_opened(corpus):
    (corpus.path / "shard-00001.gbt").rename(corpus.path / "elsewhere")
    assert refusal(DataError, lambda: Corpus.open(corpus.path)) == (
        message("data/build:damage_is_named_when_it", corpus.path / "shard-00001.gbt", corpus.path / MANIFEST)
    )


@pytest.mark.parametrize(
    "content, said",
    [
        ({"shards": 3}, "shards: got 3, wanted the names of the corpus' shards; "),
        ({"shards": []}, "shards: got [], wanted the names of the corpus' shards; "),
        ({}, "shards: got None, wanted the names of the corpus' shards; "),
        ({"shards": ["../other/shard-00000.gbt"]}, "names the file '../other/shard-00000.gbt', wanted the name of a file in"),
        ({"shards": ["/other/shard-00000.gbt"]}, "names the file '/other/shard-00000.gbt', wanted the name of a file in"),
        ({"shards": [["shard-00000.gbt"]]}, "names the file ['shard-00000.gbt'], wanted the name of a file in"),
        ({"shards": ["shard-00000.gbt", "shard-00000.gbt"]}, "shards: a file is listed twice; "),
        ([], "holds a JSON list, wanted an object; "),
    ],
    ids=str,
)
def test_a_manifest_that_lies(corpus, content, said):
    (corpus.path / MANIFEST).write_text(json.dumps(content))
    assert refusal(DataError, lambda: Corpus.open(corpus.path)).startswith(f"{corpus.path / MANIFEST}: {said}")
    assert str(corpus.path / MANIFEST) in refused(corpus.path)


@pytest.mark.parametrize("texts", [None, [1], [-1, 0], [1 << 62, 0], [True, 0]], ids=str)
def test_a_manifest_without_a_position(corpus, texts):
    manifest = json.loads((corpus.path / MANIFEST).read_text()) | {"texts": texts}
    (corpus.path / MANIFEST).write_text(json.dumps(manifest))
    wanted = "wanted how many were read and their checksum; restore the file or build the corpus anew."
    assert refused(corpus.path) == f"{corpus.path / MANIFEST}: texts: got {texts!r}, {wanted}"


def test_a_claim_that_is_garbled(tmp_path):
    (tmp_path / CLAIM).write_text("{")
    assert refused(tmp_path).startswith(f"{tmp_path / CLAIM}: is not JSON (")


def test_another_tokenizer_put_in_the_corpus_folder_is_noticed(tmp_path):
    """Its ids would be read as other words, and the export would carry the wrong one."""
    one, other = train_tokenizer(TEXTS, 280), train_tokenizer(["other words " * 9], 280)
    corpus = build(tmp_path / "c", tokenizer=one)
    assert Corpus.open(corpus.path).tokenizer().fingerprint == one.fingerprint
    other.save(corpus.path, overwrite=True)
    said = refusal(DataError, lambda: Corpus.open(corpus.path).tokenizer())
    assert said == message("data/build:another_tokenizer_put_in", corpus.path, other.fingerprint, one.fingerprint)


def test_a_tokenizers_library_that_writes_it_differently_is_no_other_tokenizer(tmp_path, monkeypatch):
    corpus = build(tmp_path / "c", tokenizer=train_tokenizer(TEXTS, 280))
    corpus.fingerprint = "as an older library wrote it"
    assert corpus.tokenizer().vocab_size == corpus.vocab_size
    manifest = json.loads((corpus.path / MANIFEST).read_text())
    del manifest["tokenizer_files"]  # as corpora were written before these were recorded
    (corpus.path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DataError, check=message("data/build:a_tokenizers_library_tha")):
        corpus.tokenizer()


def test_shards_of_two_corpora_are_not_mixed(corpus):
    strange = corpus.path / "shard-00001.gbt"
    strange.unlink()
    write_shard(strange, np.ones(4, np.uint16), np.array([0, 4]), None, vocab_size=9, tokenizer="t", texts_read=0, texts_crc=0)
    assert refusal(DataError, lambda: Corpus.open(corpus.path)) == message("data/build:shards_of_two_corpora_ar", strange)


def test_tokenizers_that_go_wrong(tmp_path):
    class Beyond(Bytes):
        def encode_batch(self, texts):
            return [[5, 300] for _ in texts]

    assert refused(tmp_path / "a", tokenizer=Beyond()) == message("data/build:tokenizers_that_go_wrong")
    assert refused(tmp_path / "b", [], kind=ValueError) == message("data/build:tokenizers_that_go_wrong.2", tmp_path / "b")
    assert refused(tmp_path / "c", shard_tokens=0, kind=ValueError) == message("data/build:tokenizers_that_go_wrong.3")
    with pytest.raises(DataError, check=message("data/build:tokenizers_that_go_wrong.4")):
        build(tmp_path / "d").tokenizer()


def test_the_progress_line_goes_to_stderr(tmp_path, capsys):
    build(tmp_path / "a", progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "60 texts" in shown.err


def test_documents_repeat_by_the_weight_of_their_source(tmp_path, said):
    """In the batches of a part, too; a held-out document is never one that is trained on."""
    for name, letters in (("a", "abcdefgh"), ("b", "ijklmnop")):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": letter * 9}) + "\n" for letter in letters))
    sources = {tmp_path / "a.jsonl": 2.25, tmp_path / "b.jsonl": 0.5}
    corpus = build(tmp_path / "c", sources, shard_tokens=25)
    assert [part.source for part in corpus.parts] == [0, 0, 0, 1, 1, 1] and list(corpus.weights.values()) == [2.25, 0.5]
    assert corpus.documents == 16 and corpus.of_source(1).documents == 8

    def texts(corpus):
        return "".join(chr(corpus.document(i)[0]) for i in range(corpus.documents))

    whole = texts(corpus.weighted())
    counts = [whole.count(letter) for letter in "abcdefghijklmnop"]
    assert sorted(counts[:8]) == [2] * 6 + [3] * 2 and sorted(counts[8:]) == [0] * 4 + [1] * 4
    training, held_out = corpus.split(0.25)
    assert not set(texts(training.weighted())) & set(texts(held_out.weighted()))
    for part, mode in ((corpus, "resident"), (corpus, "ring"), (corpus.weighted(), "resident")):
        rows = [chr(batch["input_ids"][0, 0]) for batch in part.batches(9, 1, "cpu", pack="none", mode=mode)]
        assert sorted(rows) == sorted(whole)
    assert len(list(corpus.batches(9, 1, "cpu", pack="none", weighted=False))) == 16
    said()
    again = build(tmp_path / "c", dict.fromkeys(sources, 1), shard_tokens=25)
    assert list(again.weights.values()) == [1, 1] and texts(again.weighted()) == texts(corpus)
    assert "holds this corpus already" in said()
    assert "sources" in refused(tmp_path / "c", {tmp_path / "a.jsonl": 1}, shard_tokens=25)


def test_a_build_of_sources_that_was_interrupted_goes_on(tmp_path, monkeypatch):
    sources = {}
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "%s"}\n' % (name * 9) * 6)
        sources[tmp_path / f"{name}.jsonl"] = 1
    build(tmp_path / "whole", sources, shard_tokens=20)
    write, written = build_module.write_shard, []

    def killed(path, *args, **about):
        written.append(path)
        if len(written) == 5:
            raise KeyboardInterrupt
        write(path, *args, **about)

    monkeypatch.setattr(build_module, "write_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "c", sources, shard_tokens=20)
    build(tmp_path / "c", sources, shard_tokens=20)
    assert contents(tmp_path / "c") == contents(tmp_path / "whole") and len(written) > 5


def test_files_without_a_text_are_named(tmp_path):
    for name in ("empty.txt", "blank.jsonl"):
        (tmp_path / name).write_text("\n \n" if name.endswith("l") else "")
        with pytest.raises(ValueError, match=f"no tokens in {tmp_path / name}, wanted at least one document"):
            build(tmp_path / "corpus", tmp_path / name)
