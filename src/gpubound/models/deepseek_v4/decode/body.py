"""Model runner of DeepSeek-V4: several streams through layers of windowed attention and a sparse MLP, then a head.

The runner uses torch ops and those of kernels/. Every shape follows from the runner's sizes, and every index from positions on
the device, so one CUDA graph serves any length. Each sequence has its own position and state: its tokens do not depend on the
other sequences of the batch.

Legend: B rows, T tokens, N = B T, n streams.

Reference check of a runner when it is built: its logits after a prefill and some steps, against the model's forward.

Experts and indexer entries are chosen by comparing scores, so rounding may change the choice, and either choice is valid. The
model's forward therefore uses the runner's choices, and a separate check bounds the difference between the chosen scores and
the best ones (reference.py).
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any

import torch
from torch import Tensor

from ....decode.certificate import MISSED_LIMIT, RoutingTrace
from ....decode.kv_cache import PLAIN
from ....decode.model_watch import TensorWatch, scalars_of
from ....decode.placement.plan import LayerStage, described
from ....decode.runner import ModelRunner, RunnerConfig, check_room, random_ids
from ....decode.transformer import PARTIAL_ROWS
from ....decode.weight_view import DTYPES, closed_projection, unadded
from ....errors import GenerateError
from ....kernels.decode_product import chained
from ....layers.block import visiting
from ...reader import weight_of
from ...registry import reader_of
from ..family import CompressedReader, StreamedLayerWeights, rounded, tensors_of
from .attention import LatentAttention
from .mixture import GEMV_ROWS
from .streams import Attend, Ends, SpanPass, StreamedLayer, StreamedSpan, When, bytes_kept, ends_of, streams_of, weights_of

CHUNK = 1024  # approximate tokens of a prefill chunk, rounded down to a multiple of every compression rate
SCORED = 256  # tokens whose full logits are in memory at a time while a text is scored

Place = Callable[[StreamedSpan], When]
"""positions of the tokens, on a span's device"""


