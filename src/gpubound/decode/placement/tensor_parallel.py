"""Tensor parallelism: every layer is sliced over devices of one process, and all devices compute each token.

Rows of q, k, v, gate, up and the head are sliced, and columns of output and down: a device computes some heads and some columns
of the MLP, and one term of each sum. A bias of a sum is on the first device alone. The stream is bitwise equal on all devices,
since each adds the same terms in the same order. The first device has the embedding, chooses tokens, and gathers the logits.

Each device has a CUDA graph, and the host launches all of them. A kernel that waits for another device's data blocks its own
device alone: what it waits for is sent by kernels that are launched already, or will be. A device's kernels run in order, and
the exchanges of a step have one order on all devices, so no two devices wait for each other.

Legend: B rows, T tokens of a prompt.

A `Peer` has the buffers of all exchanges between the devices of a step. A step has three kinds of exchange. The first device
broadcasts its choice: the stream of the next token and its position, or the token itself. Every part of a layer is summed over
all devices (`kernels/peer_exchange.py`): attention and MLP have buffers each, which alternate. At the end the others send their
logits, or partial maxima, to the first. A buffer of the last and of the first kind is written once a step, after an exchange of
the other kind: so none is written before it was read.

A kernel that sends does not wait, and one that waits has sent before. So devices may compute at the same time, or one after the
other, if all send before any receives.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...device import entered
from ...errors import GenerateError
from ...formatting import readable
from ...kernels import send_words, take_words
from ...kernels.decode_product import Norm, capped_
from ...kernels.dispatch import start_self_tests
from ...kernels.peer_exchange import POLLS, Mail, addresses_of, new_state
from ...models.decoding import LayerWeights, Linear
from ...models.registry import runner_of
from ...trace import notice
from ..kv_cache import Cache, cached_layers
from ..layer import GEMV_ROWS, normed
from ..model_watch import WeightVersions
from ..runner import ModelRunner, RunnerConfig, SamplingVariant, StepGraphs, choose, into_body
from ..transformer import (
    CHUNK,
    META,
    ON_ONE,
    PARTIAL_ROWS,
    SCORED,
    FusedRunner,
    ViewRunner,
    add_and_norm,
    kernel_calls,
)
from ..weight_view import WeightView, bind
from .pipeline import check_options, fused_reader
from .plan import SlicePlan, fit_slice, free_bytes, indivisible, plan_slices

SUMS = ("attention", "mlp")  # the buffers that sums alternate between


class Peer:
    """One of the devices. All make the same exchanges in the same order."""

    def __init__(self, number: int, device: torch.device) -> None:
        self.number, self.device = number, device
        self.state = new_state(device)
        self._buffers: dict[str, Mail] = {}
        self._summed = 0  # sums of this step

    def connect(self, kind: str, boxes: Sequence[Tensor], own: int | None, sender: int = 0) -> None:
        addresses = addresses_of(boxes, self.device)
        self._buffers[kind] = Mail(tuple(boxes), own, sender, self.state, addresses=addresses)

    def sum(self) -> Mail:
        """Return the buffer of the next sum, which this device sends its term to."""
        return self._buffers[SUMS[self._summed % 2]]._replace(number=self._summed)

    def add(self, x: Tensor, mode: int) -> None:
        """Add the sum to x, as soon as all devices have sent their terms."""
        take_words(x, self.sum(), True, mode)
        self.summed()

    def summed(self) -> None:
        """Count a sum that was received."""
        self._summed += 1

    def send(self, kind: str, y: Tensor, column: int = 0) -> None:
        send_words(y, self._buffers[kind], column)

    def take(self, kind: str, out: Tensor) -> None:
        take_words(out, self._buffers[kind])

    def wait(self, polls: int = POLLS) -> None:
        """Set the number of polls for each word, after which a kernel times out."""
        self.state[1:].fill_(polls)

    def gave_up(self) -> bool:
        """Return whether an exchange has timed out. Waits for the device."""
        return bool(self.state[1] == 0)

    def begin(self) -> None:
        """Begin a step or a prompt."""
        self._summed = 0  # a capture may have been interrupted

    def end(self) -> None:
        """Advance the stamps of the exchanges beyond those of this step."""
        self.state[:1].add_(max(1, self._summed))


def connected(
    devices: Sequence[torch.device],
    streams: int,
    hidden: int,
    rows: int = 1,
    home: Mapping[str, int] = MappingProxyType({}),
    broadcast: Mapping[str, tuple[int, int]] | None = None,
) -> list[Peer]:
    """Return a peer for each device.

    streams    the most rows of a sum
    rows       the most rows of a step
    home       columns of the tensors that the others send to the first device, by kind
    broadcast  (rows, columns) of the tensors that the first device sends to the others. None: streams and positions
    """
    for source, target in permutations(devices, 2):  # from the first copy on, a GPU's kernels may write another's memory
        torch.zeros(1, device=source, dtype=torch.float32).to(target)
    peers = [Peer(number, device) for number, device in enumerate(devices)]

    def boxes(to: Sequence[torch.device], senders: int, rows: int, columns: int) -> list[Tensor]:
        return [torch.zeros(senders, rows, columns, device=device, dtype=torch.int64) for device in to]

    for kind in SUMS:
        buffers = boxes(devices, len(peers), streams, hidden)
        for peer in peers:
            peer.connect(kind, buffers, peer.number, peer.number)
    for kind, size in (broadcast or {"stream": (streams, hidden), "position": (rows, 1)}).items():
        buffers = boxes(devices[1:], 1, *size)
        for peer in peers:
            peer.connect(kind, buffers, peer.number - 1 if peer.number else None)
    for kind, columns in home.items():
        buffers = boxes(devices[:1], 1, rows, columns)
        for peer in peers:
            peer.connect(kind, buffers, None if peer.number else 0)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a box is zeros before another device writes into it
    return peers


# Tokens of prompts that are captured, padding included: the rows that the buffers of sums have. Longer prompts keep GPUs busy
# for longer than their launches take. At hidden 4096 and two devices the buffers are 42 MB of each.
PROMPT_ROWS = 256


class ModelSlice:
    """Copies of one device's slice of a model, with the attributes of a WeightView."""

    sliced = True
    adapted = coded = False
    positions = layer_inputs = None
    apart = None

    def __init__(self, live: WeightView, plan: SlicePlan) -> None:
        self.live, self.plan, self.device, self.dtype = live, plan, plan.device, live.dtype
        self.model, self.tables = live.model, live.tables
        self.shape = replace(live.shape, vocab=len(plan.words))
        self._copies: list[Tensor] = []
        self.refresh()

    def refresh(self) -> None:
        """Copy the current weights, into the same memory as before where sizes are the same."""
        live, self._copied = self.live, 0
        self.reader = live.reader
        self.layers = [LayerWeights(self._part(a, a.o), self._part(mlp, mlp.down)) for a, mlp, *_ in live.layers]
        self.norm = self._norm(live.norm)
        self.head = Linear(self._copy(live.head.weight[self.plan.words.start : self.plan.words.stop]))
        self.embed: Any = self._copy(live.embed) if self.plan.number == 0 else None  # tokens are chosen on the first
        del self._copies[self._copied :]  # of biases that were removed

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._copies)

    def bytes_read(self) -> int:
        return self.nbytes - (0 if self.embed is None else self.embed.nbytes)

    def moved(self) -> str | None:
        return None  # SlicedRunner checks the model

    def __str__(self) -> str:
        heads, words = self.plan.of(self.live.layers[0].attention.query_heads), self.plan.words
        return (
            f"heads {heads.start} to {heads.stop - 1} of each layer, words {words[0]} to {words[-1]}: {readable(self.nbytes)} "
            "of weights"
        )

    def _part(self, weights: Any, last: Linear) -> Any:
        """Slice attention or MLP: columns of `last`, whose output is added to the stream, and rows of the other layers."""

        def sliced(value: Any) -> Any:
            if isinstance(value, Norm):
                return self._norm(value)
            return self._columns(value) if value is last else self._rows(value)

        return weights.mapped(sliced)

    def _rows(self, layer: Linear) -> Linear:
        mine = self.plan.of(len(layer.weight))
        return Linear(self._copy(layer.weight[mine]), None if layer.bias is None else self._copy(layer.bias[mine]))

    def _columns(self, layer: Linear) -> Linear:
        weight = self._copy(layer.weight[:, self.plan.of(layer.weight.shape[1])])
        return Linear(weight, None if layer.bias is None or self.plan.number else self._copy(layer.bias))

    def _norm(self, norm: Norm) -> Norm:
        return norm._replace(weight=self._copy(norm.weight))

    def _copy(self, source: Tensor) -> Tensor:
        """Return a contiguous copy on the device. The n-th copy of a refresh reuses the memory of the previous n-th."""
        number, self._copied = self._copied, self._copied + 1
        copies = self._copies
        if number == len(copies) or copies[number].shape != source.shape:
            copies[number : number + 1] = [source.new_empty(source.shape, device=self.device)]
        if not copies[number].is_meta:
            copies[number].copy_(source.detach())
        return copies[number]


