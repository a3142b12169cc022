"""Pipeline parallelism: stages of layers on several devices of one process, and lanes of rows that go round them.

The layers are planned by the free memory of the devices, moved there and read in place. A lane is a group of a batch's rows.
Its stream goes from device to device and back to the first, where its tokens are chosen. There are as many lanes as devices,
if there are rows enough, so each device works on one while the others work on theirs. The host launches k rounds of all lanes
and reads nothing of them. A device waits for a lane by an event in its stream.

Each device's part of a step is a CUDA graph. The first device has three: its layers, which begin a launch; the head and the
choice of a token, which end it; and both in one, between two rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ...device import label
from ...formatting import readable
from ...kernels.dispatch import start_self_tests
from ...kernels.sampling import Into
from ...models.reader import Reader, weight_of
from ...models.registry import runner_of
from ...trace import say
from ..kv_cache import Cache, cached_layers
from ..runner import BatchState, ModelRunner, RunnerConfig, SamplingVariant, StepGraphs, choose, lanes
from ..transformer import META, ON_ONE, FusedRunner, gemv_rows, kernel_calls, table_bytes, tiled_gemm_rows
from ..weight_view import ANYWHERE, WeightView, bind, readable_model
from .plan import LayerStage, StageBytes, described, memory_for, move_layers, plan


def pipeline_runner(model: Any, config: RunnerConfig, fused: bool, devices: Sequence[torch.device]) -> ModelRunner:
    """Return the runner of a model over several devices. Raise ValueError where it cannot be decoded so, or does not fit."""
    check_options(config, fused, len(devices))
    family = runner_of(model) or FUSED
    reader = family.reader_for(model, config, len(devices))
    cached, tables = family.kept_bytes(reader, config)
    blocks, head = reader.blocks, weight_of(model.lm_head)
    weights = [{t.data_ptr(): t.nbytes for t in (*block.parameters(), *block.buffers())} for block in blocks]
    inside = set().union(*weights)
    ends = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers()) if t.data_ptr() not in inside}
    sizes = StageBytes(
        weights=[sum(block.values()) for block in weights],
        cached=cached,
        ends=sum(ends.values()),
        read=head.nbytes,
        scratch=tables,
        first=4 * config.max_batch * len(head),
    )
    memory = memory_for(model, devices)
    stages = plan(sizes, memory)
    for number, (stage, device) in enumerate(zip(stages, memory)):
        what = described(stage.layers, *(sum(of[n] for n in stage.layers) for of in (sizes.weights, sizes.cached)))
        what += f"; embedding and head, {readable(sizes.ends)}" if number == 0 else ""
        say(f"decoder: stage {number} on {label(stage.device)}: {what}; {readable(device.free)} are there for it")
    move_layers(model, blocks, stages)
    return family.runner(reader, config, stages)


def check_options(config: RunnerConfig, fused: bool, count: int) -> None:
    """Raise ValueError for options that take a single device."""
    for name, wanted in (("speculate", config.tokens > 1), ("weights", config.weights is not None), ("fused=False", not fused)):
        if wanted:
            raise ValueError(f"decoder: devices: got {count} together with {name}, which takes a single device.")


def fused_reader(model: Any, config: RunnerConfig, count: int, spread: bool | str = ANYWHERE) -> Reader:
    """Return the reader of a model that several devices are to share. spread: see `readable_model`."""
    reader = readable_model(model, config.max_length, spread)
    if isinstance(reader, str):
        raise ValueError(f"decoder: devices: got {count}, which only the fused kernels run on, and {reader}.")
    if any(one.adapters for layer in reader.layers() for part in layer.parts for one in part.linears()):
        raise ValueError(f"decoder: devices: got {count} for a model with low-rank adapters, {ON_ONE}.")
    shared = any(getattr(layer.attention, "source", None) is not None for layer in reader.layers())
    if reader.copies or reader.positions() is not None or reader.layer_inputs() is not None or shared:
        why = "with learnt positions, shared keys, separate inputs of layers or weights in another layout: one device runs it"
        raise ValueError(f"decoder: devices: got {count} for a model {why}; leave devices out.")
    return reader


def _kept_bytes(reader: Reader, config: RunnerConfig) -> tuple[list[int], int]:
    dtype, layers = weight_of(reader.model.lm_head).dtype, cached_layers(reader.layers())
    return [Cache(config, {0: layer}, dtype, META).nbytes for layer in layers.values()], table_bytes(reader, config)


def _fused_runner(reader: Reader, config: RunnerConfig, stages: Sequence[LayerStage]) -> ModelRunner:
    live = bind(reader.model, config.max_length, config.max_batch > gemv_rows(config), spread=True)
    assert isinstance(live, WeightView)  # moving changes nothing that was checked
    for stage in stages:
        start_self_tests(kernel_calls(live, None, tiled_gemm_rows(live, config) > 0), stage.device, live.dtype)
    return FusedRunner(live, config, stages)


class Family(NamedTuple):
    """Functions of a family's runner that pipeline_runner calls; the family's module has the same names."""

    reader_for: Callable[[Any, RunnerConfig, int], Any]  # (model, config, number of devices) -> reader, or a ValueError
    kept_bytes: Callable[[Any, RunnerConfig], tuple[list[int], int]]  # of each layer's cache, and of each device's tables
    runner: Callable[[Any, RunnerConfig, Sequence[LayerStage]], ModelRunner]


FUSED = Family(fused_reader, _kept_bytes, _fused_runner)


class Handover:
    """Buffer of a lane on a device, one block of memory: the stream, and each row's token and position."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.flat = torch.zeros(rows * (width + 2), device=device, dtype=torch.float32)
        stream, token, position = self.flat.split([rows * width, rows, rows])
        self.x = stream.view(rows, width)
        self.token, self.position = token.view(torch.int32), position.view(torch.int32)
        self.copies = CopyStream(device) if device.type == "cuda" else None

    def send(self, to: "Handover") -> None:
        """Copy the buffer to the next device, after the work in this device's stream."""
        if self.copies is None or to.copies is None:
            to.flat.copy_(self.flat)
            return
        self.copies.await_computed()
        with torch.cuda.stream(self.copies.stream), torch.cuda.stream(to.copies.stream):
            to.flat.copy_(self.flat, non_blocking=True)
            to.copies.arrived.record(to.copies.stream)

    def receive(self) -> None:
        """Make this device's stream wait for the last copy that was sent here."""
        if self.copies is not None:
            torch.cuda.current_stream(self.flat.device).wait_event(self.copies.arrived)


