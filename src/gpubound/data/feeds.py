"""`feed(...)` chooses how the batches of a source get to the device. `Feed` serves them, epoch after epoch."""

import operator
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..device import POLICIES, host_bytes, resolve, usable_bytes
from ..errors import DataError
from ..formatting import byte_count, readable, shown
from ..trace import fallback, notice
from .leaves import Bucket, Padding
from .source import BatchList, Items, Source, open_source
from .stores import (
    END,
    CannotStay,
    Direct,
    Resident,
    ResidentItems,
    Ringed,
    Served,
    Store,
    bytes_needed,
    count_copied,
    item_bytes_needed,
)

# With budget="auto" a feed takes a quarter of the free memory and leaves the rest to the model, its gradients and the
# optimizer, which are often allocated later. A billion 16-bit tokens are 2 GB, so a quarter of 140 GB is rarely the limit.
SHARE = 4


@dataclass
class Stats:
    """Totals of a feed since it was made. `str()` is a readable line."""

    mode: str
    batches: int = 0
    bytes_copied: int = 0  # host to device, in the steps; without a resident upload
    resident: int = 0  # leaves served from the feed's device memory
    passed: int = 0  # leaves that were on the device already
    copied: int = 0  # leaves copied for the step
    wait_ms: float = 0.0  # the loop waited for the source: the data is too slow
    held_back_ms: float = 0.0  # the loop waited for the device: it had run far ahead, which costs nothing

    @property
    def bytes_per_step(self) -> float:
        return self.bytes_copied / self.batches if self.batches else 0.0

    @property
    def wait_ms_per_step(self) -> float:
        return self.wait_ms / self.batches if self.batches else 0.0

    @property
    def hit_rate(self) -> float:
        """The fraction of tensors that needed no copy; 1.0 before the first batch."""
        total = self.resident + self.passed + self.copied
        return (self.resident + self.passed) / total if total else 1.0

    def __str__(self) -> str:
        return (
            f"{self.mode}: {self.batches} batches, {self.bytes_per_step:.0f} bytes copied a step, "
            f"{self.wait_ms_per_step:.3f} ms waited a step, {100 * self.hit_rate:.0f} % of leaves needed no copy"
        )


