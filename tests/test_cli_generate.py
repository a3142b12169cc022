"""`gpubound generate` on a tiny model that knows a few texts by heart, so that what it writes is known to the letter."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gpubound import device as facts
from gpubound import trace
from gpubound.cli import generate as command
from gpubound.cli import main
from gpubound.cli.chat import ends_of_turn
from gpubound.cli.saved import open_saved
from gpubound.cli.speed import Speed
from gpubound.decode.result import Generation, Sequence
from gpubound.feed.tokenizer import Tokenizer, train_tokenizer
from gpubound.measure import ceilings
from gpubound.models import Decoder, DecoderConfig, load_hf, save_hf
from gpubound.train.checkpoint import Checkpoints

CPU = torch.device("cpu")
HELLO = "<|user|>hello<|end|><|assistant|>hi, how are you?<|end|>"
TEXTS = [
    "the cat sat on the mat and slept.<|endoftext|>",
    "one two three four five six seven.<|endoftext|>",
    HELLO,
    f"{HELLO}<|user|>fine<|end|><|assistant|>good to hear.<|end|>",
    "<|user|>fine<|end|><|assistant|>what is?<|end|>",
    "<|system|>be rude<|end|><|user|>hello<|end|><|assistant|>go away.<|end|>",
]
LINE = (
    r"(\d+) tokens, ([\d.,]+) tokens/s, [\d.]+% of the roofline \(([\d.]+)kB a step / [\d.]+[GT]B/s read here\), "
    r"first token after [\d.]+ (?:ms|s|µs), host syncs: not counted \(no GPU\)\n"
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    """The reference kernels: what is tested here is the command, not the interpreter."""
    monkeypatch.setattr(facts, "interpreted", lambda: False)
    monkeypatch.delenv("GPUBOUND_TRACEBACK", raising=False)
    monkeypatch.setattr(trace, "_said", set())  # what is said once a process may have been said by another test


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory) -> Path:
    """A Hugging Face folder with a model that has learnt TEXTS by heart."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    tokenizer = train_tokenizer(TEXTS, 300)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # before one_thread does: on products this small threads wait for each other
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "interpreted", lambda: False)
        model = Decoder(DecoderConfig(64, 128, 2, 4, 2, 320, tied=True, positions=512))
        learn(model, [tokenizer.inner.encode(text, add_special_tokens=False).ids for text in TEXTS])
    tokenizer.save(save_hf(model, folder))
    return folder