class CopyStream:
    """Stream of a lane's copies to and from a device.

    torch puts a copy between devices into the current stream of the source, makes it wait for the target's, and the target's
    for it. The default streams would be wrong on either side: in the target's, a copy waits for other lanes that are still
    computed, and in the source's it waits for all work of both devices and delays all that comes after it (CUDA's rule for
    copies in the NULL stream). 8b on two H200s took 9.4 ms for a step of two lanes, as one after the other, at 4.7 ms a lane.
    These streams ignore NULL streams (torch creates them so), and the NULL streams of two devices ignore each other, so a
    device's launches may stay in its NULL stream.

    No buffer is overwritten while it is read. A lane goes round: what arrives was computed from what was sent the round before,
    so an arriving copy waits, device by device, for the copy that left and the work before it. So does all work on the lane
    after `receive`; and the next launch begins on the first device after its last `receive`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.computed, self.arrived = torch.cuda.Event(), torch.cuda.Event()
        self.await_computed()  # the zeros, which may wait for a prompt: no copy must come before them

    def await_computed(self) -> None:
        """Make later copies wait for the work in the device's current stream."""
        self.computed.record(torch.cuda.current_stream(self.device))
        self.stream.wait_event(self.computed)


@dataclass
class LanePart:
    """A device's part of a round."""

    device: torch.device
    run: Callable[[], None]


