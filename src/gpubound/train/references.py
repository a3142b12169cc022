"""Reference values of a phase: what an objective compares with of the model that the phase begins with, such as the
log-probabilities of dpo's answers where all weights train. One number a row, computed before the first step and kept in the
run's folder, since a resumed run has other weights.
"""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ..data.progress import PROGRESS_SECONDS
from ..distributed import Ranks
from ..errors import DataError
from ..files import replacing
from ..models.registry import mode
from ..trace import notice, say
from .objectives import Objective
from .stages import EvalSet, Stage, rows_options
from .step import TrainStep

FILE = "reference-{}.safetensors"


def reference_values(
    path: Path, model: Any, objective: Objective, step: TrainStep, stage: Stage, device: torch.device, ranks: Ranks
) -> list[Tensor]:
    """Return the value of each row of the training data, then of each eval set: from the file `path`, or computed and kept."""
    sets = [EvalSet("training", stage.training, stage.recipe), *stage.eval_sets]
    rows = [each.rows for each in sets]
    ranks.wait()
    if path.exists():
        stored = safetensors.torch.load_file(path)
        values = [stored.get(str(number)) for number in range(len(sets))]
        if [value is not None and len(value) for value in values] != rows:
            raise DataError(
                f"{path}: holds reference values of other data than the run has now; put that data back, or begin anew in "
                f"another --out."
            )
        return [value for value in values if value is not None]
    notice(f"{path.name}: computing the reference values of {sum(rows):,} rows before the first step.")
    computed, done, shown = list[Tensor](), 0, time.monotonic()
    with mode(model, training=False):
        for each in sets:
            parts = list[Tensor]()
            for batch in _batches_of_all_rows(each, device):
                parts.append(step.with_weights(partial(objective.reference_values, model, batch)))
                done += len(parts[-1])
                if ranks.first and time.monotonic() - shown > PROGRESS_SECONDS:
                    shown = time.monotonic()
                    say(f"{path.name}: {done:,} of {sum(rows):,} rows")
            computed.append(torch.cat(parts).cpu())
    ranks.wait()  # every rank computes: none reads a file that another one writes meanwhile
    if ranks.first:
        with replacing(path) as file:
            file.write(safetensors.torch.save({str(number): values for number, values in enumerate(computed)}))
    return computed


def _batches_of_all_rows(rows: EvalSet, device: torch.device) -> Iterator[Any]:
    """Yield batches of micro_batch rows in order, then those that remain by twos."""
    whole = rows.rows // rows.micro_batch * rows.micro_batch
    for size, first, last in ((rows.micro_batch, 0, whole), (2, whole, rows.rows)):
        if last > first:
            feed = rows.corpus.batches(rows.seq, size, device, shuffle=False, **rows_options(rows.recipe))
            feed.seek(0, first // size)
            for _ in range((last - first) // size):
                yield feed.take()
