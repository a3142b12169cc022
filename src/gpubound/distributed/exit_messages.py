"""Exit message of a rank, for ranks that wait for it: gloo reports only that a connection was closed.

The message is written to the rendezvous store before the connections end. A rank that finds one closed reads it there.
"""

from contextlib import suppress

import torch.distributed as dist

from ..errors import GpuboundError, RankError

SAME_CALLS = "All ranks must make the same calls in the same order, step() as often on each"
_steps = 0  # that this process has launched


def stepped() -> None:
    """A step has been launched. Ranks come from wrappers, too, so nothing but the process knows of all steps."""
    global _steps
    _steps += 1


def steps() -> int:
    """Return the number of steps that this process has launched."""
    return _steps


class ExitMessages:
    """Exit messages of the ranks of one start, in that start's store."""

    def __init__(self, store: dist.Store, rank: int, world: int):
        self.rank, self.world, self._before = rank, world, _steps
        self._store = dist.PrefixStore("gpubound/parting", store)

    @property
    def place(self) -> str:
        done = _steps - self._before
        return "after 1 step" if done == 1 else f"after {done:,} steps"

    def leave(self) -> None:
        """Record that this rank has finished its work."""
        self._say(f"has left its distributed.join block {self.place}. {SAME_CALLS}")

    def fail(self, error: BaseException) -> None:
        """Record that this rank ends with `error`."""
        said = str(error).strip().partition("\n")[0]
        kind = "an error" if isinstance(error, GpuboundError) else type(error).__name__
        self._say(f"ended with {kind}{': ' if said else ''}{said}")

    def lost(self) -> RankError:
        """Return the error of a rank whose wait for others failed, with their exit messages."""
        words = [f"rank {other} {word}" for other in range(self.world) if other != self.rank and (word := self._of(other))]
        why = "; ".join(words) or "the other is gone without a word. Look into its log"
        return RankError(f"rank {self.rank} waited for another rank in vain {self.place}: {why.rstrip('.')}.")

    def _say(self, word: str) -> None:
        with suppress(dist.DistError, RuntimeError):  # the process that keeps the store has gone first, and needs no word
            self._store.set(str(self.rank), word)

    def _of(self, other: int) -> str:
        with suppress(dist.DistError, RuntimeError):
            if self._store.check([str(other)]):
                return self._store.get(str(other)).decode()
        return ""
