"""CorpusFeed: batches of tokens, cut on the device from a corpus that lies there, or streamed when it is too large.

Resident, a step copies nothing from the host: a counter on the device says which batch is next, and everything else follows
from it. `fetch()` may therefore stand inside a captured CUDA graph, and each replay draws the next batch. Streamed, the same
code cuts the same batches on the host, and the ring brings them.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import GraphError
from .choose import check_slots, resident, target, whole_seed
from .epochs import Feed, Served, Store, count_copied
from .leaves import Padding
from .ring import Ringed
from .rows import FIELDS, STREAM_FIELDS, Cutter, Order, as_stored, plan_documents, plan_stream
from .source import Source

if TYPE_CHECKING:
    from .corpus import Corpus  # which calls `batches`

UPLOAD_TOKENS = 1 << 25  # copied at once: 64 MB of 16-bit tokens
AHEAD = 64  # batches whose rows an iteration works out together: about 40 launches then cost less than one a batch


def batches(
    corpus: "Corpus",
    seq: int,
    micro_batch: int,
    device: Any = None,
    *,
    seed: int = 0,
    shuffle: bool = True,
    pack: str = "stream",
    max_documents: int | None = None,
    fields: tuple[str, ...] | None = None,
    labels: str = "next",
    pad_id: int = 0,
    rank: int = 0,
    world: int = 1,
    budget: int | str = "auto",
    keep: int | str | None = None,
    mode: str = "auto",
    slots: int = 3,
) -> "CorpusFeed":
    """Batches {"input_ids", "labels"} of `micro_batch` rows of `seq` tokens; labels are the next tokens, -100 where there is
    nothing to learn.

    pack      "stream": rows are cut from the corpus end to end, across documents, none wasted. "documents": whole documents
              are packed into rows, and position_ids, segment_ids and cu_seqlens say where each begins, so that none attends
              to another
    fields    which of rows.FIELDS a batch holds; all that `pack` makes but "valid" by default. "valid" is the number of labels
              that count
    labels    "next": the next tokens. "own": each place's own token, for models that fill masked places; of a stream alone,
              where every token has a place
    max_documents   limits the documents in a row, and so the length of cu_seqlens, micro_batch · max_documents + 1
    pad_id    fills the places of a row that no document fits
    rank, world     the ranks of a group share one sequence of batches, epoch after epoch: rank r takes numbers r, r + world and
              so on of it. All must be given the same seed. A saved position counts all ranks' batches: any number of ranks
              goes on from it
    budget, keep, mode, slots   as in gpubound.feed: "resident" in device memory, or through the "ring"
    """
    _check_numbers(seq, micro_batch, rank, world)
    _check_packing(pack, fields, labels, max_documents, pad_id, corpus.vocab_size)
    check_slots("batches", slots)
    if mode not in ("auto", "resident", "ring"):
        raise ValueError(f"batches: mode: got {mode!r}, wanted 'auto', 'resident' or 'ring'.")
    where, seed = target(device), whole_seed("batches", seed)
    plan = plan_stream(corpus.tokens, seq)
    if pack == "documents":
        plan = plan_documents(corpus.offsets(), seq, max_documents or seq)
    order = Order(micro_batch, seed, shuffle, rank, world)
    if order.batches(plan.rows) == 0:
        raise ValueError(
            f"batches: the corpus makes {plan.rows} rows of {seq} tokens, wanted at least micro_batch = {micro_batch}; take "
            f"shorter rows, smaller batches or more text."
        )
    chosen = fields or (STREAM_FIELDS if pack == "stream" else FIELDS[:-1])
    identity = {
        "corpus": corpus.identity(), "contents": corpus.contents, "seq": seq, "micro_batch": micro_batch, "pack": pack,
        "max_documents": max_documents, "seed": seed, "shuffle": shuffle,
    }  # fmt: skip

    cutter = partial(Cutter, plan, order, chosen, pad_id, own=labels == "own")

    def upload() -> tuple[Tensor, Tensor | None]:
        stored = _to_device([as_stored(part.tokens) for part in corpus.parts], where)
        return stored, _to_device(corpus.masks(), where) if corpus.masked else None

    need = corpus.tokens * (corpus.dtype.itemsize + corpus.masked) + plan.size
    tokens = resident("batches", where, mode, budget, keep, lambda: (need, upload))
    if tokens is None:
        store: Any = Ringed(_HostCut(corpus, cutter), where, slots, Padding())
        return CorpusFeed(store, where, identity, world)
    stored, mask = tokens
    cut = cutter(where, stored.take, mask.take if mask is not None else None)
    return CorpusFeed(_DeviceCut(cut, where), where, identity, world)


def _check_numbers(seq: Any, micro_batch: Any, rank: Any, world: Any) -> None:
    for name, value in (("seq", seq), ("micro_batch", micro_batch), ("world", world)):
        if not _whole(value) or value < 1:
            raise ValueError(f"batches: {name}: got {value!r}, wanted a whole number, 1 or more.")
    if not _whole(rank) or not 0 <= rank < world:
        raise ValueError(f"batches: rank: got {rank!r}, wanted 0 to {world - 1}, one of the world of {world}.")


def _check_packing(pack: str, fields: Any, labels: str, max_documents: Any, pad_id: Any, vocabulary: int) -> None:
    if pack not in ("stream", "documents"):
        raise ValueError(f"batches: pack: got {pack!r}, wanted 'stream' or 'documents'.")
    if labels not in ("next", "own") or (labels == "own" and pack != "stream"):
        raise ValueError(f"batches: labels: got {labels!r} with pack={pack!r}, wanted 'next', or 'own' with pack='stream'.")
    known = FIELDS if pack == "documents" else (*STREAM_FIELDS, "valid")
    if fields is not None and not isinstance(fields, list | tuple):
        raise ValueError(f"batches: fields: got {fields!r}, wanted a tuple of some of {', '.join(known)}.")
    if wrong := [field for field in fields or () if field not in known]:
        raise ValueError(f"batches: fields: got {wrong[0]!r}, wanted some of {', '.join(known)} with pack={pack!r}.")
    if max_documents is not None and (pack != "documents" or not _whole(max_documents) or max_documents < 1):
        raise ValueError(
            f"batches: max_documents: got {max_documents!r} with pack={pack!r}, wanted a whole number, 1 or more, with "
            f"pack='documents'; leave it out for no limit."
        )
    if not _whole(pad_id) or not 0 <= pad_id < vocabulary:  # an embedding would read beyond its table
        raise ValueError(f"batches: pad_id: got {pad_id!r}, wanted an id of the vocabulary, 0 to {vocabulary - 1}.")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _to_device(runs: list[np.ndarray], where: torch.device) -> Tensor:
    """The runs end to end, read from the disk piece by piece."""
    whole = torch.empty(sum(map(len, runs)), dtype=torch.from_numpy(runs[0][:0].copy()).dtype, device=where)
    at = 0
    for run in runs:
        for start in range(0, len(run), UPLOAD_TOKENS):
            piece = torch.from_numpy(np.array(run[start : start + UPLOAD_TOKENS]))
            whole[at : at + len(piece)].copy_(piece)
            at += len(piece)
    if where.type != "cpu":
        count_copied(whole.numel() * whole.element_size())
    return whole


class _DeviceCut(Store):
    """Batches cut where the tokens lie."""

    mode = "resident"
    length: int

    def __init__(self, cutter: Cutter, device: torch.device):
        self.cutter, self.length, self.world = cutter, cutter.batches, cutter.order.world
        # Batches that all ranks have drawn since the beginning: known to the device, and as the host believes.
        self.counter, self.drawn = torch.zeros((), dtype=torch.int64, device=device), 0
        self._ahead = torch.arange(AHEAD, device=device) * self.world
        self._rows: Tensor | None = None  # of the batches from `_from` on
        self._from = 0

    def move(self, number: int) -> None:
        if number != self.drawn:
            self.counter.fill_(number)
            self.drawn = number

    def serve(self, epoch: int, start: int) -> Generator[Served]:
        """The batches of the counter; their rows are worked out for AHEAD batches at once."""
        self.move(epoch * self.length + start)
        for _ in range(start, self.length, self.world):
            nth = (self.drawn - self._from) // self.world
            if self._rows is None or not 0 <= nth < AHEAD:
                self._rows, self._from, nth = self.cutter.rows(self.counter + self._ahead), self.drawn, 0
            batch = self.cutter.cut(self._rows[nth])
            self.counter.add_(self.world)
            self.drawn += self.world
            yield Served(batch, resident=len(batch))


class _HostCut(Source):
    """The source of a corpus too large for the device: the same batches, cut on the CPU from the memory-mapped shards."""

    def __init__(self, corpus: "Corpus", cutter: Callable[..., Cutter]):
        def read(index: Tensor) -> Tensor:
            return torch.from_numpy(as_stored(corpus.read(index.numpy())))

        def read_mask(index: Tensor) -> Tensor:
            return torch.from_numpy(corpus.read_mask(index.numpy()))

        self.cutter = cutter(torch.device("cpu"), read, read_mask if corpus.masked else None)
        order = self.cutter.order
        self.length, self.seed, self.shuffle, self.world = self.cutter.batches, order.seed, order.shuffle, order.world

    def read(self, epoch: int, start: int) -> Iterator[dict[str, Tensor]]:
        for drawn in range(epoch * self.length + start, (epoch + 1) * self.length, self.world):
            yield self.cutter.cut(self.cutter.rows(torch.tensor(drawn, device="cpu")))


class CorpusFeed(Feed):
    """A Feed of token batches. If it is resident, `fetch()` gives the next batch by a counter on the device, which works inside
    a captured graph too."""

    @property
    def counter(self) -> Tensor:
        """How many batches `fetch()` has given on all ranks, counted on the device: the state of a graph around `fetch()`."""
        return self._device_cut().counter

    def fetch(self) -> dict[str, Tensor]:
        """The batch at the device's counter, which then grows by one a rank; it also crosses into the next epoch.

        Nothing changes on the host, so this can be captured. After n fetches, in replays or outside, call `fetched(n)` to tell
        the host."""
        store = self._device_cut()
        batch = store.cutter.cut(store.cutter.rows(store.counter))
        store.counter.add_(store.world)
        return batch

    def fetched(self, batches: int) -> None:
        """Count on the host what `fetch()` has given on the device."""
        store = self._device_cut()
        self.close()
        store.drawn += batches * store.world
        self.epoch, self.batch = divmod(store.drawn, len(self))
        self._continue = True
        self._stats.batches += batches
        self._stats.resident += batches * len(store.cutter.fields)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if isinstance(state, Mapping) and (world := state.get("world", 1)) != 1:
            raise ValueError(
                f"feed: state: it is of {world} ranks that an earlier version dealt other batches to; go on with that version, "
                f"or begin where you choose with seek(epoch, batch)."
            )
        was, now = state.get("contents"), self._identity["contents"]  # earlier versions did not save it
        if state.get("corpus") == self._identity["corpus"] and None not in (was, now) and was != now:
            raise ValueError(
                "feed: state: the corpus has documents as long as those of the one it was saved with, and they hold other "
                "tokens or masks; give that corpus back, or begin anew."
            )
        super().load_state_dict({**state, "contents": now})

    def seek(self, epoch: int, batch: int = 0) -> None:
        super().seek(epoch, batch)
        if isinstance(self._store, _DeviceCut):
            self._store.drawn = -1  # set the counter even where the host believes it right: warm-ups draw without telling
            self._store.move(epoch * len(self) + batch)

    def _device_cut(self) -> _DeviceCut:
        if not isinstance(self._store, _DeviceCut):
            raise GraphError(
                "CorpusFeed: this corpus streams through the ring, so its batches are not cut on the device; raise budget=, "
                "or take the batches outside the graph."
            )
        return self._store
