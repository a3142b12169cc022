"""Which tokens of a chat are learnt, for templates of the kinds that models have; masks are written out by hand."""

import multiprocessing

import numpy as np
import pytest

from gpubound.data import Corpus, Tokenizer, chat as chats, train_tokenizer
from gpubound.data.chat import render
from gpubound.errors import DataError

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
TAGGED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }};{% endgeneration %}\n"
    "{% else %}U:{{ m.content }}\n{% endif %}{% endfor %}"
)
END = "<|im_end|>\n"
THOUGHT = [*HISTORY[:1], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nit is 1"}, *HISTORY[2:]]
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
        (TAGGED, HISTORY, ["it is 1;", "it is 2;"]),
    ],
    ids=[
        "chatml", "reasoning", "reasoning-one-turn", "reasoning-given-earlier", "reasoning-given-last", "reasoning-system",
        "llama", "gemma", "mistral", "mistral-system", "tagged",
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


def test_an_answer_that_repeats_the_header_and_an_earlier_answer():
    odd = [*HISTORY[:1], {"role": "assistant", "content": "it is 2"}, *HISTORY[2:]]
    odd[3] = {"role": "assistant", "content": "assistant\nit is 2"}
    tokenizer = chatting(REASONING)
    ((ids, mask),) = tokenizer.encode_chats([odd])
    assert tokenizer.decode(np.array(ids)[mask == 1]) == f"it is 2{END}<think>\n\n</think>\n\nassistant\nit is 2{END}"


@pytest.mark.parametrize(
    "template",
    ["{{ messages[-1].content }}", "{{ messages | map(attribute='content') | sort | join }}"],
    ids=["last", "sorted"],
)
def test_a_template_whose_answers_cannot_be_found_is_refused(template):
    with pytest.raises(DataError, match="generation"):
        chatting(template).encode_chats([HISTORY])


@pytest.mark.parametrize("template, ends", [(CHATML, 1), (CHATML.replace("<|im_end|>", "."), 2)], ids=["written", "missing"])
def test_a_chat_ends_once(tmp_path, template, ends):
    """A template that ends a turn with the end of a text and a line break had a second end after it."""
    tokenizer = chatting(template)
    corpus = Corpus.build([HISTORY[:2]], tokenizer, tmp_path / "c", progress=False)
    document = corpus.document(0)
    assert tokenizer.decode(document) == tokenizer.render(HISTORY[:2]) + ("" if ends == 1 else "<|im_end|>")
    assert (document == tokenizer.eos).sum() == (2 if ends == 1 else 1)


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


def test_the_next_chat_is_rendered_after_one_that_did_not_end(monkeypatch):
    monkeypatch.setattr(chats, "_process", None)
    monkeypatch.setattr(chats, "TEMPLATE_SECONDS", 1)
    with pytest.raises(DataError, match="1 seconds"):
        render("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", HISTORY)
    assert render("{{ messages | length }}", HISTORY) == "4"
