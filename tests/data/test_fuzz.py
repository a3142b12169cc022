"""Files and batches that are damaged or of any shape: each is read, or refused in one sentence."""

import json
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
from gpubound.data.shards import _FIXED, _PAGE, MAGIC, MANIFEST, read_shard, write_shard
from gpubound.data.texts import Texts
from gpubound.errors import GpuboundError
from tests import drawn

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


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "shard-00000.gbt"
    write_shard(
        path,
        np.arange(40, dtype=np.uint16),
        np.array([0, 7, 40]),
        None,
        vocab_size=50,
        tokenizer="t",
        texts_read=2,
        texts_crc=1,
    )
    return path


@pytest.mark.slow
@bounded
@given(data=st.data())
def test_shard_headers(shard, data):
    """A header with one field changed to anything, and a right checksum."""
    whole = shard.read_bytes()
    header = asdict(read_shard(shard).header)
    name = data.draw(st.sampled_from([*header, "unknown"]))
    header[name] = data.draw(anything)
    if name == "sections" or data.draw(st.booleans()):
        header["sections"] = {
            key: data.draw(st.lists(st.integers(-8, 1 << 40) | anything, min_size=2, max_size=4))
            for key in ("tokens", "documents")
        }
    text = json.dumps(header).encode()[: _PAGE - _FIXED.size]
    shard.write_bytes((_FIXED.pack(MAGIC, 1, len(text), zlib.crc32(text)) + text).ljust(_PAGE, b"\0") + whole[_PAGE:])
    for verify in (True, False):
        tried(read_shard, shard, verify, named=shard)
    shard.write_bytes(whole)


@bounded
@given(at=st.integers(0, 4175), bits=st.integers(1, 255))
def test_a_damaged_byte_is_found(shard, at, bits):
    whole = bytearray(shard.read_bytes())
    before, at = read_shard(shard), at % len(whole)
    whole[at] ^= bits
    shard.write_bytes(whole)
    found = tried(read_shard, shard, named=shard)
    assert found is None or (np.array_equal(found.tokens, before.tokens) and found.header == before.header), "padding alone"
    whole[at] ^= bits
    shard.write_bytes(whole)


@bounded
@given(
    content=anything
    | st.fixed_dictionaries({"shards": anything | st.lists(st.sampled_from(["shard-00000.gbt", "../x", "/x"]))})
)
def test_manifests(shard, content):
    (shard.parent / MANIFEST).write_text(json.dumps(content))
    tried(Corpus.open, shard.parent, named=shard.parent / MANIFEST)


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
