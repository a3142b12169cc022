"""Exact texts that tests compare with, all in one generated file: messages.json.

A test names a text, `str(error.value) == message("lora/test_add:unknown_target", name)`, and its values. Rewording the
library changes no test: run the tests with UPDATE_MESSAGES=1 (`make messages`) and review the diff of messages.json.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("messages.json")
UPDATES = os.environ.get("UPDATE_MESSAGES")  # a folder in which each process leaves the texts that it saw


@cache
def texts() -> dict[str, str]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def message(name: str, *values: object) -> "Message":
    """Return the text of this name, with {0}, {1}, ... replaced by `values`."""
    template = texts().get(name, "") if UPDATES else texts()[name]
    text = re.sub(r"\{(\d+)\}", lambda field: str(values[int(field[1])]), template)
    found = Message(text)
    found.name, found.values = name, [str(value) for value in values]
    return found


class Message(str):
    name: str
    values: list[str]

    def __eq__(self, other: object) -> bool:
        if UPDATES and isinstance(other, str) and str(self) != str(other):
            return self._record(str(other))
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def within(self, actual) -> bool:
        """Return whether a text contains this one, or a list this item."""
        if str(self) in actual or not UPDATES:
            return str(self) in actual
        lines = [line.strip() for line in (actual.splitlines() if isinstance(actual, str) else map(str, actual))]
        closest = difflib.get_close_matches(str(self), lines, n=1, cutoff=0.0)
        return self._record(closest[0]) if closest else False

    def __call__(self, error: BaseException) -> bool:
        """Return whether this regular expression matches an error's text: `pytest.raises(ValueError, check=message(...))`."""
        if re.search(str(self), str(error)) or not UPDATES:
            return re.search(str(self), str(error)) is not None
        return self._record(re.escape(str(error)).replace(r"\ ", " "))

    def _record(self, actual: str) -> bool:
        for index, value in sorted(enumerate(self.values), key=lambda item: -len(item[1])):
            if value:
                actual = actual.replace(value, f"{{{index}}}")
        folder = Path(str(UPDATES))
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps([self.name, actual]) + "\n")
        return True


def refusal(kind: type[BaseException], call: Callable[[], object]) -> str:
    """Return the text of the error of this kind that `call` raises."""
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def refusals(name: str, *calls: Callable[[], object]) -> None:
    """Assert that each call raises a ValueError with the text of its name: `name` and, counted from there, name.2, name.3."""
    same_texts(name, [refusal(ValueError, call) for call in calls])


def same_texts(name: str, texts: Iterable[str], *values: object) -> None:
    """Assert that these are the texts of `name` and, counted from there, of name.2, name.3, ..."""
    stem, _, last = name.rpartition(".")
    stem, first = (stem, int(last)) if last.isdecimal() else (name, 1)
    for number, text in enumerate(texts, first):
        assert text == message(stem if number == 1 else f"{stem}.{number}", *values)


def merge(folder: str) -> None:
    """Write the texts that processes left in `folder` into messages.json, and drop those that no test names."""
    known = json.loads(FILE.read_text(encoding="utf-8"))
    for path in sorted(Path(folder).glob("*.jsonl")):
        known |= dict(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    names = re.compile(r'"([\w/-]+:[^"\s]+?)"')
    quoted = {name for path in FILE.parent.rglob("*.py") for name in names.findall(path.read_text(encoding="utf-8"))}
    known = {name: text for name, text in known.items() if {name, re.sub(r"\.\d+$", "", name)} & quoted}
    FILE.write_text(json.dumps(known, indent=0, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    merge(str(UPDATES))
