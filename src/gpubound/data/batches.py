"""CorpusFeed: batches of tokens, gathered on the device from a resident corpus, or streamed if the corpus is too large.

For a resident corpus a step copies nothing from the host: a counter on the device determines the batch. `fetch()` can therefore
be captured in a CUDA graph, whose every replay draws the next batch. For a streamed corpus the same code gathers the same
batches on the host, and the ring copies them.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import GraphError
from ..trace import notice
from .feeds import Feed, check_seed, check_slots, target, try_resident
from .leaves import Padding
from .packing import (
    FIELDS,
    OVERLONG,
    PACKED_FIELDS,
    PACKS,
    PAIRED,
    STREAM_FIELDS,
    BatchCutter,
    BucketCutter,
    Order,
    Packing,
    as_stored,
    pack_buckets,
    pack_corpus,
)
from .source import Source
from .stores import Ringed, Served, Store, count_copied

if TYPE_CHECKING:
    from .corpus import Corpus  # which calls `batches`

UPLOAD_TOKENS = 1 << 25  # copied at once: 64 MB of 16-bit tokens


def batches(
    corpus: "Corpus",
    seq: int,
    micro_batch: int,
    device: Any = None,
    *,
    seed: int = 0,
    shuffle: bool = True,
    pack: str = "stream",
    overlong: str | None = None,
    buckets: int | Sequence[int] | None = None,
    accumulate: int = 1,
    fields: tuple[str, ...] | None = None,
    labels: str = "next",
    weighted: bool = True,
    row_values: Mapping[str, Tensor] | None = None,
    rank: int = 0,
    world: int = 1,
    budget: int | str = "auto",
    keep: int | str | None = None,
    mode: str = "auto",
    slots: int = 3,
) -> "CorpusFeed":
    """Return a feed of batches {"input_ids", "labels"} of `micro_batch` rows of `seq` tokens; labels are the next tokens, -100
    for tokens that the loss ignores.

    pack      "stream": rows are consecutive tokens of the corpus, across documents. "examples": whole documents, several a
              row; position_ids, segment_ids and cu_seqlens separate them in attention. "none": one document a row, padded.
              "documents": as "examples", but longer documents are split. "pairs": of preferences or matches; rows 2k and
              2k + 1 are a chosen and a rejected answer to one prompt, or a query and its positive; with n - 2 negatives a
              match is rows nk to nk + n - 1. micro_batch counts rows, a multiple of these. "packed_pairs": several whole
              pairs a row, examples 2k and 2k + 1 of it
    overlong  an example longer than a row is cut at its end ("truncate", the default) or beginning ("truncate_left"), or
              left out ("drop"). Examples without a label that counts are left out; a notice has the numbers
    fields    the fields of a batch, of rows.FIELDS; by default input_ids and labels, with "examples" and "documents" their
              bounds too. "example", of "none" and "pairs", is the number of the document, or of the pair, in this corpus
    labels    "next": the next tokens. "own": the input tokens themselves, for models that fill masked positions; only with
              pack="stream"
    buckets   of "none" and "pairs": rows of several lengths up to seq, each batch of one, chosen for the least padding, or
              given. Every length is another shape to capture
    accumulate      with buckets: the batches of a step, of all ranks together, which have one length
    weighted  repeat documents by the weights of their sources; see Corpus.weighted. Without weights nothing repeats
    row_values      further fields by name: (rows, ...), the value for each row of an epoch in the order of shuffle=False
              without buckets
    rank, world     the ranks of a group share one sequence of batches, epoch after epoch: rank r takes numbers r, r + world
              and so on. All need the same seed. A saved position counts all ranks' batches: any number of ranks can continue
    budget, keep, mode, slots   as in gpubound.feed: "resident" in device memory, or through the "ring"
    """
    _check_numbers(seq, micro_batch, rank, world)
    _check_packing(pack, overlong, fields, labels)
    _check_pairs(corpus, pack, micro_batch)
    check_slots("batches", slots)
    if mode not in ("auto", "resident", "ring"):
        raise ValueError(f"batches: mode: got {mode!r}, wanted 'auto', 'resident' or 'ring'.")
    device, seed = target(device), check_seed("batches", seed)
    corpus = corpus.weighted() if weighted else corpus
    if buckets is not None:
        _check_buckets(buckets, pack, seq, accumulate, world)
        packing = pack_buckets(corpus, pack, seq, overlong or OVERLONG[0], buckets, micro_batch, accumulate)
    else:
        packing = pack_corpus(corpus, pack, seq, overlong or OVERLONG[0], label_offset=labels == "next")
    order = Order(micro_batch, seed, shuffle, rank, world)
    if packing.batches(micro_batch) == 0:
        least = f"micro_batch = {micro_batch}"
        least = least if packing.batches_a_step == 1 else f"{least} times accumulate = {accumulate}"
        length = "longer" if packing.dropped else "shorter"
        raise ValueError(
            f"batches: the corpus makes {packing.rows} rows of {seq} tokens, wanted at least {least}; take {length} rows, "
            f"smaller batches or more text{'' if pack == 'stream' else f' ({packing})'}."
        )
    if pack != "stream":
        notice(f"batches: {packing}.")
    # Padding follows its example, which a causal model does not see: rows of one example need no bounds.
    default = {"stream": STREAM_FIELDS, "none": STREAM_FIELDS, "pairs": (*STREAM_FIELDS, "example")}.get(pack, PACKED_FIELDS)
    fields = fields or default
    identity: dict[str, Any] = {
        "corpus": corpus.identity(), "checksum": corpus.contents, "seq": seq, "micro_batch": micro_batch, "pack": pack,
        "seed": seed, "shuffle": shuffle,
    }  # fmt: skip
    if pack != "stream":
        identity |= {"overlong": overlong or OVERLONG[0], "buckets": [part.seq for part in packing.parts]}
    if packing.batches_a_step > 1:  # a separate order
        identity |= {"accumulate": accumulate}
    for name, values in (row_values or {}).items():
        if name in FIELDS or values.shape[:1] != (packing.rows,):
            raise ValueError(
                f"batches: row_values: got {name!r} of shape {tuple(values.shape)}, wanted a name other than "
                f"{', '.join(FIELDS)} and shape ({packing.rows}, ...), a value for each row of an epoch."
            )
    more: dict[str, Any] = {"row_values": row_values} if row_values else {}
    kind = BatchCutter if buckets is None else BucketCutter
    cutter = partial(kind, packing, order, fields=fields, own_labels=labels == "own", **more)

    def upload() -> tuple[Tensor, Tensor | None]:
        stored = _to_device([as_stored(part.tokens) for part in corpus.parts], device)
        return stored, _to_device(corpus.masks(), device) if corpus.masked else None

    need = corpus.tokens * (corpus.dtype.itemsize + corpus.masked) + packing.size
    tokens = try_resident("batches", device, mode, budget, keep, lambda: (need, upload))
    if tokens is None:
        store: Any = Ringed(_StreamedCorpus(corpus, cutter), device, slots, Padding())
        return CorpusFeed(store, device, identity, world)
    stored, mask = tokens
    resident = _ResidentCorpus(
        cutter(device=device, read=stored.take, read_mask=mask.take if mask is not None else None), device
    )
    return CorpusFeed(resident, device, identity, world)


def _check_numbers(seq: Any, micro_batch: Any, rank: Any, world: Any) -> None:
    for name, value in (("seq", seq), ("micro_batch", micro_batch), ("world", world)):
        if not _is_int(value) or value < 1:
            raise ValueError(f"batches: {name}: got {value!r}, wanted a whole number, 1 or more.")
        if value > 1 << 24:  # as in a recipe
            raise ValueError(f"batches: {name}: got {value:,}, wanted at most {1 << 24:,}.")
    if not _is_int(rank) or not 0 <= rank < world:
        raise ValueError(f"batches: rank: got {rank!r}, wanted 0 to {world - 1}, one of the world of {world}.")


def _check_packing(pack: str, overlong: Any, fields: Any, labels: str) -> None:
    if pack not in PACKS:
        raise ValueError(f"batches: pack: got {pack!r}, wanted one of {', '.join(map(repr, PACKS))}.")
    whole = ("examples", "none", *PAIRED)
    if overlong is not None and (overlong, pack) != ("split", "documents") and (overlong not in OVERLONG or pack not in whole):
        raise ValueError(
            f"batches: overlong: got {overlong!r} with pack={pack!r}, wanted one of {', '.join(map(repr, OVERLONG))} with "
            f"'examples', 'none' or 'pairs', or 'split' with 'documents'."
        )
    if labels not in ("next", "own") or (labels == "own" and pack != "stream"):
        raise ValueError(f"batches: labels: got {labels!r} with pack={pack!r}, wanted 'next', or 'own' with pack='stream'.")
    known = STREAM_FIELDS if pack == "stream" else FIELDS if pack in ("none", "pairs") else PACKED_FIELDS
    if fields is not None and not isinstance(fields, list | tuple):
        raise ValueError(f"batches: fields: got {fields!r}, wanted a tuple of some of {', '.join(known)}.")
    if wrong := [field for field in fields or () if field not in known]:
        raise ValueError(f"batches: fields: got {wrong[0]!r}, wanted some of {', '.join(known)} with pack={pack!r}.")


def _check_pairs(corpus: "Corpus", pack: str, micro_batch: int) -> None:
    if corpus.pairs != (pack in PAIRED):
        got, wanted = ("", "pack='pairs'") if corpus.pairs else ("no ", "another pack")
        raise ValueError(f"batches: pack: got {pack!r} for a corpus that holds {got}pairs, wanted {wanted}.")
    if pack == "packed_pairs" and corpus.group > 2:
        raise ValueError(f"batches: pack: got {pack!r} for {corpus.kind}, wanted 'pairs'.")
    if pack == "pairs" and micro_batch % corpus.group:
        wanted = (
            "an even number, two rows a pair" if corpus.group == 2 else f"a multiple of {corpus.group}, the rows of a match"
        )
        raise ValueError(f"batches: micro_batch: got {micro_batch}, wanted {wanted}.")


def _check_buckets(buckets: Any, pack: str, seq: int, accumulate: Any, world: int) -> None:
    lengths = [buckets] if _is_int(buckets) else list(buckets) if isinstance(buckets, Sequence) else []
    rising = all(_is_int(a) and _is_int(b) and a < b for a, b in pairwise([0, *lengths]))
    if not lengths or not rising or (not _is_int(buckets) and lengths[-1] != seq) or pack not in ("none", "pairs"):
        raise ValueError(
            f"batches: buckets: got {buckets!r} with pack={pack!r}, wanted a number of lengths, or rising lengths of which the "
            f"last is seq = {seq}, with 'none' or 'pairs'."
        )
    if not _is_int(accumulate) or accumulate < 1 or accumulate % world:
        raise ValueError(
            f"batches: accumulate: got {accumulate!r} for {world} ranks, wanted a multiple of them: the batches of a step, of "
            f"all ranks together, which have one length."
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _to_device(arrays: list[np.ndarray], device: torch.device) -> Tensor:
    """Concatenate the arrays on the device, reading a part at a time from the disk."""
    result = torch.empty(sum(map(len, arrays)), dtype=torch.from_numpy(arrays[0][:0].copy()).dtype, device=device)
    at = 0
    for array in arrays:
        for start in range(0, len(array), UPLOAD_TOKENS):
            part = torch.from_numpy(np.array(array[start : start + UPLOAD_TOKENS]))
            result[at : at + len(part)].copy_(part)
            at += len(part)
    if device.type != "cpu":
        count_copied(result.numel() * result.element_size())
    return result


class _ResidentCorpus(Store):
    """Batches gathered on the device of the tokens."""

    mode = "resident"
    length: int

    def __init__(self, cutter: BatchCutter | BucketCutter, device: torch.device):
        self.cutter, self.length, self.world = cutter, cutter.batches, cutter.order.world
        # Batches that all ranks have drawn since training began: on the device, and as counted on the host.
        self.counter, self.host_count = torch.zeros((), dtype=torch.int64, device=device), 0

    def move(self, number: int) -> None:
        if number != self.host_count:
            self.counter.fill_(number)
            self.host_count = number

    def serve(self, epoch: int, start: int) -> Generator[Served]:
        """Yield the batches at the host's count, and keep the counter equal to it."""
        self.move(epoch * self.length + start)
        for _ in range(start, self.length, self.world):
            batch = self.cutter.batch(self.host_count)
            self.counter.add_(self.world)
            self.host_count += self.world
            yield Served(batch, resident=len(batch))


