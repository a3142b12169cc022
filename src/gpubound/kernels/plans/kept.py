"""The user's own plans: what `gpubound tune` found on this machine, one file for each name of GPU."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from ...files import cache_folder, write_whole
from ...trace import notice
from .rules import RULES
from .searched import Key


def file_of(name: str) -> Path:
    """Where the plans for GPUs of that name are kept."""
    return cache_folder() / f"plans-{re.sub(r'[^a-z0-9.]+', '-', name.lower()).strip('-')}.json"


def plans_kept(name: str) -> dict[Key, tuple]:
    """The plans kept for GPUs of that name, read once in a process. The interpreter's GPU has no name, and none."""
    return _read(file_of(name)) if name else {}


@cache
def _read(path: Path) -> dict[Key, tuple]:
    return {_key(row): tuple(row["plan"]) for row in rows_in(path)}


def rows_in(path: Path) -> list[dict[str, Any]]:
    """What the file holds, a row a plan. None when there is no file or, with a notice, when it is not what `keep` writes."""
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["plans"]
        for row in found:
            RULES[row["op"]].kind(*row["plan"])
            _key(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        notice(f"{path} is not readable as launch plans ({type(error).__name__}: {error}): the library's own are used.")
        return []
    return found


def keep(name: str, found: list[dict[str, Any]]) -> Path:
    """Add rows to what is kept for that name of GPU, in place of older rows of the same key."""
    path = file_of(name)
    rows = {_key(row): row for row in [*rows_in(path), *found]}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"gpu": name, "plans": list(rows.values())}, indent=1) + "\n")
    _read.cache_clear()
    return path


def _key(row: dict[str, Any]) -> Key:
    return row["op"], row["way"], tuple(row["shape"]), row["bytes"]
