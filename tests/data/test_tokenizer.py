"""Tokenizers: trained, saved, loaded by us and by transformers; which tokens of a chat are learnt, mask by mask."""

import json
import multiprocessing
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from gpubound.data import Corpus, Tokenizer, chat as chats, python_stdlib_texts, torch_source_texts, train_tokenizer
from gpubound.data.chat import NAMED, render
from gpubound.data.formats import Completion
from gpubound.data.tokenizer import END_OF_TEXT, LONGEST_WORD, SPECIALS, adapt, ends_of_turn, split_endless_words
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


def test_a_text_that_a_chat_template_has_written_begins_once(tokenizer):
    """With the token that the library prepends, as Llama's does, such a text began twice."""
    inner = pickle.loads(pickle.dumps(tokenizer)).inner
    inner.add_special_tokens(["<s>", "</s>"])
    begin, end = (inner.token_to_id(token) for token in ("<s>", "</s>"))
    inner.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", begin), ("</s>", end)])
    adapted = Tokenizer(inner, "</s>", bos_token="<s>")
    plain = adapted.encode("what is new?")
    assert plain[0] == begin and plain[-1] == end and begin not in plain[1:]
    assert adapted.encode("<s>what is new?") == plain
    assert adapted.encode_batch(["<s>what is new?", "what is new?"]) == [plain, plain]
    (ids, mask), (others, other_mask) = adapted.encode_completions(
        [Completion("<s>what is", " new?"), Completion("what is", " new?")]
    )
    assert ids == others == plain and np.array_equal(mask, other_mask) and mask[-1] == 1 and not mask[0]
    assert tokenizer.encode("what")[0] == tokenizer.encode("what what")[0], "without such a token nothing is left out"


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


def test_sentences(tokenizer, tmp_path):
    said = refusal(ValueError, lambda: train_tokenizer(["x"], vocab_size=200))
    assert said == message("data/tokenizer:sentences", len(SPECIALS))
    said = refusal(ValueError, lambda: Tokenizer.load(tmp_path))
    assert said == message("data/tokenizer:sentences.2", tmp_path / "tokenizer.json")
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


