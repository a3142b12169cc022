"""Tensor-parallel DeepSeek-V4 runner: every layer is sharded over devices, and all devices compute each token.

A device has some attention heads, and some columns of every expert, and computes one term of a layer's output; the devices sum
the terms. The inputs that all heads share (a token's low-rank query, its keys and the entries) are replicated, and so are the
routing and the KV cache. The streams are bitwise equal on all devices, since each adds the same terms in the same order. The
first device chooses tokens, broadcasts them, and gathers the logits.

Legend: B sequences, T tokens, n streams.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ....decode.model_watch import WeightVersions
from ....decode.placement.plan import LayerStage, SlicePlan, fit_slice, free_bytes, let_apart, split_vocabulary
from ....decode.placement.tensor_parallel import connected
from ....decode.runner import RunnerConfig
from ....decode.transformer import META, PARTIAL_ROWS
from ....device import entered
from ....formatting import readable
from ....kernels.decode_product import chained
from ....kernels.packed_weights import GROUP, Packed
from ....trace import notice
from ...reader import weight_of
from ..family import CompressedReader, LatentWeights, LinearWeights, MixtureWeights, StreamedLayerWeights, tensors_of
from ..kernels.products import Fp8Blocks
from .attention import LatentAttention
from .body import SCORED, CompressedBody, Place, bytes_read, reader_for
from .streams import Attend, Ends, SharedStreams, SpanPass, StreamedLayer, bytes_kept, ends_of, streams_of


def indivisible(layers: list[StreamedLayerWeights], count: int) -> str | None:
    """Return why the model cannot be sharded over `count` devices; None if it can."""
    return next(
        (f"layer {number} has {why}" for number, layer in enumerate(layers) if (why := _indivisible(layer, count))), None
    )


def _indivisible(layer: StreamedLayerWeights, count: int) -> str | None:
    latent, mixture = layer.attention, layer.mixture
    width = _width(mixture)
    if latent.groups % count:
        return f"{latent.groups} groups of heads, which do not divide by {count}"
    if width % count:
        return f"experts of {width} columns, which do not divide by {count}"
    if mixture.gate.rows % count:
        return f"a shared expert of {mixture.gate.rows} columns, which do not divide by {count}"
    if isinstance(mixture.down, Packed) and width // count % GROUP:
        return f"experts in codes, {width // count} columns for each device, which are no multiple of {GROUP}"
    parts = {0: (latent.q_b, latent.o_a, mixture.gate, mixture.up), 1: (latent.o_b, mixture.shared_down)}
    for axis, weight in ((axis, layer.weight) for axis, some in parts.items() for layer in some):
        if isinstance(weight, Fp8Blocks) and weight.shape[axis] // count % weight.block[axis]:
            return f"a weight {tuple(weight.shape)} in fp8, whose blocks {weight.block} do not divide by {count}"
    return None


def _width(mixture: MixtureWeights) -> int:
    return mixture.down.columns if isinstance(mixture.down, Packed) else mixture.down.shape[2]


def slice_of(layer: StreamedLayerWeights, plan: SlicePlan) -> StreamedLayerWeights:
    """Return a layer's shard on the plan's device. Tensors, and row slices, on that device are not copied."""
    return move_to(layer._replace(attention=_latent(layer.attention, plan), mixture=_mixture(layer.mixture, plan)), plan.device)


def ends_slice(ends: Ends, plan: SlicePlan) -> Ends:
    return move_to(ends._replace(head=ends.head[plan.words.start : plan.words.stop]), plan.device)


def _latent(w: LatentWeights, plan: SlicePlan) -> LatentWeights:
    return w._replace(
        q_b=rows(w.q_b, plan),
        o_a=rows(w.o_a, plan),
        o_b=columns(w.o_b, plan),
        sinks=w.sinks[plan.of(w.heads)],
        heads=w.heads // plan.count,
        groups=w.groups // plan.count,
    )


def _mixture(w: MixtureWeights, plan: SlicePlan) -> MixtureWeights:
    width = _width(w)
    return w._replace(
        gate_up=_of_stack(w.gate_up, lambda t: _halves(t, width, plan.of(width))),
        down=_of_stack(w.down, lambda t: t[..., plan.of(t.shape[-1])]),
        gate=rows(w.gate, plan),
        up=rows(w.up, plan),
        shared_down=columns(w.shared_down, plan),
    )


def _of_stack(stack: Tensor | Packed, of: Callable[[Tensor], Tensor]) -> Tensor | Packed:
    if isinstance(stack, Packed):
        words, scale = of(stack.words), of(stack.scale)
        return stack._replace(words=words, scale=scale, columns=stack.columns * words.shape[1] // stack.words.shape[1])
    return of(stack)


def _halves(stack: Tensor, width: int, mine: slice) -> Tensor:
    """Return the rows `mine` of each gate and each up, which alternate in `stack` with `width` rows each."""
    blocks = stack.flatten(0, -2).unflatten(0, (-1, width))[:, mine]
    return blocks.flatten(0, 1) if stack.dim() == 2 else blocks.unflatten(0, (len(stack), 2)).flatten(1, 2)


def rows(layer: LinearWeights, plan: SlicePlan) -> LinearWeights:
    return _part(layer, 0, plan)._replace(bias=None if layer.bias is None else layer.bias[plan.of(len(layer.bias))])


def columns(layer: LinearWeights, plan: SlicePlan) -> LinearWeights:
    """Return a column shard of a layer. Only the first device has the bias, since the devices' products are summed."""
    return _part(layer, 1, plan)._replace(bias=None if plan.number else layer.bias)


