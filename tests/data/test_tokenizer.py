"""Tokenizers: trained, saved, loaded by us and by transformers; chats with the prompts masked."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from gpubound.data import Tokenizer, python_stdlib_texts, torch_source_texts, train_tokenizer
from gpubound.data.tokenizer import END_OF_TEXT, LONGEST_WORD, SPECIALS, adapt, split_endless_words
from gpubound.errors import DataError
from tests.messages import message, refusal

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is new?"},
    {"role": "assistant", "content": "nothing is new"},
    {"role": "user", "content": "and now?"},
    {"role": "assistant", "content": "now is now"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["what is new? nothing is new, and now is now " * 3], vocab_size=300)


def test_a_trained_tokenizer_gives_back_what_it_got(tokenizer):
    for text in ("nothing is new", "", "Ünïcode → 漢字 🙂\n\ttabs", " leading", "a" * 1000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("nothing is new")) < 8, "it learnt merges"
    assert tokenizer.vocab_size <= 300 and tokenizer.eos == tokenizer.inner.token_to_id(END_OF_TEXT)
    assert tokenizer.encode_batch(["new", "now"]) == [tokenizer.encode("new"), tokenizer.encode("now")]
    assert tokenizer.decode([*tokenizer.encode("new"), tokenizer.eos], skip_special=True) == "new"


def test_training_is_repeatable(tokenizer):
    again = train_tokenizer(["what is new? nothing is new, and now is now " * 3], vocab_size=300)
    other = train_tokenizer(["other text"], vocab_size=300)
    assert again.fingerprint == tokenizer.fingerprint != other.fingerprint


def test_a_word_of_a_million_letters_is_learnt_in_parts(monkeypatch):
    """It took minutes. What lies around it is learnt as before."""
    fed = list[str]()
    monkeypatch.setattr(
        "gpubound.data.tokenizer.split_endless_words",
        lambda text: [fed.append(part) or part for part in split_endless_words(text)],
    )
    plain = "one two one two " * 200
    for word in ("x" * 1_000_000, "ACGT" * 250_000, " " * 1_000_000, "=" * 1_000_000):
        whole = plain + word + plain
        assert "".join(parts := list(split_endless_words(whole))) == whole and max(map(len, parts)) < 5 * LONGEST_WORD
        fed.clear()
        train_tokenizer([whole], 280)
        assert fed == parts
    assert list(split_endless_words(plain)) == [plain]


def test_saved_loaded_pickled(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t")
    for copy in (
        Tokenizer.load(tmp_path / "t"),
        Tokenizer.load(tmp_path / "t" / "tokenizer.json"),
        pickle.loads(pickle.dumps(tokenizer)),
        adapt(str(tmp_path / "t")),
    ):
        assert copy.fingerprint == tokenizer.fingerprint and copy.encode("is new") == tokenizer.encode("is new")
        assert copy.eos == tokenizer.eos and copy.chat_template == tokenizer.chat_template


def test_a_mask_token_stands_behind_the_vocabulary(tokenizer, tmp_path):
    masking = tokenizer.with_mask()
    assert tokenizer.mask is None and masking.mask == tokenizer.vocab_size == masking.vocab_size - 1
    assert masking.with_mask() is masking and masking.difference(tokenizer) is None
    assert masking.encode("nothing is new") == tokenizer.encode("nothing is new")
    assert masking.decode([*masking.encode("new"), masking.mask], skip_special=True) == "new"
    masking.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.mask == masking.mask and again.with_mask() is again and again.eos == tokenizer.eos
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoTokenizer.from_pretrained(str(tmp_path)).mask_token_id == masking.mask


def test_transformers_loads_it_and_we_load_transformers(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert theirs.encode("nothing is new", add_special_tokens=False) == tokenizer.encode("nothing is new")
    assert theirs.eos_token_id == tokenizer.eos
    assert theirs.apply_chat_template(CHAT, tokenize=False) == tokenizer.render(CHAT)
    ours = adapt(theirs)
    assert ours.encode("now?") == tokenizer.encode("now?") and ours.eos == tokenizer.eos
    assert ours.encode_chats([CHAT])[0][0] == tokenizer.encode_chats([CHAT])[0][0]


def test_truncation_set_for_a_model_does_not_cut_documents(tokenizer):
    inner = pickle.loads(pickle.dumps(tokenizer)).inner
    inner.enable_truncation(4)
    inner.enable_padding(length=4)
    assert len(adapt(inner).encode("nothing is new " * 10)) > 30
    assert inner.truncation is not None, "the user's own is as it was"


def test_only_the_assistants_words_are_learnt(tokenizer):
    ((ids, mask),) = tokenizer.encode_chats([CHAT])
    assert tokenizer.decode(ids) == tokenizer.render(CHAT)
    learnt = tokenizer.decode(np.array(ids)[mask == 1])
    assert learnt == "nothing is new<|end|>now is now<|end|>"
    prompt = tokenizer.render(CHAT[:2], prompt=True)
    assert prompt == "<|system|>be brief<|end|><|user|>what is new?<|end|><|assistant|>"


def test_a_template_of_another_house_with_its_own_tokens(tokenizer):
    template = (
        "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ bos_token }}"
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    chatml = Tokenizer(tokenizer.inner, END_OF_TEXT, template, bos_token="<s>")
    ((ids, mask),) = chatml.encode_chats([CHAT])
    assert chatml.decode(ids).startswith("<s><|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n")
    assert chatml.decode(np.array(ids)[mask == 1]) == "nothing is new<|im_end|>\nnow is now<|im_end|>\n"
    with pytest.raises(DataError, match=r"^chat template: no tools \("):
        chatml.render([{"role": "tool", "content": ""}])


def test_a_template_that_rewrites_earlier_messages_is_refused(tokenizer):
    forgetful = Tokenizer(tokenizer.inner, END_OF_TEXT, "{{ messages[-1]['content'] }}")
    assert refusal(DataError, lambda: forgetful.encode_chats([CHAT])) == message("data/tokenizer:a_template_that_rewrites")


def test_sentences(tokenizer, tmp_path):
    with pytest.raises(ValueError) as error:
        train_tokenizer(["x"], vocab_size=200)
    assert str(error.value) == message("data/tokenizer:sentences", len(SPECIALS))
    with pytest.raises(ValueError) as error:
        Tokenizer.load(tmp_path)
    assert str(error.value) == message("data/tokenizer:sentences.2", tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(DataError, check=message("data/tokenizer:sentences.3")):
        Tokenizer.load(tmp_path)
    assert refusal(ValueError, lambda: Tokenizer(tokenizer.inner, "</s>")) == message("data/tokenizer:sentences.4")
    assert refusal(ValueError, lambda: Tokenizer(tokenizer.inner, None).render(CHAT)) == message("data/tokenizer:sentences.5")
    with pytest.raises(ValueError, check=message("data/tokenizer:sentences.6")):
        adapt(3)


def test_the_standard_library_as_a_corpus():
    texts = list(python_stdlib_texts(400_000))
    assert texts == list(python_stdlib_texts(400_000)) and 300_000 < sum(len(text.encode()) for text in texts) <= 400_000
    names = [text.split("\n", 1)[0] for text in texts]
    assert len({name.split("/")[0] for name in names if "/" in name}) >= 5, "packages are mixed"
    assert texts == list(python_stdlib_texts(3_000_000))[: len(texts)], "more text is the same with more behind it"
    assert not any("/test/" in name or "site-packages" in name for name in names)


def test_torchs_source_is_mixed_and_bounded():
    texts = list(torch_source_texts(300_000))
    assert 200_000 < sum(len(text.encode()) for text in texts) <= 300_000
    names = [text.partition("\n")[0].removeprefix("# ") for text in texts]
    assert all((Path(torch.__file__).parent / name).is_file() for name in names)
    assert len({name.partition("/")[0] for name in names}) > 3
