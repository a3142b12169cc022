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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..files import read_text
from ..formatting import shown
from .formats import Conversation, Messages

Written = tuple[str, list[tuple[int, int]]]  # a chat's text, and spans of it

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
    return _written(template, names, [{"messages": messages, "prompt": prompt}])[0][0]


def write_chats(template: str, chats: Sequence[Conversation], train_on: str = "assistant", **names: Any) -> list[Written]:
    """Return each chat as text, and the spans to learn."""
    tasks = [{"messages": c.messages, "tools": c.tools, "given": c.given, "train_on": train_on} for c in chats]
    return _written(template, names, tasks) if tasks else []


def _written(template: str, names: Mapping[str, Any], chats: list[dict[str, Any]]) -> list[Written]:
    replies = _request(json.dumps({"template": template, "names": names, "chats": chats}, default=str).encode() + b"\n")
    for reply, chat in zip(replies, chats):
        if "error" in reply:
            first = chat["messages"][0]["content"] if chat["messages"] else ""
            raise DataError(f"chat template: {reply['error']} (in the chat that begins with {shown(first)}).")
    return [(reply["text"], [(begin, end) for begin, end in reply["spans"]]) for reply in replies]


def _request(request: bytes) -> list[dict[str, Any]]:
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
