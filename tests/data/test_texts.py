"""Texts from everything a user may have, and what is said when it cannot be read."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from gpubound.data import texts as readers
from gpubound.data.formats import Completion, Conversation
from gpubound.data.texts import Texts, is_hub_id
from gpubound.errors import DataError
from tests.messages import message, refusal

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
TURNS = Conversation(CHAT)


def read(texts, **options):
    return list(Texts(texts, **options))


def refused(texts, kind=DataError, **options):
    return refusal(kind, lambda: read(texts, **options))


def test_texts_chats_and_rows_from_the_program():
    rows = ["plain", {"text": "in a row", "id": 3}, CHAT, {"messages": CHAT, "text": None}]
    assert read(rows) == ["plain", "in a row", TURNS, TURNS]


def test_of_a_text_and_a_chat_the_chat_is_read_and_a_notice_says_so(tmp_path, said):
    """Its text, the chat written out, would be learnt with its prompts."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "user: hi", "messages": CHAT}) + "\n")
    assert read(tmp_path) == [TURNS] and said() == message("data/texts:of_a_text_and_a_chat", tmp_path)
    assert read(tmp_path, text_key="text") == read(tmp_path, format="text") == ["user: hi"] and said() == ""


def test_empty_rows_are_no_documents_and_counted(tmp_path, said):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    texts = Texts([tmp_path, "", {"text": ""}, "y", ""])
    assert list(texts) == ["x", "y"] == list(texts)
    assert said() == message("data/texts:empty_rows_are_no_docume", tmp_path)


def test_a_file_that_two_paths_lead_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("sub/a.txt").write_text("text")
    Path("link.txt").symlink_to("sub/a.txt")
    one = "sub/a.txt"
    for first, second in ((one, one), ("sub", one), (one, "sub/../sub"), (one, "link.txt")):
        sentence = refused([Path(first), Path(second)], ValueError)
        assert message("data/texts:a_file_that_two_paths_le", Path(first), Path(second)).within(sentence)
        assert refused(map(Path, (first, second)), ValueError) == sentence, "paths that come one by one"
    assert read([Path("sub"), "text"]) == ["text", "text"], "texts of the program may be the same"


def test_files_and_folders(tmp_path):
    (tmp_path / "b.txt").write_text("a text\nof lines")
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n\n" + json.dumps({"messages": CHAT}) + "\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.txt").write_text("deep")
    (tmp_path / "sub" / "e.py").write_text("pass")
    (tmp_path / "sub" / "f.md").write_text("# Title")
    (tmp_path / "ignored.csv").write_text("not,text")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "ignored.txt").write_text("nobody's text")
    (tmp_path / ".ignored.txt").write_text("nobody's text")
    (tmp_path / "named.txt").mkdir()  # a folder by that name is a folder, read once
    (tmp_path / "named.txt" / "g.txt").write_text("inside")
    assert read(tmp_path) == read(str(tmp_path)) == ["a text\nof lines", TURNS, TURNS, "inside", "deep", "pass", "# Title"]
    assert read([tmp_path / "sub", tmp_path / "b.txt"]) == ["deep", "pass", "# Title", "a text\nof lines"]
    sub = [tmp_path / "sub" / name for name in ("d.txt", "e.py", "f.md")]
    assert Texts([tmp_path / "sub", tmp_path / "b.txt"]).files == [*sub, tmp_path / "b.txt"]
    assert Texts(["a text"]).files is None and Texts(iter([])).files is None


def test_a_file_of_several_names_in_one_folder_is_read_once(tmp_path, said):
    """By the name that is no link, else by the first; one outside of the folder, too. It was learnt again for each name."""
    folder, outside = tmp_path / "texts", tmp_path / "outside.txt"
    folder.mkdir()
    (folder / "b.txt").write_text("inside")
    outside.write_text("outside")
    for name, to in (("a.txt", "b.txt"), ("c.txt", outside), ("d.md", outside)):
        (folder / name).symlink_to(to)
    (folder / "e.txt").hardlink_to(folder / "b.txt")
    assert Texts(folder).files == [folder / "b.txt", folder / "c.txt"] and read(folder) == ["inside", "outside"]
    assert said() == message("data/texts:a_file_of_several_names", folder)


