"""Source code that is on every machine, as texts to train on: the standard library's, and torch's."""

import hashlib
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test", "pydoc_data"}


def python_stdlib_texts(limit_bytes: int | None = None) -> Iterator[str]:
    """Yield source files of this Python's standard library, a corpus on every machine. Each begins with its name, a comment.

    The order mixes packages and is always the same. The texts end before the file that would exceed `limit_bytes`.
    """
    yield from _sources(Path(sysconfig.get_paths()["stdlib"]), limit_bytes)


def torch_source_texts(limit_bytes: int | None = None) -> Iterator[str]:
    """Yield source files of the installed torch in the same format: several times as much text as the standard library."""
    import torch

    yield from _sources(Path(torch.__file__).parent, limit_bytes)


def _sources(root: Path, limit_bytes: int | None) -> Iterator[str]:
    total, names = 0, []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _SKIPPED]  # site-packages may hold a hundred times as many files
        names += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    # Sorted by a hash: by name, the first files would be of few packages.
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        with tokenize.open(root / name) as file:  # honours a coding line
            text = f"# {name}\n{file.read()}"
        total += len(text.encode())
        if limit_bytes is not None and total > limit_bytes:
            return
        yield text