class RowLane:
    """Rows that go round the devices, and their launches on each."""

    def __init__(self, body: Any, slots: BatchState, rows: range, variant: SamplingVariant) -> None:
        self.body, self.slots, self.rows, self.variant = body, slots, slice(rows.start, rows.stop), variant
        self.buffers = [Handover(len(rows), body.stream_width, group.device) for group in body.spans]
        self.tokens = torch.zeros(len(rows), device=slots.device, dtype=torch.int32)
        self.logprob = torch.zeros(len(rows), device=slots.device, dtype=torch.float32) if variant.logprobs else None
        self.state = slots.rows.part(self.rows)
        self.settings = slots.choice(self.rows, variant.penalty)
        self.first, self.between, self.last = (LanePart(slots.device, run) for run in (self._first, self._between, self._last))
        self.others = [LanePart(group.device, partial(self._pass, n)) for n, group in enumerate(body.spans) if n]

    def _first(self) -> None:
        buffer = self.buffers[0]
        buffer.token.copy_(self.state.token)
        buffer.position.copy_(self.state.position)
        self.body.enter(buffer.token, buffer.x)
        self._pass(0)

    def _pass(self, number: int) -> None:
        buffer = self.buffers[number]
        self.body.pass_stage(number, buffer.x, buffer.token, buffer.position, self.rows.start)

    def _last(self) -> None:
        logits = self.body.leave(self.buffers[0].x)
        plain = self.variant.greedy and not self.variant.logprobs and self.body.finds_best(len(self.tokens))
        choose(self.body, logits, self.state, None if plain else self.settings, Into(self.tokens), self.logprob)

    def _between(self) -> None:
        self._last()
        self._first()

    @property
    def parts(self) -> list["LanePart"]:
        return [self.first, *self.others, self.between, self.last]

    def depart(self) -> None:
        """Run the first stage of the first round."""
        self.first.run()
        self.buffers[0].send(self.buffers[1])

    def go_round(self, step: int, last: bool) -> None:
        """Run the other stages, choose the tokens of line `step`, and run the first stage of the next round, unless `last`."""
        for number, part in enumerate(self.others, 1):
            self.buffers[number].receive()
            part.run()
            self.buffers[number].send(self.buffers[(number + 1) % len(self.buffers)])
        self.buffers[0].receive()
        (self.last if last else self.between).run()
        if not last:
            self.buffers[0].send(self.buffers[1])
        self.slots.emitted[step, self.rows].copy_(self.tokens)
        if self.logprob is not None:
            self.slots.logprobs[step, self.rows].copy_(self.logprob)


class StageGraphs(StepGraphs):
    """Captured parts of every lane, each made at its first use."""

    def clear(self) -> None:
        super().clear()
        self._lanes: dict[tuple[range, SamplingVariant], RowLane] = {}

    def __len__(self) -> int:
        return sum(len(lane.parts) for lane in self._lanes.values())

    def made(self, rows: int, steps: int, variant: SamplingVariant) -> bool:
        return True  # the graphs of a launch serve any number of steps, and exist since the first

    def launch(self, rows: int, steps: int, variant: SamplingVariant) -> None:
        running = [self._lane(part, variant) for part in lanes(rows, len(self.body.spans))]
        for lane in running:
            lane.depart()
        for step in range(steps):
            for lane in running:
                lane.go_round(step, last=step + 1 == steps)

    def _lane(self, rows: range, variant: SamplingVariant) -> RowLane:
        if (rows, variant) not in self._lanes:
            lane = RowLane(self.body, self.slots, rows, variant)
            if self.slots.device.type == "cuda":
                self._capture(lane)
            self._lanes[rows, variant] = lane
        return self._lanes[rows, variant]

    def _capture(self, lane: RowLane) -> None:
        eager = [part.run for part in lane.parts]
        runners = [self._runner_on(part.device) for part in lane.parts]
        if (len(lane.tokens), lane.variant) not in self._warm:  # kernels compile and test themselves at their first call
            saved = self.state(lane.rows.stop)
            for part, runner, call in zip(lane.parts, runners, eager):
                part.run = partial(runner.run, call)
            lane.depart()
            lane.go_round(0, last=True)
            for tensor, before in saved:
                tensor.copy_(before)
            self._warm.add((len(lane.tokens), lane.variant))
        for number, (part, runner, call) in enumerate(zip(lane.parts, runners, eager)):
            runner.record(f"decode rows {lane.rows.start} to {lane.rows.stop - 1}, part {number}", call, [], set())
            part.run = runner.replay
