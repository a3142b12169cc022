"""The shard file: what is written is read, and damage, made up ones too, is named or refused in one sentence."""

import json
import os
import struct
import zlib
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from gpubound.data import Corpus, Tokenizer, feed, train_tokenizer
from gpubound.data.build import encode
from gpubound.data.formats import FORMATS, serialized, strings
from gpubound.data.shards import _FIXED, _PAGE, MANIFEST, read_shard, write_shard
from gpubound.data.texts import Texts
from gpubound.errors import DataError, GpuboundError
from tests import drawn
from tests.messages import message, refusal

TOKENS = np.arange(1000, 1100, dtype=np.uint16)
DOCUMENTS = np.array([0, 10, 11, 100])
CURE = "restore the file or build the corpus anew."


@pytest.fixture
def path(tmp_path):
    write(tmp_path / "shard-00000.gbt")
    return tmp_path / "shard-00000.gbt"


def write(path, tokens=TOKENS, mask=True, vocab_size=5000):
    some = (np.arange(len(tokens)) % 2).astype(np.uint8) if mask else None
    write_shard(path, tokens, DOCUMENTS, some, vocab_size=vocab_size, tokenizer="t", texts_read=3, texts_crc=9)


def refused(path, **options):
    return refusal(DataError, lambda: read_shard(path, **options))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("mask", [True, False])
def test_round_trip(tmp_path, dtype, mask):
    tokens = TOKENS.astype(dtype) * 60
    write(tmp_path / "a.gbt", tokens, mask, 70_000)
    shard = read_shard(tmp_path / "a.gbt")
    assert shard.tokens.dtype == dtype and np.array_equal(shard.tokens, tokens) and np.array_equal(shard.documents, DOCUMENTS)
    assert (np.array_equal(shard.mask, np.arange(100) % 2)) if mask else shard.mask is None
    header = shard.header
    assert (header.tokens, header.documents, header.vocab_size, header.tokenizer) == (100, 3, 70_000, "t")
    assert [file.name for file in tmp_path.iterdir()] == ["a.gbt"], "nothing temporary is left"
    with pytest.raises(ValueError, match="read-only"):
        shard.tokens[0] = 1


def test_nothing_is_overwritten(path):
    before = path.read_bytes()
    said = refusal(DataError, lambda: write(path, TOKENS + 1))
    assert said == message("data/shards:nothing_is_overwritten", path) and path.read_bytes() == before


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("section, at", [("tokens", 5), ("documents", 9), ("mask", 0)])
def test_corrupt_payload(path, section, at):
    flip(path, read_shard(path).header.sections[section][0] + at)
    assert refused(path) == message("data/shards:corrupt_payload", path, section, CURE)


def test_every_byte_of_the_header_is_covered(path):
    length = _FIXED.unpack_from(path.read_bytes())[2]
    for at in range(_FIXED.size + length):
        flip(path, at)
        assert str(path) in refused(path, verify=False), at
        flip(path, at)
    read_shard(path)


def test_corrupt_header(path):
    flip(path, _FIXED.size + 3)
    assert refused(path) == message("data/shards:corrupt_header", path, CURE)


@pytest.mark.parametrize("keep", [20, _PAGE - 1, _PAGE, _PAGE + 50, -1])
def test_truncated(path, keep):
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    size = len(whole[:keep])
    if size < _PAGE:
        assert refused(path) == message("data/shards:truncated", path, size, _PAGE, CURE)
    else:
        assert refused(path, verify=False) == message("data/shards:truncated.2", path, size, len(whole), CURE)


def test_too_long(path):
    size = path.stat().st_size
    with open(path, "ab") as file:
        file.write(b"x")
    assert refused(path) == message("data/shards:too_long", path, size + 1, size, CURE)


@pytest.mark.parametrize("content", [b"", b"{}", struct.pack("<256i", 20240520, 1, *range(254))])
def test_foreign_files(tmp_path, content):
    path = tmp_path / "fineweb_train_000001.bin"
    path.write_bytes(content)
    assert refused(path) == message("data/shards:foreign_files", path, repr(content[:8]))


def test_another_version(path):
    whole = bytearray(path.read_bytes())
    whole[8:12] = struct.pack("<I", 2)
    path.write_bytes(whole)
    assert refused(path) == message("data/shards:another_version", path)


def test_ids_beyond_the_vocabulary(tmp_path):
    """An embedding would read out of its table; on a GPU that ends the process."""
    write(tmp_path / "a.gbt", vocab_size=1099)
    assert refused(tmp_path / "a.gbt") == message("data/shards:ids_beyond_the_vocabular", tmp_path / "a.gbt", CURE)
    write(tmp_path / "b.gbt", vocab_size=1100)
    read_shard(tmp_path / "b.gbt")


def craft(path, text):
    """Give the shard another header, with a right checksum: what damage cannot do, but a person can."""
    rest = path.read_bytes()[_PAGE:]
    path.write_bytes((_FIXED.pack(b"GBTOKENS", 1, len(text), zlib.crc32(text)) + text).ljust(_PAGE, b"\0") + rest)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float64"},
        {"dtype": ["uint16"]},
        {"tokens": 99},
        {"tokens": -100},
        {"tokens": 100.0},
        {"tokens": True},
        {"documents": 2},
        {"vocab_size": 0},
        {"tokenizer": None},
        {"texts_read": "3"},
        {"texts_crc": 1 << 70},
        {"extra": 1},
        {"sections": {}},
        {"sections": []},
        {"sections": {"tokens": [4096, 200, 0]}},
        {"sections": {"tokens": [4096, 200], "documents": [4352, 32, 0]}},
        {"sections": {"tokens": [-4096, 200, 0], "documents": [4352, 32, 0]}},
        {"sections": {"tokens": [4096, 200, 0], "documents": [4352, 32, 0], "more": [0, 0, 0]}},
        {"sections": {"tokens": [4096, 200, 0], "documents": [4352, 3200, 0]}},
    ],
    ids=str,
)
def test_a_crafted_header(path, change):
    craft(path, json.dumps(asdict(read_shard(path).header) | change).encode())
    for verify in (True, False):
        assert refused(path, verify=verify).startswith(f"{path}: corrupt: its header is not a shard's (")


