"""The conversation of `gpubound generate --chat`, in the model's chat template.

Ctrl-C ends a reply, Ctrl-D the conversation. From a pipe, every line is a turn. An error ends the turn, not the conversation.

A reply's reasoning is shown apart from its answer, while the reply arrives:

    gpt-oss   <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    Gemma 4   <|channel>thought, a line's end, ...<channel|>...
    others    <think>...</think>...

A decoder that drops special tokens would leave the channels' names, joined with their texts.
"""

import json
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from ..data import Tokenizer
from ..data.tokenizer import ends_of_turn
from ..decode import FastDecoder
from ..errors import GpuboundError
from ..formatting import PRINTABLE
from ..models.diffusion import MaskedSampler
from .batches import Saved, Speed, build_decoder, build_sampler, decoder_settings, is_diffusion, longest, sampler_settings
from .options import Generate, stdin_lines

MARKS = (
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|channel>", "<channel|>",
    "<think>", "</think>",
)  # fmt: skip
OPENING = ("<|channel|>", "<|channel>", "<think>", "</think>")
REASONING = ("analysis", "commentary")  # channels of gpt-oss


def opening(tokenizer: Tokenizer) -> list[str]:
    """Return the marks with which replies in the tokenizer's chat template begin their reasoning, or end it."""
    return [mark for mark in OPENING if mark in (tokenizer.chat_template or "")]


def keeps_special(tokenizer: Tokenizer) -> bool:
    """Return whether a decoder must keep special tokens, because one of them begins the reasoning."""
    return any(tokenizer.inner.token_to_id(mark) in tokenizer.specials for mark in opening(tokenizer))


