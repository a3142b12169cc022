"""Chats: written with a chat template, and the parts of the text that the assistant wrote.

Templates run in a process with limits of memory and time: chat_process.py. templates/ has some by name.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..files import read_text
from .formats import Messages

Spans = list[tuple[int, int]]
Render = Callable[..., tuple[str, Spans]]

TRAIN_ON = ("assistant", "last", "all")
TEMPLATE_SECONDS = 5  # of CPU time a chat
NAMED = {  # the templates in templates/, and the special tokens that they write
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "mistral": ("[INST]", "[/INST]"),
    "zephyr": (),
    "alpaca": (),
}


def read_template(template: str | Path) -> str:
    """Return the text of a chat template: of a file, by its name in NAMED, or `template` itself."""
    if str(template) in NAMED:
        return (Path(__file__).parent / "templates" / f"{template}.jinja").read_text()
    if isinstance(template, str) and ("{%" in template or "{{" in template):
        return template
    if not Path(template).is_file():
        raise ValueError(
            f"chat_template: got {str(template)!r}, wanted a file, a template's text or one of {', '.join(NAMED)}."
        )
    return read_text(Path(template), "give another file")


_LOCK = threading.Lock()
_process: tuple[int, subprocess.Popen] | None = None  # the process that started it, and the renderer


def render(template: str, messages: Messages, prompt: bool = False, **names: Any) -> str:
    """Return the chat as text; with `prompt` it ends where the assistant's answer begins. `names`: more variables."""
    return render_spans(template, messages, prompt, **names)[0]


def render_spans(template: str, messages: Messages, prompt: bool = False, **names: Any) -> tuple[str, Spans]:
    """Return the chat as text, and the (begin, end) of every {% generation %} block of the template."""
    request = {"template": template, "messages": messages, "prompt": prompt, "names": names}
    reply = _request(json.dumps(request, default=str).encode() + b"\n")
    if "error" in reply:
        raise DataError(f"chat template: {reply['error']}")
    return reply["text"], [(begin, end) for begin, end in reply["spans"]]


def _request(request: bytes) -> dict[str, Any]:
    global _process
    with _LOCK:
        if _process is None or _process[0] != os.getpid():  # a fork must not share the pipes
            program = str(Path(__file__).with_name("chat_process.py"))
            command = [sys.executable, "-P", program, str(TEMPLATE_SECONDS)]
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            _process = os.getpid(), subprocess.Popen(command, **streams)
            atexit.register(_close, _process[1])
        renderer = _process[1]
        assert renderer.stdin is not None and renderer.stdout is not None
        try:
            renderer.stdin.write(request)
            renderer.stdin.flush()
            reply = renderer.stdout.readline()
        except BrokenPipeError:
            reply = b""
        if reply:
            return json.loads(reply)
        _close(renderer)
        _process = None
    if renderer.returncode == -signal.SIGVTALRM:
        raise DataError(
            f"chat template: it needs more than {TEMPLATE_SECONDS} seconds of CPU time for a chat; use another template."
        )
    raise DataError(f"chat template: the process that renders it ended with code {renderer.returncode}; use another template.")


def _close(renderer: subprocess.Popen) -> None:
    for stream in (renderer.stdin, renderer.stdout):
        if stream is not None:
            with suppress(BrokenPipeError):  # it has ended
                stream.close()
    renderer.wait()


def write_chat(render: Render, messages: Messages, train_on: str = "assistant", given: int = 0) -> tuple[str, Spans]:
    """Return the chat as text, and the spans to learn: the assistant's messages, each with the end of its turn.

    render    renders messages; with prompt=True up to the beginning of the assistant's answer
    train_on  "assistant", "last" (the assistant's last message) or "all" (the whole text)
    given     the first messages, of which nothing is learnt
    """
    text, spans = render(messages)
    if train_on == "all":
        return text, [(0, len(text))]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    is_part = given > 0 or train_on == "last"
    if not spans or (is_part and len(spans) != len(answers)):  # no {% generation %} blocks, or several a message
        spans = [_span(render, messages, i, text) for i in answers]
    if any(begin > end for begin, end in spans) or any(end > begin for (_, end), (begin, _) in pairwise(spans)):
        raise _unclear()
    if is_part:
        spans = [span for i, span in zip(answers, spans) if i >= given]
    return text, spans[-1:] if train_on == "last" else spans


def _span(render: Render, messages: Messages, i: int, text: str) -> tuple[int, int]:
    (asked, _), (answered, _) = render(messages[:i], prompt=True), render(messages[: i + 1])
    is_prefix = text.startswith(answered) and answered.startswith(asked)
    return (len(asked), len(answered)) if is_prefix else _find_span(render, messages, i, text)


def _find_span(render: Render, messages: Messages, i: int, text: str) -> tuple[int, int]:
    """Return the span of message `i` in `text`, for a template that renders earlier messages depending on later ones.

    Qwen3's template leaves out the reasoning of earlier turns, so the chat up to message `i` is no prefix of `text`. Render the
    chat with two other contents of message `i` instead: the results differ exactly there.
    """
    last = render([*messages[:i], messages[i] | {"content": "\ue000" * 8}])[0]
    turn_end = last.rpartition("\ue000" * 8)[2]
    one, other = (
        render([*messages[:i], messages[i] | {"content": letter * 8}, *messages[i + 1 :]])[0] for letter in "\ue000\ue001"
    )
    before, after = _common(one, other), _common(one[::-1], other[::-1])
    if before == len(one):
        raise _unclear()
    asked, prompt = render(messages[:i])[0] if i else "", render(messages[:i], prompt=True)[0]
    header = prompt[len(asked) :] if prompt.startswith(asked) else ""
    if not header and i:  # the template ends a prompt with the end of the user's turn
        header = prompt.rpartition(messages[i - 1]["content"].strip())[2]
    begin = one.rfind(header, 0, before) + len(header) if header else before
    if begin < len(header):
        raise _unclear()
    end = len(one) - after + _common(one[len(one) - after :], turn_end)
    end += len(text) - len(one)
    if text[:begin] != one[:begin] or text[end:] != one[len(one) - (len(text) - end) :]:
        raise _unclear()
    return begin, end


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def _unclear() -> DataError:
    return DataError(
        "chat template: the assistant's part of its text cannot be found, so the prompts cannot be masked; use a template that "
        "writes each message once, or one with {% generation %} blocks."
    )
