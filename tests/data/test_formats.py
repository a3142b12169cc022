"""Every row format: the rows of a batch hold each prompt whole, and exactly the answers and their ends are learnt."""

import json

import numpy as np
import pytest

from gpubound.data import Corpus, Tokenizer, train_tokenizer
from gpubound.data.formats import FORMATS, Completion, Conversation, PreferencePair, RowParser
from gpubound.data.packing import IGNORED
from gpubound.errors import DataError
from tests.messages import message, refusal

ASK, TELL = {"role": "user", "content": "one?"}, {"role": "assistant", "content": "it is 1"}
ASK2, TELL2 = {"role": "user", "content": "two?"}, {"role": "assistant", "content": "it is 2"}
SYSTEM = {"role": "system", "content": "be brief"}
USER, SAYS, END = "<|user|>one?<|end|><|assistant|>", "it is 1<|end|>", "<|endoftext|>"
# Calls are written after the content, tools before the first message.
TOOLS = (
    "{% for t in tools or [] %}<|system|>{{ t | tojson }}<|end|>{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one"], 261)  # a token a character


def learnt(tokenizer, tmp_path, row, train_on="assistant", count=4):
    """Return (text, [parts that are learnt]) of the only example, which every one of `count` equal rows makes."""
    file = tmp_path / "rows.jsonl"
    file.write_text((json.dumps(row) + "\n") * count)
    corpus = Corpus.build(file, tokenizer, tmp_path / "c", progress=False, train_on=train_on)
    (batch,) = corpus.batches(256, 1, "cpu", pack="examples", seed=1)
    segments, found = batch["segment_ids"][0].tolist(), set()
    for number in range(count):
        ids, labels = (batch[name][0, segments.index(number) :].tolist() for name in ("input_ids", "labels"))
        size = segments.count(number)
        text = [*ids[:size], corpus.document(number)[-1]]
        edges = np.flatnonzero(np.diff([label != IGNORED for label in labels[:size]], prepend=0, append=0)).reshape(-1, 2)
        parts = [tokenizer.decode(labels[first:last]) for first, last in edges]
        assert text[1:] == [label if label != IGNORED else ids for label, ids in zip(labels[:size], text[1:])]
        found.add((tokenizer.decode(text), *parts))
    ((text, *parts),) = found
    return text, parts


