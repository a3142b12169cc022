"""Scores of a verdict on a script whose true stalls are known by line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("scripts.yaml")
TIMED = frozenset({"data", "host_work"})  # kinds that only a clock finds
WHOLE = frozenset({"launch_bound", "precision", "attention", "optimizer", "gc", "comm"})  # true of a loop, not of one line


@dataclass(frozen=True)
class Script:
    """A public script, and its stalls: line -> the kinds that name it rightly.

    A line of another file is "file.py:12"; a line that stalls within a library is "651 via trainer.py", by the library's file.
    """

    name: str
    repository: str
    commit: str
    folder: str
    command: str
    data: str
    stalls: dict[int | str, list[str]]
    at: str = ""
    small: str = ""
    largest: tuple[str, ...] = ()
    """Kinds that name the largest loss rightly, one with its line if that matters: "launch_bound 188"."""
    minor: tuple[int, ...] = ()
    loaders: tuple[int, ...] = ()
    """Lines that make a DataLoader, where linters name what its loop and its copies pay for."""

    @property
    def place(self) -> str:
        """The folder that the script is looked for in."""
        return self.at or self.name

    @property
    def file(self) -> str:
        return self.command.split()[0]


@dataclass(frozen=True)
class Score:
    """Lines of true stalls that have a finding or a harmless one, those that have none, and findings that are not true."""

    found: tuple[int | str, ...]
    missed: tuple[int | str, ...]
    wrong: tuple[str, ...]


def scripts(file: Path = FILE) -> dict[str, Script]:
    table = yaml.safe_load(file.read_text(encoding="utf-8"))
    lists = ("largest", "minor", "loaders")
    return {name: Script(name, **about | {each: tuple(about.get(each, ())) for each in lists}) for name, about in table.items()}


def score(script: Script, verdict: dict[str, Any]) -> Score:
    """Compare a verdict, as in doctor.json, with the true stalls. A dry run has no step_ms, and finds no TIMED kinds."""
    dry = verdict["step_ms"] is None
    stalls = {line: kinds for line, kinds in script.stalls.items() if not (dry and set(kinds) <= TIMED)}
    named = [(each, each["kind"]) for each in (*verdict["findings"], *verdict["harmless"])]

    def covers(finding: dict[str, Any], line: int | str) -> bool:
        site = finding["site"] or finding["built"] or {"line": 0, "end": 0}
        at, _, via = str(line).partition(" via ")
        file, _, number = at.rpartition(":")
        library = Path((finding["via"] or {}).get("file", "")).name
        here = Path(finding["file"] or "").name == Path(file or script.file).name and via in ("", library)
        return here and site["line"] <= int(number) <= site["end"]

    found = tuple(line for line, kinds in stalls.items() if any(kind in kinds and covers(each, line) for each, kind in named))
    true = {*script.stalls, *script.minor}
    wrong = tuple(
        f"{each['file']}:{each['line']} {each['kind']}"
        for each in verdict["findings"]
        if each["kind"] not in WHOLE and not any(covers(each, line) for line in true)
    )
    return Score(found, tuple(line for line in stalls if line not in found), wrong)