class Feed:
    """An iterable of batches on one device; `gpubound.feed` makes it.

    `for batch in feed` is one epoch. The next loop is the next epoch, also after a `break`. `feed.take()` gives one batch at
    a time, across epochs. `state_dict()` holds the position. After `load_state_dict()` the next loop continues there.
    """

    def __init__(self, store: Store, device: torch.device, identity: Mapping[str, Any], world: int = 1):
        self.device, self._world = device, world  # ranks that draw from the same epochs
        self.epoch, self.batch = 0, 0  # the current epoch, and its batches that all ranks together have drawn
        self._store, self._length = store, store.length
        self._identity = dict(identity)  # must be equal for a saved position to be valid
        self._stats = Stats(store.mode)
        self._continue = True  # the next loop starts at the position, instead of at the next epoch
        self._running: weakref.ref[Generator[Served]] | None = None
        self._drawing: Generator[Served] | None = None  # of take()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which continues at the position; a running generator cannot be copied."""
        return vars(self) | {"_running": None, "_drawing": None, "_continue": self._continue or self._drawing is not None}

    @property
    def mode(self) -> str:
        """'resident', 'ring' or 'direct'."""
        return self._store.mode

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("feed: this source does not say how many batches it has.")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return iter(partial(self._draw, self._begin()), END)  # unlike a generator, it survives an error

    def _begin(self) -> Generator[Served]:
        if not self._continue and self.batch > 0:
            self.epoch, self.batch = self.epoch + 1, 0
        self._continue = False
        self.close()
        served = self._store.serve(self.epoch, self.batch)
        self._running = weakref.ref(served)  # weak: a loop left by `break` must end its thread at once
        return served

    def take(self) -> Any:
        """Return the next batch, in this epoch or the next."""
        for _ in range(2):
            if self._drawing is None:
                self._drawing = self._begin()
            if (batch := self._draw(self._drawing)) is not END:
                return batch
            self._drawing = None
        raise DataError("feed: an epoch had no batches left and the next had none; wanted at least one.")

    def _draw(self, running: Generator[Served]) -> Any:
        """Return the next batch of the running epoch, or END."""
        if self._running is None or self._running() is not running:
            raise DataError(
                "feed: this loop was ended by a newer one over the same feed, by an error or by close(); make one feed for "
                "each loop."
            )
        self._store.check_available()  # not inside the generator, which an exception would end
        try:
            served = next(running, None)
        except BaseException:  # a generator that raised is over, and would look like the end of the epoch
            self._continue = running is self._drawing  # take() asks for this batch again; a new loop is a new epoch
            self.close()
            raise
        if served is None:
            if self.batch == 0:
                raise DataError(f"feed: source: epoch {self.epoch} had no batches, wanted at least one.")
            self.epoch, self.batch = self._next_epoch()
            self._continue = True  # also where the ranks have drawn the first batches of the next epoch
            return END
        self.batch += self._world
        count_copied(served.bytes)
        stats = self._stats
        stats.batches += 1
        stats.bytes_copied += served.bytes
        stats.resident += served.resident
        stats.passed += served.passed
        stats.copied += served.copied
        stats.wait_ms += 1e3 * served.waited
        stats.held_back_ms += 1e3 * served.held_back
        return served.batch

    def _next_epoch(self) -> tuple[int, int]:
        """Return the position of the next epoch. Several ranks may have drawn batches of it in the last round."""
        length = self._length or self.batch
        epochs, batch = divmod(max(0, self.batch - length), length)
        return self.epoch + 1 + epochs, batch

    def close(self) -> None:
        """End the current iteration and its thread. A later loop begins a new one."""
        running = self._running() if self._running is not None else None
        self._running = self._drawing = None
        if running is not None:
            running.close()

    def stats(self) -> Stats:
        return self._stats

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the identity of the source that it belongs to."""
        epoch, batch = self.epoch, self.batch
        if self._length is not None and batch >= self._length:
            epoch, batch = self._next_epoch()
        return {"epoch": epoch, "batch": batch, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was saved. The source must be the same one."""
        if not isinstance(state, Mapping) or not {"epoch", "batch"} <= state.keys():
            raise ValueError(f"feed: state: got {shown(state)}, wanted what state_dict() gave, with its epoch and batch.")
        for key, now in self._identity.items():
            if key not in state or state[key] != now:
                raise ValueError(
                    f"feed: state: {key} was {state.get(key, 'not recorded')!r} when it was saved and is {now!r} now; make "
                    f"the feed as it was made then."
                )
        self.seek(state["epoch"], state["batch"])

    def seek(self, epoch: int, batch: int = 0) -> None:
        """Continue at batch `batch` of epoch `epoch`."""
        try:
            epoch, batch = operator.index(epoch), operator.index(batch)  # also NumPy's integers
        except TypeError:
            raise ValueError(f"feed: seek: got epoch {epoch!r}, batch {batch!r}, wanted whole numbers.") from None
        if epoch < 0 or batch < 0 or (self._length is not None and batch > self._length):
            limit = "" if self._length is None else f" of {self._length}"
            raise ValueError(f"feed: seek: got epoch {epoch}, batch {batch}{limit}, wanted a position inside the epoch.")
        self.close()
        self.epoch, self.batch, self._continue = epoch, batch, True


