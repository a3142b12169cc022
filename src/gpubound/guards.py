"""Guards of objects with memory of their model, such as a decoder or a step: one caller at a time, and no copies."""

import threading
from typing import Any, NoReturn


class ReentryGuard:
    """Context manager that raises `busy` when another caller is inside, in this thread or another.

    A generator may enter it in one thread and leave it in another.
    """

    def __init__(self, busy: type[Exception], sentence: str) -> None:
        self._lock, self._busy, self._sentence = threading.Lock(), busy, sentence

    @property
    def taken(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise self._busy(self._sentence)

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


class NotCopyable:
    """Base of objects with addresses and graphs, which a copy would share. `INSTEAD` is the advice of the error."""

    INSTEAD: str

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # which copy, deepcopy, pickle and torch.save ask for
        raise TypeError(
            f"{type(self).__name__}: it reads its model's own memory, so it can be neither copied nor pickled; {self.INSTEAD}."
        )