def learn(model: Decoder, rows: list[list[int]]) -> None:
    ids, labels = torch.zeros(len(rows), 32, dtype=torch.long), torch.full((len(rows), 32), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = labels[i, : len(row)] = torch.tensor(row)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(120):
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


@pytest.fixture
def run(capsys, monkeypatch):
    """run(*argv, stdin=None) -> (exit code, stdout, stderr)"""

    def call(*argv, stdin=None):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", StringIO(stdin))
        capsys.readouterr()
        code = main(["generate", *map(str, argv), "--device", "cpu"])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


# --- texts ---


def test_a_prompt_is_written_on_to_its_end(ckpt, run):
    code, out, err = run(ckpt, "--prompt", "the cat")
    assert (code, out) == (0, " sat on the mat and slept.\n")
    ready, line = err.splitlines(keepends=True)
    assert re.fullmatch(rf"{ckpt}: 94.5k parameters, float32 on CPU \(1 threads\), fused kernels, ready in [\d.]+ s\n", ready)
    tokens, _, kilobytes = re.fullmatch(LINE, line).groups()
    assert int(tokens) == 20
    # the embedding is the head too, so every weight is read; and of each place, 2 layers of 2 heads of 16 keys and values, fp32
    weights, prompt = 4 * sum(p.numel() for p in load_hf(ckpt).parameters()), len(Tokenizer.load(ckpt).encode("the cat"))
    assert float(kilobytes) == pytest.approx((weights + 512 * (prompt + 10)) / 1e3, rel=6e-3)


def test_several_prompts_keep_their_order_and_names(ckpt, run):
    code, out, _ = run(ckpt, "--prompt", "one two three four five", "--prompt", "the cat", "--echo")
    assert code == 0 and out == (
        "--- 1: 'one two three four five'\none two three four five six seven.\n"
        "--- 2: 'the cat'\nthe cat sat on the mat and slept.\n"
    )


@pytest.mark.parametrize("batch", ["1", "2", "32"])
def test_a_file_a_line_a_prompt_in_any_batch(ckpt, run, tmp_path, batch):
    (tmp_path / "prompts.txt").write_text("the cat\n\none two\nthe cat sat on\n")
    code, out, err = run(ckpt, "--file", tmp_path / "prompts.txt", "--batch", batch)
    assert code == 0 and out == (
        "--- 1: 'the cat'\n sat on the mat and slept.\n"
        "--- 2: 'one two'\n three four five six seven.\n"
        "--- 3: 'the cat sat on'\n the mat and slept.\n"
    )
    assert re.fullmatch(LINE, err.splitlines(keepends=True)[-1])[1] == str(20 + 23 + 14)


def test_a_whole_file_and_stdin(ckpt, run, tmp_path):
    (tmp_path / "prompt.txt").write_text("the cat sat\n")
    assert run(ckpt, "--file", tmp_path / "prompt.txt", "--whole")[1] == " on the mat and slept.\n"
    assert run(ckpt, stdin="the cat sat\n")[1] == " on the mat and slept.\n"
    assert run(ckpt, "--file", "-", stdin="the cat sat\n\none two three four\n")[1].count("---") == 2


def test_what_ends_a_text(ckpt, run):
    assert run(ckpt, "--prompt", "the cat", "--stop", " mat")[1] == " sat on the\n"
    assert run(ckpt, "--prompt", "<|user|>hello", "--stop", "<|assistant|>")[1] == "\n"
    assert run(ckpt, "--prompt", "the cat", "--max-new-tokens", "1")[2].count("1 tokens, ") == 1
    dot = Tokenizer.load(ckpt).encode(".")[0]
    assert run(ckpt, "--prompt", "the cat", "--stop-id", dot)[1] == " sat on the mat and slept\n"
    on = run(ckpt, "--prompt", "the cat", "--ignore-eos", "--special", "--max-new-tokens", "40")[1]
    assert on.startswith(" sat on the mat and slept.<|endoftext|>") and len(on) > 50


@pytest.mark.parametrize("k", ["1", "5", "auto"])
def test_json_says_everything(ckpt, run, k):
    code, out, _ = run(ckpt, "--prompt", "the cat", "--json", "--logprobs", "--k", k)
    found = json.loads(out)
    (sequence,) = found.pop("sequences")
    tokenizer = Tokenizer.load(ckpt)
    assert code == 0 and sequence["prompt"] == "the cat" and sequence["prompt_tokens"] == tokenizer.encode("the cat")
    assert sequence["text"] == " sat on the mat and slept." and sequence["finish"] == "stop token"
    assert tokenizer.decode(sequence["tokens"]) == " sat on the mat and slept.<|endoftext|>"
    ids = torch.tensor(sequence["prompt_tokens"] + sequence["tokens"])
    with torch.no_grad():
        logits = load_hf(ckpt).eval()(ids[None])[0].log_softmax(-1)
    want = logits[:-1].gather(-1, ids[1:, None])[len(sequence["prompt_tokens"]) - 1 :, 0]
    torch.testing.assert_close(torch.tensor(sequence["logprobs"]), want, atol=1e-4, rtol=1e-3)
    assert (found["model"], found["tokens"], found["steps"], found["syncs"]) == (str(ckpt), 20, 20, None)
    assert found["read_bytes_per_s"] == ceilings("cpu", quick=True).read_bytes_per_s
    assert found["roofline"] == pytest.approx(
        found["bytes_a_step"] * 20 / found["read_bytes_per_s"] / found["seconds"], rel=1e-3
    )


def test_a_seed_gives_the_same_draw_and_n_draws_differ(ckpt, run):
    hot = [ckpt, "--prompt", "the", "--temperature", "3", "--max-new-tokens", "12", "--json", "--n", "3"]
    first, again, other = ([s["tokens"] for s in json.loads(run(*hot, "--seed", seed)[1])["sequences"]] for seed in (1, 1, 2))
    assert first == again != other and len({tuple(tokens) for tokens in first}) == 3
    assert run(*hot[:-3], "--n", "2")[1].count("--- 1.") == 2


def test_equal_prompts_in_other_batches_are_drawn_anew(ckpt, run):
    hot = ["--prompt", "the", "--prompt", "the", "--temperature", "3", "--max-new-tokens", "12", "--json", "--batch", "1"]
    one, two = json.loads(run(ckpt, *hot)[1])["sequences"]
    assert one["tokens"] != two["tokens"]


def test_speculation_writes_the_same_text(ckpt, run):
    assert run(ckpt, "--prompt", "the cat", "--speculate", "3")[:2] == (0, " sat on the mat and slept.\n")


def test_the_model_in_another_dtype_and_without_fused_kernels(ckpt, run):
    code, out, err = run(ckpt, "--prompt", "the cat", "--dtype", "bfloat16", "--table", "--verify", "quick")
    assert (code, out) == (0, " sat on the mat and slept.\n") and "bfloat16 on CPU" in err
    assert "path: fused kernels over the live weights" in err and "greedy tokens equal" in err
    code, out, err = run(ckpt, "--prompt", "the cat", "--weights", "int8", "--table")
    assert (code, out) == (0, " sat on the mat and slept.\n") and "path: fused kernels over int8 copies of the weights" in err
    code, out, err = run(ckpt, "--prompt", "the cat", "--cache", "int8", "--table")
    assert (code, out) == (0, " sat on the mat and slept.\n") and "int8, a scale a token and head" in err
    assert "verify=False: nothing has shown" in run(ckpt, "--prompt", "the cat", "--verify", "none")[2]


# --- what is opened ---


def test_another_architecture_through_transformers(ckpt, run, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_positions=64, n_embd=32, n_layer=1, n_head=2, eos_token_id=5)).eval()
    model.save_pretrained(tmp_path / "gpt2")
    tokenizer = Tokenizer.load(ckpt)
    tokenizer.save(tmp_path / "gpt2")
    code, out, err = run(tmp_path / "gpt2", "--prompt", "the cat", "--json", "--max-new-tokens", "8")
    ids = tokenizer.encode("the cat")
    for _ in range(8):
        with torch.no_grad():
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    got = json.loads(out)["sequences"][0]
    assert code == 0 and got["prompt_tokens"] + got["tokens"] == ids[: len(got["prompt_tokens"] + got["tokens"])]
    assert len(got["tokens"]) == 8 or got["tokens"][-1] in (0, 5)
    assert "its own forward (GPT2LMHeadModel is none of the families with fused kernels" in err


