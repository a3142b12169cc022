"""Compare two or more callables: interleaved, in random order, with an interval on the ratio.

A drifting clock (heat, another process, power) changes neighbouring runs equally, so the ratio is taken inside each round, and
then the median over rounds. Timing one callable fully and then the other would attribute the drift to one of them.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..formatting import in_words
from .timing import Timing, Work, captured, check_counts, clock_for, resolve_device

RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """The peer's time over ours: above 1, ours is faster. `low` to `high` is the 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Half the interval, relative to the value: read it as plus or minus."""
        return (self.high - self.low) / (2 * self.value)

    def __str__(self) -> str:
        return f"{self.value:.3f}x ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`: a Timing for each name, and for each peer the Ratio of ours over it."""

    ours: str
    timings: dict[str, Timing]
    ratios: dict[str, Ratio]

    @property
    def ratio(self) -> float:
        return self._only().value

    @property
    def spread(self) -> float:
        return self._only().spread

    def _only(self) -> Ratio:
        if len(self.ratios) != 1:
            raise ValueError(
                f"comparison: {len(self.ratios)} peers were timed ({', '.join(self.ratios)}); take one of comparison.ratios."
            )
        return next(iter(self.ratios.values()))

    def __str__(self) -> str:
        width = max(map(len, self.timings))
        lines = [f"{self.ours:{width}}  {in_words(self.timings[self.ours].median_s):>8}"]
        for name, ratio in self.ratios.items():
            lines.append(f"{name:{width}}  {in_words(self.timings[name].median_s):>8}  {self.ours} is {ratio}")
        return "\n".join(lines)


def compare(
    works: Mapping[str, Work],
    *,
    rounds: int = 20,
    warmup: int = 3,
    cold_l2: bool = False,
    host_ahead: bool = False,
    graph: bool = False,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> Comparison:
    """Time `works` alternately, round after round. The first is ours, the others are its peers. Options as in `time`."""
    if len(works) < 2:
        raise ValueError(
            f"compare: got {len(works)} callables, wanted ours and at least one peer, as in {{'ours': f, 'peer': g}}."
        )
    check_counts("compare", rounds=(rounds, 3), warmup=(warmup, 0))
    device, order = resolve_device(device), list(works)
    if graph:
        works = {name: captured("compare", works[name], device, max(1, warmup), cold_l2, host_ahead) for name in order}
    clock = clock_for("compare", device, cold_l2, host_ahead, graph)
    handles: dict[str, list[Any]] = {name: [] for name in works}
    shuffle = random.Random(seed).shuffle
    try:
        for name in order:
            clock.warm(name, works[name], warmup)
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                handles[name].append(clock.run(name, works[name]))
    except Exception as error:
        error.add_note(f"compare: raised by {name!r}")
        raise
    return compare_samples({name: clock.read(handles[name]) for name in works}, clock=clock.name)


def compare_samples(seconds: Mapping[str, list[float]], *, clock: str = "given") -> Comparison:
    """Compare samples that were measured elsewhere: `seconds[name][i]` is round i. The first name is ours."""
    names = list(seconds)
    rounds = len(seconds[names[0]])
    if len(names) < 2 or any(len(samples) != rounds for samples in seconds.values()):
        raise ValueError(
            "compare_samples: got "
            + ", ".join(f"{len(s)} rounds of {n!r}" for n, s in seconds.items())
            + "; wanted the same number for ours and at least one peer."
        )
    ours = np.asarray(seconds[names[0]])
    ratios = {name: _interval(np.asarray(seconds[name]) / ours) for name in names[1:]}
    return Comparison(names[0], {name: Timing.of(list(samples), clock) for name, samples in seconds.items()}, ratios)


def _interval(per_round: np.ndarray) -> Ratio:
    """Return the median and its 95 % bootstrap interval, with a fixed seed."""
    picks = np.random.default_rng(0).integers(0, len(per_round), (RESAMPLES, len(per_round)))
    medians = np.median(per_round[picks], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Ratio(float(np.median(per_round)), float(low), float(high))