def _part(layer: LinearWeights, axis: int, plan: SlicePlan) -> LinearWeights:
    def of(t: Tensor) -> Tensor:
        mine = plan.of(t.shape[axis])
        return t[mine] if axis == 0 else t[:, mine]

    weight = layer.weight
    if isinstance(weight, Fp8Blocks):
        return layer._replace(weight=weight._replace(codes=of(weight.codes), scale=of(weight.scale)))
    return layer._replace(weight=of(weight))


def move_to(value: Any, device: torch.device) -> Any:
    """Return a copy of a nested record with all tensors contiguous on the device."""
    return tree_map_only(Tensor, lambda t: t.detach().to(device).contiguous(), value)


def compressed_slices(model: object, build: RunnerConfig, devices: Sequence[torch.device]) -> "SlicedStreams":
    """Build a tensor-parallel runner. Raises ValueError if the model is unsupported or does not fit."""
    reader = reader_for(model, build, len(devices))
    layers, words = reader.layers(), len(weight_of(reader.model.lm_head))
    plans = split_vocabulary(words, devices, PARTIAL_ROWS, indivisible(layers, len(devices)))
    sizes = [move_to(layer, META) for layer in layers]  # on meta: slicing some stacks copies them
    for plan, free in zip(plans, free_bytes(devices)):
        on_meta = SlicePlan(META, plan.number, plan.count, plan.words)
        weights = sum(t.nbytes for layer in sizes for t in tensors_of(slice_of(layer, on_meta)))
        ends = ends_slice(ends_of(reader), on_meta).nbytes
        state = sum(bytes_kept(reader, build, weight_of(reader.model.lm_head).dtype))
        needed = weights + ends + state + build.max_batch * 4 * (3 * words if plan.number == 0 else len(plan.words))
        fit_slice(plan, needed, free, "weights, state and logits", described(plan, weights + ends, state))
    let_apart(reader.model, reader.trunk.layers)
    return SlicedStreams(reader, build, plans)


def described(plan: SlicePlan, weights: int, state: int) -> str:
    part, words = f"part {plan.number + 1} of {plan.count} of each layer", f"words {plan.words[0]} to {plan.words[-1]}"
    return f"{part}, {words}: {readable(weights)} of weights, {readable(state)} of state"