class _StreamedCorpus(Source):
    """Source of a corpus too large for the device: the same batches, gathered on the CPU from the memory-mapped shards."""

    def __init__(self, corpus: "Corpus", cutter: Callable[..., BatchCutter | BucketCutter]):
        def read(index: Tensor) -> Tensor:
            return torch.from_numpy(as_stored(corpus.read(index.numpy())))

        def read_mask(index: Tensor) -> Tensor:
            return torch.from_numpy(corpus.read_mask(index.numpy()))

        self.cutter = cutter(device=torch.device("cpu"), read=read, read_mask=read_mask if corpus.masked else None)
        order = self.cutter.order
        self.length, self.seed, self.shuffle, self.world = self.cutter.batches, order.seed, order.shuffle, order.world

    def read(self, epoch: int, start: int) -> Iterator[dict[str, Tensor]]:
        for number in range(epoch * self.length + start, (epoch + 1) * self.length, self.world):
            yield self.cutter.batch(number)


class CorpusFeed(Feed):
    """A Feed of token batches. If it is resident, `fetch()` returns the next batch by a counter on the device, also inside a
    captured graph."""

    @property
    def packing(self) -> Packing:
        """The rows of an epoch: their number, the examples in them, what was truncated or dropped, and the efficiency."""
        store: Any = self._store.source if isinstance(self._store, Ringed) else self._store
        return store.cutter.packing

    @property
    def counter(self) -> Tensor:
        """Batches that `fetch()` has returned on all ranks, counted on the device: the state of a graph around `fetch()`."""
        return self._resident().counter

    def fetch(self) -> dict[str, Tensor]:
        """Return the batch at the device's counter and advance the counter by one a rank, also into the next epoch.

        Nothing changes on the host, so the call can be captured. After n fetches, in replays or outside, call `fetched(n)` to
        update the host's count."""
        store = self._resident()
        if isinstance(store.cutter, BucketCutter):
            raise GraphError(
                "CorpusFeed: a fetch has one shape, and these rows have several; take() the batches, or leave buckets out."
            )
        batch = store.cutter.cut(store.cutter.rows(store.counter))
        store.counter.add_(store.world)
        return batch

    def fetched(self, batches: int) -> None:
        """Add to the host's count the batches that `fetch()` has returned."""
        store = self._resident()
        self.close()
        store.host_count += batches * store.world
        self.epoch, self.batch = divmod(store.host_count, len(self))
        self._continue = True
        self._stats.batches += batches
        self._stats.resident += batches * len(store.cutter.fields)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        same = isinstance(state, Mapping) and state.get("corpus") == self._identity["corpus"]
        if same and "checksum" in state and state["checksum"] != self._identity["checksum"]:
            raise ValueError(
                "feed: state: the corpus has documents as long as those of the one it was saved with, and they hold other "
                "tokens or masks; give that corpus back, or begin anew."
            )
        super().load_state_dict(state)

    def seek(self, epoch: int, batch: int = 0) -> None:
        super().seek(epoch, batch)
        if isinstance(self._store, _ResidentCorpus):
            self._store.host_count = -1  # set the counter even if the host's count is equal: warm-ups fetch without `fetched`
            self._store.move(epoch * len(self) + batch)

    def _resident(self) -> _ResidentCorpus:
        if not isinstance(self._store, _ResidentCorpus):
            raise GraphError(
                "CorpusFeed: this corpus streams through the ring, so its batches are not gathered on the device; raise "
                "budget=, or take the batches outside the graph."
            )
        return self._store