def sliced_runner(model: Any, config: RunnerConfig, fused: bool, devices: Sequence[torch.device]) -> ModelRunner:
    """Return the runner of a model over several devices. Raise ValueError where it cannot be decoded so, or does not fit."""
    check_options(config, fused, len(devices))
    if config.max_batch > GEMV_ROWS:
        raise ValueError(
            f"decoder: split: got 'tensors' for max_batch={config.max_batch}, which is for up to {GEMV_ROWS} rows: more fill "
            "each GPU's products; pass split='layers', or ask for fewer rows."
        )
    family = runner_of(model)
    if family is not None:
        return family.sliced_runner(model, config, devices)
    fused_reader(model, config, len(devices), spread=True)  # or a ValueError; the model's layers stay on their devices
    live = bind(model, config.max_length, spread=True)
    assert isinstance(live, WeightView)  # it was examined
    if live.shape.logit_scale != 1:
        raise ValueError("decoder: split: got 'tensors' for a model that scales its logits; pass split='layers'.")
    plans = plan_slices(live.shape.vocab, live.layers, devices, PARTIAL_ROWS)
    for plan, free in zip(plans, free_bytes(devices)):
        on_meta = ModelSlice(live, replace(plan, device=META))
        cached = Cache(config, cached_layers(on_meta.layers), live.dtype, META, rings=False).nbytes
        logits = 4 * config.max_batch * live.shape.vocab
        needed = on_meta.nbytes + cached + (3 * logits if plan.number == 0 else logits)  # the first also has 64-bit buffers
        text = f"{on_meta}, {readable(cached)} of keys and values; {readable(free)} are there for it"
        fit_slice(plan, needed, free, "weights, keys, values and logits", text)
    exchanges = [("send_product", ()), ("send_words", (0,)), ("take_words", (False,)), ("take_words", (True,))]
    for plan in plans:
        start_self_tests([*kernel_calls(live, None), *exchanges], plan.device, live.dtype)
    return SlicedRunner(live, config, plans)