class Parts:
    """Splits the text of a reply to `prompt`, and drops special tokens. Without a tokenizer all of the text is the answer."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: str):
        self.marks = set[str]()
        if tokenizer is not None and opening(tokenizer):
            special = tokenizer.specials if keeps_special(tokenizer) else ()
            self.marks = {*MARKS, *map(tokenizer.inner.id_to_token, special)}
        longest = sorted(map(re.escape, self.marks), key=len, reverse=True)
        self.mark = re.compile(f"({'|'.join(longest)})" if longest else "($.)")  # which matches nothing
        self.reasoning = bool(self.marks) and prompt.rstrip().endswith("<think>")
        self.name: str | None = None  # of a channel, while it arrives
        self.partial, self.begins, self.gemma = "", False, False

    def add(self, piece: str, last: bool = False) -> Iterator[tuple[bool, str]]:
        """Yield (whether it is reasoning, text) of what the piece completes."""
        *parts, rest = self.mark.split(self.partial + piece)
        at = rest.rfind("<")  # a mark that has arrived in part
        self.partial = rest[at:] if not last and at >= 0 and any(mark.startswith(rest[at:]) for mark in self.marks) else ""
        for part in [*parts, rest.removesuffix(self.partial)]:
            if part in self.marks:
                self._meet(part)
                continue
            if self.name is not None:
                self.name += part
                if not self.gemma or "\n" not in self.name:
                    continue
                part, self.name = self.name.partition("\n")[2], None
            text = part.lstrip("\n") if self.begins else part
            if text:
                self.begins = False
                yield self.reasoning, text

    def _meet(self, mark: str) -> None:
        if mark in ("<|start|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>", "<|channel>"):
            self.name, self.gemma = "", mark == "<|channel>"
            self.reasoning, self.begins = self.reasoning or self.gemma, True
        elif mark == "<|message|>":
            self.reasoning, self.name, self.begins = (self.name or "").strip().startswith(REASONING), None, True
        elif mark in ("<think>", "</think>", "<channel|>"):
            self.reasoning, self.name, self.begins = mark == "<think>", None, True


LENGTH = 4096  # maximum tokens of a conversation, by default
HELP = "/clear forgets the conversation, /help prints this; Ctrl-C ends a reply, Ctrl-D the conversation."


def converse(options: Generate, saved: Saved) -> int:
    """Hold the conversation. Return exit code 0, or 2 when a turn from a pipe failed."""
    if saved.tokenizer.chat_template is None:
        raise ValueError(f"{options.ckpt}: its tokenizer has no chat template, and a conversation needs one; use --prompt.")
    length = min(LENGTH, saved.positions or LENGTH) if options.max_length is None else longest(options.max_length, saved)
    ends = ends_of_turn(saved.tokenizer)
    raw, options = options.special, replace(options, special=options.special or keeps_special(saved.tokenizer))
    engine: FastDecoder | MaskedSampler
    if is_diffusion(saved):
        settings = sampler_settings(options)
        length -= settings["tokens"]
        engine = build_sampler(options, saved, [], ends)
    else:
        settings = decoder_settings(options, saved)
        if not options.ignore_eos:
            settings["stop"] = tuple(dict.fromkeys((*settings["stop"], *ends)))
        engine = build_decoder(options, saved, [[0] * 8], length)
    chat = Chat(options, saved, engine, length, settings, raw)
    if chat.interactive:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts a background job with Ctrl-C ignored
        chat.note(HELP)
    for text in chat.typed() if chat.interactive else stdin_lines():
        chat.turn(text.rstrip("\n"))
    if options.json:
        about = {"model": str(saved.folder), "device": saved.device_label, "messages": chat.messages}
        print(json.dumps(about | chat.speed.as_dict(), indent=1))
    print(chat.speed.line(), file=sys.stderr, flush=True)
    return 2 if chat.failed and not chat.interactive else 0


class Chat:
    """The messages of a conversation, and what generates its replies, after `length` tokens at most.

    Reasoning goes to stderr, dimmed, and the answer to stdout. raw: all of a reply, with its special tokens, is the answer
    """

    def __init__(
        self,
        options: Generate,
        saved: Saved,
        engine: FastDecoder | MaskedSampler,
        length: int,
        settings: dict[str, Any],
        raw: bool = False,
    ):
        self.engine, self.length, self.settings, self.raw = engine, length, settings, raw
        self.tokenizer, self.speed = saved.tokenizer, Speed(saved.device)
        self.initial = [] if options.system is None else [{"role": "system", "content": options.system}]
        self.messages = list(self.initial)
        self.quiet, self.interactive, self.failed = options.json, sys.stdin.isatty(), False
        self.safe = PRINTABLE if sys.stdout.isatty() else {}
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)

    def note(self, text: str, style: str = "dim") -> None:
        self.console.print(text, style=style, markup=False)

    def typed(self) -> Iterator[str]:
        """Yield the lines that the user types, until Ctrl-D."""
        import readline  # noqa: F401 (arrow keys and history for input())

        while True:
            try:
                yield input("> ")
            except EOFError:
                self.console.print()
                return
            except KeyboardInterrupt:
                self.note("\nCtrl-D ends the conversation.")

    def turn(self, text: str) -> None:
        """Take one turn. A turn that fails is reported, and removed from the conversation."""
        command = text.strip()
        if not command:
            return
        if self.interactive and command == "/help":
            self.note(HELP)
            return
        if self.interactive and command == "/clear":
            self.messages = list(self.initial)
            self.note("forgotten")
            return
        before = list(self.messages)
        try:
            speed = self.reply(text)
        except (GpuboundError, ValueError, torch.OutOfMemoryError) as error:
            self.messages, self.failed = before, True
            reason = " ".join(str(error).removeprefix("generate: ").split())
            self.note(f"gpubound generate: {reason}", style="red")
            if self.interactive and len(before) > len(self.initial):
                self.note("/clear forgets the conversation.")
            return
        if self.interactive:
            self.note(speed.line())

    def reply(self, text: str) -> Speed:
        """Add `text` and the model's reply to the messages; print the reply as it arrives. Ctrl-C keeps what has arrived."""
        self.messages.append({"role": "user", "content": text})
        prompt = self.tokenizer.render(self.messages, prompt=True)
        ids = self.tokenizer.inner.encode(prompt, add_special_tokens=False).ids  # the template has them
        if len(ids) >= self.length:
            fix = "smaller --max-new-tokens" if isinstance(self.engine, MaskedSampler) else "larger --max-length"
            raise ValueError(
                f"with this turn the conversation has {len(ids)} tokens, which leaves no room in max_length={self.length}; say "
                f"less, or give a {fix}."
            )
        run: Any = self.engine.start(ids, **self.settings)
        speed, parts = Speed(self.speed.device), Parts(None if self.raw else self.tokenizer, prompt)
        written = {True: "", False: ""}  # reasoning, and the answer
        with speed.counting(), closing(run.play()) as pieces:
            try:
                for _, piece in pieces:
                    self.show(parts.add(piece), written)
            except KeyboardInterrupt:
                print(" ...", end="", file=sys.stderr, flush=True)
        self.show(parts.add("", last=True), written)
        reasoning, answer = written[True].rstrip("\n"), written[False]
        if not self.quiet:
            if reasoning and not answer:
                self.note("")
            print(flush=True)
        if (reasoning or parts.name) and not answer:
            self.note("the reply ended before its answer; give a larger --max-new-tokens or --max-length.")
        self.messages.append({"role": "assistant", "content": answer} | ({"reasoning_content": reasoning} if reasoning else {}))
        speed.add(run.result())
        self.speed.merge(speed)
        return speed

    def show(self, parts: Iterable[tuple[bool, str]], written: dict[bool, str]) -> None:
        """Print parts of the reply, and add them to what is written of its reasoning and answer."""
        for reasoning, text in parts:
            if not reasoning and written[True] and not written[False] and not self.quiet:
                self.note("")  # ends the line of the reasoning
            written[reasoning] += text
            if reasoning and not self.quiet:
                self.console.print(text.translate(PRINTABLE), style="dim", markup=False, end="")
            elif not self.quiet:
                print(text.translate(self.safe), end="", flush=True)
