"""For how long a rank of a sharded model waits for the others, noted where PyTorch's FSDP2 waits.

On a GPU the host never waits: the stream that computes waits for an event of the stream that gathers or sums. So two events lie
around one more wait for that event, in front of FSDP's own: behind it FSDP copies what was gathered, which is the rank's own
work. They are read with the step's report, when the device has passed them. On a CPU gloo's calls wait, and a clock is read on
either side of each.

It costs a wait on a GPU three calls of the host, and no kernel. What of FSDP is private to torch is named in NEEDED.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..trace import notice

NEEDED = (
    "wait_for_unshard", "reshard", "finalize_backward", "_all_gather_result", "_training_state", "_post_reduce_event",
    "_all_gather_comm", "_reduce_scatter_comm", "reshard_after_backward", "reduce_grads", "comm_ctx",
)  # fmt: skip
"""What is read of a group of parameters, or changed in it."""


class Waited:
    """Of one step. `seconds()` is for when its device has done it."""

    def __init__(self) -> None:
        self.ns = 0
        self.between: list[tuple[Any, Any]] = []
        self.unseen = False  # something was waited for that nobody notes

    def seconds(self) -> float | None:
        if self.unseen:
            return None
        return self.ns / 1e9 + sum(began.elapsed_time(ended) for began, ended in self.between) / 1e3


class Waits:
    """Notes them in FSDP's `groups` of parameters until `release`, while a step is inside `noting`."""

    def __init__(self, groups: Sequence[Any], device: torch.device, clock: Callable[[], int] = time.perf_counter_ns):
        self._now: Waited | None = None
        self._device, self._clock, self._undo = device, clock, ExitStack()
        missing = [name for name in NEEDED if not all(hasattr(group, name) for group in groups)]
        self.known = not missing
        if missing:
            notice(
                f"train: how long ranks wait for each other is not measured: the fully_shard of torch {torch.__version__} "
                f"has no {', '.join(missing)}."
            )
        for group in groups if self.known else ():
            (self._note_events if device.type == "cuda" else self._note_calls)(group)

    @contextmanager
    def noting(self) -> Iterator[Waited]:
        """Around a step."""
        waited = self._now = Waited()
        waited.unseen = not self.known
        try:
            yield waited
        finally:
            self._now = None

    def release(self) -> None:
        self._undo.close()

    def _note_calls(self, group: Any) -> None:
        for name in ("_all_gather_comm", "_reduce_scatter_comm"):
            own = getattr(group, name)
            setattr(group, name, _Timed(own, self._clocked))
            self._undo.callback(setattr, group, name, own)

    def _clocked(self, call: Callable[[], Any]) -> Any:
        began, now = self._clock(), self._now
        result = call()
        if now is not None:
            now.ns += self._clock() - began
            now.unseen |= result is not None  # still under way
        return result

    def _note_events(self, group: Any) -> None:
        gathered, reshard, finalize = group.wait_for_unshard, group.reshard, group.finalize_backward

        def wait_for_unshard() -> None:
            if (result := group._all_gather_result) is not None:
                self._wait([result.all_gather_event])
            gathered()

        def reshard_and_wait() -> None:
            reshard()
            if group._training_state.name == "POST_BACKWARD" and group.reduce_grads:
                self._wait(_sums_due(group.comm_ctx))

        def finalize_backward() -> None:
            if self._now is not None and not group.reshard_after_backward:
                self._now.unseen = True
            self._wait(_sums_left(group))
            finalize()

        for own in (wait_for_unshard, reshard_and_wait, finalize_backward):
            name = own.__name__.removesuffix("_and_wait")
            vars(group)[name] = own
            self._undo.callback(vars(group).pop, name)

    def _wait(self, events: Sequence[Any]) -> None:
        """Let the stream that computes wait for these, and note when it began and when it went on."""
        if self._now is None or not events:
            return
        if None in events:
            self._now.unseen = True
            return
        stream = torch.cuda.current_stream(self._device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(stream)
        for event in events:
            stream.wait_event(event)
        ended.record(stream)
        self._now.between.append((began, ended))


class _Timed:
    """One of FSDP's collectives, called between two readings of a clock."""

    def __init__(self, own: Any, clocked: Callable[[Callable[[], Any]], Any]):
        self.allocate, self._own, self._clocked = own.allocate, own, clocked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._clocked(lambda: self._own(*args, **kwargs))


def _sums_due(context: Any) -> list[Any]:
    """Of the sums whose memory the next one takes over: FSDP waits for these behind a group's backward. One in torch 2.11."""
    states = getattr(context, "reduce_scatter_states", None)
    if states is None:
        states = [] if context.reduce_scatter_state is None else [context.reduce_scatter_state]
    most = getattr(context, "reduce_scatter_max_input_buffers", 1)
    return [state.event for state in states[: max(0, len(states) - most + 1)]]


def _sums_left(group: Any) -> list[Any]:
    """Of the sums that the end of a backward waits for: all of them since torch 2.12, the group's own before."""
    left = [*getattr(group.comm_ctx, "_last_post_reduce_events", {}).values(), group._post_reduce_event]
    return [event for event in left if event is not None]