def test_without_transformers_other_architectures_are_refused(ckpt, run, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    Tokenizer.load(ckpt).save(tmp_path)
    monkeypatch.setattr("gpubound.cli.saved.find_spec", lambda name: None)
    assert run(tmp_path, "--prompt", "x") == (
        2,
        "",
        f"gpubound generate: {tmp_path}: it is a 'gpt2' model beyond our own decoder, which transformers reads, and it is not "
        "installed: pip install 'gpubound[hf]'.\n",
    )


def test_the_ends_that_the_models_files_name(ckpt, tmp_path):
    saved = open_saved(ckpt, CPU)
    assert saved.ends == (0,) and saved.positions == 512
    save_hf(saved.model, tmp_path)
    saved.tokenizer.save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0, 9]}')
    assert open_saved(tmp_path, CPU).ends == (0, 7, 9)


def checkpoint(folder: Path, ckpt: Path, step: int, **average) -> None:
    """A checkpoint as a run leaves it, with the model of `ckpt`."""
    model = load_hf(ckpt)
    tensors = {f"model.{name}": t for name, t in model.state_dict().items()} | average
    tensors["model.lm_head.weight"] = tensors["model.lm_head.weight"].clone()
    Tokenizer.load(ckpt).save(folder / "corpus")
    facts = {"recipe": {"model": str(ckpt), "seq": 32, "data": ["stdlib"], "tokenizer": None}}
    Checkpoints(folder / "checkpoints").save(step, tensors, facts, wait=True)


def test_a_run_is_its_export_or_a_newer_checkpoint(ckpt, tmp_path):
    checkpoint(tmp_path, ckpt, 3)
    step = tmp_path / "checkpoints" / "step-00000003"
    assert open_saved(tmp_path, CPU).folder == open_saved(tmp_path / "checkpoints", CPU).folder == step
    assert open_saved(step, CPU).folder == step
    Tokenizer.load(ckpt).save(save_hf(load_hf(ckpt), tmp_path / "model"))
    assert open_saved(tmp_path, CPU).folder == tmp_path / "model"
    newer = (tmp_path / "model" / "config.json").stat().st_mtime + 10
    os.utime(step / "state.json", (newer, newer))
    assert open_saved(tmp_path, CPU).folder == step


