"""k steps in one launch: a CUDA graph a bucket of rows, a number of steps and a way of choosing; plain calls on a CPU. Prompts
too: a prefill that comes a second time in one size is captured, if it is small enough to be bound by its launches.

And what steps work on: the state of a running batch on the device, and the pinned ring through which its tokens leave. One
block of int32 holds all that the host wants to know after a launch: the tokens of each step, their log-probabilities, who is
alive, who went bad. So a launch is followed by one copy to pinned memory and one event; the host asks the event, it never waits
on the device. A slot of the ring is written again only after its event was seen, at least one launch later.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..graph.runner import GraphRunner
from ..kernels import pick, sample
from ..kernels.sampling import SETTINGS, Into, Rows, Settings
from .request import STOPS, Request, draws, to_device

RING = 3  # launches that the host may be ahead of what it has read
ON_CPU = 1  # the same on a CPU, where a launch has ended when it returns: its tokens are shown before the next begins


@dataclass(frozen=True)
class Tokens:
    """The result of one launch, on the host."""

    emitted: list[list[int]]  # (k, B), -1 where a row had ended
    logprobs: list[list[float]]  # (k, B); empty where nobody asked for them
    alive: list[int]  # (B,)
    bad: list[int]  # (B,): 0, or 1 + the position whose logits were not finite


class BatchState:
    """`max_batch` rows; a request fills the first of them, and views of so many are what kernels get."""

    def __init__(self, max_batch: int, vocab: int, longest: int, device: torch.device) -> None:
        self.max_batch, self.vocab, self.longest, self.device = max_batch, vocab, longest, device
        self.block = torch.zeros(2 * longest + 2, max_batch, device=device, dtype=torch.int32)
        self.emitted, self.logprobs = self.block[:longest], self.block[longest:-2].view(torch.float32)  # a line a token
        token, position, limit = torch.zeros(3, max_batch, device=device, dtype=torch.int32)
        stops = torch.full((STOPS,), -1, device=device, dtype=torch.int32)
        self.rows = Rows(token, position, self.block[-2], limit, self.block[-1], stops)
        made = {name: torch.zeros(max_batch, device=device, dtype=dtype) for name, dtype in SETTINGS.items()}
        self.settings = Settings(**made)  # a request writes all of them
        self.seen: Tensor | None = None
        pinned = device.type == "cuda"
        self.lead = RING if pinned else ON_CPU
        self._ring = [torch.zeros(self.block.shape, dtype=torch.int32, device="cpu", pin_memory=pinned) for _ in range(RING)]
        self._events = [torch.cuda.Event() for _ in range(RING)] if pinned else []
        self._waiting: deque[tuple[int, int]] = deque()
        self._next = 0

    def choice(self, rows: slice, seen: bool) -> Settings:
        return Settings._make([*(t[rows] for t in self.settings[:-1]), self.marks()[rows] if seen else None])

    def marks(self) -> Tensor:
        """uint8 (max_batch, V), made when a penalty is first asked for."""
        if self.seen is None:
            self.seen = torch.zeros(self.max_batch, self.vocab, device=self.device, dtype=torch.uint8)
        return self.seen

    def fill(self, request: Request, rows: int, max_length: int) -> None:
        """Write the request into the first rows, one small copy each; of `rows`, those beyond it are not alive."""
        count, choice = len(request.prompts), request.choice
        last = [prompt[-1] for prompt in request.prompts]
        ends = [min(n + request.max_new_tokens, max_length) for n in request.lengths]
        table = [last, [n - 1 for n in request.lengths], [1] * count, ends, draws(request.prompts)]
        columns = torch.tensor([column + [0] * (rows - count) for column in table], dtype=torch.int32, device="cpu")
        targets = self.rows.token, self.rows.position, self.rows.alive, self.rows.limit, self.settings.row
        for target, values in zip(targets, to_device(columns, self.device)):
            target[:rows] = values
        self.rows.bad.zero_()
        self.rows.stops.fill_(-1)
        if request.stops:
            stops = torch.tensor(request.stops, dtype=torch.int32, device="cpu")
            self.rows.stops[: len(stops)] = to_device(stops, self.device)
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            getattr(self.settings, name).fill_(getattr(choice, name))
        self.settings.penalty.fill_(choice.repetition_penalty)
        if choice.repetition_penalty != 1:
            marks = torch.zeros(rows, self.vocab, dtype=torch.uint8, device="cpu")
            for row, prompt in zip(marks, request.prompts):
                row[prompt] = 1
            self.marks()[:rows] = to_device(marks, self.device)

    def end(self, rows: list[int]) -> None:
        """End these rows, for a reason that only the host knows, such as a stop string."""
        kept = torch.ones(self.max_batch, dtype=torch.int32, device="cpu")
        kept[rows] = 0
        self.rows.alive.mul_(to_device(kept, self.device))

    def send(self, steps: int) -> None:
        """Copy the results of a launch of `steps` into the next slot of the ring."""
        slot, self._next = self._next, (self._next + 1) % RING
        self._ring[slot].copy_(self.block, non_blocking=True)
        if self._events:
            self._events[slot].record()
        self._waiting.append((slot, steps))

    @property
    def ahead(self) -> int:
        """Launches sent and not yet received."""
        return len(self._waiting)

    def receive(self, logprobs: bool = False) -> Tokens:
        """Return the oldest launch's results as lists once they have arrived: indexing a tensor takes a µs each time."""
        slot, steps = self._waiting.popleft()
        while self._events and not self._events[slot].query():
            time.sleep(2e-5)  # asks, and lets other threads run meanwhile; a wait on the event would hold the host
        block = self._ring[slot]
        said = block[self.longest : self.longest + steps].view(torch.float32).tolist() if logprobs else []
        alive, bad = block[-2:].tolist()
        return Tokens(block[:steps].tolist(), said, alive, bad)

    def drop(self) -> None:
        """Discard launches that will not be read, of a stream that was closed early."""
        while self._waiting:
            self.receive()