@torch.inference_mode(False)  # a batch that a loader collates inside could not be saved for a later backward
def feed(
    source: Any,
    device: str | torch.device | None = None,
    budget: int | str = "auto",
    slots: int = 3,
    *,
    mode: str = "auto",
    keep: int | str | None = None,
    shuffle: bool = False,
    seed: int | None = None,
    batch_size: int | None = None,
    drop_last: bool = False,
    collate: Callable[[list], Any] | None = None,
    pad: Mapping[Any, Any] | None = None,
    bucket: Bucket = None,
    rows: int | None = None,
    seq: int | None = None,
) -> Feed:
    """Serve the batches of `source` on `device`. The step copies nothing if memory allows; otherwise it waits for no copy.

    source      a list or iterable of batches (tensors in dicts, tuples, lists, dataclasses), a function that returns such an
                iterable, a DataLoader, a Corpus; or, with `batch_size`, a list or map dataset of single items
    device      None: the GPU if there is one. Otherwise a device as in gpubound.device
    budget      the bytes that the feed may hold on the device ("2 GB"). "auto": a quarter of the free memory, or with `keep`
                all but that
    slots       the number of pinned buffers of the ring, at least 3: one being filled, one being copied, one ready
    mode        "resident": all batches are uploaded once. "ring": a thread copies ahead. "direct": batches pass unchanged,
                because nothing needs a copy. "auto": resident if the source surely yields the same batches every epoch (a
                list, tensors) and they fit; direct on the CPU; otherwise the ring. Choose "resident" yourself for a dataset
                or DataLoader whose items never change
    shuffle     a new order in every epoch, from (seed, epoch): of the batches in a list, or of items with `batch_size`
    pad, bucket, rows   see gpubound.data.leaves: pad={"input_ids": 0, "labels": -100}, bucket="pow2", rows=32
    seq         for a Corpus: the tokens in each of `batch_size` rows. corpus.batches(...) has more options

    >>> batches = [{"x": torch.ones(2), "y": torch.zeros(2)} for _ in range(3)]
    >>> [batch["x"].sum().item() for batch in feed(batches, device="cpu")]
    [2.0, 2.0, 2.0]
    """
    if mode not in ("auto", "resident", "ring", "direct"):
        raise ValueError(f"feed: mode: got {mode!r}, wanted one of auto, resident, ring, direct.")
    check_slots("feed", slots)
    if seed is not None:
        seed = check_seed("feed", seed)
    if hasattr(source, "make_feed"):  # a Corpus
        return source.make_feed(
            device, budget=budget, keep=keep, mode=mode, slots=slots, seq=seq, batch_size=batch_size, shuffle=shuffle,
            seed=seed, drop_last=drop_last, collate=collate, pad=pad, bucket=bucket, rows=rows,
        )  # fmt: skip
    if seq is not None:
        raise ValueError(f"feed: seq= has an effect only on a Corpus, got a {type(source).__name__}; leave it out.")
    device = target(device)
    opened = open_source(source, batch_size, seed, shuffle, drop_last, collate)
    padding = Padding(pad or {}, bucket, rows)
    unsteady = mode == "auto" and not opened.steady
    if unsteady and device.type != "cpu":
        notice(
            "feed: streaming: this source may yield other batches every epoch (random order, random transforms); if it never "
            "does, mode='resident' uploads it once."
        )
    upload = partial(_plan_upload, opened, device, padding)
    store = try_resident("feed", device, "ring" if unsteady else mode, budget, keep, upload)
    if store is None and (mode == "direct" or (mode == "auto" and device.type == "cpu")):
        store = Direct(opened, device, padding)
    elif store is None:
        store = Ringed(opened, device, slots, padding)
    identity = {"seed": opened.seed, "shuffle": opened.shuffle, "length": store.length, "batch_size": batch_size}
    return Feed(store, device, identity)