def test_of_a_checkpoint_with_an_average_the_average_speaks(ckpt, tmp_path, run):
    zeros = {f"average.{n}": torch.zeros_like(p) for n, p in load_hf(ckpt).named_parameters() if n != "lm_head.weight"}
    checkpoint(tmp_path / "plain", ckpt, 1)
    checkpoint(tmp_path / "averaged", ckpt, 1, **zeros)
    assert run(tmp_path / "plain", "--prompt", "the cat")[1] == " sat on the mat and slept.\n"
    model = open_saved(tmp_path / "averaged", CPU).model
    assert all(not p.any() for p in model.parameters()) and model.lm_head.weight is model.model.embed_tokens.weight


def test_what_demo_leaves(tmp_path, run, monkeypatch, capsys):
    from gpubound.train import prepare

    whole = prepare.python_stdlib_texts
    monkeypatch.setattr(prepare, "python_stdlib_texts", lambda limit: whole(60_000))
    assert main(["demo", "--out", str(tmp_path / "demo"), "--steps", "3", "--device", "cpu"]) == 0
    prompt = ["--prompt", "import sys", "--max-new-tokens", "16", "--json"]
    exported = json.loads(run(tmp_path / "demo", *prompt)[1])
    kept = json.loads(run(tmp_path / "demo" / "checkpoints" / "step-00000003", *prompt)[1])
    assert exported["model"] == str(tmp_path / "demo" / "model")
    assert exported["sequences"] == kept["sequences"] and len(kept["sequences"][0]["tokens"]) > 0


# --- what is refused ---


