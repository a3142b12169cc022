"""What a document is: a text, or a chat as a list of {"role", "content"} messages; and how a row becomes one."""

import os
from collections.abc import Mapping
from typing import Any

from ..errors import DataError

Document = str | list[dict[str, Any]]

KEYS = ("text", "messages")  # where a row's document is looked for
_DEEPEST = 64  # a message's further fields may be nested; a template writes them out, and Python ends at a thousand
_SHOWN = 8  # keys that an error lists


def as_document(item: Any, where: str, text_key: str | None = None) -> Document:
    """The document in `item`, which stands at `where`: a text, a chat, or a row that holds one under `text_key`."""
    if isinstance(item, Mapping):
        keys = KEYS if text_key is None else (text_key,)
        found = next((key for key in keys if item.get(key) is not None), None)
        if found is None:
            raise DataError(_without_text(item, where, keys))
        item, where = item[found], f"{where}[{found!r}]"
    if isinstance(item, str):
        _check_text(item, where)
        return item
    return _chat(item, where)


def _without_text(row: Mapping, where: str, keys: tuple[str, ...]) -> str:
    names = [repr(key) for key in row]
    there = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    if null := [key for key in keys if key in row]:
        return f"{where}: its {null[0]!r} is null, wanted a text or a chat; leave the row out."
    wanted = " or ".join(map(repr, keys))
    return (
        f"{where}: has {'the keys ' + there if there else 'no keys'}, wanted {wanted}; name another with text_key (--text-key)."
    )


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can write "\ud800", half of a character
        raise DataError(
            f"{where}: holds half a surrogate pair (U+{ord(text[error.start]):04X} at character {error.start}), which no "
            f"tokenizer takes; remove it or write the whole character."
        ) from error


def _chat(item: Any, where: str) -> list[dict[str, Any]]:
    chat = list(item) if isinstance(item, list | tuple) else None
    if not chat or not all(isinstance(m, Mapping) and isinstance(m.get("content"), str) and "role" in m for m in chat):
        raise DataError(
            f"{where}: got a {type(item).__name__}, wanted a string or a chat [{{'role': ..., 'content': ...}}, ...]."
        )
    for number, message in enumerate(chat):
        here = f"{where}[{number}]"
        if not isinstance(message["role"], str):
            raise DataError(f"{here}: role: got {message['role']!r}, wanted a text such as 'user' or 'assistant'.")
        _check_text(message["role"], here)
        _check_text(message["content"], here)
        if any(_deeper(value, _DEEPEST) for value in message.values()):
            raise DataError(f"{here}: is nested more than {_DEEPEST} deep; leave the field out.")
    return [dict(message) for message in chat]


def _deeper(value: Any, than: int) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return False
    return than == 0 or any(_deeper(inner, than - 1) for inner in value)


def weight(document: Document) -> int:
    """Letters of a document."""
    return len(document) if isinstance(document, str) else sum(len(message["content"]) for message in document)


def refuse_a_files_name(item: Any, where: str, suffixes: tuple[str, ...]) -> None:
    """A list of paths given as strings would be learnt as a few very short texts."""
    if isinstance(item, str) and len(item) < 4096 and item.endswith(suffixes) and os.path.isfile(item):
        raise ValueError(
            f"{where}: got {item!r}, which is the name of a file, wanted a text; write Path({item!r}) to have it read."
        )
