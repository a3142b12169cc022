"""A request on its way through a decoder.

Its prompts go through `prefill`, then k tokens at a time are launched as one CUDA graph; the host stays a few launches
ahead of what it has read and never waits on the device. All rows take every step together; one that has ended is frozen by its
own flag.
"""

import atexit
import math
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from ..errors import GenerateError
from .request import Request, check_adapters, pad, to_device
from .result import Generated, Generation
from .step_graphs import SamplingVariant
from .text import TextStream

if TYPE_CHECKING:
    from .generate import FastDecoder


@cache
def _end_at_exit() -> WeakSet[Generator]:
    """Generators to close at exit: torch 2.11 aborts the process when one with tensors in its frame is cleared after that."""
    playing: WeakSet[Generator] = WeakSet()

    def end() -> None:
        for generator in list(playing):
            with suppress(ValueError):  # another thread is inside
                generator.close()

    atexit.register(end)
    return playing


# A launch may run one step past the end of the last row for every 64 steps so far: the last 7 of 256 tokens are one launch of 8
# steps instead of seven launches of one step, which would depend on the host's speed. Ended rows are frozen.
OVERSHOT = 1 / 64
HEAVY = 1 << 30  # bytes that a step reads, 0.25 ms on an H200: from here on the host is quick enough, and no step is too many


