"""`gpubound generate --chat`: conversations out of a pipe and at a terminal, with a model that knows its replies by heart."""

import io
import json
import os
import pty
import re
import select
import subprocess
import time

import pytest

from gpubound import cli
from gpubound.data import Tokenizer, train_tokenizer
from gpubound.data.tokenizer import ends_of_turn
from gpubound.generate.chat import MARKS, Parts
from gpubound.models import Decoder, DecoderConfig, load_hf, save_hf
from tests.messages import message

from . import by_heart, forked
from .by_heart import LINE
from .processes import plain_environment

pytestmark = pytest.mark.usefixtures("one_thread")
reference, ckpt, run = by_heart.reference, by_heart.ckpt, by_heart.run  # fixtures


@pytest.mark.slow
def test_a_conversation_from_a_pipe_remembers(ckpt, run):
    code, out, err = run(ckpt, "--chat", stdin="hello\nfine\n")
    assert (code, out) == (0, message("cli_chat:a_conversation_from_a_pi"))
    assert re.fullmatch(LINE, err.splitlines(keepends=True)[-1])
    assert run(ckpt, "--chat", stdin="fine\n")[1] == "what is?\n"
    assert run(ckpt, "--chat", "--system", "be rude", stdin="hello\n")[1] == "go away.\n"


