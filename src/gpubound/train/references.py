"""Reference values of a phase: what an objective compares with of the model that the phase begins with, such as the
log-probabilities of dpo's answers where all weights train. One number a row, or for each example that a row has room for,
computed before the phase's first step and kept in its checkpoints, since a resumed run has other weights.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..data.packing import Packing
from ..data.progress import PROGRESS_SECONDS
from ..distributed import Ranks
from ..errors import DataError
from ..models.registry import mode
from ..trace import notice, say
from .checkpoint.checkpoints import Checkpoint
from .objectives import Objective
from .stages import EvalSet, Stage, rows_options
from .step import TrainStep

PART = "reference"  # of a checkpoint's tensors


def rows_with_values(stage: Stage) -> list[EvalSet]:
    """Return the rows that have reference values: the training data's, all of one length, then each eval set's."""
    return [EvalSet("training", stage.training, replace(stage.recipe, buckets=0)), *stage.eval_sets]


def stored_values(checkpoint: Checkpoint, stage: Stage, new_rows: bool) -> list[Tensor] | None:
    """Return the values in a checkpoint of this phase, None if they are of other rows. DataError if they can be had nowhere."""
    stored = checkpoint.tensors(begin=(f"{PART}.",))
    values, rows = [stored[name] for name in sorted(stored)], [each.rows for each in rows_with_values(stage)]
    if [len(value) for value in values] == rows and not new_rows:
        return values
    if checkpoint.facts["phase"]:
        raise DataError(
            f"{checkpoint.path}: has no reference values of the {sum(rows):,} rows that phase {stage.name} has now, and the "
            f"weights that they are computed with were those at its beginning; give the rows of then, or begin anew in another "
            f"--out."
        )
    return None


def reference_values(
    model: Any, objective: Objective, step: TrainStep, stage: Stage, device: torch.device, ranks: Ranks
) -> list[Tensor]:
    """Compute the value of each row of the training data, then of each eval set, with the present weights."""
    sets = rows_with_values(stage)
    rows = sum(each.rows for each in sets)
    notice(f"reference: computing a value for each of {rows:,} rows before the first step.")
    computed, done, shown = list[Tensor](), 0, time.monotonic()
    with mode(model, training=False):
        for each in sets:
            parts = list[Tensor]()
            for batch in _batches_of_all_rows(each, device):
                values = step.with_weights(partial(objective.reference_values, model, batch))
                parts.append(values.view(len(batch["labels"]), -1).squeeze(-1))
                done += len(parts[-1])
                if ranks.first and time.monotonic() - shown > PROGRESS_SECONDS:
                    shown = time.monotonic()
                    say(f"reference: {done:,} of {rows:,} rows")
            computed.append(torch.cat(parts).cpu())
    return computed


def empty_values(packing: Packing) -> Tensor:
    """Return values of 0 for the rows of `packing`."""
    room = (packing.max_pieces + packing.max_pieces % 2,) if packing.group == 1 else ()  # of pairs of a packed row
    return torch.zeros(packing.rows, *room, device="cpu", dtype=torch.float64)


def _batches_of_all_rows(rows: EvalSet, device: torch.device) -> Iterator[Any]:
    """Yield batches of micro_batch rows in order, then those that remain, as few at a time as stay together."""
    whole = rows.rows // rows.micro_batch * rows.micro_batch
    for size, first, last in ((rows.micro_batch, 0, whole), (rows.group, whole, rows.rows)):
        if last > first:
            feed = rows.corpus.batches(rows.seq, size, device, shuffle=False, **rows_options(rows.recipe))
            feed.seek(0, first // size)
            for _ in range((last - first) // size):
                yield feed.take()
