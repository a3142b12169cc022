"""What there is one of: a decoder's cache, a step's buffers. One caller at a time may be inside, and no copy can be made."""

import threading
from typing import Any, NoReturn


class Turn:
    """`with turn:` raises `busy` where another caller is inside already, in this thread or another.

    A generator may begin it in one thread and end it in another.
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


class Uncopied:
    """What holds memory's addresses and graphs: a copy's would be the original's. `INSTEAD` says what to do."""

    INSTEAD: str

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # which copy, deepcopy, pickle and torch.save ask for
        raise TypeError(
            f"{type(self).__name__}: it reads its model's own memory, so it can be neither copied nor pickled; {self.INSTEAD}."
        )
