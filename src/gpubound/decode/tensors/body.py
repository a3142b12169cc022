"""The body of a decoder whose layers are sliced over devices: a FusedRunner for each slice, and what they tell each other.

The stream is the same on all devices, to the bit: each adds the same words in the same order. The first has the embedding,
chooses tokens, and is told all logits.

Legend: B rows, T tokens of a prompt.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...device import entered
from ...errors import GenerateError
from ...formatting import readable
from ...kernels import send_words
from ...kernels.decode_product import capped_
from ...kernels.dispatch import hasten
from ...models.registry import runner_of
from ...trace import notice
from ..calls import kernel_calls
from ..kv_cache import Cache
from ..layer import GEMV_ROWS
from ..model_watch import WeightVersions
from ..reference import RoutingTrace, first_not_finite
from ..runner import ModelRunner, RunnerConfig
from ..span import META, added
from ..stages.body import fused_reader, refuse_together
from ..stages.spread import rooms_beside
from ..transformer import CHUNK, ON_ONE, PARTIAL_ROWS, SCORED, FusedRunner
from ..weight_view import WeightView, bind
from .peers import connected
from .plan import SlicePlan, fit_slice, indivisible, plan_slices
from .slices import ModelSlice

# Tokens of prompts that are captured, padding counted: as many rows as sums have boxes for. More keep GPUs busy for longer than
# their launches take. At hidden 4096 and two devices they are 42 MB of each.
PROMPT_ROWS = 256


def sliced_runner(model: Any, build: RunnerConfig, fused: bool, devices: Sequence[torch.device]) -> ModelRunner:
    """A ValueError where the model is not decoded so, or does not fit."""
    refuse_together(build, fused, len(devices))
    if build.max_batch > GEMV_ROWS:
        raise ValueError(
            f"decoder: split: got 'tensors' for max_batch={build.max_batch}, which is for up to {GEMV_ROWS} rows: more fill "
            "each GPU's products; pass split='layers', or ask for fewer rows."
        )
    family = runner_of(model)
    return (_fused_slices if family is None else family.sliced_runner)(model, build, devices)


def _fused_slices(model: Any, build: RunnerConfig, devices: Sequence[torch.device]) -> "SlicedRunner":
    fused_reader(model, build, len(devices), spread=True)  # or a sentence; the model stays where it lies, and goes on working
    live = bind(model, build.max_length, spread=True)
    assert isinstance(live, WeightView)  # it was examined
    plans = plan_slices(live.shape, live.layers, devices, PARTIAL_ROWS)
    _check_room(live, build, plans)
    for plan in plans:
        shared = [
            ("send_product", ()),
            ("send_words", (0,)),
            ("take_words", (False,)),
            ("take_words", (True,)),
        ]
        hasten([*kernel_calls(live, None), *shared], plan.device, live.dtype)
    return SlicedRunner(live, build, plans)


def _check_room(live: WeightView, build: RunnerConfig, plans: Sequence[SlicePlan]) -> None:
    """Say what each device gets, if all have room for it."""
    for plan, free in zip(plans, rooms_beside([plan.device for plan in plans])):
        there = ModelSlice(live, SlicePlan(META, plan.number, plan.count, plan.words))
        kept = Cache(build, range(len(live.layers)), there.shape, live.dtype, META).nbytes
        logits = 4 * build.max_batch * live.shape.vocab
        needed = there.nbytes + kept + (3 * logits if plan.number == 0 else logits)  # and a box of 64 bits for each
        told = f"{_described(there, kept)}; {readable(free)} are there for it"
        fit_slice(plan, needed, free, "weights, keys, values and logits", told)


def _described(live: ModelSlice, kept: int) -> str:
    heads, words = live.plan.of(live.live.shape.heads), live.plan.words
    return (
        f"heads {heads.start} to {heads.stop - 1} of each layer, words {words[0]} to {words[-1]}: {readable(live.nbytes)} of "
        f"weights, {readable(kept)} of keys and values"
    )


class SlicedRunner(ModelRunner):
    """`step` computes device after device. tensors/graphs.py lets them compute at once."""

    captures_prefill = True
    x: Tensor
    best: Tensor
    arg: Tensor
    reads = "copies of the weights, in slices"

    def __init__(self, live: WeightView, build: RunnerConfig, plans: Sequence[SlicePlan]) -> None:
        self.live, self.max_batch, self.max_length = live, build.max_batch, build.max_length
        self.vocab, self.plans = live.shape.vocab, plans
        self._versions = WeightVersions(live.model)
        self.models = [ModelSlice(live, plan) for plan in plans]
        self.slices = [FusedRunner(cast(WeightView, model), build) for model in self.models]
        home = self.home = self.slices[0]
        self.device, self.x, self.cache, self.kernels = home.device, home.x, home.cache, home.kernels
        self.rounds = home.rounds
        B, parts = self.max_batch, -(-self.vocab // PARTIAL_ROWS)
        self.logits = torch.zeros(B, self.vocab, device=self.device, dtype=torch.float32)
        self.best = torch.zeros(B, parts, device=self.device, dtype=torch.float32)
        self.arg = torch.zeros(B, parts, device=self.device, dtype=torch.int32)
        self.places = [torch.zeros(B, 1, device=one.device, dtype=torch.int32) for one in self.slices]
        columns = {"logits": self.vocab, "best": parts, "arg": parts}
        streams = max(B, PROMPT_ROWS)
        self.peers = connected([plan.device for plan in plans], streams, live.shape.hidden, B, columns)
        for one, peer in zip(self.slices, self.peers):
            one.bench.peer = peer

    @property
    def embed(self) -> Tensor:  # type: ignore[override]
        return self.home.embed

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        rows = len(token)
        for number in range(len(self.slices)):
            self.begin_step(number, rows, position)
        for parts in zip(*(one.layers for one in self.slices)):
            attention, mlp = zip(*parts)
            for one, place, part in zip(self.slices, self.places, attention):
                part.give(one.x[:rows], place[:rows, 0], 0)
            self._close(attention, rows)
            for one, part in zip(self.slices, mlp):
                part.give(one.x[:rows], 0)
            self._close(mlp, rows)
        for number in reversed(range(len(self.slices))):  # the first takes what the others have sent
            self.end_step(number, rows, ("logits", "best", "arg"))
        return self.logits[:rows]

    def _close(self, parts: Sequence[Any], rows: int) -> None:
        for one, part in zip(self.slices, parts):
            part.close(one.x[:rows])

    def step_on(self, number: int, rows: int, token: Tensor, position: Tensor, kinds: Sequence[str]) -> None:
        """A step of one device, while the others do theirs. Behind the first's, what `kinds` names is there. The tokens are in
        the first's stream already."""
        one = self.slices[number]
        self.begin_step(number, rows, position)
        one.spans[0].step(one.x[:rows], self.places[number][:rows, 0], one.mode(rows), True)
        self.end_step(number, rows, kinds)

    def begin_step(self, number: int, rows: int, position: Tensor) -> None:
        """The stream and positions of all rows, from the first device to the others."""
        peer, x, place = self.peers[number], self.slices[number].x[:rows], self.places[number][:rows]
        peer.begin()
        with entered(peer.device):
            if number == 0:
                if self.live.shape.embedded != 1:
                    x *= self.live.shape.embedded
                place.copy_(position[:, None])
            for kind, told in (("position", place), ("stream", x)):
                (peer.take if number else peer.send)(kind, told)

    def end_step(self, number: int, rows: int, kinds: Sequence[str]) -> None:
        """The logits of a slice's words, and all slices' together on the first device."""
        peer, one, words = self.peers[number], self.slices[number], self.plans[number].words
        with entered(peer.device):
            found = {"logits": one.leave(one.x[:rows]), "best": one.best[:rows], "arg": one.arg[:rows]}
            if "arg" in kinds and number:
                found["arg"].add_(words.start)
            for kind in kinds:
                peer.send(kind, found[kind], words.start // (1 if kind == "logits" else PARTIAL_ROWS))
            for kind in kinds if number == 0 else ():
                peer.take(kind, {"logits": self.logits, "best": self.best, "arg": self.arg}[kind][:rows])
            peer.end()

    def finds_best(self, rows: int) -> bool:
        return True

    def same_kernels(self, rows: int) -> bool:
        return True

    def begin(self, token: Tensor) -> None:
        self.home.begin(token)
        for peer in self.peers:  # again, if a device had failed
            peer.wait()

    def reserve(self, limits: Tensor) -> None:
        for one in self.slices:
            one.reserve(limits)

    def check_request(self, limits: list[int]) -> None:
        self.home.check_request(limits)

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        for start in range(0, ids.shape[1], CHUNK):
            self._streamed(ids[:, start : start + CHUNK], start)

    def _streamed(self, ids: Tensor, start: int) -> list[Tensor]:
        """The normed stream (B, T, hidden) of ids (B, T) at places start.. behind the last layer, on each device."""
        end, x = start + ids.shape[1], self.home.embedded(ids)
        streams = [x.to(plan.device) for plan in self.plans]
        pending: Sequence[Any] = [None] * len(self.plans)
        for layers in zip(*(one.layers for one in self.slices)):
            for parts, given in zip(zip(*layers), ((start, end), ())):
                read = [added(x, y, part.weights.norm) for x, y, part in zip(streams, pending, parts)]
                streams = [x for _, x in read]
                pending = self._summed([part.prompt(h, *given) for part, (h, _) in zip(parts, read)])
                pending = [part.behind(y) for part, y in zip(parts, pending)]
        return [added(x, y, one.live.norm)[0] for x, y, one in zip(streams, pending, self.slices)]

    def prompt_on(self, number: int, ids: Tensor) -> None:
        """`prefill` of one device while the others do theirs, of at most PROMPT_ROWS tokens. ids (B, T) are on the first."""
        peer, one = self.peers[number], self.slices[number]
        peer.begin()
        x = torch.zeros(ids.numel(), self.live.shape.hidden, device=peer.device, dtype=torch.float32)
        if number == 0:
            x.copy_(self.home.embedded(ids).flatten(0, 1))
        (peer.take if number else peer.send)("stream", x)
        x, pending = x.to(self.live.dtype).view(*ids.shape, -1), None
        for layer in one.layers:
            for part, given in zip(layer, ((0, ids.shape[1]), ())):
                h, x = added(x, pending, part.weights.norm)
                send_words(part.prompt(h, *given).flatten(0, 1).float(), peer.sum())
                total = torch.zeros(ids.numel(), x.shape[-1], device=peer.device, dtype=torch.float32)
                peer.add(total, 0)
                pending = part.behind(total.to(x.dtype).view_as(x))
        peer.end()

    def _summed(self, parts: list[Tensor]) -> list[Tensor]:
        """The sum of what each device computed, on each, in one order."""
        found = []
        for plan in self.plans:
            total = parts[0].to(plan.device).float()
            for part in parts[1:]:
                total = total + part.to(plan.device)
            found.append(total.to(parts[0].dtype))
        return found

    def logits_after(self, ids: Tensor) -> Iterator[Tensor]:
        for start in range(0, len(ids), CHUNK):
            hidden = self._streamed(ids[None, start : start + CHUNK], start)
            for pieces in zip(*(h[0].split(SCORED) for h in hidden)):
                found = [F.linear(h, *one.head.matrices()).to(self.device) for h, one in zip(pieces, self.slices)]
                yield capped_(torch.cat(found, -1).float(), self.live.shape.logit_cap)

    def moved(self) -> str | None:
        return self.live.moved() or self._versions.changed()

    def numbers(self) -> Any:
        return self.live.numbers()

    def rebind(self) -> None:
        live = self.live
        live.refresh()
        if live.adapted:
            raise GenerateError(f"decoder: devices: the model has low-rank adapters, {ON_ONE}.")
        if why := indivisible(live.shape, live.layers, len(self.plans)):
            raise GenerateError(f"decoder: the model has changed since its decoder was built: {why}; build a new one.")
        self.taken += 1
        self._versions = WeightVersions(live.model)
        for one in self.slices:
            one.rebind()
        notice("decoder: the weights have changed since their slices were copied: copied again")

    def bytes_a_step(self, live: list[int]) -> int:
        return sum(one.bytes_a_step(live) for one in self.slices)

    def exact(self) -> Any:
        return self.live

    def locate(self, ids: Tensor) -> str:
        return first_not_finite(self.live, ids)

    def poison(self) -> None:
        for one in self.slices:
            one.poison()

    @contextmanager
    def trace_routing(self) -> Iterator[RoutingTrace]:
        yield RoutingTrace()  # dense layers choose nothing

    def report(self) -> list[tuple[str, str, str]]:
        slices = [
            (f"slice {model.plan.number}", str(model.device), _described(model, one.cache.nbytes))
            for model, one in zip(self.models, self.slices)
        ]
        return [*slices, *self.home.report()]