class SamplingVariant(NamedTuple):
    """The options of sampling that change which kernels are launched."""

    greedy: bool = True
    penalty: bool = False
    logprobs: bool = False


class Stepper:
    """Runs the steps of the rows of `slots`: plain ones here, a token of a row each. speculation.py has others."""

    tokens = 1  # of a row that a step may bring

    def __init__(self, body: Any, slots: BatchState) -> None:
        self.body, self.slots = body, slots

    def run(self, rows: int, steps: int, way: SamplingVariant) -> None:
        """`steps` steps for each of the first `rows` rows, all on the device: what graphs record."""
        state, settings = self.slots.rows.first(rows), self.slots.choice(slice(rows), way.penalty)
        chosen = None if way.greedy and not way.logprobs and self.body.finds_best(rows) else settings
        for step in range(steps):
            logits = self.body.step(state.token, state.position)
            logprob = self.slots.logprobs[step, :rows] if way.logprobs else None
            choose(self.body, logits, state, chosen, into_body(self.body, self.slots.emitted[step, :rows]), logprob)

    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        """The prompts (B, T), right-padded, without their last tokens: what the body does not keep of them."""

    def moved(self) -> str | None:
        """Return the name of a weight that moved and that the runner does not read."""
        return None

    def rebind(self) -> None:
        """Read such weights again."""

    def bytes_a_step(self, live: list[int]) -> int:
        """Return the bytes that a step reads besides the runner's."""
        return 0

    def report(self) -> list[tuple[str, str, str]]:
        return []

    def exact(self, rows: int) -> bool:
        """Return whether this number of rows gets its logits from the kernels of a plain step."""
        return True


def into_body(body: Any, emitted: Tensor) -> Into:
    """RoutingTrace become the body's next input, where it takes embeddings."""
    return Into(emitted, body.embed, None if body.embed is None else body.x[: len(emitted)])