HISTORY = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "it is 1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "it is 2"},
]
SYSTEM = [{"role": "system", "content": "be brief"}, *HISTORY]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Writes the reasoning of the turn after the last question only, and an empty one where the last answer has none.
REASONING = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- set parts = m.content.split('</think>') -%}
    {%- set thought = m.reasoning_content or (parts[0].split('<think>')[-1] if parts | length > 1 else '') -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if loop.index0 > ns.last and (loop.last or thought) -%}
      {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' -}}
    {%- endif -%}
    {{- parts[-1].lstrip('\n') + '<|im_end|>\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('must alternate') }}{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# The system's text goes into the last question; the prompt has no header of its own.
MISTRAL = (
    "{{ bos_token }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set turns = messages[1:] if system else messages %}{% for m in turns %}{% if m.role == 'user' %}[INST] "
    "{% if system and m == (turns | selectattr('role', 'equalto', 'user') | list | last) %}{{ system }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# A prompt begins the reasoning; earlier turns have none of it.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# A prompt ends the reasoning before it begins, also where the last answer has some.
UNTHINKING = THINKING.replace("assistant\n<think>\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")
# Channels within a turn; the last turn's end is another than that of earlier ones.
CHANNELS = (
    "<|start|>system<|message|>x<|end|>{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
    "<|channel|>final{% endif %}<|message|>{{ m.content }}"
    "{% if m.role == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# The last turn is followed by the end of the text, which begins like the mark of a next turn.
CLOSED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }};{% endgeneration %}\n"
    "{% else %}U:{{ m.content }}\n{% endif %}{% endfor %}"
)
END = "<|im_end|>\n"
THOUGHT = [*HISTORY[:1], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nit is 1"}, *HISTORY[2:]]
LINE, EMPTY = ([*SYSTEM[:1], {"role": "user", "content": text}, *HISTORY[1:]] for text in ("one?\n", ""))
WEIGHED = [*HISTORY[:1], HISTORY[1] | {"weight": 0}, *HISTORY[2:]]
THOUGHT_LAST = [*HISTORY[:3], {"role": "assistant", "content": "it is 2", "reasoning_content": "hm"}]


@pytest.mark.parametrize(
    "template, chat, learnt",
    [
        (CHATML, SYSTEM, [f"it is 1{END}", f"it is 2{END}"]),
        (REASONING, HISTORY, [f"it is 1{END}", f"<think>\n\n</think>\n\nit is 2{END}"]),
        (REASONING, HISTORY[:2], [f"<think>\n\n</think>\n\nit is 1{END}"]),
        (REASONING, THOUGHT, [f"it is 1{END}", f"<think>\n\n</think>\n\nit is 2{END}"]),
        (REASONING, THOUGHT_LAST, [f"it is 1{END}", f"<think>\nhm\n</think>\n\nit is 2{END}"]),
        (REASONING, SYSTEM, [f"it is 1{END}", f"<think>\n\n</think>\n\nit is 2{END}"]),
        (LLAMA, SYSTEM, ["it is 1<|eot_id|>", "it is 2<|eot_id|>"]),
        (GEMMA, HISTORY, ["it is 1<end_of_turn>\n", "it is 2<end_of_turn>\n"]),
        (MISTRAL, HISTORY, [" it is 1</s>", " it is 2</s>"]),
        (MISTRAL, SYSTEM, [" it is 1</s>", " it is 2</s>"]),
        (MISTRAL, LINE, [" it is 1</s>", " it is 2</s>"]),
        (MISTRAL, EMPTY, [" it is 1</s>", " it is 2</s>"]),
        (CHATML, WEIGHED, [f"it is 2{END}"]),
        (TAGGED, WEIGHED, ["it is 2;"]),
        (THINKING, THOUGHT_LAST, [f"it is 1{END}", f"hm\n</think>\n\nit is 2{END}"]),
        (UNTHINKING, THOUGHT_LAST, [f"it is 1{END}", f"hm\n</think>\n\nit is 2{END}"]),
        (CHANNELS, HISTORY, ["<|channel|>final<|message|>it is 1<|end|>", "<|channel|>final<|message|>it is 2<|return|>"]),
        (CHANNELS, [*HISTORY[:3], HISTORY[3] | {"thinking": "hm"}], ["<|channel|>final<|message|>it is 1<|end|>",
         "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>it is 2<|return|>"]),
        (CLOSED, HISTORY, ["it is 1<|end|>\n", "it is 2<|end|>\n<|im_end|>"]),
        (TAGGED, HISTORY, ["it is 1;", "it is 2;"]),
    ],
    ids=[
        "chatml", "reasoning", "reasoning-one-turn", "reasoning-given-earlier", "reasoning-given-last", "reasoning-system",
        "llama", "gemma", "mistral", "mistral-system",
        "mistral-line", "mistral-empty", "weights", "weights-tagged", "thinking-prompt", "unthinking-prompt",
        "channels", "channels-thinking", "closed", "tagged",
    ],
)  # fmt: skip
def test_the_assistant_s_turns_are_learnt(template, chat, learnt):
    tokenizer = chatting(template)
    ((ids, mask),) = tokenizer.encode_chats([chat])
    assert tokenizer.decode(ids) == tokenizer.render(chat), "the text is that of the whole chat"
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)
    assert [tokenizer.decode(ids[first:last]) for first, last in edges] == learnt


def chatting(template):
    inner = train_tokenizer(["it is one? two? be brief"] * 3, 270).inner
    inner.add_special_tokens(["</s>", "<|im_start|>", "<|im_end|>"])
    return Tokenizer(inner, "</s>" if template is MISTRAL else "<|im_end|>", template, bos_token=None)


ENDS = {
    "chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>", "zephyr": "</s>",
    "alpaca": "</s>",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_templates_by_name_write_and_mask_as_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    inner = train_tokenizer(["it is one? two? be brief"], 270).inner
    inner.add_special_tokens(["</s>", "<s>", *NAMED[name]])
    tokenizer = Tokenizer(inner, "</s>", bos_token="<s>").with_template(name)
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    both = theirs.apply_chat_template(SYSTEM, return_assistant_tokens_mask=True, return_dict=True)
    ((ids, mask),) = tokenizer.encode_chats([SYSTEM])
    assert ids == both["input_ids"] and mask.tolist() == both["assistant_masks"]
    assert tokenizer.decode(np.array(ids)[mask == 1]).split(ENDS[name]) in (
        ["it is 1", "it is 2", ""],
        [" it is 1", " it is 2", ""],
    )
    for i in (2, 4):
        assert tokenizer.render(SYSTEM).startswith(tokenizer.render(SYSTEM[:i], prompt=True)), "a prompt begins the chat"
    assert [inner.id_to_token(i) for i in ends_of_turn(tokenizer)] == [ENDS[name]]
    unmarked = re.sub("{%- (end)?generation -%}", "", tokenizer.chat_template)
    ((_, mask),) = tokenizer.with_template(unmarked).encode_chats([SYSTEM])
    learnt = tokenizer.decode(np.array(ids)[mask == 1]).replace("\n", "")
    assert learnt == tokenizer.decode(np.array(ids)[np.array(both["assistant_masks"]) == 1]).replace("\n", "")


@pytest.mark.parametrize("known", [("<|end|>", "<|return|>", "<|call|>"), ("<|end|>", "<|return|>"), ("<|end|>",)])
@pytest.mark.parametrize("last", ["<|return|>", "<|end|>"])
def test_a_turn_of_channels_does_not_end_with_its_first_message(last, known):
    """Some templates write <|end|> after an answer, too, and a model writes it after its analysis."""
    inner = train_tokenizer(["it is one? two? be brief"], 270).inner
    inner.add_special_tokens([*known, "<|channel|>"])
    tokenizer = Tokenizer(inner, "<|end|>", CHANNELS.replace("<|return|>", last))
    want = [name for name in ("<|return|>", "<|call|>") if name in known] or ([last] if last in known else [])
    assert [inner.id_to_token(i) for i in ends_of_turn(tokenizer)] == want


@pytest.mark.parametrize("pack", ["examples", "none"])
@pytest.mark.parametrize("name", NAMED)
def test_a_row_holds_the_prompts_of_its_answers(name, pack, tmp_path):
    """Each example of a row is a whole chat, whatever else the row holds."""
    inner = train_tokenizer(["it is one? two? be brief"], 270).inner
    inner.add_special_tokens(["</s>", "<s>", *NAMED[name]])
    tokenizer = Tokenizer(inner, "</s>", bos_token="<s>").with_template(name)
    chats = [SYSTEM, HISTORY, HISTORY[:2], [*HISTORY, *HISTORY[:2]]]
    corpus = Corpus.build(chats, tokenizer, tmp_path / "c", progress=False)
    longest = int(np.diff(corpus.offsets()).max())
    fields = ("input_ids", "labels", "segment_ids")
    feed, found = corpus.batches(2 * longest if pack == "examples" else longest, 1, "cpu", pack=pack, fields=fields), []
    for batch in feed:
        ids, labels, segments = (batch[key][0] for key in fields)
        for number in segments[segments >= 0].unique():
            inside = segments == number
            text, answers = tokenizer.decode(ids[inside]), tokenizer.decode(labels[inside & (labels >= 0)]).count("it is")
            (chat,) = (
                chat
                for chat in chats
                if tokenizer.render(chat).startswith(text[:-1]) and answers == sum(m["role"] == "assistant" for m in chat)
            )
            assert text.startswith(tokenizer.render(chat[:-1], prompt=True))
            found.append(chats.index(chat))
    assert sorted(found) == [0, 1, 2, 3] and (len(feed) == 4) == (pack == "none")


def test_a_template_is_named_a_text_or_a_file(tmp_path, said):
    (tmp_path / "chat.jinja").write_text(CHATML)
    tokenizer = chatting(None)
    for template in (CHATML, str(tmp_path / "chat.jinja"), tmp_path / "chat.jinja"):
        assert tokenizer.with_template(template).chat_template == CHATML and tokenizer.chat_template is None
    assert said() == ""
    tokenizer.with_template("llama3")
    assert message("data/chat:marks_are_no_tokens").within(said())
    assert refusal(ValueError, lambda: tokenizer.with_template("vicuna")) == message("data/chat:unknown_template")
    with pytest.raises(ValueError, check=message("data/chat:unknown_template")):
        Corpus.build([HISTORY], tokenizer, tmp_path / "c", chat_template="vicuna")
    corpus = Corpus.build([HISTORY], tokenizer, tmp_path / "c", chat_template="chatml", progress=False)
    assert corpus.tokenizer().chat_template == tokenizer.with_template("chatml").chat_template


@pytest.mark.parametrize(
    "template, learnt",
    [(CHATML, "it is 2<|im_end|>\n"), (CHATML.replace("<|im_end|>", ""), "it is 2\n<|im_end|>"),
     (CHATML.replace("<|im_end|>", "</s>"), "it is 2</s>\n")],
    ids=["end-of-text", "none", "another"],
)  # fmt: skip
def test_the_end_of_the_last_answer_is_learnt_once(tmp_path, template, learnt):
    """Where the template ends a turn with another special token, the end of the text only separates documents."""
    tokenizer = chatting(template)
    corpus = Corpus.build([HISTORY], tokenizer, tmp_path / "c", progress=False, train_on="last")
    document, mask = corpus.document(0), corpus.read_mask(np.arange(corpus.tokens))
    assert tokenizer.decode(document[mask == 1]) == learnt
    assert tokenizer.decode(document) == tokenizer.render(HISTORY) + ("" if template is CHATML else "<|im_end|>")


def test_an_answer_that_repeats_the_header_and_an_earlier_answer():
    odd = [*HISTORY[:1], {"role": "assistant", "content": "it is 2"}, *HISTORY[2:]]
    odd[3] = {"role": "assistant", "content": "assistant\nit is 2"}
    tokenizer = chatting(REASONING)
    ((ids, mask),) = tokenizer.encode_chats([odd])
    assert tokenizer.decode(np.array(ids)[mask == 1]) == f"it is 2{END}<think>\n\n</think>\n\nassistant\nit is 2{END}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content }}",
        "{{ messages | map(attribute='content') | sort | join }}",
    ],
    ids=["last", "sorted"],
)
def test_a_template_whose_answers_cannot_be_found_is_refused(template):
    tokenizer = chatting(template)
    assert refusal(DataError, lambda: tokenizer.encode_chats([HISTORY])) == message("data/tokenizer:answers_not_found")


def test_ids_beyond_32_bits_are_refused_when_a_tokenizer_is_loaded(tmp_path):
    train_tokenizer(["some text"], 270).save(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace('"Ġ":', f'"far": {1 << 31}, "Ġ":', 1))
    with pytest.raises(ValueError, match="2,147,483,64"):
        Tokenizer.load(tmp_path)


def render_once(_):
    return render(CHATML, HISTORY[:1])


def test_a_forked_process_renders_by_itself():
    """Of two processes on one pipe each would read what the other asked for."""
    render_once(0)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(render_once, range(40)) == [f"<|im_start|>user\none?{END}"] * 40
    assert render_once(0) == f"<|im_start|>user\none?{END}"


@pytest.mark.slow
def test_the_next_chat_is_rendered_after_one_that_did_not_end(monkeypatch):
    monkeypatch.setattr(chats, "_process", None)
    monkeypatch.setattr(chats, "TEMPLATE_SECONDS", 0.2)
    with pytest.raises(DataError, match=r"0\.2 seconds"):
        render("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", HISTORY)
    assert render("{{ messages | length }}", HISTORY) == "4"
