"""`python -m benchmarks.real_weights`: TRL gets the rows that ours has, and a run's records become its figures."""

import json
import re

import pytest
import torch

from benchmarks.real_weights import compared, files, of_ours
from benchmarks.real_weights_trl import held_out_loss, tokenized
from gpubound.data import Corpus, train_tokenizer
from gpubound.data.chat import NAMED, read_template
from gpubound.data.tokenizer import Tokenizer


def test_both_learn_the_same_tokens(tmp_path):
    transformers = pytest.importorskip("transformers")
    _, held_out = files("sft", tmp_path)
    chats = [
        [{"role": "user", "content": f"which is it, {n}?"}, {"role": "assistant", "content": "it" * n + " is."}]
        for n in range(5)
    ]
    held_out.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    inner = train_tokenizer(["in which module of the standard library is it?"], 270).inner
    inner.add_special_tokens(["<|endoftext|>", *NAMED["chatml"]])
    unmarked = re.sub("{%- (end)?generation -%}", "", read_template("chatml"))  # as SmolLM2's own template is
    tokenizer = Tokenizer(inner, "<|endoftext|>", unmarked)
    tokenizer.save(tmp_path / "tokenizer")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "tokenizer"))
    rows = [tokenized(theirs, chat) for chat in chats]
    corpus = Corpus.build(held_out, tokenizer, tmp_path / "corpus", progress=False)
    feed = corpus.batches(256, 1, "cpu", pack="none", shuffle=False)
    assert len(feed) == len(rows) == 5
    for batch, row in zip(feed, rows, strict=True):
        ids, labels, length = batch["input_ids"][0], batch["labels"][0], len(row["input_ids"]) - 1
        assert ids[:length].tolist() == row["input_ids"][:-1]
        learnt = [token if mask else -100 for token, mask in zip(row["input_ids"], row["completion_mask"], strict=True)][1:]
        assert labels[:length].tolist() == learnt and (labels[length + 1 :] == -100).all()

    def uniform(input_ids):
        return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 300)})

    assert held_out_loss(uniform, rows, "cpu") == pytest.approx(torch.tensor(300.0).log().item(), rel=1e-6)


def test_records_become_the_figures_of_a_run(tmp_path):
    (tmp_path / "sft-ours-0").mkdir()
    records = [{"step": n, "loss": 4.0 - n} | ({} if n == 1 else {"seconds": 1.0 if n < 3 else 0.5}) for n in range(1, 5)]
    records[1]["held_out"], records[3]["held_out"] = 2.0, 1.5
    (tmp_path / "sft-ours-0/steps.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = of_ours(tmp_path, "sft-ours-0")
    assert found == {"held_out": [2.0, 1.5], "accuracy": [], "loss": [3.0, 2.0, 1.0, 0.0], "epoch_s": 1.0, "steps": 4}
    runs = {"sft-ours-0": found, "sft-ours-1": {"held_out": [1.7]}, "sft-trl-0": {"held_out": [1.62]}, "sft-trl-liger-0": found}
    assert "differ by 0.0200, seeds by up to 0.2000" in compared("sft", runs) and compared("dpo", runs) == ""
