"""Where the prompts of `gpubound generate` come from: the command line, a file or stdin."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import reading
from ..formatting import shown

if TYPE_CHECKING:
    from .generate import Generate

VERIFY: dict[str, bool | str] = {"full": True, "quick": "quick", "none": False}
# What a model writes may hold control characters, and a terminal obeys them.
HARMLESS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def read_prompts(options: "Generate") -> list[str]:
    """The prompts, none of them empty."""
    if options.prompt:
        prompts, where = list(options.prompt), "prompt"
    elif options.file is not None:
        where = "stdin" if options.file == "-" else options.file
        text = "".join(stdin_lines()) if options.file == "-" else _text(options.file)
        if options.whole:
            prompts = [text.removesuffix("\n")]
        elif options.file.endswith(".jsonl"):
            lines = enumerate(text.split("\n"), 1)
            prompts = [_prompt_of(line, f"{where}:{number}") for number, line in lines if line.strip()]
        else:
            prompts = [line for line in text.split("\n") if line.strip()]
    elif not sys.stdin.isatty():
        prompts, where = ["".join(stdin_lines()).removesuffix("\n")], "stdin"
    else:
        raise ValueError("prompt: got none; give --prompt TEXT or --file FILE, pipe a text in, or --chat.")
    if not prompts or not all(prompts):
        raise ValueError(f"{where}: the prompt is empty; give it at least one character to go on from.")
    return prompts


def _prompt_of(line: str, where: str) -> str:
    """The prompt in a line of JSON, which stands at `where`."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError: nested a thousand deep
        said = f"{where}: {shown(line)} is no JSON ({error}); a .jsonl has a line of JSON for each prompt."
        raise ValueError(said) from error
    prompt = found.get("prompt") if isinstance(found, dict) else found
    if not isinstance(prompt, str):
        raise ValueError(f'{where}: {shown(line)} has no prompt; write {{"prompt": "..."}}, or a text in quotes.')
    if not prompt:
        raise ValueError(f"{where}: the prompt is empty; give it at least one character to go on from, or leave the line out.")
    check_text(where, prompt)
    return prompt


def _text(file: str) -> str:
    try:
        with reading(Path(file)):
            return Path(file).read_text(encoding="utf-8-sig")  # sig: a byte order mark is no text
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text in UTF-8: {error}.") from error


def check_text(where: str, text: str) -> None:
    """Bytes that are not UTF-8 reach Python as surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: is not a text in UTF-8 (at character {error.start + 1}); convert it first.") from error


def stdin_lines() -> Iterator[str]:
    """Every line of stdin, with its end."""
    try:
        for line in sys.stdin:
            check_text("stdin", line)
            yield line
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not a text in UTF-8: {error}.") from error