def test_what_a_folder_holds_besides_is_counted(tmp_path, said):
    """A folder of compressed texts beside a README would train on the README alone."""
    for name in ("README.md", "a.jsonl.gz", "b.jsonl.gz", "c.TXT", "notes", ".hidden"):
        (tmp_path / name).write_text("text")
    (tmp_path / "again").symlink_to(tmp_path)
    assert read(tmp_path) == ["text"]
    assert said() == message("data/texts:what_a_folder_holds_besi", tmp_path)
    for number in range(9):
        (tmp_path / f"a.{number}").write_text("")
    read(tmp_path)
    assert message("data/texts:what_a_folder_holds_besi.2").within(said())


def test_a_json_file_is_a_list_of_texts_chats_or_rows(tmp_path):
    path = tmp_path / "data.json"
    for found, wanted in (
        (["The sun rises. </s>", "User: hi\nAssistant: hello </s>"], None),
        ([CHAT, "a text"], [TURNS, "a text"]),
        ([{"text": "row"}], ["row"]),
        ([{"messages": CHAT}], [TURNS]),
        (CHAT, [TURNS]),
        ([], None),
    ):
        path.write_text(json.dumps(found, indent=1))
        assert read(path) == (found if wanted is None else wanted)
    path.write_text(json.dumps([{"body": "x"}, {"body": "y"}]))
    given = Texts(path, text_key="body")
    assert list(given) == ["x", "y"] and given.read == given.size == path.stat().st_size
    (tmp_path / "a.txt").write_text("text")
    assert read(tmp_path) == ["text"], "a folder's .json may hold anything"


def test_a_json_file_that_is_no_list(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text, sentence in (
        ('["one", "two",]', "a.json: is not JSON ("),
        ('{"text": "one"}', "a.json: holds a JSON dict, wanted a list of texts, of chats or of rows."),
        ('["one", 2]', "a.json: row 1: got a int, wanted a string or a chat [{'role': ..., 'content': ...}, ...]."),
        ("[" * 100_000, "a.json: is not JSON ("),
    ):
        Path("a.json").write_text(text)
        assert refused(Path("a.json")).startswith(sentence)


def test_a_separator_splits_a_txt_file_even_across_its_chunks(tmp_path, monkeypatch):
    path = tmp_path / "stories.txt"
    path.write_text("one\n<|endoftext|>\ntwo\nlines\n<|endoftext|>\nthree")
    for chunk in (1, 5, 1000):
        monkeypatch.setattr(readers, "_CHUNK", chunk)
        assert read(path, separator="<|endoftext|>") == ["one", "two\nlines", "three"]


def test_a_separator_makes_no_empty_documents(tmp_path):
    (tmp_path / "a.txt").write_text("<s>\none<s><s>\n<s>two\n<s>\n")
    (tmp_path / "b.txt").write_text("")
    assert read(tmp_path, separator="<s>") == ["one", "two"] and read(tmp_path / "b.txt") == []
    assert refused(tmp_path, ValueError, separator="").startswith("texts: separator: got an empty text")


def test_another_key_holds_the_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"body": "one", "text": "title"}) + "\n" + json.dumps({"body": CHAT}) + "\n")
    assert read(path, text_key="body") == ["one", TURNS] == read([{"body": "one"}, {"body": CHAT}], text_key="body")
    path.write_text(json.dumps({"body": None}) + "\n")
    assert refused(path, text_key="body") == message("data/texts:another_key_holds_the_te", path)
    (tmp_path / "b.txt").write_text("text")
    assert read(tmp_path / "b.txt") == ["text"]
    assert refused(tmp_path / "b.txt", ValueError, text_key="body") == (
        message("data/texts:another_key_holds_the_te.2", tmp_path / "b.txt")
    )


