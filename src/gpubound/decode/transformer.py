"""The body for families of models/registry.py: a list of layers between an embedding and a head, by the fused kernels.

Few rows are products by kernels that multiply row after row (kernels/decode_product.py), in a chain where each may start while
the one before still runs; `gemv_rows` says how many are few. Some more are taken together by such kernels on tensor cores
(kernels/tiled_product.py), up to `tiled_gemm_rows`. Many are matrices for cuBLAS. What a layer is made of is its own affair
(layer.py, moe.py); how weights are held, that of their format (weights/).

The layers may lie on several devices, a span (span.py) on each. The stream begins and ends on the first, which has the
embedding, the norm and the head.

Legend: B rows, T tokens of a prompt.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import GenerateError
from ..kernels.decode_product import EARLY, LATE, capped_
from ..kernels.dependent_launch import can_chain
from ..models.decoding import DenseWeights
from . import cpu_step
from .kv_cache import PLAIN
from .layer import GEMV_ROWS, DenseMLP, Workspace, normed_rows
from .reference import Accuracy, RoundedModel, RoutingTrace, first_not_finite
from .runner import ModelRunner, RunnerConfig, check_room
from .span import PARTS as PARTS, Layer, LayerGroup, added
from .stages.plan import LayerStage
from .ways import gemv_rows, tiled_gemm_rows
from .weight_view import WeightView
from .weights import weight_format

PARTIAL_ROWS = 16  # of the head's weight, whose greatest logit is found where they are computed
CHUNK = 2048  # tokens of a prompt at a time
SCORED = 256  # tokens whose logits are whole in memory while a text is scored


UNADDED = "its kernels add no adapters, and the model's are on; merge them, switch them off, or pass weights=None"
ON_ONE = "which are added on one device alone; merge them, switch them off, or leave devices out"


class FusedRunner(ModelRunner):
    """`step` after `begin`, as often as wanted. The buffers are its own, made once; the weights are the model's."""

    x: Tensor
    embed: Tensor
    best: Tensor
    arg: Tensor
    measured: Accuracy | None = None

    def __init__(self, live: WeightView, build: RunnerConfig, stages: Sequence[LayerStage] | None = None) -> None:
        """stages: where the layers lie, if not all on one device."""
        self.live, self.max_batch, self.max_length, self.tokens = live, build.max_batch, build.max_length, build.tokens
        self.device, self.vocab = live.device, live.shape.vocab
        self.form = weight_format(build.weights)
        s, B = live.shape, build.max_batch * build.tokens
        if stages is None:
            stages = [LayerStage(self.device, range(len(live.layers)))]
            check_room(LayerGroup.bytes_kept(live, build, stages[0].layers) + 4 * B * self.vocab, self.device, build)
        self.spans = [LayerGroup(live, build, stage) for stage in stages]
        home = self.spans[0]
        self.cache, self.bench, self.adapting = home.cache, home.bench, home.bench.adapting
        wide: Any = {"device": self.device, "dtype": torch.float32}
        self.x = torch.zeros(B, s.hidden, **wide)
        self.normed = self.bench.buffer("normed", B, s.hidden, dtype=live.dtype)
        self.logits = torch.zeros(B, self.vocab, **wide)
        dense = all(type(layer.mlp) is DenseWeights for layer in live.layers)
        self.few = gemv_rows(build) if dense and live.whole else GEMV_ROWS
        self.tilable = tiled_gemm_rows(live, build)
        plain = build.tokens == 1 and build.cache == PLAIN and len(self.spans) == 1 and live.whole
        on_host = cpu_step.fits(self.device) and plain and dense
        parts = 1 if on_host else -(-self.vocab // PARTIAL_ROWS)
        self.best = torch.zeros(B, parts, **wide)
        self.arg = torch.zeros(B, parts, device=self.device, dtype=torch.int32)
        self.host = cpu_step.CpuStep(self) if on_host else None
        self.rounds = ", ".join(part for part in (build.weights, build.cache.kind and f"{build.cache.kind} cache") if part)
        kernels = "fused kernels" if self.bench.kernels == "triton" else "reference kernels"
        self.kernels, self.reads = "plain torch" if on_host else kernels, self.form.reads
        self._take()

    @property
    def layers(self) -> list[Layer]:
        return [layer for span in self.spans for layer in span.layers]

    def _take(self) -> None:
        """Take the weights as they are now. What was made of them before is dropped layer by layer."""
        if self.live.adapted and not self.form.adds:
            raise GenerateError(f"decoder: weights: got {self.form.kind!r}, but {UNADDED}.")
        if self.live.adapted and len(self.spans) > 1:
            raise GenerateError(f"decoder: devices: the model has low-rank adapters, {ON_ONE}.")
        self.taken += 1
        self.form.begin(self.live.model, kept=self.host is not None)
        self.tiled = 0 if self.live.adapted else self.tilable
        self.narrowest = 1 if self.tiled else self.few
        for span in self.spans:
            self._take_together(span.bench)
            span.take(self.live, self.form)
        self.embed, self.head = self.live.embed, self.form.head(self.live.head)
        self.gate_up_bytes = max(layer.mlp.gate_up_bytes for layer in self.layers)
        read = [tensor for layer in self.layers for part in layer for tensor in part.tensors()]
        read += [self.live.norm.weight, *self.head.tensors()]
        self.bytes_whole = sum({t.data_ptr(): t.nbytes for t in read}.values())  # what a step reads whole
        self.bytes_a_token = sum(span.cache.bytes_a_token for span in self.spans)
        self.sparse = [layer for layer in self.layers if type(layer.mlp) is not DenseMLP]
        self.captures_prefill = len(self.spans) == 1 and all(layer.mlp.captures_prompts for layer in self.layers)
        self.measured = None
        if self.host:
            self.host.take()

    def _take_together(self, bench: Workspace) -> None:
        """Set the row count from which GEMMs take rows together, and the stream's 16-bit copy that they read."""
        bench.few = self.narrowest if self.tiled else None
        behind = any(part.post_norm is not None for layer in self.live.layers for part in layer)  # what adds to the stream then
        copied = bench.few is not None and not behind
        bench.copy = bench.buffer("copy", bench.rows, bench.shape.hidden, dtype=bench.dtype) if copied else None

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """The logits (B, V) after `token`, whose embedding is in x, at `position`; its keys and values go to the cache.

        Or after T tokens of each row at once, both (B, T) and T up to the body's `tokens`: the logits are (B T, V). To the
        products and norms, B T tokens are as many rows.
        """
        rows = token.numel()
        if self.host or not self.narrow(rows):
            self.adapting.mark(len(token), rows // len(token))
        if self.host:
            return self.host.step(token, position)
        x, mode = self.x[:rows], self.mode(rows)
        if self.live.shape.embedded != 1:
            x *= self.live.shape.embedded
        for span in self.spans:
            x, position = x.to(span.device), position.to(span.device)
            span.step(x, position, mode, self.chains(rows))
        return self.leave(x.to(self.device))

    @property
    def stream_width(self) -> int:
        return self.live.shape.hidden

    def enter(self, token: Tensor, x: Tensor) -> None:
        """Write the embedded tokens to x (B, hidden), the stream of a micro-batch before the first layer."""
        x.copy_(F.embedding(token, self.live.embed))
        if self.live.shape.embedded != 1:
            x *= self.live.shape.embedded

    def pass_stage(self, number: int, x: Tensor, token: Tensor, position: Tensor, first: int) -> None:
        """Run a stage on the stream x in place. Its rows are those of the cache from `first` on."""
        span = self.spans[number]
        span.cache.first = first
        span.step(x, position, self.mode(len(x)), self.chains(len(x)))
        span.cache.first = 0

    def leave(self, x: Tensor) -> Tensor:
        """Return the logits (B, V) of the stream x after the last layer."""
        rows, mode = len(x), self.mode(len(x))
        if not self.narrow(rows):
            return self.logits_of(normed_rows(x, self.live.norm, self.normed[:rows], mode))
        best = self.best[:rows], self.arg[:rows]
        return self.head.norm_product(x, self.live.norm, self.logits[:rows], mode, best, self.live.shape.logit_cap)

    def logits_of(self, h: Tensor) -> Tensor:
        """Return the logits of normed h (B, hidden), computed by torch."""
        logits, (weight,) = self.logits[: len(h)], self.head.matrices()
        if h.dtype == logits.dtype:
            torch.mm(h, weight.detach().t(), out=logits)
        elif h.is_cuda:
            torch.mm(h, weight.t(), out_dtype=torch.float32, out=logits)
        else:
            logits.copy_(F.linear(h, weight))
        return capped_(logits, self.live.shape.logit_cap)

    def narrow(self, rows: int) -> bool:
        return rows <= self.narrowest

    def chains(self, rows: int) -> bool:
        """Return whether the layers run gpubound's kernels only, and no cuBLAS."""
        return rows <= max(self.narrowest, self.tiled)

    def ways(self) -> set[int]:
        """Return one number of rows for each path that computes a step."""
        return {1, *(min(self.max_batch, n) for n in (self.tiled, self.max_batch) if n > self.narrowest)}

    def mode(self, rows: int) -> int:
        """Return the launch mode of a step's kernels: programmatic dependent launch where the GPU has it."""
        if not can_chain(self.device):
            return 0
        return EARLY if not self.narrow(rows) or self.gate_up_bytes <= self.form.early_bytes else LATE

    def chained(self, rows: int) -> bool:
        return self.mode(rows) > 0

    def finds_best(self, rows: int) -> bool:
        return self.host is not None or self.narrow(rows)

    def same_kernels(self, rows: int) -> bool:
        return self.narrow(rows) and self.host is None

    @property
    def adapters(self) -> list[str] | None:
        return list(self.adapting.owners)

    def choose(self, names: Sequence[str | None] | None) -> None:
        self.adapting.choose(names)

    def begin(self, token: Tensor) -> None:
        """Embed the first tokens. The sampler embeds those that follow."""
        self.x[: len(token)] = F.embedding(token, self.live.embed)

    def reserve(self, limits: Tensor) -> None:
        for span in self.spans:
            span.cache.reserve(limits.to(span.device))

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        """Write the keys and values of ids (B, T), right-padded. Positions after a row's length are never read."""
        for start in range(0, ids.shape[1], CHUNK):
            self.streamed(ids[:, start : start + CHUNK], start)  # a span may read a chunk while the next has the one before
        if self.host:
            self.host.finite = ids.shape[1]

    @torch.no_grad()
    def hidden(self, ids: Tensor, start: int = 0) -> Tensor:
        """Return the last hidden state (B, T, hidden) of ids (B, T) at positions from start on, after those in the cache."""
        x, pending = self.streamed(ids, start)
        return added(x.to(self.device), pending.to(self.device), self.live.norm)[0]

    def streamed(self, ids: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return the stream of ids (B, T) after the last layer, on its device, and the last MLP's output, not yet added."""
        self.adapting.mark(len(ids), ids.shape[1])
        x = self.embedded(ids)
        pending: Any = None
        for span in self.spans:
            x, pending = span.prompt(x, pending, start)
        return x, pending

    def embedded(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.live.embed)
        return x if self.live.shape.embedded == 1 else x * self.live.shape.embedded

    def logits_after(self, ids: Tensor) -> Iterator[Tensor]:
        for start in range(0, len(ids), CHUNK):
            for hidden in self.hidden(ids[None, start : start + CHUNK], start)[0].split(SCORED):
                logits = F.linear(hidden, self.head.matrices()[0]).float()
                yield capped_(logits, self.live.shape.logit_cap)

    def moved(self) -> str | None:
        return self.live.moved() or self.form.changed()

    def numbers(self) -> Any:
        return self.live.numbers()

    def rebind(self) -> None:
        self.live.refresh()
        for span in self.spans:
            for tables, current in zip(span.bench.tables, self.live.tables(self.max_length)):
                for table, now in zip(tables, current):
                    table.copy_(now)  # a cast there and back may have rounded the model's own frequencies
        self._take()

    def bytes_a_step(self, live: list[int]) -> int:
        """Return the bytes of all weights, of experts those that are chosen, and of the keys and values of these lengths."""
        chosen = sum(layer.mlp.chosen_bytes(len(live) * self.tokens) for layer in self.sparse)
        return self.bytes_whole + self.bytes_a_token * sum(live) + round(chosen)

    def exact(self) -> Any:
        return self.live if self.form.kind is None else RoundedModel(self)

    def locate(self, ids: Tensor) -> str:
        return first_not_finite(self.exact(), ids)

    def poison(self) -> None:
        for span in self.spans:
            span.cache.poison()

    @contextmanager
    def trace_routing(self) -> Iterator[RoutingTrace]:
        """Record the experts that the last row of each step and prefill is routed to."""
        found = RoutingTrace()
        for span in self.spans:
            span.bench.routing_trace = found
        try:
            yield found
        finally:
            for span in self.spans:
                span.bench.routing_trace = None

    def check_request(self, limits: list[int]) -> None:
        self.cache.layout.check_request(limits)

    def report(self) -> list[tuple[str, str, str]]:
        most, together = len(self.x), max(self.narrowest, self.tiled)
        wide = most > together
        read, whole = self.bytes_whole, self.live.bytes_read()
        weights = self.form.report(self.bench.kernels, read, whole, f", more than {together} rows" * wide)
        if self.host:
            rows = [(f"{len(self.layers)} layers, head", "torch", "a CPU has no kernels of ours")]
            return [*rows, *self.adapting.report(), *weights, *self._rounding()]
        counted = Counter(row for layer in self.layers for part in layer for row in part.report())
        rows = [span.report(number) for number, span in enumerate(self.spans)] if len(self.spans) > 1 else []
        rows += [(f"{count} x {part}", what, why) for (part, what, why), count in counted.items()]
        rows.append(("norm, head", f"{self.bench.kernels}: {self.form.prefix}norm_product", ""))
        if most > self.narrowest and self.tiled:
            what = f"{self.bench.kernels}: tiled products; head by torch (cuBLAS)"
            rows.append((f"{self.narrowest + 1} to {min(most, self.tiled)} rows", what, "all rows together, on tensor cores"))
        if wide:
            why = f"; those of one input one by one: {self.live.apart}" if self.live.apart else ""
            rows.append((f"more than {together} rows", "products by torch (cuBLAS)", f"they fill tensor cores{why}"))
        special = dict.fromkeys(row for layer in self.layers for row in layer.mlp.report_wide(wide))
        return [*rows, *special, *self.adapting.report(), *weights, *self._rounding()]

    def _rounding(self) -> list[tuple[str, str, str]]:
        """Return the table's rows about the cache's format and the measured cost of rounding."""
        rows = self.cache.report()
        if self.rounds:
            rows.append(("accuracy", "measured" if self.measured else "not measured", str(self.measured or "")))
        return rows