class SlicedRunner(ViewRunner):
    """A FusedRunner for each slice. `step` computes them one after the other, SliceGraphs at the same time."""

    captures_prefill = True
    x: Tensor
    best: Tensor
    arg: Tensor
    reads = "copies of the weights, in slices"

    def __init__(self, live: WeightView, config: RunnerConfig, plans: Sequence[SlicePlan]) -> None:
        self.live, self.max_batch, self.max_length = live, config.max_batch, config.max_length
        self.vocab, self.plans = live.shape.vocab, plans
        self._versions = WeightVersions(live.model)
        self.models = [ModelSlice(live, plan) for plan in plans]
        self.slices = [FusedRunner(cast(WeightView, model), config) for model in self.models]
        home = self.home = self.slices[0]
        self.device, self.x, self.cache, self.kernels = home.device, home.x, home.cache, home.kernels
        self.rounds = home.rounds
        B, parts = self.max_batch, -(-self.vocab // PARTIAL_ROWS)
        self.logits = torch.zeros(B, self.vocab, device=self.device, dtype=torch.float32)
        self.best = torch.zeros(B, parts, device=self.device, dtype=torch.float32)
        self.arg = torch.zeros(B, parts, device=self.device, dtype=torch.int32)
        self.positions = [torch.zeros(B, 1, device=one.device, dtype=torch.int32) for one in self.slices]
        columns = {"logits": self.vocab, "best": parts, "arg": parts}
        streams = max(B, PROMPT_ROWS)
        self.peers = connected([plan.device for plan in plans], streams, live.shape.hidden, B, columns)
        for one, peer in zip(self.slices, self.peers):
            one.workspace.peer = peer

    @property
    def embed(self) -> Tensor:  # type: ignore[override]
        return self.home.embed

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        rows = len(token)
        for number in range(len(self.slices)):
            self.begin_step(number, rows, position)
        for parts in zip(*(one.layers for one in self.slices)):
            attention, mlp = zip(*(layer.parts for layer in parts))
            for one, own_position, part in zip(self.slices, self.positions, attention):
                part.send(one.x[:rows], own_position[:rows, 0], 0)
            self._finish(attention, rows)
            for one, part in zip(self.slices, mlp):
                part.send(one.x[:rows], 0)
            self._finish(mlp, rows)
        for number in reversed(range(len(self.slices))):  # the first receives what the others have sent
            self.end_step(number, rows, ("logits", "best", "arg"))
        return self.logits[:rows]

    def _finish(self, parts: Sequence[Any], rows: int) -> None:
        for one, part in zip(self.slices, parts):
            part.finish(one.x[:rows])

    def step_on(self, number: int, rows: int, token: Tensor, position: Tensor, outputs: Sequence[str]) -> None:
        """Compute a step on one device, at the same time as the others. The first device gathers `outputs`.

        The tokens are in the first device's stream already.
        """
        one = self.slices[number]
        self.begin_step(number, rows, position)
        one.spans[0].step(one.x[:rows], self.positions[number][:rows, 0], one.mode(rows), True)
        self.end_step(number, rows, outputs)

    def begin_step(self, number: int, rows: int, position: Tensor) -> None:
        """Broadcast the stream and the positions of all rows from the first device."""
        peer, x, own_position = self.peers[number], self.slices[number].x[:rows], self.positions[number][:rows]
        peer.begin()
        with entered(peer.device):
            if number == 0:
                if self.live.shape.embedded != 1:
                    x *= self.live.shape.embedded
                own_position.copy_(position[:, None])
            for kind, tensor in (("position", own_position), ("stream", x)):
                (peer.take if number else peer.send)(kind, tensor)

    def end_step(self, number: int, rows: int, outputs: Sequence[str]) -> None:
        """Compute the logits of a slice of the vocabulary, and gather `outputs` on the first device."""
        peer, one, words = self.peers[number], self.slices[number], self.plans[number].words
        with entered(peer.device):
            results = {"logits": one.leave(one.x[:rows]), "best": one.best[:rows], "arg": one.arg[:rows]}
            if "arg" in outputs and number:
                results["arg"].add_(words.start)
            for kind in outputs:
                peer.send(kind, results[kind], words.start // (1 if kind == "logits" else PARTIAL_ROWS))
            for kind in outputs if number == 0 else ():
                peer.take(kind, {"logits": self.logits, "best": self.best, "arg": self.arg}[kind][:rows])
            peer.end()

    def finds_best(self, rows: int) -> bool:
        return True

    def same_kernels(self, rows: int) -> bool:
        return True

    def begin(self, token: Tensor) -> None:
        self.home.begin(token)
        for peer in self.peers:  # wait again after a device had failed
            peer.wait()

    def reserve(self, limits: Sequence[int]) -> None:
        for one in self.slices:
            one.reserve(limits)

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        for start in range(0, ids.shape[1], CHUNK):
            self._streamed(ids[:, start : start + CHUNK], start)

    def _streamed(self, ids: Tensor, start: int) -> list[Tensor]:
        """Return each device's final normed stream (B, T, hidden) of ids (B, T) at positions from `start` on."""
        end, x = start + ids.shape[1], self.home.embedded(ids)
        streams = [x.to(plan.device) for plan in self.plans]
        pending: Sequence[Any] = [None] * len(self.plans)
        for layers in zip(*(one.layers for one in self.slices)):
            for parts, extent in zip(zip(*layers), ((start, end), ())):
                inputs = [add_and_norm(x, y, part.weights.norm) for x, y, part in zip(streams, pending, parts)]
                streams = [x for _, x in inputs]
                terms = [part.prompt(h, *extent) for part, (h, _) in zip(parts, inputs)]
                pending = [normed(y, part.weights.post_norm) for part, y in zip(parts, self._summed(terms))]
        return [add_and_norm(x, y, one.live.norm)[0] for x, y, one in zip(streams, pending, self.slices)]

    def prompt_on(self, number: int, ids: Tensor) -> None:
        """Prefill one device, at the same time as the others, with at most PROMPT_ROWS tokens. ids (B, T) are on the first."""
        peer, one = self.peers[number], self.slices[number]
        peer.begin()
        x = torch.zeros(ids.numel(), self.live.shape.hidden, device=peer.device, dtype=torch.float32)
        if number == 0:
            x.copy_(self.home.embedded(ids).flatten(0, 1))
        (peer.take if number else peer.send)("stream", x)
        x, pending = x.to(self.live.dtype).view(*ids.shape, -1), None
        for layer in one.layers:
            for part, extent in zip(layer, ((0, ids.shape[1]), ())):
                h, x = add_and_norm(x, pending, part.weights.norm)
                send_words(part.prompt(h, *extent).flatten(0, 1).float(), peer.sum())
                total = torch.zeros(ids.numel(), x.shape[-1], device=peer.device, dtype=torch.float32)
                peer.add(total, 0)
                pending = normed(total.to(x.dtype).view_as(x), part.weights.post_norm)
        peer.end()

    def _summed(self, terms: list[Tensor]) -> list[Tensor]:
        """Return the sum of the devices' terms on each device, in the same order."""
        sums = []
        for plan in self.plans:
            total = terms[0].to(plan.device).float()
            for term in terms[1:]:
                total = total + term.to(plan.device)
            sums.append(total.to(terms[0].dtype))
        return sums

    def logits_after(self, ids: Tensor) -> Iterator[Tensor]:
        for start in range(0, len(ids), CHUNK):
            hidden = self._streamed(ids[None, start : start + CHUNK], start)
            for pieces in zip(*(h[0].split(SCORED) for h in hidden)):
                logits = [F.linear(h, *one.head.matrices()).to(self.device) for h, one in zip(pieces, self.slices)]
                yield capped_(torch.cat(logits, -1).float(), self.live.shape.logit_cap)

    def moved(self) -> str | None:
        return self.live.moved() or self._versions.changed()

    def rebind(self) -> None:
        live = self.live
        live.refresh()
        if live.adapted:
            raise GenerateError(f"decoder: devices: the model has low-rank adapters, {ON_ONE}.")
        if why := indivisible(live.layers, len(self.plans)):
            raise GenerateError(f"decoder: the model has changed since its decoder was built: {why}; build a new one.")
        self.taken += 1
        self._versions = WeightVersions(live.model)
        for one in self.slices:
            one.rebind()
        notice("decoder: the weights have changed since their slices were copied: copied again")

    def bytes_a_step(self, live: list[int]) -> int:
        return sum(one.bytes_a_step(live) for one in self.slices)

    def poison(self) -> None:
        for one in self.slices:
            one.poison()

    def report(self) -> list[tuple[str, str, str]]:
        slices = [
            (f"slice {model.plan.number}", str(model.device), f"{model}, {readable(one.cache.nbytes)} of keys and values")
            for model, one in zip(self.models, self.slices)
        ]
        return [*slices, *self.home.report()]


class SliceGraphs(StepGraphs):
    """Captured launches of all devices. On a CPU the devices compute one after the other."""

    longest_prompt = PROMPT_ROWS

    def _make(self, rows: int, steps: int, variant: SamplingVariant) -> Callable[[], None]:
        if self.slots.device.type != "cuda":
            return partial(self.run, rows, steps, variant)
        if (rows, variant) not in self._warm:
            saved = self.state(rows)
            self._warm_up(lambda number: self._run_on(number, rows, 1, variant))
            for tensor, before in saved:
                tensor.copy_(before)
            self._warm.add((rows, variant))
        return self._record(f"decode {rows} x {steps}", lambda number: self._run_on(number, rows, steps, variant))

    def _capture_prompt(self, call: Callable[..., None], name: str, buffers: tuple[Tensor, ...]) -> Callable[[], None]:
        ids, _ = buffers
        self._warm_up(lambda number: self.body.prompt_on(number, ids))
        return self._record(name, lambda number: self.body.prompt_on(number, ids))

    def _warm_up(self, call: Callable[[int], None]) -> None:
        """Compile and test the kernels of each device. They do not wait for other devices, and their results are not used."""
        for number, peer in enumerate(self.body.peers):
            peer.wait(0)
            self._runner_on(peer.device).run(partial(call, number))
            peer.wait()

    def _record(self, name: str, call: Callable[[int], None]) -> Callable[[], None]:
        runners = [self._runner_on(peer.device) for peer in self.body.peers]
        for number, runner in enumerate(runners):
            runner.record(f"{name}, slice {number}", partial(call, number), [], set())

        def replay() -> None:
            for runner in runners:
                runner.replay()

        return replay

    def _run_on(self, number: int, rows: int, steps: int, variant: SamplingVariant) -> None:
        """Run `steps` steps of one device. The first device chooses the tokens."""
        body, slots = self.body, self.slots
        state = slots.rows.first(rows)
        plain = variant.greedy and not variant.logprobs and body.finds_best(rows)
        settings = None if plain else slots.choice(slice(rows), variant.penalty)
        for step in range(steps):
            body.step_on(number, rows, state.token, state.position, ("best", "arg") if plain else ("logits",))
            if number == 0:
                logprob = slots.logprobs[step, :rows] if variant.logprobs else None
                choose(body, body.logits[:rows], state, settings, into_body(body, slots.emitted[step, :rows]), logprob)
