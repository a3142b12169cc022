"""Reading of untrusted files, atomic writes, and locks of folders.

A folder of data, a corpus or a model may be damaged or malicious. The functions return the content or raise one DataError that
names the file.

Locks are flock's. The kernel releases a lock when its process ends, also after kill -9. NFS (Linux, version 3 or later) passes
flock to its server, so a lock also holds between machines. A notice reports a file system without locks, and the work goes on.
"""

import errno
import fcntl
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from .errors import DataError, RankError
from .formatting import readable
from .trace import notice

_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
LOCK = "run.lock"
EXPORT = "gpubound.json"  # in a folder that a run exported: the id of the run
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBADF, errno.EINVAL)  # EBADF: a folder on NFS


def regular(path: Path) -> Path:
    """Return `path` if it is a regular file. Opening a pipe would wait for its writer."""
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
    """Raise DataError with the file's name if the system cannot read it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {_reason(error)}; check the path, its permissions and its disk.") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise DataError with the file's name if the system cannot write it. A full disk remains an OSError."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise DataError(
            f"{path}: cannot be written: {_reason(error)}; check its permissions, its disk and its quota."
        ) from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


LARGEST = 1 << 28  # bytes of a JSON file; an index of 100,000 tensors has 10 MB


def check_size(path: Path, largest: int, cure: str) -> None:
    """Raise DataError if the regular file `path` has more bytes than any file of its kind."""
    if (size := regular(path).stat().st_size) > largest:
        raise DataError(f"{path}: has {readable(size)}, wanted at most {readable(largest)}; {cure}.")


def read_json(path: Path, cure: str = "restore the file") -> dict[str, Any]:
    """Return the JSON object in `path`. `cure` is the advice for a file without one."""
    check_size(path, LARGEST, cure)
    try:
        with reading(path):
            content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # RecursionError: nested a thousand deep
        raise DataError(f"{path}: is not JSON ({' '.join(str(error).split())}); {cure}.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds a JSON {type(content).__name__}, wanted an object; {cure}.")
    return content


def read_text(path: Path, cure: str, largest: int | None = None) -> str:
    """Return the text in `path`. `cure` is the advice for a file that is no text, or has more than `largest` bytes."""
    if largest is not None:
        check_size(path, largest, cure)
    try:
        with reading(path):
            return regular(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not a text in UTF-8: {error}; {cure}.") from error


def make_folder(path: Path) -> None:
    """Make the folder and its parents."""
    if path.is_file():
        raise DataError(f"{path}: is a file, wanted a folder; give another path.")
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def check_creatable(folder: Path, argument: str) -> None:
    """Raise ValueError if the folder cannot be made, or not be written to: said before the work whose result it gets."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"{argument}: {existing} is a file; give a folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{argument}: {existing} cannot be written to; give another folder.")


def check_replaceable(
    folder: Path, argument: str, names: Iterable[str] | None = None, run: str | None = None, overwrite: bool = False
) -> None:
    """Raise ValueError if writing to `folder` would replace files of unknown origin.

    Every function that writes a folder calls this before its first write. Weights that are replaced cannot be restored.

    argument   the argument or function that the error names
    names      the files that are going to be written or removed; None: any file in the folder counts
    run        the id of the run that writes: its own export may be replaced
    overwrite  the caller has asked for the replacement
    """
    if overwrite or not folder.is_dir():
        return
    present = sorted(path.name for path in folder.iterdir())
    if names is not None:
        present = sorted(set(present) & set(names))
    if not present or (run is not None and exporting_run(folder) == run):
        return
    if run is None:
        raise ValueError(
            f"{argument}: {folder} holds {present[0]!r}, which would be replaced; give another folder, or overwrite=True."
        )
    raise ValueError(f"{argument}: {folder} holds {present[0]!r} and is not an export of this run; give another folder.")


def exporting_run(folder: Path) -> str | None:
    """Return the id of the run that exported to `folder`; None for a folder without one."""
    if not (folder / EXPORT).exists():
        return None
    run = read_json(folder / EXPORT, "export the run again, to another folder").get("run")
    return run if isinstance(run, str) else None


