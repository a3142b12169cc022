"""A request on its way through a decoder, and what it shares with rollouts: how a row's tokens are read, streams closed at
exit, the interpreter's switch interval, the location of bad logits."""

import atexit
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import Tensor

from ..errors import GenerateError
from .request import Generated, Generation, Request, check_adapters, pad, prompt_width
from .runner import SamplingVariant, Tokens
from .text import TextStream

if TYPE_CHECKING:
    from .generate import FastDecoder

HEAVY = 1 << 30  # bytes that a step reads, 0.25 ms on an H200: from here on the host is quick enough for launches of one step
# A launch may run one step past the end of the last row for every 64 steps so far: the last 7 of 256 tokens are one launch of 8
# steps instead of seven launches of one step, which would depend on the host's speed. Ended rows are frozen.
OVERSHOT = 1 / 64


def read_row(
    decoder: "FastDecoder",
    tokens: Tokens,
    row: int,
    sequence: Any,
    text: TextStream,
    stops: Sequence[int],
    prompt: list[int],
    name: str,
) -> tuple[Any, str]:
    """Add a row's tokens of a launch to its sequence. Return the new text, without a tokenizer the new tokens, and its finish.

    The finish is "stop token", "stop string" or "length", and "" where the sequence goes on.
    """
    steps = [number for number, step in enumerate(tokens.emitted) if step[row] >= 0]
    new = [tokens.emitted[number][row] for number in steps]
    sequence.tokens += new
    if tokens.logprobs:
        sequence.logprobs += [tokens.logprobs[number][row] for number in steps]
    piece: Any = text.add(new)
    if text.stopped:
        return piece, "stop string"
    finish = ""
    if not tokens.alive[row]:
        if tokens.bad[row]:
            raise_not_finite(decoder, name, prompt + sequence.tokens, tokens.bad[row] - 1)
        finish = "stop token" if sequence.tokens and sequence.tokens[-1] in stops else "length"
    if piece is None:
        return new, finish
    return piece + text.rest() if finish else piece, finish


def cut_at_stop(sequence: Any, text: TextStream) -> None:
    """Remove the tokens of the stop string that ended a sequence, and those after it."""
    count = text.tokens_before_stop()
    sequence.tokens, sequence.logprobs = sequence.tokens[:count], sequence.logprobs[:count]


def raise_not_finite(decoder: "FastDecoder", name: str, tokens: list[int], position: int) -> None:
    """Raise an error that names the module where the logits after `position` of a sequence first are not finite."""
    body = decoder.body
    if waited := [str(peer.device) for peer in body.peers if peer.gave_up()]:
        raise GenerateError(
            f"{name}: {' and '.join(waited)} timed out waiting for another GPU, so the logits at position {position} are none. "
            "See what the driver says of the GPUs (nvidia-smi, dmesg); the next request waits again."
        )
    with decoder.plainly():
        where = body.locate(pad([tokens], position + 1, body.device)[0])
    raise GenerateError(
        f"{name}: the logits at position {position} are not finite; first seen in {where}. Check the weights (a diverged "
        "training run?) and the dtype."
    )


@cache
def closed_at_exit() -> WeakSet[Generator]:
    """Return the generators to close at exit: torch 2.11 aborts where one with tensors in its frame is cleared after that."""
    playing: WeakSet[Generator] = WeakSet()

    def close() -> None:
        for generator in list(playing):
            with suppress(ValueError):  # another thread is inside
                generator.close()

    atexit.register(close)
    return playing


# A thread that computes yields the interpreter every 5 ms, if another asks. The generating thread asks several times a launch,
# after each call of torch or sleep that had released it, and between two busy threads it then waits 5 to 10 ms: on an H200 a
# 350m model fell to 0.47 of its speed. While a request runs the interval is 0.1 ms, for all threads: 0.96.
INTERVAL_S = 1e-4