@pytest.mark.parametrize("text", [b"[]", b"3", b"{}", b"{", b"[" * 3000, b"\xff"], ids=str)
def test_a_header_that_is_no_header(path, text):
    craft(path, text)
    assert refused(path).startswith(f"{path}: corrupt: its header is not a shard's (")


def test_a_pipe_in_a_shards_place(tmp_path):
    os.mkfifo(tmp_path / "a.gbt")
    assert refused(tmp_path / "a.gbt") == message("data/shards:a_pipe_in_a_shards_place", tmp_path / "a.gbt")


def test_documents_that_do_not_cover_the_tokens(tmp_path):
    path = tmp_path / "a.gbt"
    write_shard(path, TOKENS, np.array([0, 50, 40, 100]), None, vocab_size=5000, tokenizer="t", texts_read=0, texts_crc=0)
    assert refused(path) == message("data/shards:documents_that_do_not_co", path, CURE)


def test_a_file_that_is_not_there(tmp_path):
    assert refused(tmp_path / "a.gbt") == message("data/shards:a_file_that_is_not_there", tmp_path / "a.gbt")


def test_the_checksum_is_crc32_of_the_bytes_as_stored(path):
    header = read_shard(path).header
    assert header.sections["tokens"] == [_PAGE, 200, zlib.crc32(TOKENS.astype("<u2").tobytes())]


REFUSALS = (GpuboundError, ValueError)
bounded = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

TOKENIZER = train_tokenizer(["some text"], 270)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | drawn.text(max_size=8)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(drawn.text(max_size=8), inner, max_size=3)
)


def tried(call, *arguments, named: Path | None = None):
    """What `call` gives; None when it refuses, which it does in one line that names the file."""
    try:
        return call(*arguments)
    except REFUSALS as error:
        assert "\n" not in str(error).strip() or named is None
        assert named is None or str(named) in str(error), str(error)
        return None


@bounded
@given(
    content=anything
    | st.fixed_dictionaries({"shards": anything | st.lists(st.sampled_from(["shard-00000.gbt", "../x", "/x"]))})
)
def test_manifests(path, content):
    (path.parent / MANIFEST).write_text(json.dumps(content))
    tried(Corpus.open, path.parent, named=path.parent / MANIFEST)


words = drawn.text(max_size=4) | st.sampled_from(["one", "user", "assistant", "gpt", " "])
calls = anything | st.lists(st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": words, "arguments": anything})}))
plain = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": words})
odd = st.fixed_dictionaries({"role": words, "content": words | anything, "tool_calls": calls}) | st.fixed_dictionaries(
    {"from": words, "value": words}
)
turns = words | st.just("\ud800") | st.lists(plain, min_size=1, max_size=3) | st.lists(odd, max_size=2) | anything
keys = sorted({key for known in FORMATS for key in (*known.keys, *known.optional)})
rows = st.sampled_from(FORMATS).flatmap(lambda known: st.fixed_dictionaries(dict.fromkeys(known.keys, turns)))
lines = st.binary(max_size=40) | st.builds(
    lambda row, more: json.dumps(row | more if isinstance(row, dict) else row).encode(),
    rows | rows | anything,
    st.just({}) | st.dictionaries(st.sampled_from(keys), turns, max_size=1),
)


@bounded
@given(content=st.lists(lines, max_size=3), key=st.sampled_from([None, None, "body"]))
def test_jsonl(tmp_path, content, key):
    """Each row becomes texts that a tokenizer takes, or the file is refused."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(content))
    documents = tried(lambda: list(Texts(path, text_key=key)), named=path) or []
    for document in documents:
        assert all(text.encode() is not None for text in strings(document)) and serialized(document).encode()
    for ids, mask in (part for document in documents for part in tried(encode, TOKENIZER, [document])[0]):
        assert len(ids) and (mask is None or mask.shape == ids.shape)


@bounded
@given(content=st.binary(max_size=60), separator=st.none() | drawn.text(min_size=1, max_size=2))
def test_plain_text(tmp_path, content, separator):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert all(tried(lambda: list(Texts(path, separator)), named=path) or ["x"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["some text and some more"], 270).save(folder)
    return folder


@bounded
@given(data=st.data())
def test_tokenizer_files(saved, data):
    name = data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]))
    whole = (saved / name).read_text()
    content = json.loads(whole)
    content[data.draw(st.sampled_from([*content, "unknown"]))] = data.draw(anything)
    (saved / name).write_text(json.dumps(content))
    try:
        found = tried(Tokenizer.load, saved)
        assert found is None or found.vocab_size > 0
    finally:
        (saved / name).write_text(whole)


leaves = scalars | st.builds(torch.ones, st.integers(0, 3)) | st.builds(np.ones, st.integers(0, 3)) | st.just(object())
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(drawn.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


@bounded
@given(batches=st.lists(trees, max_size=3), mode=st.sampled_from(["auto", "resident", "ring", "direct"]))
def test_batches_of_any_shape(batches, mode):
    """Every batch arrives, in order and of its kind, or the feed says why not."""
    served = tried(lambda: list(feed(batches, device="cpu", mode=mode)))
    if served is not None:
        assert [type(batch) for batch in served] == [torch.Tensor if isinstance(b, np.ndarray) else type(b) for b in batches]
