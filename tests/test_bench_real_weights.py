"""`python -m benchmarks.real_weights`, and `real_weights_rl`: TRL gets the rows that ours has, and records become figures."""

import json
import os
import re
import subprocess
from types import SimpleNamespace

import pytest
import torch

from benchmarks import real_weights_rl
from benchmarks.real_weights import WARMUP, Session, compared, files, of_ours
from benchmarks.real_weights_trl import give_our_rates, greedy, held_out_loss, tokenized
from gpubound.data import Corpus, train_tokenizer
from gpubound.data.chat import NAMED, read_template
from gpubound.data.tokenizer import Tokenizer
from gpubound.train.schedule import Schedule

from . import forked


def chat_tokenizer() -> Tokenizer:
    inner = train_tokenizer(["in which module of the standard library is it?"], 270).inner
    inner.add_special_tokens(["<|endoftext|>", *NAMED["chatml"]])
    unmarked = re.sub("{%- (end)?generation -%}", "", read_template("chatml"))  # as SmolLM2's own template is
    return Tokenizer(inner, "<|endoftext|>", unmarked)


def test_both_learn_the_same_tokens(tmp_path):
    transformers = pytest.importorskip("transformers")
    _, held_out = files("sft", tmp_path)
    chats = [
        [{"role": "user", "content": f"which is it, {n}?"}, {"role": "assistant", "content": "it" * n + " is."}]
        for n in range(5)
    ]
    held_out.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    tokenizer = chat_tokenizer()
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
    text = compared("sft", runs | {"sft-trl-fp32-0": {"held_out": [1.6]}})
    assert "trl 1.6200: means differ by 0.0200, seeds by up to 0.2000" in text and compared("dpo", runs) == ""
    assert "trl-fp32 1.6000: means differ by 0.0000" in text and "trl-liger 1.5000" in text


def test_both_have_the_same_rates():
    trainer = SimpleNamespace(optimizer=torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1e-4))
    give_our_rates(trainer, WARMUP)
    schedule, rates = trainer.create_scheduler(num_training_steps=20), []
    for _ in range(20):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.optimizer.step()
        schedule.step()
    assert rates == pytest.approx(Schedule("linear", 20, WARMUP).table(1e-4)[:20].tolist(), rel=1e-9)
    assert trainer.lr_scheduler is schedule and rates[0] == pytest.approx(2e-5)


