"""The conversation of `gpubound generate --chat`: by the model's chat template, a reply as it arrives, errors kept inside.

Ctrl-C ends a reply, Ctrl-D the conversation. From a pipe, every line is a turn.
"""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from ..data.tokenizer import ends_of_turn
from ..decode import FastDecoder
from ..errors import GpuboundError
from .prompts import HARMLESS, stdin_lines
from .saved import Saved, build, settings_of
from .speed import Speed

if TYPE_CHECKING:
    from .generate import Generate

LENGTH = 4096  # tokens that a conversation may have, unless asked otherwise
HELP = "/clear forgets what was said, /help says this; Ctrl-C ends a reply, Ctrl-D the conversation."


def converse(options: "Generate", saved: Saved) -> int:
    """Exit code 0, or 2 when a turn from a pipe failed."""
    if saved.tokenizer.chat_template is None:
        raise ValueError(f"{options.ckpt}: its tokenizer has no chat template, and a conversation needs one; use --prompt.")
    length = min(LENGTH, saved.positions) if options.max_length is None else options.max_length
    settings = settings_of(options, saved)
    if not options.ignore_eos:
        settings["stop"] = tuple(dict.fromkeys((*settings["stop"], *ends_of_turn(saved.tokenizer))))
    chat = Chat(options, saved, build(options, saved, [[0] * 8], length), settings)
    if chat.live:
        # A shell starts a background job with Ctrl-C ignored; whoever types here expects it to end a reply.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        chat.note(HELP)
    for text in chat.typed() if chat.live else stdin_lines():
        chat.take(text.rstrip("\n"))
    if options.json:
        about = {"model": str(saved.folder), "device": saved.where, "messages": chat.messages}
        print(json.dumps(about | chat.speed.as_dict(), indent=1))
    print(chat.speed.line(), file=sys.stderr, flush=True)
    return 2 if chat.failed and not chat.live else 0


class Chat:
    """What was said, and how the next reply comes about."""

    def __init__(self, options: "Generate", saved: Saved, decoder: FastDecoder, settings: dict[str, Any]):
        self.decoder, self.tokenizer, self.settings, self.speed = decoder, saved.tokenizer, settings, Speed(saved.device)
        self.start = [] if options.system is None else [{"role": "system", "content": options.system}]
        self.messages = list(self.start)
        self.quiet, self.live, self.failed = options.json, sys.stdin.isatty(), False
        self.safe = HARMLESS if sys.stdout.isatty() else {}
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)

    def note(self, text: str, style: str = "dim") -> None:
        self.console.print(text, style=style, markup=False)

    def typed(self) -> Iterator[str]:
        """What the user types, until Ctrl-D."""
        import readline  # noqa: F401 (arrow keys and history for input())

        while True:
            try:
                yield input("> ")
            except EOFError:
                self.console.print()
                return
            except KeyboardInterrupt:
                self.note("\nCtrl-D ends the conversation.")

    def take(self, text: str) -> None:
        """One turn. Whatever goes wrong in it is said, and the turn is forgotten."""
        command = text.strip()
        if not command:
            return
        if self.live and command == "/help":
            self.note(HELP)
            return
        if self.live and command == "/clear":
            self.messages = list(self.start)
            self.note("forgotten")
            return
        before = list(self.messages)
        try:
            speed = self.reply(text)
        except (GpuboundError, ValueError, torch.OutOfMemoryError) as error:
            self.messages, self.failed = before, True
            said = " ".join(str(error).removeprefix("generate: ").split())
            self.note(f"gpubound generate: {said}", style="red")
            if self.live and len(before) > len(self.start):  # to a pipe it is a turn as any other
                self.note("/clear forgets what was said before.")
            return
        if self.live:
            self.note(speed.line())

    def reply(self, text: str) -> Speed:
        """Say `text`, print the answer while it is written, and remember both. Ctrl-C keeps what is there."""
        self.messages.append({"role": "user", "content": text})
        prompt = self.tokenizer.render(self.messages, prompt=True)
        ids = self.tokenizer.inner.encode(prompt, add_special_tokens=False).ids  # the template writes them
        if len(ids) >= (most := self.decoder.max_length):
            raise ValueError(
                f"with this turn the conversation has {len(ids)} tokens, which leaves no room in max_length={most}; say less, "
                "or give a larger --max-length."
            )
        run = self.decoder.start(ids, **self.settings)
        mine, written = Speed(self.speed.device), ""
        with mine.counting(), closing(run.play()) as pieces:
            try:
                for _, piece in pieces:
                    written += piece
                    if not self.quiet:
                        print(piece.translate(self.safe), end="", flush=True)
            except KeyboardInterrupt:
                print(" ...", end="", file=sys.stderr, flush=True)
        if not self.quiet:
            print(flush=True)
        self.messages.append({"role": "assistant", "content": written})
        mine.add(run.result())
        self.speed.merge(mine)
        return mine