def try_resident(
    what: str,
    device: torch.device,
    mode: str,
    budget: int | str,
    keep: int | str | None,
    plan_upload: Callable[[], tuple[int, Callable[[], Any]]],
) -> Any:
    """Return the result of the upload, or None where batches must be streamed, with a notice of the reason.

    `plan_upload` returns the bytes of the upload, and the upload. It raises CannotStay if the source cannot be resident.
    """
    limit = allowance(budget, keep, free_bytes(device) if budget == "auto" else None)
    if mode not in ("auto", "resident"):
        return None
    need, advice = 0, "pass mode='ring'"
    try:
        need, upload = plan_upload()
        if need and limit is not None and need > limit:  # batches that are on the device already need nothing
            advice = "raise budget= or pass mode='ring'"
            raise CannotStay(f"its {readable(need)} do not fit the budget of {readable(limit)} on {device}")
        result = upload()
    except CannotStay as error:
        if mode == "resident":
            raise ValueError(f"{what}: mode='resident': {error}; {advice}.") from error
        notice(f"{what}: streaming: {error}.")
        return None
    except torch.OutOfMemoryError:
        fallback(what, f"{device} ran out of memory while {readable(need)} were uploaded; streaming instead")
        return None
    if need:
        allowed = f"of {readable(limit)} allowed" if limit is not None else "no limit"
        notice(f"{what}: {readable(need)} resident on {device} ({allowed}).")
    return result


def _plan_upload(source: Source, device: torch.device, padding: Padding) -> tuple[int, Callable[[], Store]]:
    if isinstance(source, Items) and source.collate is torch.utils.data.default_collate:
        return item_bytes_needed(source, device), lambda: ResidentItems(source, device, padding)
    if source.shuffle and not isinstance(source, BatchList):
        raise CannotStay("shuffle=True with your own collate makes other batches every epoch")
    batches = source if isinstance(source, BatchList) else BatchList(list(source.read(0, 0)), source.seed, False)
    return bytes_needed(batches.batches, device, padding), lambda: Resident(batches, device, padding)


def check_slots(what: str, slots: Any) -> None:
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < 3:  # 0 would wait without end
        raise ValueError(f"{what}: slots: got {slots!r}, wanted 3 or more: one being filled, one being copied, one ready.")


def check_seed(what: str, seed: Any) -> int:
    try:
        return operator.index(seed)  # NumPy's integers would overflow in the hashes
    except TypeError:
        raise ValueError(f"{what}: seed: got {seed!r}, wanted a whole number.") from None


def target(device: str | torch.device | None) -> torch.device:
    """Return the device as tensors report it. None and the policies of gpubound.device are resolved and tested."""
    if device is None:
        return resolve("auto")
    is_cpu = isinstance(device, torch.device) and device.type == "cpu"  # perhaps with an index, which no policy has
    if not is_cpu and str(device).partition(":")[0] in POLICIES:
        return resolve(device)
    try:
        return torch.empty(0, device=device, dtype=torch.float32).device
    except RuntimeError as error:  # an unknown or unusable device
        why = str(error).partition("\n")[0].partition(": ")[0]
        raise ValueError(f"feed: device: got {str(device)!r}, wanted {', '.join(POLICIES)} or cuda:<index>: {why}.") from error


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that could be allocated on `device` now; None if unknown."""
    if device.type == "cuda":
        return usable_bytes(device)
    return host_bytes() if device.type == "cpu" else None


def allowance(budget: int | str, keep: int | str | None, free: int | None) -> int | None:
    """Return the bytes that a feed may keep resident: `budget`, else `free` less `keep`. None is no limit."""
    if budget != "auto":
        if keep is not None:
            raise ValueError(
                "feed: got both budget= and keep=, wanted one; budget is what the feed may take, keep what it must leave."
            )
        return parse_bytes("budget", budget)
    if free is None:
        return None
    return max(0, free - parse_bytes("keep", keep)) if keep is not None else free // SHARE


def parse_bytes(what: str, size: int | str) -> int:
    count = byte_count(size)
    if count is None:
        raise ValueError(f"feed: {what}: got {size!r}, wanted a number of bytes, as in 2_000_000_000, '2 GB' or '1.9 GiB'.")
    return count
