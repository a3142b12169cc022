"""Files that come from outside: opened only if they are regular files, read as what they should be, written whole.

A folder of data, a corpus or a model may be damaged or made by somebody with bad intentions. Everything here ends in the
content or in one DataError that names the file.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path
from typing import Any

from .errors import DataError

_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def regular(path: Path) -> Path:
    """`path`, if it is a regular file. Opening a pipe would wait for its writer, perhaps for ever."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL byte
        raise DataError(f"{path}: cannot be read: {_reason(error)}; check the path.") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else _KINDS.get(stat.S_IFMT(mode), "a special file")
        raise DataError(f"{path}: is {kind}, wanted a regular file.")
    return path


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the file when the system cannot read it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {_reason(error)}; check the path, its permissions and its disk.") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file when the system cannot write it. A full disk stays an OSError: commands have a sentence of their own."""
    try:
        yield
    except OSError as error:
        if error.errno == ENOSPC:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise DataError(
            f"{path}: cannot be written: {_reason(error)}; check its permissions, its disk and its quota."
        ) from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def read_json(path: Path, cure: str = "restore the file") -> dict[str, Any]:
    """The JSON object in `path`. `cure` tells the user what to do about a file that holds none."""
    try:
        with reading(path):
            found = json.loads(regular(path).read_bytes())
    except (ValueError, RecursionError) as error:  # RecursionError: nested a thousand deep
        raise DataError(f"{path}: is not JSON ({' '.join(str(error).split())}); {cure}.") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: holds a JSON {type(found).__name__}, wanted an object; {cure}.")
    return found


def write_whole(path: Path, text: str) -> None:
    """Write `path` so that it holds its old content or all of the new one, whenever the process or the machine stops."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with writing(path):
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def beside(listing: Path, name: Any) -> Path:
    """The file `name` in the folder of `listing`, which names it. Another folder's file is refused: a listing that came from
    elsewhere must not point anywhere on this machine."""
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name or name != os.path.basename(name):
        raise DataError(f"{listing}: names the file {name!r}, wanted the name of a file in the same folder.")
    return listing.parent / name


def cache_folder() -> Path:
    """Where this user's programs keep what this machine measured: ceilings, tuned plans."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "gpubound"