def test_how_far_it_has_read(tmp_path):
    (tmp_path / "a.txt").write_text("é" * 10)
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    texts = Texts(["abc", tmp_path])
    assert texts.size == 3 + 20 + 28 and [texts.read for _ in texts] == [0, 23, 37, 51]
    assert [texts.read for _ in texts] == [0, 23, 37, 51], "again from the beginning"
    assert Texts(iter(["abc"])).size is None and Texts([{"text": "abc"}]).size is None


def test_texts_of_several_kinds_are_one(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    both = Texts([Texts(tmp_path, text_key="body"), Texts(["abc", "de"])])
    assert both.size == 14 + 5 and both.files is None
    for _ in range(2):
        assert [(text, both.read) for text in both] == [("x", 14), ("abc", 14), ("de", 17)] and both.read == both.size
    assert Texts([Texts(iter(["abc"])), "de"]).size is None


# What a data folder from elsewhere may hold


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    for where in (tmp_path, tmp_path / name, [tmp_path / name], iter([tmp_path])):
        assert refused(where) == message("data/texts:a_pipe_is_refused_and_no", tmp_path / name)


def test_a_pipe_among_a_datasets_files(tmp_path):
    (tmp_path / "dataset_info.json").write_text("{}")
    os.mkfifo(tmp_path / "state.json")
    assert refused(tmp_path) == message("data/texts:a_pipe_among_a_datasets", tmp_path / "state.json")


@pytest.mark.parametrize("name", ["../a.arrow", "/a.arrow", 3, None])
def test_a_saved_dataset_names_only_its_own_files(tmp_path, name):
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    assert refused(tmp_path) == message("data/texts:a_saved_dataset_names_on", tmp_path / "state.json", repr(name))


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"_data_files": 3}', '{"_data_files": [3]}', '{"_data_files": []}'])
def test_a_damaged_dataset_is_named(tmp_path, state):
    pytest.importorskip("datasets")
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(state)
    assert refused(tmp_path).startswith(str(tmp_path))
    (tmp_path / "dataset_dict.json").write_text(state)
    with pytest.raises((ValueError, DataError), match=f"^{re.escape(str(tmp_path))}"):
        read(tmp_path)


def test_a_link_that_leads_nowhere(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone.txt")
    assert refused(tmp_path) == message("data/texts:a_link_that_leads_nowher", tmp_path / "a.txt")


@pytest.mark.parametrize(
    "line, said",
    [
        (b"[" * 100_000, "is not JSON ("),
        (b'{"text": ' * 100_000, "is not JSON ("),
        (b'{"text": {"text": {"text": "x"}}}', "['text']: got a dict, wanted a string or a chat"),
        (b'{"text": "a\\ud800"}', "['text']: holds half a surrogate pair (U+D800 at character 1), which no tokenizer takes"),
        (b'{"messages": [{"role": "user", "content": "\\udfff"}]}', "['messages'][0]: holds half a surrogate pair (U+DFFF"),
        (b'{"messages": [{"role": 3, "content": ""}]}', "['messages'][0]: role: got 3, wanted a text such as 'user'"),
        (
            b'{"messages": [{"role": "user", "content": "", "calls": ' + b"[" * 80 + b"]" * 80 + b"}]}",
            "['messages'][0]: is nested more than 64 deep; leave the field out.",
        ),
        (b'{"messages": [{"content": ""}]}', "['messages'][0]: role: got None, wanted a text such as 'user'"),
        (
            b'{"messages": [{"role": "u", "content": "x"}, {"role": "a", "content": null}]}',
            "[1]: content: got None, wanted a text",
        ),
        (
            b'{"messages": [{"role": "u", "content": [{"type": "text"}]}]}',
            "[0]: content: got [{'type': 'text'}], wanted a text",
        ),
        (b'{"messages": ["x"]}', "['messages']: got a list, wanted a string or a chat"),
        (b'{"messages": []}', "['messages']: got an empty list, wanted a string or a chat"),
        (b'{"text": 5}', "['text']: got a int, wanted a string or a chat"),
        (b"null", "got a NoneType, wanted a string or a chat"),
        (b"{}", "has no keys, wanted 'text', 'messages', "),
        (b"\xff\xfe\x00", "is not JSON ("),
        (b"9" * 5000, "is not JSON ("),
    ],
    ids=lambda value: value[:20],
)
def test_lines_that_are_no_documents(tmp_path, line, said):
    path = tmp_path / "a.jsonl"
    fine = {"messages": CHAT} if b"messages" in line else {"text": "fine"}
    path.write_bytes(json.dumps(fine).encode() + b"\n" + line + b"\n")
    sentence = refused(path)
    assert sentence.startswith(f"{path}:2") and said in sentence and "\n" not in sentence and len(sentence) < 1000


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "row"}\n')
    assert read(tmp_path) == ["text", "row"]


