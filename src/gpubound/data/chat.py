"""Chats: rendered by the tokenizer's own chat template, with the spans that the assistant wrote.

Templates run in a process under limits of memory and time: chat_process.py.
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

Messages = list[dict[str, Any]]
Spans = list[tuple[int, int]]
Render = Callable[..., tuple[str, Spans]]

_LOCK = threading.Lock()
_process: tuple[int, subprocess.Popen] | None = None  # the process that started it, and the renderer


def render(template: str, messages: Messages, prompt: bool = False, **names: Any) -> str:
    """Return the chat as text; with `prompt` it ends where the assistant's answer begins. `names`: more variables."""
    return render_spans(template, messages, prompt, **names)[0]


def render_spans(template: str, messages: Messages, prompt: bool = False, **names: Any) -> tuple[str, Spans]:
    """Return the chat as text, and the spans of the template's {% generation %} blocks."""
    request = {"template": template, "messages": messages, "prompt": prompt, "names": names}
    reply = _ask(json.dumps(request, default=str).encode() + b"\n")
    if "error" in reply:
        raise DataError(f"chat template: {reply['error']}")
    return reply["text"], [(begin, end) for begin, end in reply["spans"]]


def _ask(request: bytes) -> dict[str, Any]:
    global _process
    with _LOCK:
        if _process is None or _process[0] != os.getpid():  # a fork must not share the pipes
            command = [sys.executable, "-P", str(Path(__file__).with_name("chat_process.py"))]
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
        raise DataError("chat template: it needs more than 5 seconds of CPU time for a chat; use another template.")
    raise DataError(f"chat template: the process that renders it ended with code {renderer.returncode}; use another template.")


def _close(renderer: subprocess.Popen) -> None:
    for stream in (renderer.stdin, renderer.stdout):
        if stream is not None:
            with suppress(BrokenPipeError):  # it has ended
                stream.close()
    renderer.wait()


def write_chat(render: Render, messages: Messages) -> tuple[str, Spans]:
    """Return the whole chat as text, and the spans that the assistant wrote: each of its messages with the end of its turn.

    render  renders messages, with prompt=True up to where the assistant's answer begins
    """
    text, spans = render(messages)
    if spans:
        return text, spans
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            (asked, _), (answered, _) = render(messages[:i], prompt=True), render(messages[: i + 1])
            whole = text.startswith(answered) and answered.startswith(asked)
            spans.append((len(asked), len(answered)) if whole else _span_of(render, messages, i, text))
    if any(begin > end for begin, end in spans) or any(end > begin for (_, end), (begin, _) in pairwise(spans)):
        raise _unclear()
    return text, spans


def _span_of(render: Render, messages: Messages, i: int, text: str) -> tuple[int, int]:
    """Return the span of message `i` in `text`, the whole chat, where later messages change how earlier ones are written.

    Qwen3's template leaves out the reasoning of earlier turns, so the text up to message `i` is no prefix of the whole. The
    whole chat is rendered with two other contents of message `i` instead: they differ exactly there.
    """
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
    closing = _closing(render, messages, i)
    end = len(one) - after + _common(one[len(one) - after :], closing)
    end += len(text) - len(one)
    if text[:begin] != one[:begin] or text[end:] != one[len(one) - (len(text) - end) :]:
        raise _unclear()
    return begin, end


def _closing(render: Render, messages: Messages, i: int) -> str:
    """Return the text that ends the turn of message `i`, as where it is the last message."""
    marked = "\ue000" * 8
    last = render([*messages[:i], messages[i] | {"content": marked}])[0]
    return last.rpartition(marked)[2]


def _common(one: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def _unclear() -> DataError:
    return DataError(
        "chat template: the assistant's part of its text cannot be found, so the prompts cannot be masked; use a template that "
        "writes each message once, or one with {% generation %} blocks."
    )
