"""One writer at a time in a run's folder.

The lock is flock's. The kernel releases it when its process ends, also after kill -9, so a lock is never left behind. The file
beside it says who holds the lock; it is removed at the end. NFS (Linux, version 3 or later) passes flock to its server, so the
lock also holds between machines. Where a file system has no locks, a line says so, and the run goes on.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..trace import notice

LOCK = "run.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


@contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Inside, this process alone writes to `folder`. ValueError when another one does.

    The folder is made. If nothing has been written to it at the end, it is removed again.
    """
    folder = Path(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    handle = _take(folder)
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)  # while it is held: whoever has opened it in between sees that it is gone
        os.close(handle)
        for path in made:
            if not path.is_dir() or any(path.iterdir()):
                break
            path.rmdir()


def _take(folder: Path) -> int:
    while True:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 4096)
            os.close(handle)
            raise ValueError(
                f"{folder} is in use by {_described(holder)}; wait until it has ended, or give another --out."
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(handle)
                raise
            notice(f"{folder}: its file system has no locks ({error.strerror}); make sure that no other process trains there.")
        if _is_at(handle, folder / LOCK):
            os.truncate(handle, 0)
            about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
            os.write(handle, json.dumps(about).encode())
            return handle
        os.close(handle)  # its holder has just ended and removed the file


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _described(holder: bytes) -> str:
    try:
        about = json.loads(holder)
        return f"process {about['pid']} on {about['host']} (since {about['since']})"
    except (ValueError, KeyError, TypeError):  # taken a moment ago, or not written by us
        return "another process"