_lock = threading.Lock()
_requests = 0
_before = 0.0


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Shorten the interval at which Python threads switch while tokens are generated.

    Of several requests at once, the last to end sets the interval back; one that someone set meanwhile stays.
    """
    global _requests, _before
    with _lock:
        _requests += 1
        if _requests == 1:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, INTERVAL_S))
    try:
        yield
    finally:
        with _lock:
            _requests -= 1
            if _requests == 0 and abs(sys.getswitchinterval() - min(_before, INTERVAL_S)) < 1e-6:
                sys.setswitchinterval(_before)


class RunningRequest:
    """A request on its way through a decoder: a prefill, then launches of k steps for all rows together.

    The host stays a few launches ahead of the tokens that it has read, and never waits on the device. A row that has ended is
    frozen by its `alive` flag.
    """

    def __init__(
        self, decoder: "FastDecoder", request: Request, prefill: Callable[[Tensor, Tensor], None] | None = None
    ) -> None:
        """prefill: that of prompts with images"""
        self.decoder, self.request, self.prefill = decoder, request, prefill or decoder.graphs.prefill
        self.begun = time.perf_counter()
        self.wanted = 0  # steps, of those launched, that some row may still need
        self.in_flight: deque[tuple[int, bool]] = deque()  # steps launched and not read yet, and whether these are plain
        self.ends = [min(len(prompt) + request.max_new_tokens, decoder.max_length) for prompt in request.prompts]
        self.rows = decoder.bucket(len(request.prompts))
        choice = request.choice
        penalty = choice.repetition_penalty != 1
        self.variant = SamplingVariant(choice.greedy, penalty, request.logprobs, filtered=choice.filtered)
        self.sequences = [Generated(prompt) for prompt in request.prompts]
        self.generation = Generation(self.sequences)
        self.texts = [TextStream(decoder.text, request.stop_strings, request.stops) for _ in self.sequences]

    def play(self, alone: bool = False) -> Generator[tuple[int, Any], None, None]:
        """Yield (row, new tokens or text) as they arrive. A stream that is not read to its end is closed before Python exits.

        alone: no code of the caller runs between the tokens. Weights are then checked after the last launch, not before each:
        for the 1,537 tensors of 43 layers of DeepSeek-V4 a check takes 0.3 ms.
        """
        generator = self._play(alone)
        closed_at_exit().add(generator)
        return generator

    def _play(self, alone: bool) -> Generator[tuple[int, Any], None, None]:
        decoder, slots, pace = self.decoder, self.decoder.slots, self.decoder.stepper.pace
        with decoder.turn:
            try:
                with short_switch_interval():
                    with decoder.plainly():
                        decoder.time_steps(self.rows)
                        self._prefill()
                    if pace is not None:
                        pace.begin(self.rows)
                    # On one device, a step that reads much is long enough to be launched alone. Several devices need more.
                    body = decoder.body
                    read = 0 if body.peers or len(body.spans) > 1 else body.bytes_a_step(list(map(len, self.request.prompts)))
                    alive = True
                    while alive and ((left := self._steps_left()) > 0 or slots.ahead):
                        steps, variant = 0, self.variant
                        lead = slots.lead if pace is None else pace.lead(slots.lead)
                        if left > 0 and slots.ahead < lead:
                            # The first launches are short, so that the first tokens appear soon.
                            ladder = decoder.ladder[max(0, len(decoder.ladder) - 1 - self.generation.launches) :]
                            spare = 0 if read >= HEAVY else int(self.generation.steps * OVERSHOT)
                            steps = next(k for k in ladder if k <= left + spare)
                            if pace is not None and pace.plain(steps):
                                variant, left = variant._replace(plain=True), math.ceil(self._tokens_left())
                                ladder = pace.ladder[max(0, len(pace.ladder) - 1 - self.generation.launches) :]
                                steps = next(k for k in ladder if k <= left + spare)
                            # A graph is captured, in 0.4 s, once all launched tokens are read.
                            if slots.ahead and not decoder.graphs.made(self.rows, steps, variant):
                                steps = 0
                        if not steps:
                            alive = yield from self._receive()
                            continue
                        if not alone:
                            decoder.bound.check_unmoved()
                        with decoder.plainly():
                            decoder.graphs.launch(self.rows, steps, variant)
                        slots.send(steps * (1 if variant.plain else decoder.stepper.tokens))
                        self.in_flight.append((steps, variant.plain))
                        if pace is not None:
                            pace.launched(variant.plain, steps)
                        self.generation.launches += 1
                        self.generation.steps += steps
                        self.wanted += min(steps, left)
                    decoder.bound.check_unmoved()
            finally:
                slots.drop()
                self.generation.seconds = time.perf_counter() - self.begun
        for sequence, text in zip(self.sequences, self.texts):
            sequence.finish = sequence.finish or "length"
            sequence.text = text.complete()
            if text.stopped:
                cut_at_stop(sequence, text)

    def _prefill(self) -> None:
        decoder, request = self.decoder, self.request
        decoder.bound.follow()
        if request.adapters is not None:  # a stream may begin long after it was asked for
            check_adapters(request.adapters, len(request.prompts), decoder.body)
        # A prompt's last token goes through the first step. Lengths and tokens are one transfer.
        rows = [[len(prompt) - 1, *prompt[:-1]] for prompt in request.prompts]
        width = min(prompt_width(max(map(len, rows)) - 1), decoder.max_length)
        table = pad(rows + [[0]] * (self.rows - len(rows)), 1 + width, decoder.body.device)
        lengths_B, ids = table.split([1, width], 1)
        decoder.begin(request, ids, lengths_B[:, 0], self.prefill)

    def _steps_left(self) -> int:
        """Return the steps that the longest row still needs after those in flight, at the tokens a step so far."""
        return math.ceil(self._tokens_left() / (self.generation.tokens_a_step or 1.0))

    def _tokens_left(self) -> float:
        """Return the tokens that the longest row still needs after those of the launches in flight, at that rate."""
        tokens = [end - len(s.prompt) - len(s.tokens) for end, s in zip(self.ends, self.sequences) if not s.finish]
        rate = self.generation.tokens_a_step or 1.0
        return max(tokens, default=0) - sum(steps * (1.0 if plain else rate) for steps, plain in self.in_flight)

    def _receive(self) -> Generator[tuple[int, Any], None, bool]:
        """Read the oldest launch and yield its pieces; return False when every sequence has ended."""
        tokens, (_, plain) = self.decoder.slots.receive(self.request.logprobs), self.in_flight.popleft()
        width, pace = 1 if plain else self.decoder.stepper.tokens, self.decoder.stepper.pace
        before = self.generation.count, self.generation.row_steps
        self.generation.first_token_s = self.generation.first_token_s or time.perf_counter() - self.begun
        stopped = []
        for row, (sequence, text) in enumerate(zip(self.sequences, self.texts)):
            if sequence.finish:
                continue
            self.generation.row_steps += sum([step[row] >= 0 for step in tokens.emitted[::width]])
            what = self.request.stops, sequence.prompt, f"sequence {row}"
            piece, sequence.finish = read_row(self.decoder, tokens, row, sequence, text, *what)
            if sequence.finish == "stop string":
                stopped.append(row)
            if piece:
                yield row, piece
        if pace is not None and not plain:
            pace.add(self.generation.count - before[0], self.generation.row_steps - before[1])
        if all(sequence.finish for sequence in self.sequences):
            return False
        if stopped:
            self.decoder.slots.end(stopped)
        return True

    def result(self) -> Generation:
        """Return the generation, with the bytes that its wanted steps had to read: those of a step of mean length."""
        generation, body = self.generation, self.decoder.body
        lengths = [len(s.prompt) + len(s.tokens) // 2 for s in self.sequences]
        read = self.decoder.stepper.bytes_a_step(lengths)
        for lane in body.lanes(len(lengths)):
            read += body.bytes_a_step(lengths[lane.start : lane.stop])
        generation.bytes_read, generation.wanted = read * self.wanted, self.wanted
        generation.at_once = body.readers(len(lengths))
        return generation