def test_chat_is_a_command(ckpt, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert cli.main(["chat", str(ckpt), "--device", "cpu"]) == 0 and capsys.readouterr().out == "hi, how are you?\n"


def test_a_conversation_as_json(ckpt, run):
    code, out, _ = run(ckpt, "--chat", "--json", stdin="hello\n")
    found = json.loads(out)
    assert code == 0 and found["messages"] == [
        {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi, how are you?"},
    ]  # fmt: skip
    assert found["tokens"] == len(Tokenizer.load(ckpt).encode("hi, how are you?<|end|>"))


def test_a_turn_that_fails_is_said_and_forgotten(ckpt, run):
    code, out, err = run(ckpt, "--chat", "--max-length", "40", stdin=f"hello\n{'fine ' * 50}\nfine\n")
    assert (code, out) == (2, message("cli_chat:a_turn_that_fails_is_sai"))
    assert re.search(
        r"gpubound generate: with this turn the conversation has \d+ tokens, which leaves no room in max_length=40; say less, "
        r"or give a larger --max-length\.\n", err,
    )  # fmt: skip
    assert "/clear" not in err, "of a pipe it is a turn as any other"


def test_no_template_no_conversation(ckpt, run, tmp_path):
    save_hf(load_hf(ckpt), tmp_path)
    Tokenizer(Tokenizer.load(ckpt).inner, "<|endoftext|>").save(tmp_path)
    assert run(tmp_path, "--chat", stdin="hello\n")[2].splitlines()[-1] == (
        message("cli_chat:no_template_no_conversat", tmp_path)
    )


def test_the_end_of_a_turn_is_read_off_the_template(ckpt):
    tokenizer = Tokenizer.load(ckpt)
    assert [tokenizer.inner.id_to_token(i) for i in ends_of_turn(tokenizer)] == ["<|end|>"]
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    assert ends_of_turn(tokenizer) == []


HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TAGGED = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
REPLIES = [  # template, special tokens, the prompt's end, a reply with them, what is reasoning in it, and the answer
    (HARMONY, True, "<|start|>assistant", "<|channel|>analysis<|message|>It is 1 < 2.<|end|><|start|>assistant<|channel|>"
     "final<|message|>Yes: <|b> is.<|return|>", "It is 1 < 2.", "Yes: <|b> is."),
    (HARMONY, True, "<|start|>assistant", "<|channel|>final<|message|>Yes.", "", "Yes."),
    (HARMONY, True, "<|start|>assistant", "<|message|>Yes.<|x|>", "", "Yes."),
    (HARMONY, True, "<|start|>assistant", "<|channel|>analysis<|message|>It", "It", ""),
    ("<|channel>{{ x }}", True, "<|turn>model\n", "<|channel>thought\nIt\nis.\n<channel|>Yes.", "It\nis.\n", "Yes."),
    ("<|channel>{{ x }}", True, "<|turn>model\n", "thought of", "", "thought of"),
    (TAGGED, False, "assistant\n", "<think>\nIt <b>\n</think>\n\nYes\n.", "It <b>\n", "Yes\n."),
    (TAGGED, False, "assistant\n<think>\n", "It\n</think>\n\nYes <", "It\n", "Yes <"),
    ("{{ messages }}", False, "", "\n<think>It</think> <|end|>", "", "\n<think>It</think> <|end|>"),
]  # fmt: skip


def with_marks(tokenizer: Tokenizer, template: str, special: bool) -> Tokenizer:
    inner = type(tokenizer.inner).from_str(tokenizer.inner.to_str())
    inner.add_special_tokens([*MARKS, "<|x|>"] if special else [])
    return Tokenizer(inner, tokenizer.eos_token, template)


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("case", REPLIES, ids=range(len(REPLIES)))
def test_reasoning_is_apart_from_the_answer_in_pieces_of_any_size(case, size):
    template, special, prompt, reply, *wanted = case
    parts, got = Parts(with_marks(train_tokenizer(["a"], 300), template, special), prompt), {True: "", False: ""}
    for begin in range(0, len(reply) + 1, size):
        for reasoning, text in parts.add(reply[begin : begin + size], last=begin + size > len(reply)):
            got[reasoning] += text
    assert [got[True], got[False]] == wanted


@pytest.mark.slow
def test_a_conversation_with_a_model_of_channels(ckpt, run, tmp_path):
    """The names of channels were joined with their texts: "analysisgreetfinalhi."."""
    tokenizer = with_marks(Tokenizer.load(ckpt), HARMONY, True)
    greet = (
        "<|start|>user<|message|>hello<|end|><|start|>assistant<|channel|>analysis<|message|>greet<|end|>"
        "<|start|>assistant<|channel|>final<|message|>hi.<|return|>"
    )
    model = Decoder(DecoderConfig(64, 128, 2, 4, 2, 320, tied=True, positions=512))
    by_heart.learn(model, [tokenizer.inner.encode(greet, add_special_tokens=False).ids])
    tokenizer.save(save_hf(model, tmp_path))
    code, out, err = run(tmp_path, "--chat", stdin="hello\n")
    assert (code, out) == (0, "hi.\n") and "\ngreet\n" in err
    code, out, _ = run(tmp_path, "--chat", "--json", stdin="hello\n")
    assert json.loads(out)["messages"][1] == {"role": "assistant", "content": "hi.", "reasoning_content": "greet"}
    assert run(tmp_path, "--chat", "--special", stdin="hello\n")[1].startswith("<|channel|>analysis<|message|>greet<|end|>")
    begun = len(tokenizer.encode("<|channel|>analysis<|message|>gr"))
    code, out, err = run(tmp_path, "--chat", "--max-new-tokens", begun, stdin="hello\n")
    assert (code, out) == (0, "\n") and err.splitlines()[-2] == message("cli_chat:a_conversation_with_a_mo")


# Ctrl-C reaches a process through the terminal that controls it.
BEHIND = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, {handler})
from gpubound.cli import main
sys.exit(main())
"""


class Terminal:
    """`gpubound generate ... --chat` behind a terminal of its own."""

    def __init__(self, *argv, ignored=False):
        """`ignored`: started as a shell starts a background job, which does not hear Ctrl-C."""
        mine, its = pty.openpty()
        behind = BEHIND.format(handler="signal.SIG_IGN" if ignored else "signal.default_int_handler")
        command = [forked.python(), "-c", behind, "generate", *map(str, argv), "--device", "cpu"]
        own = {"env": plain_environment() | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}, "start_new_session": True}
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


@pytest.mark.slow
def test_a_conversation_at_a_terminal(ckpt):
    """Replies arrive, /clear forgets, Ctrl-D ends with the figures of it all."""
    with Terminal(ckpt, "--chat") as terminal:
        assert message("cli_chat:a_conversation_at_a_term").within(terminal.until("> "))
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


@pytest.mark.slow
def test_ctrl_c_ends_a_reply_and_the_conversation_goes_on(ckpt):
    with Terminal(ckpt, "--chat", "--ignore-eos", "--max-length", "100000", "--verify", "none", ignored=True) as terminal:
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