@contextmanager
def partial(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path` to write to, and delete it at the end."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with writing(path):
            yield temporary
    finally:
        with suppress(OSError):  # a disk that fails was reported above
            temporary.unlink()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file whose content replaces `path` atomically, also if the process or the machine stops."""
    with partial(path) as temporary:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def write_atomic(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def sibling(listing: Path, name: Any) -> Path:
    """Return the file `name` in the folder of `listing`, which names it. A file in another folder is refused: an untrusted
    listing must not name other files of this machine."""
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name or name != os.path.basename(name):
        raise DataError(f"{listing}: names the file {name!r}, wanted the name of a file in the same folder.")
    return listing.parent / name


def cache_folder() -> Path | None:
    """Return the folder for this user's measurements of this machine (its ceilings); it may not exist yet.

    A user without a home that can be written to, as in many containers, gets one among the system's temporary files, with a
    notice. None, with a notice, where that fails, too.
    """
    with suppress(RuntimeError):  # ~ of an unknown user
        wanted = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gpubound"
        if _may_write(wanted):
            return wanted
    temporary = Path(tempfile.gettempdir()) / f"gpubound-{os.getuid()}"
    with suppress(OSError):
        temporary.mkdir(mode=0o700, exist_ok=True)
        status = temporary.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            notice(f"measurements are cached in {temporary}: no home folder can be written to; XDG_CACHE_HOME names another.")
            return temporary
    notice("measurements are not cached: no home folder can be written to; let XDG_CACHE_HOME name one that can.")
    return None


def _may_write(folder: Path) -> bool:
    """Return True when `folder`, or the nearest of its parents that exists, is a folder that this user may write to."""
    nearest = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


@contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Lock a run's `folder` for this process inside the block. Raise ValueError if another process has the lock.

    A file in the folder describes the holder and is removed at the end. A folder that does not exist is made, and removed if
    it is empty at the end.
    """
    folder = Path(folder)
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder)
    with writing(folder):
        handle = _take(folder)
    try:
        yield
    finally:
        with suppress(OSError):  # a folder that is gone or read-only must not hide an error of the block
            (folder / LOCK).unlink()  # under the lock: a process that has opened it meanwhile sees that it is gone
        os.close(handle)
        for path in new:
            if not path.is_dir() or any(path.iterdir()):
                break
            path.rmdir()


def _take(folder: Path) -> int:
    while True:
        with ExitStack() as unwanted:
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            unwanted.callback(os.close, handle)
            if not flock(handle, folder, "make sure that no other process trains there"):
                holder = _described(os.read(handle, 4096))
                raise ValueError(f"{folder} is in use by {holder}; wait until it has ended, or give another --out.")
            if _is_at(handle, folder / LOCK):  # else its holder has just ended and removed the file
                os.truncate(handle, 0)
                about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
                os.write(handle, json.dumps(about).encode())
                unwanted.pop_all()
                return handle


def flock(handle: int, where: str | Path, advice: str) -> bool:
    """Lock an open file; return False if another process has the lock. For a file system without locks, print `advice`."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        notice(f"{where}: its file system has no locks ({error.strerror}); {advice}.")
    return True


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _described(holder: bytes) -> str:
    try:
        about = json.loads(holder)
        return f"process {about['pid']} on {about['host']} (since {about['since']})"
    except (ValueError, KeyError, TypeError):  # not written yet, or by another program
        return "another process"


@contextmanager
def explain_disk_full(path: str | Path, advice: str) -> Iterator[None]:
    """Raise DataError with `advice` when the disk is full under a block that writes to `path`."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RankError) as error:  # RankError: another rank's
        signs = f"os error {errno.ENOSPC}", f"[Errno {errno.ENOSPC}]"
        if getattr(error, "errno", None) != errno.ENOSPC and not any(sign in str(error) for sign in signs):
            raise
        raise DataError(f"{path}: no space is left on its disk; {advice}") from error
