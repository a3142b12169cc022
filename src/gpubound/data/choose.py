"""`feed(...)`: look at the source, the device and the memory, and choose how the batches get there."""

import operator
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..device import POLICIES, resolve, usable_bytes
from ..formatting import byte_count, readable
from ..trace import fallback, notice
from .epochs import Direct, Feed, Store
from .leaves import Bucket, Padding
from .resident import CannotStay, Resident, ResidentItems, bytes_needed, item_bytes_needed
from .ring import Ringed
from .source import BatchList, Items, Source, open_source

# Without a word from the user a feed takes a quarter of what is free when it is made and leaves the rest to the model, its
# gradients and the optimizer, which often come later. A billion 16-bit tokens are 2 GB, so a quarter of 140 GB is seldom the
# limit.
SHARE = 4


@torch.inference_mode(False)  # what a loader collates inside could not be kept for a later backward
def feed(
    source: Any,
    device: str | torch.device | None = None,
    budget: int | str = "auto",
    slots: int = 3,
    mutation_guard: bool = True,
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
        seed = whole_seed("feed", seed)
    if hasattr(source, "make_feed"):  # a Corpus, whose batches are cut on the device
        return source.make_feed(
            device, budget=budget, keep=keep, mode=mode, slots=slots, seq=seq, batch_size=batch_size, shuffle=shuffle,
            seed=seed, drop_last=drop_last, collate=collate, pad=pad, bucket=bucket, rows=rows,
        )  # fmt: skip
    if seq is not None:
        raise ValueError(f"feed: seq= has an effect only on a Corpus, got a {type(source).__name__}; leave it out.")
    where = target(device)
    opened = open_source(source, batch_size, seed, shuffle, drop_last, collate)
    padding = Padding(pad or {}, bucket, rows)
    unsteady = mode == "auto" and not opened.steady
    if unsteady and where.type != "cpu":
        notice(
            "feed: streaming: this source may yield other batches every epoch (random order, random transforms); if it never "
            "does, mode='resident' uploads it once."
        )
    chosen = "ring" if unsteady else mode
    store = resident("feed", where, chosen, budget, keep, lambda: _plan(opened, where, padding, mutation_guard))
    if store is None and (mode == "direct" or (mode == "auto" and where.type == "cpu")):
        store = Direct(opened, where, padding)
    elif store is None:
        store = Ringed(opened, where, slots, padding)
    identity = {"seed": opened.seed, "shuffle": opened.shuffle, "length": store.length, "batch_size": batch_size}
    return Feed(store, where, identity)


def resident(
    what: str,
    where: torch.device,
    mode: str,
    budget: int | str,
    keep: int | str | None,
    plan: Callable[[], tuple[int, Callable[[], Any]]],
) -> Any:
    """What `plan` uploads, or None when batches are to be streamed, with the reason said.

    `plan` gives the bytes that an upload would take, and the upload. It raises CannotStay where there can be none.
    """
    limit = allowance(budget, keep, free_bytes(where) if budget == "auto" else None)
    if mode not in ("auto", "resident"):
        return None
    need, cure = 0, "pass mode='ring'"
    try:
        need, upload = plan()
        if need and limit is not None and need > limit:  # what is there already needs nothing
            cure = "raise budget= or pass mode='ring'"
            raise CannotStay(f"its {readable(need)} do not fit the budget of {readable(limit)} on {where}")
        made = upload()
    except CannotStay as error:
        if mode == "resident":
            raise ValueError(f"{what}: mode='resident': {error}; {cure}.") from error
        notice(f"{what}: streaming: {error}.")
        return None
    except torch.OutOfMemoryError:
        fallback(what, f"{where} ran out of memory while {readable(need)} were uploaded; streaming instead")
        return None
    if need:
        allowed = f"of {readable(limit)} allowed" if limit is not None else "no limit"
        notice(f"{what}: {readable(need)} resident on {where} ({allowed}).")
    return made


def check_slots(what: str, slots: Any) -> None:
    """A ring of none would wait for ever."""
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < 3:
        raise ValueError(f"{what}: slots: got {slots!r}, wanted 3 or more: one being filled, one being copied, one ready.")


def whole_seed(what: str, seed: Any) -> int:
    try:
        return operator.index(seed)  # NumPy's whole numbers, too: what is computed from them would overflow
    except TypeError:
        raise ValueError(f"{what}: seed: got {seed!r}, wanted a whole number.") from None


def _plan(source: Source, where: torch.device, padding: Padding, guard: bool) -> tuple[int, Callable[[], Store]]:
    """(bytes an upload would take, the upload). Raises CannotStay."""
    if isinstance(source, Items) and source.collate is torch.utils.data.default_collate:
        return item_bytes_needed(source, where), lambda: ResidentItems(source, where, padding)
    if source.shuffle and not isinstance(source, BatchList):
        raise CannotStay("shuffle=True with your own collate makes other batches every epoch")
    listed = source if isinstance(source, BatchList) else BatchList(list(source.read(0, 0)), source.seed, False)
    return bytes_needed(listed.batches, where, padding), lambda: Resident(listed, where, padding, guard)


def target(device: str | torch.device | None) -> torch.device:
    """As tensors report it. None and the policies of gpubound.device go through its test; others are taken as they are."""
    if device is None:
        return resolve("auto")
    cpu = isinstance(device, torch.device) and device.type == "cpu"  # perhaps with an index, which no policy has
    if not cpu and str(device).partition(":")[0] in POLICIES:
        return resolve(device)
    try:
        return torch.empty(0, device=device, dtype=torch.float32).device
    except RuntimeError as error:  # torch knows no such device, or cannot use it
        why = str(error).partition("\n")[0].partition(": ")[0]
        raise ValueError(f"feed: device: got {str(device)!r}, wanted {', '.join(POLICIES)} or cuda:<index>: {why}.") from error


def free_bytes(device: torch.device) -> int | None:
    """Memory that could be allocated on `device` now, as measured; None where nothing measures it."""
    if device.type == "cuda":
        return usable_bytes(device)
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def allowance(budget: int | str, keep: int | str | None, free: int | None) -> int | None:
    """Bytes a feed may hold resident: what `budget` says, else what is free less `keep`. None is no limit."""
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
