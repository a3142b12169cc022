"""Records of steps: the values and the pace of each, read one step late so that the host never waits for the device.

Everything in a record is measured (monitor/tape.py lists the names). The pace comes from the ends of two steps on the device's
clock. `host_lead_ms` is how long the host waited for a result. `gpu_busy` comes from events around each captured step: they
do not see the gaps between the launches of an eager one. One early step, and one in a thousand after it, runs under the ledger,
which counts host syncs and copies, and names their lines as `stalls`. With several ranks each reports how long it waited for
the others: `waited_ms`, by rank, and what follows from it belong to the step before, so that no rank waits for the exchange.

The cost of a step is its arithmetic per token.
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..distributed import ALONE, Ranks
from ..distributed.ranks import Poll
from ..layers.linear_product import size_of
from ..models.registry import Sizes
from ..watch import Ledger, watch
from .device_step import StepResult
from .offload import blocks_of
from .step import TrainStep

Record = dict[str, Any]
WATCHED = 6  # the first step under the ledger: after compiling and capture, early enough for a short run
WATCHED_EVERY = 1000  # steps between two under the ledger: counting slows the host down
NO_STALLS = ("launch", "cpu_op", "clone")  # hundreds of lines a step that keep no device waiting


class Instant:
    """A point in time: on a GPU, when the device reaches it in stream order; on a CPU, now."""

    def __init__(self, device: torch.device):
        self.clock, self.event = time.perf_counter(), None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))

    def since(self, earlier: "Instant") -> float:
        """Return the seconds between both. The device must have reached them."""
        if self.event is None or earlier.event is None:
            return self.clock - earlier.clock
        return earlier.event.elapsed_time(self.event) / 1e3


@dataclass
class _Launched:
    number: int
    result: StepResult
    previous_end: Instant | None  # None: the time since then is not this step's
    begin: Instant
    end: Instant
    ledger: Ledger | None
    notes: Record = field(default_factory=dict)


class StepRecorder:
    """Launches steps; passes each step's record to `on_record` when the next is launched, the last one's at `finish()`."""

    def __init__(self, step: TrainStep, on_record: Callable[[Record], None], ranks: Ranks = ALONE, tokens: float | None = None):
        """tokens: of an average step, where the objective counts other items; None: what it counts are tokens"""
        self.step, self.on_record, self.ranks, self.tokens = step, on_record, ranks, tokens
        self._launches = 0
        self._poll = Poll(ranks)
        self._previous_seconds: float | None = None
        self._newest: _Launched | None = None
        self._previous_end: Instant | None = None  # the first step includes compiling and capture

    def launch(self, number: int, batches: Any) -> None:
        """Launch step `number` with micro-batches drawn from `batches`; then record the step before."""
        self._launches += 1
        device = self.step.device
        watched = device.type == "cuda" and self._launches % WATCHED_EVERY == WATCHED  # a CPU has nothing to wait for
        with watch() if watched else nullcontext() as ledger:
            begin = Instant(device)
            result = self.step(batches)
            end = Instant(device)
        assert result is not None, "a feed does not end"
        launched = _Launched(number, result, self._previous_end, begin, end, ledger)
        self.finish()
        self._newest, self._previous_end = launched, end

    def note(self, **values: Any) -> None:
        """Add values to the newest step's record. The time that measuring them took is not the next step's."""
        assert self._newest is not None
        self._newest.notes |= values
        self._previous_end = Instant(self.step.device)

    def finish(self) -> None:
        """Record the newest step."""
        launched, self._newest = self._newest, None
        if launched is not None:
            self.on_record(self._record(launched) | launched.notes)

    def _record(self, launched: _Launched) -> Record:
        before_read = time.perf_counter()
        values = launched.result.read()
        waited = time.perf_counter() - before_read
        end = launched.end
        record: Record = {"step": launched.number}
        record |= {name: getattr(values, name) for name in ("loss", "grad_norm", "lr", "tokens", "skipped")}
        if self.tokens is not None:
            record["tokens"] = self.tokens
        if not values.tokens:  # no item counted, as where all labels are -100: there is no loss
            del record["loss"], record["grad_norm"]
        if end.event is not None:
            end.event.synchronize()  # a microsecond after the report that has just been read
            record["host_lead_ms"] = 1e3 * waited
        if launched.previous_end is not None:
            seconds = end.since(launched.previous_end)
            record |= {"seconds": seconds, "tokens_per_s": record["tokens"] / seconds}
            if end.event is not None and self.step.captured:
                record["gpu_busy"] = end.since(launched.begin) / seconds
        if not self.ranks.alone:
            waits = self._poll.ask(math.nan if values.waited_s is None else values.waited_s)
            record |= rank_waits(waits, self._previous_seconds)
            self._previous_seconds = record.get("seconds")
        if launched.ledger is not None:
            record |= {name: n for name, n in launched.ledger.totals.items() if name in ("syncs", "h2d_bytes")}
            if stalls := [row.record() for row in launched.ledger.rows if row.kind not in NO_STALLS]:
                record["stalls"] = stalls
        return record


def rank_waits(waited: list[float], seconds: float | None) -> Record:
    """Return the entries of a record that follow from each rank's wait in a step of `seconds`; empty if a wait is unknown.

    The slowest rank waits least, for the collectives only. Any longer wait of another rank is a wait for the slowest.
    """
    if not waited or any(map(math.isnan, waited)):
        return {}
    least, most = min(waited), max(waited)
    record: Record = {"waited_ms": [round(1e3 * wait, 3) for wait in waited], "slowest_rank": waited.index(least)}
    record["held_up_ms"] = 1e3 * (most - least)
    return record if seconds is None else record | {"sums_share": least / seconds}


@dataclass(frozen=True)
class TokenFlops:
    """Operations of a training step per token.

    The first number of each term is the operations per parameter: 2 forward, 2 for the gradient of the input, 2 for that of the
    weight. Attention costs as many a layer, over half the square (measure.train_flops_per_token), or all of it if not causal.
    """

    weights: list[tuple[int, int, str]]  # (passes, parameters, description)
    layers: list[tuple[int, int]]  # (passes, layers)
    width: int  # of a layer's attention

    def flops_per_token(self, seq: float) -> float:
        attention = sum(passes * layers for passes, layers in self.layers) * self.width * seq
        return sum(passes * parameters for passes, parameters, _ in self.weights) + attention


def flops_of(model: nn.Module, sizes: Sizes) -> TokenFlops:
    """Return the operations of training all of a model, or only its adapters: below the first of them there is no backward."""
    halves = 2 if getattr(getattr(model, "config", None), "causal", True) is False else 1  # of the square that attention fills
    if all(p.requires_grad for p in model.parameters()):
        return TokenFlops([(6, sizes.product_parameters, "parameters in products")], [(6 * halves, sizes.layers)], sizes.width)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    blocks = blocks_of(model)
    first = next((i for i, block in enumerate(blocks) if any(p.requires_grad for p in block.parameters())), len(blocks))
    below = sum(size_of(p) for block in blocks[:first] for p in block.parameters() if p.dim() > 1)
    weights = [
        (6, trained, "parameters of adapters"),
        (4, sizes.product_parameters - below, "frozen parameters in products"),
        (2, below, "below the first adapter"),
    ]
    layers = [(6 * halves, sizes.layers - first), (2 * halves, first)]
    return TokenFlops([w for w in weights if w[1]], [w for w in layers if w[1]], sizes.width)
