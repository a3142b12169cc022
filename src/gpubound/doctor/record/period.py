"""The period of a loop, from the steps in which each of its lines blocked: a rollout every 16 steps, a print every 10th.

Steps of one loop are not alike. A window that is no multiple of the period counts a rare event too often or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from statistics import median
from typing import Any

LONGEST = 64  # steps: a longer period is not looked for
MUCH = 1.5  # a step that takes this many times the median is a rare one


@dataclass
class Period:
    """Number of steps after which the loop repeats itself, shared by the phases; 1 if all steps are alike."""

    steps: int = 1

    def rounded(self, steps: int) -> int:
        """Return the smallest multiple of the period that is at least `steps`."""
        return -(-steps // self.steps) * self.steps


def repeats_after(steps: Collection[int], window: int) -> int:
    """Return the distance at which these steps of a window repeat; 0 if one of them was not seen to."""
    marked = [step in steps for step in range(window)]
    for distance in range(1, window):
        if all(a == b for a, b in zip(marked, marked[distance:])):
            repeats = all(step + distance in steps or step - distance in steps for step in steps)
            return distance if steps and repeats else 0
    return 0


def period_of(lines: Mapping[Any, Collection[int]], window: int) -> tuple[int, bool]:
    """Return the period of a window of steps, and whether a longer window may have another.

    `lines` are the steps in which each line blocked. A line without a rhythm, such as a read in a random branch, is left out.
    The period of several lines is their least common multiple, or if that is above LONGEST, the longest one.
    """
    distances = {repeats_after(steps, window) for steps in map(frozenset, lines.values())} - {0}
    longest = max(distances, default=1)
    common = lcm(*distances)
    single = any(len(frozenset(steps)) == 1 for steps in lines.values())
    return common if common <= LONGEST else min(longest, LONGEST), single


def rare_steps(step_ms: Sequence[float]) -> dict[str, float]:
    """Return the fraction of steps that take MUCH of the median or more, of the time that is theirs, and how many times the
    median they take; {} if there are none, or if they are not rare."""
    if not step_ms:
        return {}
    middle = median(step_ms)
    long = [ms for ms in step_ms if ms >= MUCH * middle]
    if not long or 3 * len(long) > len(step_ms):
        return {}
    share, time = len(long) / len(step_ms), sum(long) / sum(step_ms)
    return {"steps": share, "time": time, "times": sum(long) / len(long) / middle}