class RunningRequest:
    """One request on its way through a decoder."""

    def __init__(self, decoder: "FastDecoder", request: Request) -> None:
        self.decoder, self.request = decoder, request
        self.alone = False
        self.begun = time.perf_counter()
        self.wanted = 0  # steps, of those launched, that some row may still need
        self.flying = 0  # steps launched and not read yet
        self.ends = [min(n + request.max_new_tokens, decoder.max_length) for n in request.lengths]
        self.rows = decoder.bucket(len(request.prompts))
        self.way = SamplingVariant(request.choice.greedy, request.choice.repetition_penalty != 1, request.logprobs)
        self.sequences = [Generated(prompt) for prompt in request.prompts]
        self.found = Generation(self.sequences)
        self.texts = [TextStream(decoder.text, request.stop_strings, request.stops) for _ in self.sequences]

    def play(self, alone: bool = False) -> Generator[tuple[int, Any], None, None]:
        """(row, new tokens or text) as they come. A stream that nobody read to its end is closed before Python ends.

        alone: no code of the caller runs between the tokens. Then weights are looked at behind the last launch, not before
        each: the 1,537 tensors of 43 layers of DeepSeek-V4 take 0.3 ms.
        """
        self.alone = alone
        playing = self._play()
        _end_at_exit().add(playing)
        return playing

    def _play(self) -> Generator[tuple[int, Any], None, None]:
        decoder = self.decoder
        with decoder.turn:
            try:
                with short_switch_interval():
                    with decoder.plainly():
                        self._prefill()
                    yield from self._loop()
                    self._check_weights()
            finally:
                decoder.slots.drop()
                self.found.seconds = time.perf_counter() - self.begun
        self._finish()

    def _prefill(self) -> None:
        decoder, request = self.decoder, self.request
        decoder.bound.follow()
        check_adapters(request.adapters, len(request.prompts), decoder.body)  # a stream may begin long after it was asked for
        most = max(request.lengths) - 1  # the last token of a prompt goes through the first step
        width = min(max(16, 1 << (most - 1).bit_length()), decoder.max_length) if most else 0
        device, spare = decoder.body.device, [[0]] * (self.rows - len(request.prompts))
        ids = pad([prompt[:-1] for prompt in request.prompts] + spare, width, device)
        lengths = to_device(torch.tensor(request.lengths + [1] * len(spare), device="cpu") - 1, device)
        decoder.begin(request, ids, lengths, decoder.graphs.prefill)

    def _loop(self) -> Generator[tuple[int, Any], None, None]:
        slots = self.decoder.slots
        alive = True
        while alive and ((left := self._left()) > 0 or slots.ahead):
            if left > 0 and slots.ahead < slots.lead and self._may_launch(steps := self._steps(left)):
                self._launch(steps, left)
            else:
                alive = yield from self._take()

    def _steps(self, left: int) -> int:
        """Return the number of steps of the next launch. The first launches are short, so that the first tokens appear soon."""
        ladder = self.decoder.ladder
        ladder = ladder[max(0, len(ladder) - 1 - self.found.launches) :]
        spare = 0 if self._heavy else int(self.found.steps * OVERSHOT)
        return next(k for k in ladder if k <= left + spare)

    @cached_property
    def _heavy(self) -> bool:
        """Whether steps on one device are long enough to launch one at a time. Several devices need longer launches."""
        body = self.decoder.body
        return len(body.spans) < 2 and not body.peers and body.bytes_a_step(self.request.lengths) >= HEAVY

    def _may_launch(self, steps: int) -> bool:
        """Return whether to launch now. A graph is captured (0.4 s) once all launched tokens are read."""
        return not self.decoder.slots.ahead or self.decoder.graphs.made(self.rows, steps, self.way)

    def _launch(self, steps: int, wanted: int) -> None:
        decoder = self.decoder
        if not self.alone:
            self._check_weights()
        with decoder.plainly():
            decoder.graphs.launch(self.rows, steps, self.way)
        decoder.slots.send(steps * decoder.stepper.tokens)
        self.flying += steps
        self.found.launches += 1
        self.found.steps += steps
        self.wanted += min(steps, wanted)

    def _check_weights(self) -> None:
        if name := self.decoder.bound.moved():
            raise GenerateError(f"{name} was changed, moved or replaced while tokens were generated from it; start again.")

    def _left(self) -> int:
        """Return the steps that the longest row still needs after those in flight, at the tokens a step so far."""
        wanted = (end - len(s.prompt) - len(s.tokens) for end, s in zip(self.ends, self.sequences) if not s.finish)
        return math.ceil(max(wanted, default=0) / (self.found.tokens_a_step or 1.0)) - self.flying

    def _take(self) -> Generator[tuple[int, Any], None, bool]:
        """Read the oldest launch and yield its pieces; return False when every sequence has ended."""
        tokens = self.decoder.slots.receive(self.request.logprobs)
        self.found.first_token_s = self.found.first_token_s or time.perf_counter() - self.begun
        emitted = tokens.emitted
        self.flying -= len(emitted) // self.decoder.stepper.tokens
        ended = []
        for row, (sequence, text) in enumerate(zip(self.sequences, self.texts)):
            if sequence.finish:
                continue
            new = [step[row] for step in emitted if step[row] >= 0]
            said = zip(tokens.logprobs, emitted)  # empty where nobody asked for logprobs
            sequence.logprobs += [values[row] for values, step in said if step[row] >= 0]
            sequence.tokens += new
            self.found.row_steps += sum(step[row] >= 0 for step in emitted[:: self.decoder.stepper.tokens])
            piece = text.add(new)
            if text.stopped:
                sequence.finish = "stop string"
                ended.append(row)
            elif not tokens.alive[row]:
                self._check(row, tokens.bad[row])
                stopped = bool(sequence.tokens) and sequence.tokens[-1] in self.request.stops
                sequence.finish = "stop token" if stopped else "length"
                piece = piece + text.rest() if piece is not None else None
            if shown := new if piece is None else piece:
                yield row, shown
        if all(sequence.finish for sequence in self.sequences):
            return False
        if ended:
            self.decoder.slots.end(ended)
        return True

    def _check(self, row: int, bad: int) -> None:
        if bad:
            if waited := [str(peer.device) for peer in self.decoder.body.peers if peer.gave_up()]:
                raise GenerateError(
                    f"sequence {row}: {' and '.join(waited)} waited in vain for what another GPU sends, so the logits at "
                    f"position {bad - 1} are none. See what the driver says of the GPUs (nvidia-smi, dmesg); the next request "
                    "waits again."
                )
            sequence = self.sequences[row]
            ids = pad([sequence.prompt + sequence.tokens], bad, self.decoder.body.device)[0]
            with self.decoder.plainly():
                where = self.decoder.body.locate(ids)
            raise GenerateError(
                f"sequence {row}: the logits at position {bad - 1} are not finite; first seen in {where}. Check the weights "
                "(a diverged training run?) and the dtype."
            )

    def _finish(self) -> None:
        for sequence, text in zip(self.sequences, self.texts):
            sequence.finish = sequence.finish or "length"
            sequence.text = text.complete()
            if sequence.finish == "stop string":
                kept = text.tokens_before_stop()
                sequence.tokens, sequence.logprobs = sequence.tokens[:kept], sequence.logprobs[:kept]

    def result(self) -> Generation:
        lengths = [len(s.prompt) + len(s.tokens) // 2 for s in self.sequences]  # of the mean step
        body = self.decoder.body
        together = [lengths[lane.start : lane.stop] for lane in body.lanes(len(lengths))]
        read = sum(map(body.bytes_a_step, together)) + self.decoder.stepper.bytes_a_step(lengths)
        self.found.bytes_read, self.found.wanted = read * self.wanted, self.wanted
        self.found.at_once = body.readers(len(lengths))
        return self.found


# A thread that computes gives the interpreter up every 5 ms, if another asks. The generating thread asks several times a
# launch, whenever a call of torch or a sleep had let go of it, and between two busy threads it then waits 5 to 10 ms: on an
# H200 a 350m model fell to 0.47 of its speed. While a request runs the interval is 0.1 ms, for all threads: 0.96.
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