class SliceLogits(NamedTuple):
    """Logits of a vocabulary shard, and their partial maxima."""

    logits: Tensor
    best: Tensor
    arg: Tensor

    @classmethod
    def of(cls, rows: int, words: int, device: torch.device) -> "SliceLogits":
        parts = -(-words // PARTIAL_ROWS)
        logits, best = (torch.zeros(rows, size, device=device, dtype=torch.float32) for size in (words, parts))
        return cls(logits, best, torch.zeros(rows, parts, device=device, dtype=torch.int32))

    def rows(self, count: int) -> "SliceLogits":
        return SliceLogits(*(t[:count] for t in self))


class SlicedStreams(CompressedBody):
    """Model runner with layers sharded over devices.

    `step` launches all devices from one thread. tensors/graphs.py runs the devices concurrently.
    """

    reads = "copies of the weights, in slices"

    def __init__(self, reader: CompressedReader, build: RunnerConfig, plans: Sequence[SlicePlan]) -> None:
        self.plans, devices = plans, [plan.device for plan in plans]
        words, hidden = weight_of(reader.model.lm_head).shape
        B = build.max_batch
        home = {"logits": words, "best": -(-words // PARTIAL_ROWS), "arg": -(-words // PARTIAL_ROWS)}
        self.peers = connected(devices, B, hidden, B, home, {"token": (B, 1), "position": (B, 1)})
        self.inputs = [torch.zeros(2, B, 1, device=device, dtype=torch.int32) for device in devices]  # token, position
        self.shards = [SliceLogits.of(B, len(plan.words), plan.device) for plan in plans]
        super().__init__(reader, build, [LayerStage(device, range(len(reader.trunk.layers))) for device in devices])

    def _take(self) -> None:
        self.versions = WeightVersions(self.reader.model, buffers=True)
        self.slices: list[Ends] = []
        super()._take()
        self.slices = [ends_slice(self.ends, plan) for plan in self.plans]
        self.captures_prefill = False

    def _weights(self, number: int) -> list[StreamedLayerWeights]:
        return [slice_of(layer, self.plans[number]) for layer in self.reader.layers()]

    @property
    def layers(self) -> list[StreamedLayer]:
        """Layers of the first device."""
        return self.spans[0].layers

    @torch.no_grad()
    def step(self, token: Tensor, position: Tensor) -> Tensor:
        with chained(self.device):
            going = [self._begun(number, token, position) for number in range(len(self.plans))]
            for part in range(len(going[0].names)):
                for one in going:
                    one.give(part)
                for one in going:
                    one.spread(part)
            for number in reversed(range(len(going))):  # last, the first device receives the others' logits
                self._end(number, going[number], ("logits", "best", "arg"))
        return self.logits[: len(token)]

    def step_on(self, number: int, rows: int, token: Tensor, position: Tensor, outputs: Sequence[str]) -> None:
        """Run a step on one device, concurrently with the other devices."""
        with chained(self.device):
            walk = self._begun(number, token[:rows], position[:rows])
            for _ in walk.run():
                pass
            self._end(number, walk, outputs)

    def _begun(self, number: int, token: Tensor, position: Tensor) -> SpanPass:
        """Broadcast tokens and positions from the first device, and compute the streams before the first layer."""
        peer, span = self.peers[number], self.spans[number]
        peer.begin()
        with entered(peer.device):
            inputs = [t.int()[:, None] for t in (token, position)] if number == 0 else self.inputs[number][:, : len(token)]
            for kind, one in zip(("token", "position"), inputs):
                (peer.take if number else peer.send)(kind, one)
            token_int, position_B1 = inputs
            token_B1 = token_int.long() if number == 0 else token_int.long().clamp_min(0)  # -1 where the exchange timed out
            x = self.slices[number].enter(token_B1)
            x = x if number == 0 else x.masked_fill((token_int < 0)[..., None, None], float("nan"))
        return SpanPass(span, SharedStreams(x, peer), token_B1[:, 0], span.moment(position_B1), LatentAttention.step)

    def _end(self, number: int, walk: SpanPass, outputs: Sequence[str]) -> None:
        """Compute the logits of the vocabulary shard, and gather the tensors that `outputs` names on the first device."""
        peer, x, words = self.peers[number], walk.streams.x.flatten(0, 1), self.plans[number].words
        with entered(peer.device):
            shard = self.shards[number].rows(len(x))
            self.slices[number].leave(x, *shard)
            if "arg" in outputs and number:
                shard.arg.add_(words.start)
            for kind in outputs:
                peer.send(kind, getattr(shard, kind), words.start // (1 if kind == "logits" else PARTIAL_ROWS))
            for kind in outputs if number == 0 else ():
                peer.take(kind, getattr(self, kind)[: len(x)])
            peer.end()

    def begin(self, token: Tensor) -> None:
        for peer in self.peers:  # reset the timeout after a failed device
            peer.wait()

    def _stages(self, token_BT: Tensor, when: Place, attend: Attend) -> Iterator[tuple[str, Tensor]]:
        """Run a prefill chunk. The devices' outputs are copied and summed on each device in the same order."""
        going = []
        for span, ends in zip(self.spans, self.slices):
            token = token_BT.to(span.device)
            with entered(span.device):
                going.append(SpanPass(span, streams_of(ends.enter(token)), token.flatten(), when(span), attend))
        self._reached = [one.streams.x for one in going]
        yield "model.embed_tokens", self._reached[0]
        for part, name in enumerate(going[0].names):
            for one in going:
                one.give(part)
            terms = [one.streams.term() for one in going]
            for one in going:
                with entered(one.span.device):
                    one.streams.give(_summed(terms, one.span.device))
                one.spread(part)
            self._reached = [one.streams.x for one in going]
            yield name, self._reached[0]

    @torch.no_grad()
    def logits_after(self, ids: Tensor) -> Iterator[Tensor]:
        for token, when in self._pieces(ids):
            for _ in self._stages(token, when, LatentAttention.prompt):
                pass
            for pieces in zip(*(x[0].split(SCORED) for x in self._reached)):
                shards = [ends.logits(ends.collapsed(x)).to(self.device) for ends, x in zip(self.slices, pieces)]
                yield torch.cat(shards, 1)

    def moved(self) -> str | None:
        return super().moved() or self.versions.changed()

    def refusal(self, reader: CompressedReader) -> str | None:
        was, now = self.ends.embed.shape[1], weight_of(reader.trunk.embed_tokens).shape[1]
        if now != was:
            return f"its streams are {now} wide, and what devices tell each other has room for {was}"
        return super().refusal(reader) or indivisible(reader.layers(), len(self.plans))

    def rebind(self) -> None:
        super().rebind()
        notice("decoder: the weights have changed since their slices were copied: copied again")

    def bytes_a_step(self, live: list[int]) -> int:
        return sum(bytes_read(ends, span.layers, live, 1) for ends, span in zip(self.slices, self.spans))

    def carried(self) -> list[Tensor]:
        """Return the whole state: a warm-up launch does not wait for peers, so it may write at a wrong position."""
        return self.state()

    def shares(self) -> list[tuple[str, str, str]]:
        rows = []
        for plan, span, ends in zip(self.plans, self.spans, self.slices):
            weights, state = span.nbytes()
            rows.append((f"slice {plan.number}", str(plan.device), described(plan, weights + ends.nbytes, state)))
        return rows


def _summed(terms: Sequence[Tensor], device: torch.device) -> Tensor:
    total = terms[0].to(device)
    for term in terms[1:]:
        total = total + term.to(device)
    return total