@pytest.mark.parametrize(
    "row, text, answers",
    [
        ({"text": "one? it is 1"}, f"one? it is 1{END}", None),
        ({"messages": [ASK, TELL]}, USER + SAYS + END, [SAYS]),
        ({"messages": [{**ASK, "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "?"}]}, TELL]},
         USER + SAYS + END, [SAYS]),
        ({"conversations": [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "it is 1"}]},
         USER + SAYS + END, [SAYS]),
        ({"conversations": [ASK, TELL], "system": "be brief"}, f"<|system|>be brief<|end|>{USER}{SAYS}{END}", [SAYS]),
        ({"instruction": "one?", "input": "", "output": "it is 1"}, USER + SAYS + END, [SAYS]),
        ({"instruction": "one", "input": "be", "output": "it is 1", "text": "all"},
         f"<|user|>one\n\nbe<|end|><|assistant|>{SAYS}{END}", [SAYS]),
        ({"prompt": "one?", "completion": " it is 1"}, f"one? it is 1{END}", [f" it is 1{END}"]),
        ({"prompt": [ASK, TELL, ASK2], "completion": [TELL2]},
         f"{USER}{SAYS}<|user|>two?<|end|><|assistant|>it is 2<|end|>{END}", ["it is 2<|end|>"]),
        ({"prompt": "one?", "completion": [TELL]}, USER + SAYS + END, [SAYS]),
    ],
    ids=["text", "messages", "parts", "sharegpt", "conversations", "alpaca", "alpaca-input", "completion", "completion-chat",
         "completion-mixed"],
)  # fmt: skip
def test_a_row_holds_its_prompt_and_learns_its_answers(tokenizer, tmp_path, row, text, answers):
    found = learnt(tokenizer, tmp_path, row)
    assert found == (text, answers or [text[1:]])


@pytest.mark.parametrize(
    "row, train_on, answers",
    [
        ({"messages": [ASK, TELL, ASK2, TELL2]}, "assistant", [SAYS, "it is 2<|end|>"]),
        ({"messages": [ASK, TELL, ASK2, TELL2]}, "last", ["it is 2<|end|>"]),
        ({"messages": [SYSTEM, ASK, TELL]}, "all", [f"be brief<|end|>{USER}{SAYS}"]),
        ({"prompt": "one?", "completion": " it is 1"}, "all", [f"ne? it is 1{END}"]),
        ({"messages": [ASK, TELL, ASK2]}, "last", [SAYS]),
    ],
)
def test_what_is_learnt(tokenizer, tmp_path, row, train_on, answers):
    assert learnt(tokenizer, tmp_path, row, train_on)[1] == answers


def test_tools_and_calls_reach_the_template(tokenizer, tmp_path):
    with_tools = Tokenizer(tokenizer.inner, tokenizer.eos_token, TOOLS)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    calling, result = (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "name": None},
    )
    row = {"messages": [ASK, calling, result, TELL], "tools": json.dumps([{"name": "add"}])}
    text, parts = learnt(with_tools, tmp_path, row, count=1)
    assert parts == ['{"name": "add", "arguments": {"a": 1}}<|end|>', SAYS]
    assert text.startswith('<|system|>{"name": "add"}<|end|><|user|>one?')
    for number, part in enumerate((row | {"tools": None}, {"messages": [ASK, TELL], "tools": row["tools"]})):
        (tmp_path / str(number)).mkdir()  # the tokenizer's own template writes neither
        with pytest.raises(DataError, match="it does not write the tool 'add'"):
            learnt(tokenizer, tmp_path / str(number), part)


@pytest.mark.parametrize(
    "row, chosen, rejected, answers",
    [
        ({"prompt": "one?", "chosen": " it is 1", "rejected": " two"}, "one? it is 1", "one? two", (" it is 1", " two")),
        ({"chosen": "Q: one? A: it is 1", "rejected": "Q: one? A: two"}, "Q: one? A: it is 1", "Q: one? A: two",
         ("it is 1", "two")),
        ({"prompt": [ASK], "chosen": [TELL], "rejected": [TELL2]}, USER + SAYS, f"{USER}it is 2<|end|>",
         (SAYS, "it is 2<|end|>")),
        ({"prompt": "one?", "chosen": [ASK, TELL], "rejected": [ASK, TELL2]}, USER + SAYS, f"{USER}it is 2<|end|>",
         (SAYS, "it is 2<|end|>")),
        ({"prompt": "one?", "chosen": [TELL], "rejected": [TELL2]}, USER + SAYS, f"{USER}it is 2<|end|>",
         (SAYS, "it is 2<|end|>")),
        ({"chosen": [ASK, TELL, ASK2, TELL2], "rejected": [ASK, TELL, ASK2, TELL]}, None, None, ("it is 2<|end|>", SAYS)),
    ],
    ids=["texts", "whole-texts", "chats", "whole-chats", "text-and-chats", "several-turns"],
)  # fmt: skip
def test_preferences(tokenizer, tmp_path, row, chosen, rejected, answers):
    (tmp_path / "rows.json").write_text(json.dumps([row] * 3))
    corpus = Corpus.build(tmp_path / "rows.json", tokenizer, tmp_path / "c", progress=False, train_on="all", shard_tokens=20)
    assert corpus.pairs and Corpus.open(tmp_path / "c").pairs and corpus.documents == 6
    (batch, *_) = corpus.batches(80, 2, "cpu", pack="pairs", seed=1)
    for i, (text, answer) in enumerate(zip((chosen, rejected), answers)):
        ids = tokenizer.decode(corpus.document(i))
        end = "" if answer.endswith("<|end|>") else END
        labels = batch["labels"][i]
        assert text is None or ids == text + END
        assert tokenizer.decode(labels[labels != IGNORED]) == answer + end and ids.endswith(answer + END)
        assert tokenizer.decode(batch["input_ids"][i][: len(corpus.document(i)) - 1]) + END == ids


def test_pairs_are_held_out_and_shuffled_as_pairs(tokenizer, tmp_path):
    rows = [{"prompt": f"{i}", "chosen": f" yes {i}", "rejected": f" no {i}"} for i in range(20)]
    corpus = Corpus.build(rows, tokenizer, tmp_path / "c", progress=False)
    training, held_out = corpus.split(0.2)
    assert (training.documents, held_out.documents) == (32, 8) and training.pairs
    assert [tokenizer.decode(held_out.document(i)).split()[1] for i in range(4)] == ["yes", "no"] * 2
    seen = []
    for batch in training.batches(16, 4, "cpu", pack="pairs", seed=2):
        assert batch["example"].tolist()[::2] == batch["example"].tolist()[1::2]
        for number, ids in zip(batch["example"].tolist()[::2], batch["input_ids"][::2].tolist()):
            assert ids[:4] == training.document(2 * number).tolist()[:4]
            seen.append(number)
    assert sorted(seen) == list(range(16)) != seen
    assert refusal(ValueError, lambda: training.batches(16, 2, "cpu")) == message("data/formats:pairs_are_rows_of_pairs")
    assert refusal(ValueError, lambda: training.batches(16, 3, "cpu", pack="pairs")) == message("data/formats:pairs_are_even")


def test_pairs_are_packed_next_to_each_other(tokenizer, tmp_path):
    rows = [{"prompt": f"{i}" * (1 + i % 5), "chosen": " y" * (1 + i % 3), "rejected": f" no {i}"} for i in range(40)]
    corpus = Corpus.build(rows, tokenizer, tmp_path / "c", progress=False)
    feed, seen = corpus.batches(48, 1, "cpu", pack="packed_pairs", shuffle=False), []
    for batch in feed:
        for ids, labels, segments in zip(batch["input_ids"], batch["labels"], batch["segment_ids"].tolist()):
            count = 1 + max(segments)
            assert count % 2 == 0 and count >= 2
            for number in range(count):
                begin, size = segments.index(number), segments.count(number)
                text = tokenizer.decode([*ids[begin : begin + size].tolist(), int(labels[begin + size - 1])])
                seen.append(text)
    texts = [tokenizer.decode(corpus.document(i)) for i in range(80)]
    assert sorted(zip(seen[0::2], seen[1::2])) == sorted(zip(texts[0::2], texts[1::2])) and feed.packing.efficiency > 0.8
    short = corpus.batches(24, 1, "cpu", pack="packed_pairs", overlong="truncate_left").packing
    assert short.truncated > 0 and short.examples == 80


def test_a_class_is_the_only_label_at_the_last_token_of_its_text(tokenizer, tmp_path):
    rows = [{"text": "one", "label": 2}, {"text": "two, too", "label": False}, {"text": " ", "label": 1}]
    corpus = Corpus.build(rows, tokenizer, tmp_path / "c", progress=False, format="classification")
    assert corpus.kind == Corpus.open(tmp_path / "c").kind == "classes" and corpus.documents == 2
    (batch,) = corpus.batches(16, 1, "cpu", pack="examples", shuffle=False)
    ids, labels, segments = (batch[name][0] for name in ("input_ids", "labels", "segment_ids"))
    for number, (text, label) in {0: ("one", 2), 1: ("two, too", 0)}.items():
        found = next(n for n in (0, 1) if tokenizer.decode(ids[segments == n]) == text)
        assert labels[segments == found].tolist() == [IGNORED] * (len(text) - 1) + [label], number
    assert RowParser()(rows[0], "a:1") == "one", "a text, unless the format is named"
    parse = RowParser(format="classification")
    for label in ("", -1, 0.5):
        with pytest.raises(DataError, match=r"label.*number"):
            parse({"text": "one", "label": label}, "a:1")
    with pytest.raises(DataError, match=r"^texts\[0\]\['label'\]: got 261, "):
        Corpus.build([{"text": "one", "label": 261}], tokenizer, tmp_path / "d", progress=False, format="classification")


def test_a_class_by_its_name(tokenizer, tmp_path):
    rows = [{"text": "one", "label": "yes"}, {"text": "two", "label": 0}, {"text": "three", "label": "no"}]
    options: dict = {"progress": False, "format": "classification"}
    built = Corpus.build(rows, tokenizer, tmp_path / "c", classes=["no", "yes"], **options)
    assert [int(built.document(n)[-1]) for n in range(3)] == [1, 0, 0]
    assert Corpus.build(rows, tokenizer, tmp_path / "c", classes=["no", "yes"], **options).tokens == built.tokens
    with pytest.raises(DataError, match="classes"):
        Corpus.build(rows, tokenizer, tmp_path / "c", classes=["yes", "no"], **options)
    for name, classes in (("d", ["no", "maybe"]), ("e", None)):
        with pytest.raises(DataError, match=r"^texts\[0\]\['label'\]: got 'yes', wanted "):
            Corpus.build(rows, tokenizer, tmp_path / name, classes=classes, **options)


def test_matches_are_pairs_that_end_with_the_end_of_the_text(tokenizer, tmp_path):
    rows = [{"query": "one?", "positive": "it is 1"}, {"query": "two?", "positive": ""}]
    corpus = Corpus.build(rows, tokenizer, tmp_path / "c", progress=False)
    assert corpus.kind == "matches" and corpus.pairs and corpus.documents == 2
    (batch,) = corpus.batches(16, 2, "cpu", pack="pairs", shuffle=False)
    for ids, labels, text in zip(batch["input_ids"], batch["labels"], ("one?", "it is 1")):
        (last,) = (labels != IGNORED).nonzero()
        assert tokenizer.decode(ids[: last + 1]) == text + END and labels[last] == 0


def test_matches_have_the_same_number_of_negatives(tokenizer, tmp_path):
    row = {"query": "one?", "positive": "it is 1", "negative": ["it is 2", "it is 3"]}
    rows = [row, row | {"anchor": row["query"], "query": None}, row | {"negative": None, "negatives": row["negative"]}]
    corpus = Corpus.build(rows, tokenizer, tmp_path / "c", progress=False)
    assert corpus.kind == "matches of 4 texts" and corpus.group == 4 and corpus.documents == 12
    opened = Corpus.open(tmp_path / "c")
    for batch in opened.batches(16, 4, "cpu", pack="pairs"):
        ends = (batch["labels"] != IGNORED).long().argmax(1)
        texts = [tokenizer.decode(ids[: end + 1]) for ids, end in zip(batch["input_ids"], ends)]
        assert texts == [text + END for text in ("one?", "it is 1", "it is 2", "it is 3")]
    training, held_out = opened.split(0.4)
    assert (training.documents, held_out.documents) == (8, 4)
    assert "multiple of 4" in refusal(ValueError, lambda: opened.batches(16, 6, "cpu", pack="pairs"))
    assert "'pairs'" in refusal(ValueError, lambda: opened.batches(64, 2, "cpu", pack="packed_pairs"))
    file = tmp_path / "rows.jsonl"
    file.write_text("\n\n".join(map(json.dumps, (row, row | {"positive": " "}, row | {"negative": "it is 2"}))))
    sentence = refusal(DataError, lambda: Corpus.build(file, tokenizer, tmp_path / "d", progress=False))
    assert sentence == message("data/formats:matches_have_the_same_nu", file)  # the fifth line
    with pytest.raises(DataError, match=r"a:1\['negative'\]"):
        RowParser()(row | {"negative": [1]}, "a:1")


def test_rows_of_two_formats_in_a_file_are_named(tmp_path):
    parse = RowParser()
    parse({"text": "one"}, "a:1")
    assert refusal(DataError, lambda: parse({"messages": [ASK]}, "a:2")) == message("data/formats:two_formats")
    both = {"messages": [ASK, TELL], "chosen": [ASK, TELL], "rejected": [ASK, TELL2]}
    assert refusal(DataError, lambda: RowParser()(both, "a:1")) == message("data/formats:several_formats")
    assert isinstance(RowParser(format="preference")(both, "a:1"), PreferencePair)
    assert RowParser(format="messages")(both, "a:1") == Conversation([ASK, TELL])
    assert refusal(ValueError, lambda: RowParser(format="csv")) == message("data/formats:unknown_format")
    mixed = RowParser(mixed=True)
    assert [mixed("a", ""), mixed({"prompt": "a", "completion": "b"}, "")] == ["a", Completion("a", "b")]
    assert len({known.keys for known in FORMATS}) == len(FORMATS)


@pytest.mark.parametrize(
    "row, fact",
    [
        ({"conversations": [{"from": "nobody", "value": "x"}]}, "['conversations'][0]: from: got 'nobody', wanted one of"),
        ({"messages": [{"role": "Asistant", "content": "x"}]}, "['messages'][0]: role: got 'Asistant', wanted 'assistant'"),
        ({"messages": [TELL | {"weight": 0.5}]}, "['messages'][0]: weight: got 0.5, wanted 1, or 0"),
        ({"conversations": [{"from": "human", "value": 3}]}, "['conversations'][0]: content: got 3, wanted a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content: got [{'type': 'image'}], wanted a text"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [3]}]}, "tool_calls: got 3, wanted {'function'"),
        ({"messages": [ASK], "tools": "[1"}, "['tools']: is not JSON ("),
        ({"messages": [ASK], "tools": [1]}, "['tools']: got [1], wanted a list of functions"),
        ({"prompt": "a", "completion": "b", "label": False}, "has 'label', a preference without its pair"),
        ({"prompt": "a", "completion": 3}, "['completion']: got a int, wanted a string or a chat"),
        ({"instruction": 3, "output": "x"}, "['instruction']: got 3, wanted a text"),
        ({"chosen": [ASK], "rejected": [ASK, TELL]}, "['chosen']: has no assistant's answer after the messages"),
        ({"chosen": [ASK, TELL], "rejected": "x"}, "['chosen']: has no assistant's answer after the messages"),
        ({"question": "x", "answer": "y"}, "has the keys 'question', 'answer', wanted 'text', 'messages'"),
        ({"prompt": None, "completion": "x"}, "its 'prompt' is null, wanted"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_rows_are_named(row, fact):
    sentence = refusal(DataError, lambda: RowParser()(row, "a.jsonl:7"))
    assert sentence.startswith("a.jsonl:7") and fact in sentence and "\n" not in sentence


def test_the_keys_of_a_format_that_was_named_are_wanted():
    row, label = {"messages": [ASK, TELL]}, {"text": "x", "label": None}
    sentence = refusal(DataError, lambda: RowParser(format="alpaca")(row, "a.jsonl:7"))
    assert "has the keys 'messages', wanted 'instruction' with 'output', by its format 'alpaca';" in sentence
    sentence = refusal(DataError, lambda: RowParser(format="classification")(label, "a.jsonl:7"))
    assert "its 'label' is null, wanted a class" in sentence


def test_empty_answers_are_left_out():
    for row in (
        {"instruction": "x", "output": " "}, {"prompt": "x", "completion": ""}, {"chosen": "a b", "rejected": "a "},
        {"chosen": [ASK, TELL], "rejected": [ASK, TELL]},
    ):  # fmt: skip
        assert RowParser()(row, "a:1") == ""


def test_a_token_of_prompt_and_completion_is_learnt():
    tokenizer = train_tokenizer(["one one"], 263)
    ((ids, mask),) = tokenizer.encode_completions([Completion("on", "e?")])
    assert [tokenizer.decode([i]) for i in ids] == ["one", "?"] and mask.tolist() == [1, 1]


@pytest.mark.parametrize("row", [{"prompt": "one?", "completion": " 1"}, {"prompt": "one?", "chosen": " 1", "rejected": " 2"}])
def test_texts_need_no_chat_template(tokenizer, tmp_path, row):
    base = Tokenizer(tokenizer.inner, tokenizer.eos_token, None)
    corpus = Corpus.build([row] * 2, base, tmp_path / "c", progress=False)
    assert tokenizer.decode(corpus.document(0)) == f"one? 1{END}"


def test_preferences_among_other_rows_are_refused(tokenizer, tmp_path):
    rows = [{"text": "x"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    with pytest.raises(DataError, check=message("data/formats:preferences_among_others")):
        Corpus.build(rows, tokenizer, tmp_path / "c", progress=False)
