"""Texts from everything a user may have, and what is said when it cannot be read."""

import json
from pathlib import Path

import pytest

from gpubound.errors import DataError
from gpubound.feed import text
from gpubound.feed.text import documents, files

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def read(texts, **options):
    return list(documents(texts, **options))


def refused(texts, kind=DataError, **options):
    with pytest.raises(kind) as error:
        read(texts, **options)
    return str(error.value)


def test_texts_chats_and_rows_from_the_program():
    rows = ["plain", {"text": "in a row", "id": 3}, CHAT, {"messages": CHAT, "text": None}]
    assert read(rows) == ["plain", "in a row", CHAT, CHAT]


def test_files_and_folders(tmp_path):
    (tmp_path / "b.txt").write_text("a text\nof lines")
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "row"}) + "\n\n" + json.dumps({"messages": CHAT}) + "\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.txt").write_text("deep")
    (tmp_path / "ignored.md").write_text("not text")
    assert read(tmp_path) == read(str(tmp_path)) == ["a text\nof lines", "row", CHAT, "deep"]
    assert read([tmp_path / "sub", tmp_path / "b.txt"]) == ["deep", "a text\nof lines"]
    assert files([tmp_path / "sub", tmp_path / "b.txt"]) == [tmp_path / "sub" / "d.txt", tmp_path / "b.txt"]
    assert files(["a text"]) is None and files(iter([])) is None


def test_a_separator_splits_a_txt_file_even_across_its_chunks(tmp_path, monkeypatch):
    path = tmp_path / "stories.txt"
    path.write_text("one\n<|endoftext|>\ntwo\nlines\n<|endoftext|>\nthree")
    for chunk in (1, 5, 1000):
        monkeypatch.setattr(text, "_CHUNK", chunk)
        assert read(path, separator="<|endoftext|>") == ["one", "two\nlines", "three"]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "n": [1, 2]}), tmp_path / "t.parquet")
    parquet.write_table(pyarrow.table({"messages": [CHAT]}), tmp_path / "u.parquet")
    parquet.write_table(pyarrow.table({"n": [1]}), tmp_path / "v.parquet")
    assert read(tmp_path / "t.parquet") == ["a", "b"] and read(tmp_path / "u.parquet") == [CHAT]
    assert refused(tmp_path / "v.parquet") == f"{tmp_path / 'v.parquet'}: has the columns n, wanted 'text' or 'messages'."


def test_a_saved_dataset(tmp_path):
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    # With a fingerprint of our own: datasets 5.2 cannot compute one of pyarrow 26's tables.
    rows = datasets.Dataset(pyarrow.table({"text": ["a", "b", "c"], "n": [1, 2, 3]}), fingerprint="rows")
    chats = datasets.Dataset(pyarrow.table({"messages": [CHAT]}), fingerprint="chats")
    rows.save_to_disk(str(tmp_path / "rows"))
    chats.save_to_disk(str(tmp_path / "chats"))
    assert read(tmp_path / "rows") == read(rows) == ["a", "b", "c"] and read(tmp_path / "chats") == [CHAT]
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "splits"))
    assert refused(tmp_path / "splits", ValueError) == (
        f"{tmp_path / 'splits'}: holds the splits train, test, wanted one of them; pass the folder of the split."
    )


@pytest.mark.parametrize("suffix, package", [("t.parquet", "pyarrow"), ("saved", "datasets")])
def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch, suffix, package):
    import importlib

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    path = tmp_path / suffix
    if suffix == "saved":
        path.mkdir()
        (path / "dataset_info.json").write_text("{}")
        (path / "state.json").write_text("{}")
    else:
        path.write_bytes(b"")
    assert refused(path, ValueError) == (
        f"{path}: reading it needs {package}, which is not installed; pip install 'gpubound[hf]', or convert it to jsonl."
    )


def test_sentences(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    Path("bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    Path("keys.jsonl").write_text('{"body": "x", "title": "y"}\n')
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("x.csv").write_text("")
    Path("empty").mkdir()
    assert refused("nowhere.txt", ValueError) == (
        "texts: 'nowhere.txt' does not exist, wanted the path of a file or folder; pass a single text as a list of one."
    )
    assert refused(["a.txt"], ValueError) == (
        "texts[0]: got 'a.txt', which is the name of a file, wanted a text; write Path('a.txt') to have it read."
    )
    assert refused(3, ValueError) == "texts: got a int, wanted a path, or an iterable of strings, chats or paths."
    assert refused([3]) == "texts[0]: got a int, wanted a string or a chat [{'role': ..., 'content': ...}, ...]."
    assert (
        refused([[{"role": "user"}]]) == "texts[0]: got a list, wanted a string or a chat [{'role': ..., 'content': ...}, ...]."
    )
    assert refused("bad.jsonl").startswith("bad.jsonl:2: is not JSON (")
    assert refused("keys.jsonl") == "keys.jsonl:1: has the keys 'body', 'title', wanted 'text' or 'messages'."
    assert refused("latin.txt") == "latin.txt: is not UTF-8 text (unexpected end of data at byte 3); convert it first."
    assert refused("x.csv", ValueError) == "x.csv: cannot be read as texts, wanted one of .txt, .jsonl, .parquet or a folder."
    assert refused("empty", ValueError) == (
        "empty: holds no texts, wanted .txt, .jsonl, .parquet files or a saved Hugging Face dataset."
    )
