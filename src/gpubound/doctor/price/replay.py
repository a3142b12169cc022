"""Replay of the recorded steps without some stalls, to compare the times.

The sum of the times spent in waits says little. A wait of 30 ms costs nothing while the device has work, and one of 0.2 ms
costs 20 ms when it lets a queue run dry. So the host is played with its pauses, the streams as queues, and the waits as what
they are (mechanism.py); model.py finds all of this on the tape. Then some of the waits are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

from ...errors import MeasureError
from ..record.tape import Tape, chosen
from .dependencies import HostDependencies, Stalls
from .fit import fit_simulator
from .simulator import Simulator

WRONG = 0.02  # a mechanism that misses a recorded time by more of the tape's length prices nothing
LOST = 0.005  # of all works: with more launches missing than this, what the host did is not known
STEPS = 40  # steps in a play: the first one begins with an empty queue, so its price is wrong, and a 40th of the answer
SLOWED = 0.5  # of the time that a recorded host takes, the least that an unrecorded one was seen to take was 0.55
HALVINGS = 8  # of the shares between that and all of it: good to 0.2 %
BUDGET = 200_000  # calls in a play, about 0.2 s: the steps of a large tape are played fewer times, but once in any case


class Replay:
    """Prices in milliseconds a step: the steps of the tape are played again and again, with some of their stalls and without.

    `error` is by how much a play of the whole tape misses a recorded time at most, as a share of its length. `mechanism` is
    played `times` times, which makes `steps` steps. Its host takes `share` of the recorded time (see `paced`); `recorded_ms` is
    a step of one that takes all of it.
    """

    share = 1.0

    def __init__(self, tape: Tape, order: HostDependencies | None = None):
        order = order or HostDependencies(tape)
        order.measurable()
        if (lost := len(order.lost)) > LOST * len(tape.work):
            raise MeasureError(
                f"{lost} of {len(tape.work)} works have no launch on the tape, wanted at most {LOST:.1%}, so no stall can be "
                "priced; record the tape with a profiler that runs before the first step and sees all threads."
            )
        mechanism = fit_simulator(tape, order)
        self.error = mechanism.error()
        if self.error > WRONG:
            raise MeasureError(
                f"the replay misses recorded times by up to {self.error:.1%} of the tape, wanted at most {WRONG:.0%}: "
                "something that is not on the tape held up the host or the device, so no stall can be priced; record it again."
            )
        self.tape = tape
        self.mechanism = mechanism.within(*tape.window) if tape.steps else mechanism
        steps = max(len(tape.steps), 1)
        most = max(BUDGET // max(len(self.mechanism.calls), 1), 1)
        self.times = min(max(STEPS // steps, 1), most) if tape.steps else 1
        self.steps = self.times * steps
        self._base = self.mechanism.play(self.times).length
        self.recorded_ms = self.step_ms
        self.waits = frozenset(place for place, call in enumerate(tape.calls) if call.waits)
        self.stalls = frozenset(place for place, span in enumerate(tape.spans) if span.kind in Stalls.KINDS)

    @property
    def step_ms(self) -> float:
        """A step with all its stalls, by the replay."""
        return self._ms(self._base)

    def paced(self, step_ms: float) -> Replay:
        """The replay whose host is as much faster as makes a step so long, as far as a recording can have slowed it.

        A profiler slows the host alone. Where the device holds up a step, a recorded one takes little longer than a timed one,
        and yet what the host does while the device waits took up to twice its time.
        """
        low, high = SLOWED, 1.0
        if step_ms >= self.step_ms:
            return self
        awake = self.mechanism.awake(Stalls(self.tape))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._with(middle, awake).step_ms < step_ms else (low, middle)
        return self._with(high, awake)

    def _with(self, share: float, awake: Simulator) -> Replay:
        paced = copy(self)
        paced.share, paced.mechanism = share, self.mechanism.paced(share, awake)
        paced._base = paced.mechanism.play(self.times).length
        return paced

    def saved(self, calls: Iterable[int] = (), spans: Iterable[int] = (), work: bool = False) -> float:
        """Compute what a step would save if these calls cost their host nothing, never waited, and these spans were gone.

        `calls` are places of tape.calls. What they launch still runs, but not with `work`. A blocking copy is a copy and a
        wait: either means both. `spans` are places of tape.spans: the host's pauses in them are left out, not the calls.
        """
        return self._ms(self._base - self._without(calls, spans, work))

    def together(self, sets: Sequence[Iterable[int]], spans: Iterable[int] = (), work: bool = False) -> float:
        """What-if of all these sets of calls. It can be more than their sum: a wait that is left out
        alone often moves on to the next one."""
        return self.saved((call for each in sets for call in each), spans, work)

    def ceiling(self) -> float:
        """A step whose host never stalls: no waits, nor waits for data, collections, compilations, checkpoints."""
        return self._ms(self._without(self.waits, self.stalls))

    def launch_free(self) -> float:
        """A step whose host costs nothing, as a graph's: what the devices take alone."""
        return self._ms(self.mechanism.hostless().play(self.times).length)

    def _without(self, calls: Iterable[int], spans: Iterable[int], work: bool = False) -> float:
        gone = chosen(calls, len(self.tape.calls), "calls")
        away = chosen(spans, len(self.tape.spans), "spans")
        mechanism = self.mechanism.without(gone, work) if gone else self.mechanism
        mechanism = mechanism.awake(Stalls(self.tape, away)) if away else mechanism
        return mechanism.play(self.times).length

    def _ms(self, us: float) -> float:
        return us / self.steps / 1e3