def choose(
    body: Any, logits: Tensor, state: Rows, settings: Settings | None, into: Into, logprob: Tensor | None = None
) -> None:
    """Choose the next token of each row. Without settings: the likeliest, from the runner's partial maxima."""
    rows = len(into.emitted)
    if settings is None:
        pick(body.best[:rows], body.arg[:rows], state, into, dependent=body.chained(rows))
    else:
        sample(logits, state, settings, into, logprob, body.chained(rows))


PROMPT_TOKENS = 4096  # in a prefill, padding counted: more keep the GPU busy for longer than their launches take


class StepGraphs:
    """The captured launches of a stepper, made when first wanted; those of one device share a pool of memory."""

    longest_prompt = PROMPT_TOKENS

    def __init__(self, stepper: Stepper) -> None:
        self.body, self.slots, self.run = stepper.body, stepper.slots, stepper.run
        self.clear()

    def clear(self) -> None:
        """Forget every graph, after the weights have moved."""
        self._launches: dict[tuple[int, int, SamplingVariant], Callable[[], None]] = {}
        self._warm: set[tuple[int, SamplingVariant]] = set()
        self._prompts: dict[torch.Size, tuple[tuple[Tensor, Tensor], Callable[[], None]] | None] = {}
        self._pools: dict[torch.device, Any] = {}

    def __len__(self) -> int:
        return len(self._launches)

    def made(self, rows: int, steps: int, way: SamplingVariant) -> bool:
        """Return whether the graph for `launch` is captured."""
        return (rows, steps, way) in self._launches

    def launch(self, rows: int, steps: int, way: SamplingVariant) -> None:
        key = (rows, steps, way)
        if key not in self._launches:
            self._launches[key] = self._make(*key)
        self._launches[key]()

    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        """body.prefill(ids (B, T), lengths (B,))."""
        size = ids.shape
        fits = self.body.captures_prefill and ids.device.type == "cuda" and 0 < ids.numel() <= self.longest_prompt
        if not fits or size not in self._prompts:  # at its first, its kernels compile and test themselves
            self.body.prefill(ids, lengths)
            self._prompts.setdefault(size, None)
            return
        given, replay = self._prompts[size] or self._capture_prefill(ids.clone(), lengths.clone())
        for kept, new in zip(given, (ids, lengths)):
            kept.copy_(new)
        replay()

    def _capture_prefill(self, ids: Tensor, lengths: Tensor) -> tuple[tuple[Tensor, Tensor], Callable[[], None]]:
        runner = self._runner_on(self.slots.device)
        runner.record(f"prefill {len(ids)} x {ids.shape[1]}", lambda: self.body.prefill(ids, lengths), [], set())
        self._prompts[ids.shape] = found = (ids, lengths), runner.replay
        return found

    def _runner_on(self, device: torch.device) -> GraphRunner:
        runner = GraphRunner(device, self._pools.get(device))
        self._pools[device] = runner.pool
        return runner

    def _make(self, rows: int, steps: int, way: SamplingVariant) -> Callable[[], None]:
        call = partial(self.run, rows, steps, way)
        if self.slots.device.type != "cuda":
            return call
        runner = self._runner_on(self.slots.device)
        if (rows, way) not in self._warm:  # kernels compile and test themselves at their first call, which no graph may hold
            saved = self._state(rows)
            runner.run(lambda: self.run(rows, 1, way))
            for tensor, before in saved:
                tensor.copy_(before)
            self._warm.add((rows, way))
        runner.record(f"decode {rows} x {steps}", call, [], set())
        return runner.replay

    def _state(self, rows: int) -> list[tuple[Tensor, Tensor]]:
        """Return copies of the tensors that a step changes, except the cache, whose position the next step writes again."""
        tensors = [self.slots.block, self.slots.rows.token, self.slots.rows.position, *self.body.carried()]
        tensors += [t for t in (self.body.x, self.slots.seen) if t is not None]
        return [(t, t.clone()) for t in tensors]