def test_a_long_text_that_ends_like_a_files_name():
    text = "x" * 300 + ".txt"  # as a name it would be too long for the system, which says so
    assert read([text]) == [text]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "n": [1, 2]}), tmp_path / "t.parquet")
    parquet.write_table(pyarrow.table({"messages": [CHAT]}), tmp_path / "u.parquet")
    parquet.write_table(pyarrow.table({"n": [1]}), tmp_path / "v.parquet")
    assert read(tmp_path / "t.parquet") == ["a", "b"] and read(tmp_path / "u.parquet") == [TURNS]
    assert refused(tmp_path / "v.parquet") == message("data/texts:parquet", tmp_path / "v.parquet")
    assert refused(tmp_path / "t.parquet", text_key="body") == message("data/texts:parquet.2", tmp_path / "t.parquet")


def test_a_saved_dataset(tmp_path):
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    # With a fingerprint of our own: datasets 5.2 cannot compute one of pyarrow 26's tables.
    rows = datasets.Dataset(pyarrow.table({"text": ["a", "b", "c"], "n": [1, 2, 3]}), fingerprint="rows")
    chats = datasets.Dataset(pyarrow.table({"messages": [CHAT]}), fingerprint="chats")
    rows.save_to_disk(str(tmp_path / "rows"))
    chats.save_to_disk(str(tmp_path / "chats"))
    assert read(tmp_path / "rows") == read(rows) == ["a", "b", "c"] and read(tmp_path / "chats") == [TURNS]
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "splits"))
    assert refused(tmp_path / "splits", ValueError) == message("data/texts:a_saved_dataset", tmp_path / "splits")


@pytest.mark.parametrize("suffix, package", [("t.parquet", "pyarrow"), ("saved", "datasets")])
def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch, suffix, package):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(readers, "import_module", missing)
    path = tmp_path / suffix
    if suffix == "saved":
        path.mkdir()
        (path / "dataset_info.json").write_text("{}")
        (path / "state.json").write_text('{"_data_files": []}')
    else:
        path.write_bytes(b"")
    assert refused(path, ValueError) == message("data/texts:a_missing_library_is_nam", path, package)


