"""The body: several streams through layers of a windowed attention and a sparse MLP, then a head.

It is made of torch's own ops and of those of kernels/. Every shape follows from the body's sizes and every place from
positions on the device, so a step's graph serves any length. Rows stand at positions of their own, each with a state of its
own: a row's tokens do not depend on what stands beside it.

Legend: B rows, T tokens, N = B T, n streams.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from math import lcm
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import GenerateError
from ...kernels import hc_head, hc_post, hc_pre
from ...kernels.decode_product import Norm
from ...models.decoding import weight_of
from ...models.deepseek_v4.family import CompressedReader
from ...models.deepseek_v4.weights import HyperWeights
from ...models.registry import reader_of
from ..bind import closed_projection, unadded
from ..contract import Body, Build, Watched, check_room
from .attention import LatentAttention
from .mixture import Mixture
from .products import NARROW
from .state import Moment, Stretch, normed
from .trial import Trial, try_body

CHUNK = 1024  # tokens of a prompt at a time, about: a whole number of every stretch
META = torch.device("meta")
SCORED = 256  # tokens whose logits are whole in memory while a text is scored


class StreamedLayer(NamedTuple):
    attention_streams: HyperWeights
    attention: LatentAttention
    mixture_streams: HyperWeights
    mixture: Mixture


Attend = Callable[[LatentAttention, Tensor, Any], Tensor]
"""LatentAttention.step or its prompt"""


class CompressedBody(Body):
    """`CompressedBody(reader, build)`: the weights are the model's, read where they lie; the state is the body's own."""

    kernels = "a step of its own"
    reads = "the live weights"

    def __init__(self, reader: CompressedReader, build: Build) -> None:
        self.model, self.max_batch, self.max_length, self.tokens = reader.model, build.max_batch, build.max_length, build.tokens
        self._check(reader)
        self.reader = reader
        embed = weight_of(reader.trunk.embed_tokens)
        self.device, self.dtype = embed.device, embed.dtype
        self.vocab = len(weight_of(reader.model.lm_head))
        layers = reader.layers()
        state = sum(t.nbytes for one in layers for t in LatentAttention(one.attention, build, self.dtype, META).tensors())
        check_room(state + 4 * build.max_batch * build.tokens * self.vocab, self.device, build)
        self.build = build
        self.logits = torch.zeros(build.max_batch * build.tokens, self.vocab, device=self.device)
        self.tables = reader.tables(build.max_length, self.device)
        rates = [w.entries.rate for w in (one.attention for one in layers) if w.entries is not None]
        whole = lcm(*rates)
        self.chunk = max(1, CHUNK // whole) * whole
        self._take()
        self.trial: Trial = try_body(self)

    def _check(self, reader: CompressedReader) -> None:
        if why := closed_projection(reader.model, reader.PRODUCTS) or unadded(reader.model) or reader.refusal(self.max_length):
            raise ValueError(f"decoder: model: got {type(reader.model).__name__}, which is not decoded: {why}.")

    def _take(self) -> None:
        """Take the weights as they are now."""
        reader = self.reader
        self.watched = Watched(reader.model, "_parameters", "_buffers")
        self.embed_weight, self.head = weight_of(reader.trunk.embed_tokens), weight_of(reader.model.lm_head)
        self.norm: Norm = reader.norm(reader.trunk.norm)
        self.collapse = reader.collapse()
        self.layers: list[StreamedLayer] = []  # what was there is free before new state is made: a request begins with none
        for number, (attention_streams, attention, mixture_streams, mixture) in enumerate(reader.layers()):
            latent = LatentAttention(attention, self.build, self.dtype, self.device)
            self.layers.append(StreamedLayer(attention_streams, latent, mixture_streams, Mixture(mixture, number)))
        self.streams = self.collapse.product.shape[0]
        self.captures_prefill = not any(layer.mixture.ungrouped for layer in self.layers)

    @torch.no_grad()
    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """A row that is full writes its last place again: what comes of that is nobody's."""
        rows = len(token)
        token_BT = token.long().view(rows, -1)
        now = Moment(position.long().clamp(max=self.max_length - 1).view(rows, -1), self.tables)
        x = self._through(token_BT, now, LatentAttention.step)
        count = token_BT.numel()
        return self.logits[:count].copy_(self._logits(x).flatten(0, 1))

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        for start in range(0, ids.shape[1], self.chunk):
            end = min(start + self.chunk, ids.shape[1])
            stretch = Stretch(start, end, lengths.long(), self.tables)
            self._through(ids[:, start:end].long(), stretch, LatentAttention.prompt)

    @torch.no_grad()
    def logits_after(self, ids: Tensor) -> Iterator[Tensor]:
        for token, now in self._pieces(ids):
            for some in self._through(token, now, LatentAttention.prompt)[0].split(SCORED):
                yield self._logits(some)

    def _pieces(self, ids: Tensor) -> Iterator[tuple[Tensor, Stretch]]:
        """Of the sequence ids (T,), in the place of the first row."""
        lengths = torch.full((1,), len(ids), device=ids.device)
        for start in range(0, len(ids), self.chunk):
            end = min(start + self.chunk, len(ids))
            yield ids[None, start:end].long(), Stretch(start, end, lengths, self.tables)

    def _through(self, token_BT: Tensor, now: Any, attend: Attend) -> Tensor:
        """The streams (B, T, n, hidden), fp32, behind the last layer."""
        return deque(self._stages(token_BT, now, attend), maxlen=1).pop()[1]

    def _stages(self, token_BT: Tensor, now: Any, attend: Attend) -> Iterator[tuple[str, Tensor]]:
        """(name, the streams behind it) of every part."""
        x = F.embedding(token_BT, self.embed_weight).float()[:, :, None].expand(-1, -1, self.streams, -1).contiguous()
        yield "model.embed_tokens", x
        token_N = token_BT.flatten()
        for number, layer in enumerate(self.layers):
            u, give, mix = read(x, layer.attention_streams)
            x = hc_post(x, attend(layer.attention, u, now), give, mix)
            yield f"model.layers.{number}.self_attn", x
            u, give, mix = read(x, layer.mixture_streams)
            x = hc_post(x, layer.mixture(u.flatten(0, 1), token_N).view_as(u), give, mix)
            yield f"model.layers.{number}.mlp", x

    def _logits(self, x: Tensor) -> Tensor:
        w = self.collapse
        h = normed(hc_head(x, w.product, w.scale, w.base, w.eps, w.norm_eps), self.norm).to(self.dtype)
        return F.linear(h, self.head).float()

    def moved(self) -> str | None:
        return self.watched.moved()

    def rebind(self) -> None:
        found = reader_of(self.model)
        if not isinstance(found, CompressedReader):
            raise GenerateError(f"decoder: the model has changed since its decoder was built: {type(self.model).__name__}.")
        self._check(found)
        self.reader = found
        for tables, current in zip(self.tables, found.tables(self.max_length, self.device)):
            for table, now in zip(tables, current):
                table.copy_(now)
        self._take()

    def bytes_a_step(self, live: list[int]) -> int:
        """Weights once, of the experts those that are chosen if each is as likely as any; what of the state rows see."""
        read = {t.data_ptr(): t.nbytes for t in (*self.collapse.tensors(), self.norm.weight, self.head)}
        experts = 0.0
        for layer in self.layers:
            w = layer.mixture.weights
            unread = {t.data_ptr() for t in (w.gate_up, w.down, w.table) if t is not None}
            parts = layer.attention_streams, layer.attention.weights, layer.mixture_streams, w
            read |= {t.data_ptr(): t.nbytes for part in parts for t in part.tensors() if t.data_ptr() not in unread}
            different = 1 - (1 - w.slots / len(w.gate_up)) ** (len(live) * self.tokens)
            experts += different * (w.gate_up.nbytes + w.down.nbytes)
        return sum(read.values()) + round(experts) + sum(layer.attention.bytes_seen(live) for layer in self.layers)

    @torch.no_grad()
    def locate(self, ids: Tensor) -> str:
        for token, now in self._pieces(ids):
            for name, x in self._stages(token, now, LatentAttention.prompt):
                if not x.isfinite().all():
                    return name
        return "lm_head"

    def poison(self) -> None:
        for tensor in self.state():
            tensor.fill_(float("nan"))

    def state(self) -> list[Tensor]:
        return [t for layer in self.layers for t in layer.attention.tensors()]

    def report(self) -> list[tuple[str, str, str]]:
        held = sum(t.nbytes for t in self.state())
        counted = Counter(layer.attention.report() for layer in self.layers)
        rows = [(f"{count} x {part}", what, why) for (part, what, why), count in counted.items()]
        ungrouped = next((layer.mixture.ungrouped for layer in self.layers if layer.mixture.ungrouped), None)
        many = "every expert for all tokens, by torch" if ungrouped else "grouped by expert: F.grouped_mm"
        return [
            *rows,
            (f"experts, up to {NARROW} rows", "routed_gate_up, add_routed", "chosen experts' weights read where they lie"),
            ("experts, more rows, prompts", many, ungrouped or ""),
            ("state", f"{held / 2**20:.1f} MiB, {str(self.dtype).removeprefix('torch.')}", "rings and stores, fixed in size"),
            self.trial.row(),
        ]


def read(x: Tensor, w: HyperWeights) -> tuple[Tensor, Tensor, Tensor]:
    """What a part reads of the streams, and how `hc_post` spreads what it gives."""
    return hc_pre(x, w.product, w.scale, w.base, w.eps, w.norm_eps, w.rounds)