class CompressedBody(ModelRunner):
    """Run a DeepSeek-V4 model from its weights in place, with a separate KV cache."""

    kernels = "the family's step"
    reads = "the live weights"
    best: Tensor
    arg: Tensor

    def __init__(self, reader: CompressedReader, build: RunnerConfig, stages: Sequence[LayerStage] | None = None) -> None:
        """stages: devices of the layers, if the layers are on several devices."""
        self.model, self.max_batch, self.max_length, self.tokens = reader.model, build.max_batch, build.max_length, build.tokens
        check_reader(reader, self.max_length)
        self.reader = reader
        embed, layers = weight_of(reader.trunk.embed_tokens), reader.layers()
        self.device, self.dtype = embed.device if stages is None else stages[0].device, embed.dtype
        self.vocab, self.built = len(weight_of(reader.model.lm_head)), described_by(reader)
        if stages is None:
            stages = [LayerStage(self.device, range(len(layers)))]
            state = sum(bytes_kept(reader, build, self.dtype))
            check_room(state + 4 * build.max_batch * build.tokens * self.vocab, self.device, build)
        rows, parts = build.max_batch * build.tokens, -(-self.vocab // PARTIAL_ROWS)
        self.logits = torch.zeros(rows, self.vocab, device=self.device, dtype=torch.float32)
        self.best = torch.zeros(rows, parts, device=self.device, dtype=torch.float32)
        self.arg = torch.zeros(rows, parts, device=self.device, dtype=torch.int32)
        self.spans = [StreamedSpan(reader, build, stage) for stage in stages]
        rates = [w.entries.rate for w in (one.attention for one in layers) if w.entries is not None]
        multiple = lcm(*rates)
        self.chunk = max(1, CHUNK // multiple) * multiple
        self._take()
        self.trial: Trial = try_body(self)

    @property
    def layers(self) -> list[StreamedLayer]:
        return [layer for span in self.spans for layer in span.layers]

    def _take(self) -> None:
        """Read the model's current weights and allocate the state."""
        self.taken += 1
        self.watched = TensorWatch(self.reader.model, "_parameters", "_buffers")
        self.ends = ends_of(self.reader)
        for span in self.spans:
            span.clear()
        for number, span in enumerate(self.spans):
            span.take(self._weights(number), self.dtype)
        self.captures_prefill = len(self.spans) == 1 and not any(layer.mixture.experts.ungrouped for layer in self.layers)

    def _weights(self, number: int) -> list[StreamedLayerWeights]:
        """Return the layers' weights for span `number`."""
        return self.reader.layers()

    @torch.no_grad()
    def step(self, token: Tensor, position: Tensor) -> Tensor:
        token_BT, position_BT = (t.view(len(token), -1) for t in (token.long(), position))
        with chained(self.device):
            return self.leave(self._through(token_BT, lambda span: span.moment(position_BT), LatentAttention.step))

    @property
    def stream_width(self) -> int:
        return self.ends.streams * self.ends.embed.shape[1]

    def enter(self, token: Tensor, x: Tensor) -> None:
        """Write the streams before the first layer to x (B, n hidden), at the start of a lane's round."""
        x.copy_(self.ends.enter(token[:, None]).flatten(1))

    @torch.no_grad()
    def pass_stage(self, number: int, x: Tensor, token: Tensor, position: Tensor, first: int) -> None:
        """Run the layers of a stage on the streams x, in place. x's sequences start at batch index `first` of the state."""
        span, streams = self.spans[number], x.view(len(x), 1, self.ends.streams, -1)
        now, rows = span.moment(position[:, None]), slice(first, first + len(x))
        with chained(span.device):
            *_, (_, y) = SpanPass(span, streams_of(streams), token.long(), now, LatentAttention.step, rows).run()
        streams.copy_(y)

    @torch.no_grad()
    def leave(self, x: Tensor) -> Tensor:
        """Return the logits (N, V) of the streams after the last layer."""
        x = x.flatten(0, 1) if x.dim() == 4 else x.unflatten(1, (self.ends.streams, -1))
        return self.ends.leave(x, self.logits[: len(x)], self.best[: len(x)], self.arg[: len(x)])

    def finds_best(self, rows: int) -> bool:
        return rows <= GEMV_ROWS

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        for start in range(0, ids.shape[1], self.chunk):
            end = min(start + self.chunk, ids.shape[1])
            when = _stretch(start, end, lengths.long())
            deque(self._stages(ids[:, start:end].long(), when, LatentAttention.prompt), maxlen=0)

    @torch.no_grad()
    def logits_after(self, ids: Tensor) -> Iterator[Tensor]:
        for token, when in self._pieces(ids):
            for some in self._through(token, when, LatentAttention.prompt)[0].split(SCORED):
                yield self.ends.logits(self.ends.collapsed(some))

    def _pieces(self, ids: Tensor) -> Iterator[tuple[Tensor, Place]]:
        """Yield prefill chunks of the sequence ids (T,), as batch entry 0."""
        lengths = torch.full((1,), len(ids), device=ids.device)
        for start in range(0, len(ids), self.chunk):
            end = min(start + self.chunk, len(ids))
            yield ids[None, start:end].long(), _stretch(start, end, lengths)

    def _through(self, token_BT: Tensor, when: Place, attend: Attend) -> Tensor:
        """Return the fp32 streams (B, T, n, hidden) after the last layer."""
        return deque(self._stages(token_BT, when, attend), maxlen=1).pop()[1].to(self.device)

    def _stages(self, token_BT: Tensor, when: Place, attend: Attend) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each module and the streams after the module: embedding, then attention and MLP of each layer."""
        x = self.ends.enter(token_BT)
        yield "model.embed_tokens", x
        for span in self.spans:
            token_N = token_BT.to(span.device).flatten()
            for name, y in SpanPass(span, streams_of(x.to(span.device)), token_N, when(span), attend).run():
                yield name, y
            x = y

    def moved(self) -> str | None:
        return self.watched.moved()

    def numbers(self) -> Any:
        why = refusal(self.reader, self.max_length)
        return why or (scalars_of(self.reader.layers()), scalars_of(self.reader.collapse()))

    def refusal(self, reader: CompressedReader) -> str | None:
        """Return why the runner cannot compute the current model; None if it can."""
        if why := refusal(reader, self.max_length):
            return why
        was, now = ([2 * cos.shape[1] for cos, _ in some] for some in (self.spans[0].tables, reader.tables(1, self.device)))
        other = (f"its heads turn {new} of their numbers, which were {old}" for old, new in zip(was, now) if new != old)
        return next(other, None)

    def rebind(self) -> None:
        reader = reader_of(self.model)
        changed = "decoder: the model has changed since its decoder was built"
        if not isinstance(reader, CompressedReader):
            raise GenerateError(f"{changed}: {type(self.model).__name__}.")
        if (description := described_by(reader)) != self.built:
            raise GenerateError(
                f"decoder: the model is now {description}, the decoder was built for {self.built}; build a new one."
            )
        if why := self.refusal(reader):
            raise GenerateError(f"{changed}: {why}; build a new one.")
        self.reader = reader
        for span in self.spans:
            for tables, current in zip(span.tables, reader.tables(self.max_length, self.device)):
                for table, now in zip(tables, current):
                    table.copy_(now)
        self._take()

    def bytes_a_step(self, live: list[int]) -> int:
        """Weights once, of the experts those that are chosen if each is as likely as any; what of the state rows see."""
        return bytes_read(self.ends, self.layers, live, self.tokens)

    @torch.no_grad()
    def locate(self, ids: Tensor) -> str:
        for token, when in self._pieces(ids):
            for name, x in self._stages(token, when, LatentAttention.prompt):
                if not x.isfinite().all():
                    return name
        ends = {"model.hc_head": tensors_of(self.ends.collapse), "model.norm": [self.ends.norm.weight]}
        return next((name for name, some in ends.items() if not all(t.isfinite().all() for t in some)), "lm_head")

    def poison(self) -> None:
        for tensor in self.state():
            tensor.fill_(float("nan"))

    def state(self) -> list[Tensor]:
        return [t for span in self.spans for layer in span.layers for t in layer.attention.tensors()]

    def shares(self) -> list[tuple[str, str, str]]:
        """Return the report's rows of layers and memory per device, if there are several."""
        if len(self.spans) == 1:
            return []
        descriptions = (described(span.numbers, *span.nbytes()) for span in self.spans)
        return [
            (f"stage {number}", str(span.device), what) for number, (span, what) in enumerate(zip(self.spans, descriptions))
        ]

    def report(self) -> list[tuple[str, str, str]]:
        nbytes = sum(t.nbytes for t in self.state())
        counted = Counter(layer.attention.report() for layer in self.layers)
        rows = [(f"{count} x {part}", what, why) for (part, what, why), count in counted.items()]
        experts = self.layers[0].mixture.experts
        return [
            *self.shares(),
            *rows,
            (f"experts, up to {GEMV_ROWS} rows", experts.reads, "chosen experts' weights read where they lie"),
            ("experts, more rows, prompts", *experts.report()),
            ("state", f"{nbytes / 2**20:.1f} MiB, {str(self.dtype).removeprefix('torch.')}", "rings and stores, fixed in size"),
            self.trial.row(),
        ]


def _stretch(start: int, end: int, lengths_B: Tensor) -> Place:
    return lambda span: span.stretch(start, end, lengths_B)


def bytes_read(ends: Ends, layers: Sequence[StreamedLayer], live: list[int], tokens: int) -> int:
    """Estimate the bytes that a step reads for sequences of the lengths `live`, with `tokens` tokens each."""
    read, experts = {t.data_ptr(): t.nbytes for t in ends.read()}, 0.0
    for layer in layers:
        w, own = layer.mixture.weights, layer.mixture.experts
        unread = {t.data_ptr() for t in (*own.tensors(), w.table) if t is not None}
        read |= {t.data_ptr(): t.nbytes for t in tensors_of(weights_of(layer)) if t.data_ptr() not in unread}
        experts += own.count * (1 - (1 - w.slots / own.count) ** (len(live) * tokens)) * own.nbytes
    return sum(read.values()) + round(experts) + sum(layer.attention.bytes_seen(live) for layer in layers)


def described_by(reader: CompressedReader) -> str:
    """Describe the model that a decoder is built for. Layers may be on several devices, so their devices are omitted."""
    head = weight_of(reader.model.lm_head)
    return f"{len(reader.trunk.layers)} layers in {head.dtype} on {head.device} with {len(head)} words"


def check_reader(reader: CompressedReader, max_length: int) -> None:
    if why := refusal(reader, max_length):
        raise ValueError(f"decoder: model: got {type(reader.model).__name__}, which is not decoded: {why}.")


def reader_for(model: Any, build: RunnerConfig, count: int) -> CompressedReader:
    """Return the reader of a model that `count` devices are to share. Raise ValueError where the model is not decoded."""
    if build.cache != PLAIN:
        raise ValueError(
            f"decoder: cache, pages: got {build.cache.kind!r}, {build.cache.pages!r}, which only the fused kernels read, and "
            "the model's layers have another step; leave them out."
        )
    reader: Any = reader_of(model)
    check_reader(reader, build.max_length)
    return reader


def kept_bytes(reader: CompressedReader, build: RunnerConfig) -> tuple[list[int], int]:
    """Return the bytes of each layer's state, and of each device's rotary tables."""
    head = weight_of(reader.model.lm_head)
    of_a_position = sum(t.nbytes for pair in reader.tables(1, head.device) for t in pair)
    return bytes_kept(reader, build, head.dtype), of_a_position * build.max_length


def refusal(reader: CompressedReader, max_length: int) -> str | None:
    """Return why this runner cannot compute the model; None if it can."""
    model = reader.model
    return closed_projection(model, reader.own_product) or unadded(model) or reader.refusal(max_length) or _odd(reader)


def _odd(reader: CompressedReader) -> str | None:
    """Report a weight whose dtype differs from the embedding's or is unsupported, or a head with a bias."""
    dtype = weight_of(reader.trunk.embed_tokens).dtype
    if dtype not in DTYPES:
        return f"its weights are {dtype}; the kernels take fp32, fp16 and bf16"
    if reader.model.lm_head.bias is not None:
        return "its head has a bias"
    dtypes = reader.dtypes() | {"lm_head": weight_of(reader.model.lm_head).dtype}
    other = next((name for name, kind in dtypes.items() if kind != dtype), None)
    return None if other is None else f"{other} is {dtypes[other]}, its embedding {dtype}; cast it with .to({dtype})"


STEPS = 4  # after the prefill
LONGEST = 512  # tokens: the check covers windows and entries of up to this length
# Largest relative error of the logits, in the norm. A 16-bit model rounds its streams after every attention and MLP; the runner
# keeps them in fp32.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}


@dataclass(frozen=True)
class Trial:
    error: float
    tokens: int

    def row(self) -> tuple[str, str, str]:
        return "trial", f"logits within {self.error:.1e} of the model's own", f"{self.tokens} tokens, the last {STEPS} in steps"


@torch.no_grad()
def try_body(body: CompressedBody) -> Trial:
    reaches = [layer.attention.reach + STEPS for layer in body.layers]
    tokens = min(max([STEPS, *(reach for reach in reaches if reach <= LONGEST)]), body.max_length)
    first = max(0, tokens - STEPS)
    ids = random_ids(body.vocab, tokens, body.device)
    place = torch.arange(tokens, device=body.device)
    with _overheard(body) as (choices, entries):
        body.prefill(ids[None, :first], place[first : first + 1])
        steps = (slice(at, at + 1) for at in range(first, tokens))
        ours = torch.cat([body.step(ids[at].int(), place[at].int()).clone() for at in steps])
    with _forced(body, choices, entries), visiting(body.reader.trunk.layers, body.device):
        inputs = {"input_ids": ids[None].to(body.model.device), "use_cache": False, "logits_to_keep": tokens - first}
        own = body.model(**inputs).logits[0].float().to(body.device)
    if not own.isfinite().all():
        raise GenerateError(
            f"decoder: the model's logits are not finite; first seen in {body.locate(ids)}. Check the weights (a diverged "
            "training run?) and the dtype."
        )
    error, name = ((ours - own).norm() / own.norm()).item(), type(body.model).__name__
    if not error <= TOLERANCE[body.dtype]:
        raise GenerateError(
            f"decoder: logits are {error:.1e} from those of {name} itself (limit {TOLERANCE[body.dtype]:.0e}): the step does "
            "not compute this model; report it with the model's config."
        )
    for what, missed in (("experts", choices.missed), ("entries", entries.missed)):
        if not missed <= MISSED_LIMIT[body.dtype]:
            raise GenerateError(
                f"decoder: the step chooses {what} whose scores lie {missed:.1e} deviations below those that {name} finds best "
                f"(limit {MISSED_LIMIT[body.dtype]:.0e}): it does not compute this model; report it with the model's config."
            )
    return Trial(error, tokens)


@contextmanager
def _overheard(body: CompressedBody) -> Iterator[tuple[RoutingTrace, "Entered"]]:
    """Record the experts and entries that the runner chooses within the context."""
    choices, entries = RoutingTrace(), Entered()
    indexes = {number: layer.attention.index for number, layer in enumerate(body.layers) if layer.attention.index is not None}
    for layer in body.layers:
        layer.mixture.routing_trace = choices
    for number, index in indexes.items():
        index.routing_trace = partial(entries.add, number)
    try:
        yield choices, entries
    finally:
        for layer in body.layers:
            layer.mixture.routing_trace = None
        for index in indexes.values():
            index.routing_trace = None


class Entered(RoutingTrace):
    """Chosen entries of a sequence's tokens: `ids` (T, K), padded with -1."""

    def judged(self, number: int, scores: Tensor) -> Tensor:
        """Return the chosen entries and record how far their scores are below the best.

        `scores` (T, S) are -inf for entries that a token may not attend to.
        """
        ids = self.ids[number].long().to(scores.device)
        if not (entries := scores.shape[1]):
            return ids
        finite, valid, at = scores.isfinite(), ids >= 0, ids.clamp(0, entries - 1)
        count, low = finite.sum(-1, keepdim=True).clamp_min(1), scores.masked_fill(~finite, 0.0)
        spread = (low - low.sum(-1, keepdim=True) / count).masked_fill(~finite, 0.0).square().sum(-1).div(count[:, 0]).sqrt()
        best, chosen = scores.topk(min(ids.shape[1], entries)).values, low.gather(-1, at).masked_fill(~valid, 0.0)
        short = best.masked_fill(best.isinf(), 0.0).sum(-1) - chosen.sum(-1)
        invalid = valid & ~finite.gather(-1, at) | (ids >= entries)
        wrong = invalid.any(-1) | (valid.sum(-1) != best.isfinite().sum(-1))
        self._missed.append((short / count[:, 0] / spread.clamp_min(1e-30)).masked_fill(wrong, float("inf")))
        return at.masked_fill(~valid, -1)


@contextmanager
def _forced(body: CompressedBody, choices: RoutingTrace, entries: Entered) -> Iterator[None]:
    """Make the model's routers and indexers return the runner's choices within the context. The model keeps its dtype."""

    def force(number: int) -> Any:
        weights = body.layers[number].mixture.weights

        def hook(router: Any, inputs: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
            assert weights.correction is not None
            scores = weights.score(outputs[0].float())
            ids = choices.judged(number, scores + weights.correction.to(scores.device))
            shares = scores.gather(-1, ids)
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20) * weights.scale
            return outputs[0], shares.to(outputs[1].dtype), ids

        return hook

    def entered(number: int) -> tuple[Any, Any]:
        scores: list[Tensor] = []
        index = body.layers[number].attention.index
        assert index is not None
        rate = index.entries.weights.rate

        def keep(scorer: Any, inputs: Any, output: Tensor) -> None:
            scores.append(output[0].float())

        def hook(indexer: Any, inputs: Any, output: Tensor) -> Tensor:
            (values,) = scores
            closed = (torch.arange(len(values), device=values.device) + 1) // rate
            beyond = torch.arange(values.shape[1], device=values.device) >= closed[:, None]
            return entries.judged(number, values.masked_fill(beyond, float("-inf")))[None]

        return keep, hook

    routers = body.reader.routers().items()
    handles = [router.register_forward_hook(force(n)) for n, router in routers if body.layers[n].mixture.weights.table is None]
    for number, indexer in body.reader.indexers().items():
        keep, hook = entered(number)
        handles += [indexer.scorer.register_forward_hook(keep), indexer.register_forward_hook(hook)]
    handles += rounded(body.model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