def test_sentences(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    Path("bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    Path("keys.jsonl").write_text('{"body": "x", "title": "y"}\n')
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("x.csv").write_text("")
    Path("empty").mkdir()
    assert refused("nowhere.txt", ValueError) == message("data/texts:sentences")
    assert refused(["a.txt"], ValueError) == message("data/texts:sentences.2")
    assert refused(3, ValueError) == message("data/texts:sentences.3")
    assert refused([3]) == message("data/texts:sentences.4")
    assert refused([[{"role": "user"}]]) == message("data/texts:sentences.5")
    assert refused("bad.jsonl").startswith("bad.jsonl:2: is not JSON (")
    assert refused("keys.jsonl") == message("data/texts:sentences.6")
    assert refused("latin.txt") == message("data/texts:sentences.7")
    assert refused("x.csv", ValueError) == message("data/texts:sentences.8", readers.KINDS)
    assert refused("empty", ValueError) == message("data/texts:sentences.9", readers.KINDS)


# Datasets of the hub, and weights


def test_a_dataset_of_the_hub(tmp_path, monkeypatch):
    """The real load_dataset, of a folder instead of the hub."""
    datasets = pytest.importorskip("datasets")
    load, folder, asked = datasets.load_dataset, tmp_path / "rows", []
    folder.mkdir()
    for split, row in (("train", {"prompt": "a", "completion": "b"}), ("test", {"prompt": "c", "completion": "d"})):
        (folder / f"{split}.jsonl").write_text(json.dumps(row) + "\n")

    def redirected(name, config, split):
        asked.append((name, config, split))
        return load(str(folder), split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", redirected)
    monkeypatch.chdir(tmp_path)
    assert read("owner/name") == [Completion("a", "b")] and read([Path("owner/name:en:test")]) == [Completion("c", "d")]
    assert asked == [("owner/name", None, "train"), ("owner/name", "en", "test")]
    assert Texts("owner/name").files is None and Texts("owner/name").size is None

    def streamed(name, config, split, streaming):
        rows = load("json", data_files=str(many), split=split, streaming=streaming, cache_dir=str(tmp_path / "cache"))
        return (drawn.append(row) or row for row in rows)

    many, drawn = tmp_path / "many.jsonl", []
    many.write_text("".join(json.dumps({"text": "x" * 100}) + "\n" for _ in range(50)))
    monkeypatch.setattr(datasets, "load_dataset", streamed)
    assert list(Texts("owner/name", hub_bytes=350)) == ["x" * 100] * 3 and len(drawn) == 4, "no row beyond the limit"
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: 1 / 0)
    assert refused("owner/name") == message("data/texts:a_dataset_of_the_hub")


def test_a_dataset_of_the_hub_is_read_from_the_cache_without_a_network(tmp_path, monkeypatch):
    """The cache is made of a file's, since no network is here."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    made = Path(datasets.load_dataset("json", data_files="rows.jsonl", split="train").cache_files[0]["filename"])
    cached = tmp_path / "cache" / "owner___name" / "default" / "0.0.0" / ("a" * 40)
    shutil.copytree(made.parent, cached)
    (cached / made.name).rename(cached / "name-train.arrow")
    about = json.loads((cached / "dataset_info.json").read_text())
    (cached / "dataset_info.json").write_text(json.dumps(about | {"dataset_name": "name", "config_name": "default"}))
    assert read("owner/name") == [Completion("a", "b")]
    with pytest.raises(DataError, match="owner/other"):
        read("owner/other")


def test_names_that_are_paths_are_not_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("owner").mkdir()
    for name in ("owner/name", "other/rows.jsonl", "name", "a/b/c", "../a"):
        assert not is_hub_id(name)
    assert is_hub_id("Other/name-1.0:default:train[:10]") is False and is_hub_id("Other/name-1.0:default:train")


def test_paths_with_weights(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    texts = Texts({tmp_path / "a.txt": 2, str(tmp_path / "b.txt"): 0.5})
    assert [(text, texts.source) for text in texts] == [("a", 0), ("b", 1)] and texts.size == 2
    assert list(texts.weights.values()) == [2.0, 0.5] and Texts([tmp_path / "a.txt"]).weights is None
    for weights in ({"a": 0}, {"a": "x"}, {3: 1}, {"a": True}, {"a": float("nan")}):
        with pytest.raises(ValueError, match="wanted a path and a weight above 0"):
            Texts(weights)
    with pytest.raises(ValueError, match="read twice"):
        Texts({tmp_path / "a.txt": 1, tmp_path: 1})
