"""Packed rows of examples whose lengths are drawn as those of chats, and the contenders that train on them, one a process."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gpubound.data.packing import Pieces, best_fit

from .lora_worker import add
from .serving import Contender, Job, serve
from .shapes import SHAPES
from .train_worker import BATCHES, ours

ROW, MEAN, SPREAD = 4096, 400, 1.0  # tokens of an example, log-normal, for rows of 4,096; the deviation of its logarithm
EXAMPLES = 20_000


def lengths(seq: int) -> np.ndarray:
    """Return the tokens of each example, at most a row's."""
    drawn = np.random.default_rng(0).normal(np.log(MEAN * seq / ROW) - SPREAD**2 / 2, SPREAD, EXAMPLES)
    return np.exp(drawn).astype(np.int64).clip(1, seq)


def packed_fields(seq: int, micro: int, most: int | None = None) -> list[dict[str, Tensor]]:
    """Return position_ids, segment_ids and cu_seqlens of BATCHES batches, drawn from all rows that the examples fill, up to
    `most` a row."""
    each = lengths(seq)
    first, begins, shift = best_fit(Pieces(np.cumsum(each) - each, each, np.arange(len(each))), seq, most)
    rows = np.random.default_rng(1).permutation(len(first) - 1)[: BATCHES * micro].reshape(BATCHES, micro)
    fields, pieces = [], int(np.diff(first).max())
    for batch in rows:
        starts = [np.asarray(begins[first[row] : first[row + 1]]) for row in batch]
        padded = [bool(shift[first[row + 1] - 1] < 0) for row in batch]
        at = np.arange(seq)
        number = [np.searchsorted(start, at, side="right") - 1 for start in starts]
        positions = np.stack([at - start[n] for start, n in zip(starts, number)])
        segments = np.stack([np.where(pad & (n == n[-1]), -1, n) for pad, n in zip(padded, number)])
        bounds = np.concatenate([start + r * seq for r, start in enumerate(starts)])
        bounds = np.pad(bounds, (0, micro * pieces + 1 - len(bounds)), constant_values=micro * seq)
        fields.append(
            {
                "position_ids": torch.from_numpy(positions),
                "segment_ids": torch.from_numpy(segments),
                "cu_seqlens": torch.from_numpy(bounds.astype(np.int32)),
            }
        )
    return fields


def batches(job: Job, packed: bool) -> list[dict[str, Tensor]]:
    """Return the same tokens with and without bounds. A label counts if its position holds a token of an example."""
    g = torch.Generator().manual_seed(1)
    made = []
    for fields in packed_fields(job.seq, job.micro):
        ids = torch.randint(SHAPES[job.shape].vocab, (job.micro, job.seq), generator=g)
        labels = ids.masked_fill(fields["segment_ids"] < 0, -100)
        batch = {"input_ids": ids, "labels": labels} | (fields if packed else {})
        made.append({name: value.to(job.device) for name, value in batch.items()})
    return made


def trained(job: Job, packed: bool, adapters: bool) -> Contender:
    return ours(job, batches=batches(job, packed), **({"attach": add} if adapters else {}))


CONTENDERS: dict[str, Callable[[Job], Contender]] = {
    "packed": partial(trained, packed=True, adapters=False),
    "dense": partial(trained, packed=False, adapters=False),
    "packed-lora": partial(trained, packed=True, adapters=True),
    "dense-lora": partial(trained, packed=False, adapters=True),
}


if __name__ == "__main__":
    serve(CONTENDERS)