def sentences(folder: Path):
    wanted = "wanted a Hugging Face folder, or a run of gpubound train or demo"
    return [
        (["nowhere", "--prompt", "x"], f"nowhere: there is no such folder; {wanted}."),
        ([__file__, "--prompt", "x"], f"{__file__}: this is a file; {wanted}."),
        ([folder, "--prompt", "x"], f"{folder} holds neither a config.json nor a whole checkpoint; {wanted}."),
        (["CKPT", "--prompt", ""], "prompt: the prompt is empty; give it at least one character to go on from."),
        (["CKPT", "--file", "-"], "stdin: the prompt is empty; give it at least one character to go on from."),
        (["CKPT", "--prompt", "x", "--chat"], "prompt: give one of --prompt, --file and --chat."),
        (["CKPT", "--prompt", "x", "--whole"], "whole: it takes a file as a single prompt; give --file with it."),
        (["CKPT", "--prompt", "x", "--system", "s"], "system: it begins a conversation; give --chat with it."),
        (["CKPT", "--chat", "--n", "2"], "n: got 2, but a conversation has one reply a turn; leave --n out."),
        (["CKPT", "--prompt", "x", "--n", "0"], "n: got 0, wanted at least 1."),
        (["CKPT", "--prompt", "x", "--batch", "0"], "batch: got 0, wanted at least 1."),
        (["CKPT", "--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens: got 0, wanted at least 1."),
        (["CKPT", "--prompt", "x", "--temperature", "-1"], "temperature: got -1.0, wanted 0 (greedy) or more."),
        (["CKPT", "--prompt", "x", "--top-p", "0"], "top_p: got 0.0, wanted more than 0 and at most 1 (off)."),
        (["CKPT", "--prompt", "x", "--k", "some"], "k: got 'some', wanted auto or a number of steps a launch."),
        (["CKPT", "--prompt", "x", "--verify", "no"], "verify: got 'no', wanted one of full, quick, none."),
        (["CKPT", "--prompt", "x", "--dtype", "int8"], "dtype: got 'int8', wanted auto, float32, bfloat16, float16."),
        (["CKPT", "--prompt", "x", "--stop-id", "999"],
         "the stop token 999 lies outside the vocabulary of 320, so it can never be seen."),
        (["CKPT", "--prompt", "the cat", "--max-length", "2"],
         "prompt 0 has 5 tokens, which leaves no room in max_length=2; shorten it, or build the decoder longer."),
        (["CKPT", "--prompt", "x", "--tokenizer", "nowhere"],
         "tokenizer: nowhere does not exist, wanted a tokenizer.json or a folder with one."),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(len(sentences(Path()))))
def test_what_is_refused_by_its_sentence(ckpt, run, tmp_path, number):
    arguments, sentence = sentences(tmp_path)[number]
    code, out, err = run(*[ckpt if word == "CKPT" else word for word in arguments], stdin="")
    assert (code, out, err.splitlines()[-1]) == (2, "", f"gpubound generate: {sentence}")


def test_a_terminal_without_any_prompt(ckpt, run, monkeypatch):
    terminal = StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert run(ckpt)[2] == (
        "gpubound generate: prompt: got none; give --prompt TEXT or --file FILE, pipe a text in, or --chat.\n"
    )


def test_files_that_are_not_what_they_should_be(ckpt, run, tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert run(ckpt, "--file", tmp_path / "latin")[2].startswith(
        f"gpubound generate: {tmp_path / 'latin'} is not a text in UTF-8: "
    )
    save_hf(load_hf(ckpt), tmp_path / "mute")
    assert run(tmp_path / "mute", "--prompt", "x")[2] == (
        f"gpubound generate: {tmp_path / 'mute'} has no tokenizer.json, and texts must become tokens; give one with "
        "--tokenizer FOLDER.\n"
    )
    assert run(tmp_path / "mute", "--prompt", "the cat", "--tokenizer", ckpt)[1] == " sat on the mat and slept.\n"
    Tokenizer.load(ckpt).save(tmp_path / "half")
    (tmp_path / "half" / "config.json").write_text('{"model_type": "llama"}')
    assert run(tmp_path / "half", "--prompt", "x")[2] == (
        f"gpubound generate: {tmp_path / 'half'}: its config.json has no 'hidden_size'; is it a model's?\n"
    )
    (tmp_path / "half" / "config.json").write_text("{")
    assert run(tmp_path / "half", "--prompt", "x")[2].startswith(
        f"gpubound generate: {tmp_path / 'half' / 'config.json'} is not JSON: "
    )


def test_an_unknown_option_suggests_the_near_one_and_help_has_an_example(run):
    code, _, err = run("ckpt", "--temprature", "1")
    assert code == 2 and "Unrecognized options: --temprature" in err and "--temperature FLOAT" in err
    code, out, _ = run("--help")
    assert code == 0 and 'gpubound generate demo-run --prompt "def main(" --temperature 0.7' in out


# --- conversations ---


def test_a_conversation_from_a_pipe_remembers(ckpt, run):
    code, out, err = run(ckpt, "--chat", stdin="hello\nfine\n")
    assert (code, out) == (0, "hi, how are you?\ngood to hear.\n")
    assert re.fullmatch(LINE, err.splitlines(keepends=True)[-1])
    assert run(ckpt, "--chat", stdin="fine\n")[1] == "what is?\n"
    assert run(ckpt, "--chat", "--system", "be rude", stdin="hello\n")[1] == "go away.\n"


def test_a_conversation_as_json(ckpt, run):
    code, out, _ = run(ckpt, "--chat", "--json", stdin="hello\n")
    found = json.loads(out)
    assert code == 0 and found["messages"] == [
        {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi, how are you?"},
    ]  # fmt: skip
    assert found["tokens"] == len(Tokenizer.load(ckpt).encode("hi, how are you?<|end|>"))


def test_a_turn_that_fails_is_said_and_forgotten(ckpt, run):
    code, out, err = run(ckpt, "--chat", "--max-length", "40", stdin=f"hello\n{'fine ' * 50}\nfine\n")
    assert (code, out) == (2, "hi, how are you?\ngood to hear.\n")
    assert re.search(
        r"gpubound generate: prompt 0 has \d+ tokens, which leaves no room in max_length=40; shorten it, or build the decoder "
        r"longer\.\n/clear forgets what was said before\.\n", err,
    )  # fmt: skip


def test_no_template_no_conversation(ckpt, run, tmp_path):
    save_hf(load_hf(ckpt), tmp_path)
    Tokenizer(Tokenizer.load(ckpt).inner, "<|endoftext|>").save(tmp_path)
    assert run(tmp_path, "--chat", stdin="hello\n")[2].splitlines()[-1] == (
        f"gpubound generate: {tmp_path}: its tokenizer has no chat template, and a conversation needs one; use --prompt."
    )


def test_the_end_of_a_turn_is_read_off_the_template(ckpt):
    tokenizer = Tokenizer.load(ckpt)
    assert [tokenizer.inner.id_to_token(i) for i in ends_of_turn(tokenizer)] == ["<|end|>"]
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    assert ends_of_turn(tokenizer) == []


# Ctrl-C reaches a process through the terminal that controls it.
BEHIND = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from gpubound.cli import main; sys.exit(main())"


class Terminal:
    """`gpubound generate ... --chat` behind a terminal of its own."""

    def __init__(self, *argv):
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        mine, its = pty.openpty()
        command = [sys.executable, "-c", BEHIND, "generate", *map(str, argv), "--device", "cpu"]
        own = {"env": environment | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}, "start_new_session": True}
        self.child = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, **own)
        os.close(its)
        self.file, self.seen = mine, ""

    def until(self, text: str, again: str = "") -> str:
        """What it shows up to and with `text`; from there on it is read next time. `again` is typed while nothing comes: a
        Ctrl-C that falls between readline's last look for signals and its wait is only seen with the next key."""
        deadline = time.monotonic() + 120
        while text not in self.seen:
            while again and time.monotonic() < deadline and not select.select([self.file], [], [], 3)[0]:
                self.type(again)
            assert select.select([self.file], [], [], max(0, deadline - time.monotonic()))[0], f"only {self.seen!r}"
            try:
                more = os.read(self.file, 4096).decode()
            except OSError:  # its end was closed
                more = ""
            assert more, f"it ended with only {self.seen!r}"
            self.seen += more.replace("\r\n", "\n")
        shown, _, self.seen = self.seen.partition(text)
        return shown + text

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def end(self) -> int:
        return self.child.wait(timeout=60)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        os.close(self.file)


def test_a_conversation_at_a_terminal(ckpt):
    """Replies arrive, /clear forgets, Ctrl-D ends with the figures of it all."""
    with Terminal(ckpt, "--chat") as terminal:
        assert "Ctrl-C ends a reply, Ctrl-D the conversation.\n" in terminal.until("> ")
        for said, answer in (("hello", "hi, how are you?"), ("fine", "good to hear.")):
            terminal.type(f"{said}\n")
            assert f"\n{answer}\n" in terminal.until("tokens/s")
            terminal.until("> ")
        terminal.type("/clear\n")
        terminal.until("forgotten\n> ")
        terminal.type("fine\n")
        assert "\nwhat is?\n" in terminal.until("tokens/s")
        terminal.until("> ")
        terminal.type("\x03")
        terminal.until("Ctrl-D ends the conversation.\n> ", again="\x03")
        terminal.type("\x04")
        assert re.search(LINE, terminal.until("(no GPU)\n")) and terminal.end() == 0


def test_ctrl_c_ends_a_reply_and_the_conversation_goes_on(ckpt):
    with Terminal(ckpt, "--chat", "--ignore-eos", "--max-length", "100000", "--verify", "none") as terminal:
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("hi, how are you?")
        terminal.type("\x03")
        terminal.until(" ...\n")
        terminal.until("tokens/s")
        terminal.until("> ")
        terminal.type("/help\n")
        terminal.until("> ")
        terminal.type("\x04")
        terminal.until("(no GPU)\n")
        assert terminal.end() == 0


# --- the figures ---


def test_steps_beyond_the_last_token_do_not_count_as_work():
    speed = Speed(CPU)
    speed._rate = 1e9
    sequences = [Sequence([1], [2] * 20), Sequence([1], [2] * 5)]
    speed.add(Generation(sequences, 2.0, 0.5, launches=5, steps=40, row_steps=25, bytes_read=40_000_000))
    assert (speed.tokens, speed.steps, speed.bytes_read) == (25, 20, 20_000_000)
    assert speed.line() == (
        "25 tokens, 12.5 tokens/s, 1.0% of the roofline (1MB a step / 1GB/s read here), first token after 500 ms, "
        "host syncs: not counted (no GPU)"
    )
    speed.merge(speed)
    assert speed.tokens_per_s == 12.5 and speed.first_token_s == 0.5


def test_a_launch_that_overshot_is_counted_as_far_as_it_was_wanted():
    """257 steps for 256 tokens, of which 256 are in bytes_read."""
    speed = Speed(CPU)
    speed.add(Generation([Sequence([1], [2] * 256)], 2.0, 0.5, 12, 257, 256, bytes_read=256_000, wanted=256))
    assert (speed.steps, speed.bytes_read) == (256, 256_000)


def test_control_characters_do_not_reach_a_terminal():
    assert "a\x1b[2Jb\r\x07\n\t\x9b".translate(command.HARMLESS) == "a\ufffd[2Jb\ufffd\ufffd\n\t\ufffd"


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits(ckpt, capsys, monkeypatch):
    monkeypatch.undo()
    code = main(["generate", str(ckpt), "--prompt", "the cat", "--ignore-eos", "--json", "--device", "cuda"])
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert code == 0 and found["syncs"] == 0 and found["tokens"] == 256
    assert found["sequences"][0]["text"].startswith(" sat on the mat and slept.") and said.err.endswith("host syncs: 0\n")