@pytest.mark.slow
def test_one_command_trains_judges_and_writes_the_results(tmp_path):
    pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    inner = train_tokenizer(["In which module of Python's standard library is it?"], 270).inner
    inner.add_special_tokens(["<|endoftext|>", *NAMED["chatml"]])
    Tokenizer(inner, "<|im_end|>", read_template("chatml"), pad_token="<|endoftext|>").save(tmp_path / "base")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=inner.get_vocab_size())
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    results = tmp_path / "results.json"
    wanted = ["--only", "sft", "--peers", "trl", "--seeds", "1", "--quick", "--limit", "600"]
    command = [forked.python(), "-m", "benchmarks.real_weights", str(tmp_path / "base"), "--out", str(tmp_path / "runs")]
    where = {"env": os.environ | {"FORKED": forked.python(), "OMP_NUM_THREADS": "1"}}
    run = subprocess.run([*command, "--results", str(results), *wanted], check=True, capture_output=True, text=True, **where)
    found = json.loads(results.read_text())
    assert found["judged"].keys() == {"before", "sft-ours-0", "sft-trl-0"}
    ours, theirs = (found["runs"][f"sft-{who}-0"] for who in ("ours", "trl"))
    assert ours["steps"] >= theirs["steps"] > 4
    before, after = (found["judged"][name]["loss"] for name in ("before", "sft-ours-0"))
    for one in (ours, theirs):
        assert len(one["held_out"]) == 2 and one["held_out"][1] < one["held_out"][0] < before
    assert after == pytest.approx(ours["held_out"][-1], abs=0.02)  # bf16 weights
    assert "means differ by" in run.stdout
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "base"))
    chats = map(json.loads, (tmp_path / "runs/chats-train.jsonl").read_text().splitlines())
    learnt = sum(sum(tokenized(tokenizer, chat["messages"])["completion_mask"]) for chat in chats)
    trl = json.loads((tmp_path / "runs/sft-trl-0/result.json").read_text())
    assert trl["learnt"] == learnt, "the answers alone"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder of a tiny random model, whose tokenizer writes chats."""
    transformers, folder = pytest.importorskip("transformers"), tmp_path_factory.mktemp("base")
    tokenizer = chat_tokenizer()
    end = tokenizer.inner.token_to_id("<|im_end|>")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"vocab_size": tokenizer.inner.get_vocab_size(), "eos_token_id": end, "bos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **special)).save_pretrained(folder)
    Tokenizer(tokenizer.inner, "<|im_end|>", tokenizer.chat_template).save(folder)
    return str(folder)


def test_greedy_answers_are_those_of_each_prompt_alone(base):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    prompts = [[5, 6, 7], [8], [9, 10]]

    def alone(prompt: list[int]) -> list[int]:
        ids = list(prompt)
        for _ in range(4):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    with torch.no_grad():
        wanted = [alone(prompt) for prompt in prompts]
    end = wanted[1][2]  # cuts this answer, and others that hold it
    cut = [answer[: answer.index(end)] if end in answer else answer for answer in wanted]
    assert greedy(model, tokenizer, prompts, end, 4, "cpu") == [tokenizer.decode(ids, skip_special_tokens=True) for ids in cut]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_reinforcement_learning_beside_trl(base, tmp_path, capfd):
    pytest.importorskip("trl")
    options = ["--quick", "--steps", "2", "--seeds", "1", "--limit", "400", "--out", f"{tmp_path}/runs"]
    assert real_weights_rl.main([base, *options, "--results", f"{tmp_path}/found.json"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["runs"]) == {"ours-0", "trl-0"} and set(found["judged"]) == {"before", "ours-0", "trl-0"}
    for run in found["runs"].values():
        assert len(run["reward"]) == len(run["seconds"]) == 2 and list(run["held_out"]) == ["0", "1", "2"]
    assert {run["held_out"]["0"] for run in found["runs"].values()} == {found["judged"]["before"]["all"]}
    assert "ours  step    2" in capfd.readouterr().out


def test_a_run_that_is_late_is_told_with_what_it_had(tmp_path, capsys, monkeypatch):
    """Its curve ends early, and the means of all end there."""
    kept = {"reward": [0.1, 0.4], "seconds": [1.0, 1.0], "held_out": {"0": 0.25, "25": 0.5, "50": 0.75}}

    def start(session, settings, seed, name):
        whole = name == "trl-0"
        if whole or seed == 1:
            found = kept if whole else kept | {"held_out": {"0": 0.25, "25": 0.25}}
            (tmp_path / f"{name}.json").write_text(json.dumps(found))
        return SimpleNamespace(wait=lambda timeout: 0 if whole else 1)

    monkeypatch.setattr(real_weights_rl, "ours", lambda session, settings, seed: start(session, settings, seed, f"ours-{seed}"))
    monkeypatch.setattr(
        real_weights_rl, "theirs", lambda session, settings, seed: start(session, settings, seed, f"trl-{seed}")
    )
    monkeypatch.setattr(real_weights_rl, "judged", lambda *_: {"all": 0.25})
    for name in ("ours-0", "ours-1", "trl-0", "trl-1"):
        (tmp_path / f"{name}.log").write_text("out of memory\n")
    (tmp_path / "eval.jsonl").touch()
    options = SimpleNamespace(seeds=2, peers="trl", limit=1.0)
    table = real_weights_rl.measured(Session("base", tmp_path, "cpu"), {"max_new_tokens": 4}, options)
    assert {name: run["whole"] for name, run in table["runs"].items()} == {"trl-0": True, "trl-1": False}
    out = capsys.readouterr().out
    assert "ours-0: exit code 1:\n    out of memory" in out and "trl   step   25:  37.5% (25.0% to 50.0%)" in out
    assert "trl   step   50" not in out and "ours  step" not in out
