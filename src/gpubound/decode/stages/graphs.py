"""k steps of layers on several devices: a CUDA graph for each device's part of a step, and rows that go round in lanes.

A lane is some rows of a batch. Its stream goes from device to device and back to the first, where its tokens are chosen. There
are as many lanes as devices, if there are rows enough, so each device works on one while the others work on theirs. The host
launches k rounds of all lanes and reads nothing of them. A device waits for a lane by an event, in its own stream.

Each device's part is captured on a stream of that device, the first one's as a whole: from the final norm on, the choice of a
token, and with it on to the end of its own layers. A launch begins with the last of these alone, and ends with the first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...kernels.sampling import Into
from ..step_graphs import BatchState, SamplingVariant, StepGraphs, choose
from .plan import lanes


class Handover:
    """What goes from device to device for a lane: the stream, and each row's token and position. One piece of memory."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.flat = torch.zeros(rows * (width + 2), device=device, dtype=torch.float32)
        stream, token, position = self.flat.split([rows * width, rows, rows])
        self.x = stream.view(rows, width)
        self.token, self.position = token.view(torch.int32), position.view(torch.int32)
        self.copies = CopyStream(device) if device.type == "cuda" else None

    def send(self, to: "Handover") -> None:
        """Copy it, once what this device's stream computes is there."""
        if self.copies is None or to.copies is None:
            to.flat.copy_(self.flat)
            return
        self.copies.await_computed()
        with torch.cuda.stream(self.copies.stream), torch.cuda.stream(to.copies.stream):
            to.flat.copy_(self.flat, non_blocking=True)
            to.copies.arrived.record(to.copies.stream)

    def receive(self) -> None:
        """Let this device's stream wait for what was sent here."""
        if self.copies is not None:
            torch.cuda.current_stream(self.flat.device).wait_event(self.copies.arrived)


class CopyStream:
    """A lane's copies to and from a device, in a stream of their own.

    torch puts a copy between devices into the current stream of the source, lets it wait for the target's, and the target's for
    it. The default streams would be wrong on either side: behind the target's a copy waits for other lanes that it still works
    on, and a copy in the source's waits for all work of both devices and holds up all that comes after it (CUDA's rule for
    copies in the NULL stream). 8b on two H200s took 9.4 ms for a step of two lanes, as one after the other, at 4.7 ms a lane.
    These streams heed no NULL stream (torch's are made so), and the NULL streams of two devices do not heed each other: a
    device's launches may stay in its own.

    Nothing is overwritten that is still read. A lane goes round: what comes here was computed from what was sent from here the
    round before, so a copy that arrives waits, device by device, for the copy that left and for the work before it. So does
    all that works on the lane here, behind `receive`; and the next launch begins on the first device behind its last `receive`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.computed, self.arrived = torch.cuda.Event(), torch.cuda.Event()
        self.await_computed()  # the zeros, which may have to wait for a prompt: no copy may come before them

    def await_computed(self) -> None:
        """Let what comes wait for all that the device's current stream has been told to do."""
        self.computed.record(torch.cuda.current_stream(self.device))
        self.stream.wait_event(self.computed)


@dataclass
class LanePart:
    """What a device does of a round."""

    device: torch.device
    run: Callable[[], None]


class RowLane:
    """Rows on their way round the devices, and what is launched for them on each."""

    def __init__(self, body: Any, slots: BatchState, rows: range, way: SamplingVariant) -> None:
        self.body, self.slots, self.rows, self.way = body, slots, slice(rows.start, rows.stop), way
        self.places = [Handover(len(rows), body.stream_width, span.device) for span in body.spans]
        self.said = torch.zeros(len(rows), device=slots.device, dtype=torch.int32)
        self.logprob = torch.zeros(len(rows), device=slots.device, dtype=torch.float32) if way.logprobs else None
        self.state = slots.rows.part(self.rows)
        self.settings = slots.choice(self.rows, way.penalty)
        self.before, self.turn, self.behind = (LanePart(slots.device, run) for run in (self._before, self._turn, self._behind))
        self.others = [LanePart(span.device, partial(self._pass, number)) for number, span in enumerate(body.spans) if number]

    def _before(self) -> None:
        here = self.places[0]
        here.token.copy_(self.state.token)
        here.position.copy_(self.state.position)
        self.body.enter(here.token, here.x)
        self._pass(0)

    def _pass(self, number: int) -> None:
        here = self.places[number]
        self.body.pass_stage(number, here.x, here.token, here.position, self.rows.start)

    def _behind(self) -> None:
        logits = self.body.leave(self.places[0].x)
        plain = self.way.greedy and not self.way.logprobs and self.body.finds_best(len(self.said))
        choose(self.body, logits, self.state, None if plain else self.settings, Into(self.said), self.logprob)

    def _turn(self) -> None:
        self._behind()
        self._before()

    @property
    def parts(self) -> list["LanePart"]:
        return [self.before, *self.others, self.turn, self.behind]

    def depart(self) -> None:
        """The first stage of the first round."""
        self.before.run()
        self.places[0].send(self.places[1])

    def go_round(self, step: int, last: bool) -> None:
        """The other stages; the tokens, which become line `step` of what the launch brings; the first stage of the next round
        unless this is the last."""
        for number, part in enumerate(self.others, 1):
            self.places[number].receive()
            part.run()
            self.places[number].send(self.places[(number + 1) % len(self.places)])
        self.places[0].receive()
        (self.behind if last else self.turn).run()
        if not last:
            self.places[0].send(self.places[1])
        self.slots.emitted[step, self.rows].copy_(self.said)
        if self.logprob is not None:
            self.slots.logprobs[step, self.rows].copy_(self.logprob)


class StageGraphs(StepGraphs):
    """The captured parts of every lane, made when first wanted."""

    def clear(self) -> None:
        super().clear()
        self._lanes: dict[tuple[range, SamplingVariant], RowLane] = {}

    def __len__(self) -> int:
        return sum(len(lane.parts) for lane in self._lanes.values())

    def made(self, rows: int, steps: int, way: SamplingVariant) -> bool:
        return True  # the same for any number of steps, and there since the request's first launch

    def launch(self, rows: int, steps: int, way: SamplingVariant) -> None:
        going = [self._lane(part, way) for part in lanes(rows, len(self.body.spans))]
        for lane in going:
            lane.depart()
        for step in range(steps):
            for lane in going:
                lane.go_round(step, last=step + 1 == steps)

    def _lane(self, rows: range, way: SamplingVariant) -> RowLane:
        if (rows, way) not in self._lanes:
            lane = RowLane(self.body, self.slots, rows, way)
            if self.slots.device.type == "cuda":
                self._capture(lane)
            self._lanes[rows, way] = lane
        return self._lanes[rows, way]

    def _capture(self, lane: RowLane) -> None:
        eager = [part.run for part in lane.parts]
        runners = [self._runner_on(part.device) for part in lane.parts]
        if (len(lane.said), lane.way) not in self._warm:  # kernels compile and test themselves at their first call
            saved = self._state(lane.rows.stop)
            for part, runner, call in zip(lane.parts, runners, eager):
                part.run = partial(runner.run, call)
            lane.depart()
            lane.go_round(0, last=True)
            for tensor, before in saved:
                tensor.copy_(before)
            self._warm.add((len(lane.said), lane.way))
        for number, (part, runner, call) in enumerate(zip(lane.parts, runners, eager)):
            runner.record(f"decode rows {lane.rows.start} to {lane.rows.stop - 1}, part {number}", call, [], set())
            part.run = runner.replay
