"""Runner of models/registry.py's families: a list of layers between an embedding and a head, by the fused kernels.

The number of rows of a step chooses how it is multiplied. Up to `gemv_rows`, kernels multiply row after row
(kernels/decode_product.py), in a chain where each may start while the previous one still runs. Up to `tiled_rows`, kernels
multiply all rows together on tensor cores (kernels/quantized_product.py), as they do those of packed weights. More rows are
GEMMs of cuBLAS. The parts of a layer are in layer.py and moe.py, the formats of its weights in weights.py.

The layers may be on several devices, a `LayerGroup` on each. The residual stream begins and ends on the first, which has the
embedding, the norm and the head.

Legend: B rows, T tokens of a prompt.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import entered
from ..errors import GenerateError
from ..kernels import add_rms_norm, keep_stream, layer_norm_rows
from ..kernels.decode_product import EARLY, LATE, Norm, call_shape, can_chain, capped_
from ..kernels.dispatch import SIXTEEN_BITS, Call, can_launch
from ..kernels.experts import routing_shape
from ..kernels.packed_weights import Packed
from ..kernels.row_ops import LayerNorm
from ..kernels.split_product import MOST_PARTS, parts_of
from ..models.decoding import (
    AnyNorm,
    AttentionWeights,
    ColumnExpertWeights,
    DenseAndExpertWeights,
    DenseWeights,
    ExpertWeights,
    LatentAttentionWeights,
    LayerInputWeights,
    NoWeights,
    UngatedWeights,
    norm_tensors,
)
from ..models.reader import Reader
from ..models.recurrent import DeltaWeights, MambaWeights, ShortConvWeights
from . import cpu_step
from .certificate import Accuracy, RoundedModel, RoutingTrace, first_not_finite
from .kv_cache import PLAIN, Cache, CachedLayer, cached_layers
from .layer import (
    GEMV_ROWS,
    CachedAttention,
    CachedLatentAttention,
    DenseMLP,
    NoMLP,
    UngatedMLP,
    Workspace,
    normed,
    normed_rows,
)
from .lora import adapter_names, shape_of_adapters
from .moe import ColumnMoELayer, DenseAndExperts, MoELayer
from .placement.plan import LayerStage, described
from .recurrent import GatedDelta, Mamba, ShortConv
from .request import CHUNK
from .runner import ModelRunner, RunnerConfig, check_room
from .weight_view import HostView, WeightView
from .weights import MATMUL_ROWS, InputProduct, LayerInput, PackedFormat, weight_format

# Rows of a GEMV where cuBLAS can read the weights: a third row costs more than its tensor cores do. Experts, and speculating
# rows, which must get the bits of a plain step, have GEMV_ROWS. H200, us a step by rows, kernels and cuBLAS:
# 350m 3: 743, 953; 8: 1,524, 870. 1b 2: 1,094, 1,035; 8: 4,177, 1,073. 8b 8: 22,368, 4,638.
FEW = 2
# Rows of a GEMV of packed weights. H200, us of the products of a layer of llama-8b in int4, by a GEMV and all rows together:
# 4 rows 84, 73; 8 rows 150, 78. A GEMV computes norms in its products.
PACKED_GEMV_ROWS = 4
# The most rows of a tiled GEMM where a layer's gate and up have at most so many bytes. H200, us a step by rows, tiled and
# otherwise: 135m (4 MB) 2: 392, 422; 3: 402, 483. 350m (17 MB) 2: 416, 538; 4: 432, 920; 8: 458, 841. 1b (67 MB) 2: 807,
# 1,052; 4: 836, 1,046. Before operands stayed in registers, 1b 8: 1,025, 1,064; 16: 1,355, 1,090. 8b, by its products alone:
# slower.
TILED = ((32 << 20, 16), (96 << 20, 8))
# The rows of split GEMMs, by the same bytes. H200, us a token with 16, 32, 64 and 128 rows: 350m 533,
# 623, 803 and 1,081, before 750, 935, 1,073 and 1,232. Fewer rows are tiled: a step of 2, 4 and 8 of 350m takes 474, 469 and
# 476 split, 416, 432 and 458 tiled; of 2 and 4 of 1b 842 and 877 split. A layer without attention, split and by cuBLAS: 1b with
# 32, 64 and 128 rows 44 and 57, 46 and 59, 53 and 65; 8b (235 MB) with 32 121 and 138.
SPLIT = ((96 << 20, range(9, 129)), (256 << 20, range(9, 33)))
SPLIT_EARLY = 32 << 20  # bytes of gate and up beyond which a split chain is LATE: a layer of 1b with 64 rows 46 us, EARLY 48
SPLIT_HEAD = 32  # rows of a split head. H200, us with its norm, split and cuBLAS: 350m 32 rows 21.8, 23.6, 1b 134, 142
PARTIAL_ROWS = 16  # rows of the head's weight whose greatest logit is found in the kernel that computes them
SCORED = 256  # tokens whose full logits are in memory at a time while a text is scored
META = torch.device("meta")

Rows = TypeVar("Rows", int, range)

UNADDED = "its kernels add no adapters, and the model's are on; merge them, switch them off, or pass weights=None"
ON_ONE = "which are added on one device alone; merge them, switch them off, or leave devices out"

# The class that runs the weights of a layer's part. Another MLP is one more line, its record in models/decoding.py.
PARTS: dict[type, Any] = {
    AttentionWeights: CachedAttention,
    ShortConvWeights: ShortConv,
    LatentAttentionWeights: CachedLatentAttention,
    DeltaWeights: GatedDelta,
    MambaWeights: Mamba,
    DenseWeights: DenseMLP,
    UngatedWeights: UngatedMLP,
    NoWeights: NoMLP,
    ExpertWeights: MoELayer,
    ColumnExpertWeights: ColumnMoELayer,
    DenseAndExpertWeights: DenseAndExperts,
    LayerInputWeights: LayerInput,
}


def gemv_rows(config: RunnerConfig, coded: bool = False) -> int:
    """Return the most rows of a GEMV, for a model without experts. coded: whether the model's weights are quantised"""
    alone = config.tokens > 1 and config.same_bits
    return GEMV_ROWS if alone else PACKED_GEMV_ROWS if config.weights is not None or coded else FEW


def tiled_gemm_rows(live: WeightView | HostView, config: RunnerConfig) -> int:
    """Return the most rows of a tiled GEMM; 0 where there is none.

    It needs a dense model in bf16 without adapters: the kernels round x times its norm's gain, which may overflow in fp16. And
    one token a row, or tokens that need not have the bits of single ones.
    """
    return _by_bytes(live, config, TILED, 0)


def split_gemm_rows(live: WeightView | HostView, config: RunnerConfig) -> range:
    """Return the rows of split GEMMs, before which there may be tiled ones; none where there are none. They need what a tiled
    one does, one token a row, and RMSNorms before the parts alone, one of which adds what the part before leaves."""
    plain = config.tokens == 1 and isinstance(live.norm, Norm)
    for layer in live.layers if plain else ():
        attention, mlp = layer.attention, layer.mlp
        plain &= type(attention) is AttentionWeights and not attention.gated and not attention.joined and layer.factor is None
        plain &= all(isinstance(part.norm, Norm) and part.post_norm is None for part in layer.parts)
        plain &= isinstance(mlp, DenseWeights) and not mlp.parallel
    return _by_bytes(live, config, SPLIT, range(0)) if plain else range(0)


def _by_bytes(live: WeightView | HostView, config: RunnerConfig, sizes: tuple[tuple[int, Rows], ...], none: Rows) -> Rows:
    """Return the rows of the first of `sizes` that has as many bytes as a layer's gate and up; `none` for other models."""
    parts = [layer.mlp for layer in live.layers if isinstance(layer.mlp, DenseWeights)]
    if any(layer.extra is not None or getattr(layer.attention, "v", layer) is None for layer in live.layers):
        return none
    several = config.max_batch * config.tokens > 1 and not (config.tokens > 1 and config.same_bits)
    plain = several and config.weights is None and not live.sliced and not live.adapted
    if not plain or live.coded or len(parts) < len(live.layers) or live.dtype != torch.bfloat16 or not can_launch(live.device):
        return none
    largest = max(mlp.gate.weight.nbytes + mlp.up.weight.nbytes for mlp in parts)
    return next((rows for most, rows in sizes if largest <= most), none)


def kernel_calls(
    live: WeightView | HostView, weights: str | None, tiled: bool = False, many: bool = False, split: bool = False
) -> list[Call]:
    """Return the products that the model's steps will call, so that their kernels' self-tests can begin in parallel.

    tiled, split: include those of tiled and split GEMMs; many: those that add adapters to the results of cuBLAS.
    """
    (attention, *_), extra = live.layers[0], live.layers[0].extra
    mlp = next((layer.mlp for layer in live.layers if not isinstance(layer.mlp, NoWeights)), NoWeights())
    norm, rounded = in_product(attention.norm), weight_format(weights).prefix
    prefix = "quantized_" if live.coded else rounded
    product, add, gate_up = (f"{prefix}{op}" for op in ("norm_product", "add_product", "norm_gate_up"))
    activation = live.reader.activation()
    calls: list[Call] = [
        (product, call_shape(norm, 0.0)),
        (add, ()),
        (f"{rounded}norm_product", call_shape(in_product(live.norm), live.shape.logit_cap)),
    ]
    parts = [layer.mlp.experts if isinstance(layer.mlp, DenseAndExpertWeights) else layer.mlp for layer in live.layers]
    sparse = [part for part in parts if isinstance(part, ExpertWeights)]
    if sparse:
        routing = sparse[0].routing
        calls += [("route", ())] if routing is None else [("select_experts", routing_shape(routing))]
        calls += [("gate_rows", ())] if sparse[0].shared_gate is not None else []
        unit: tuple = () if sparse[0].activation == "silu" else (sparse[0].activation,)
        calls += [(f"{rounded}routed_gate_up", unit if not rounded else ()), (f"{rounded}add_routed", ())]
    if isinstance(live.layers[0].mlp, ColumnExpertWeights):
        routing, stack = live.layers[0].mlp.routing, live.layers[0].mlp.gate_up
        calls += [("select_experts", routing_shape(routing)), ("add_slots", ())]
        coded, shape = ("quantized_", (stack.kind,)) if isinstance(stack, Packed) else ("", ())
        calls += [(f"{coded}{op}", shape) for op in ("column_gate_up", "column_down")]
    if isinstance(mlp, UngatedWeights):
        calls.append((product, call_shape(in_product(mlp.norm), 0.0, unit=() if prefix else (mlp.activation, False))))
    else:
        calls.append((gate_up, call_shape(norm, activation)))
    if extra is not None:
        unit = extra.activation, True
        calls.append((product, call_shape(None, 0.0)))
        calls.append(("activate_rows", unit) if prefix else (product, call_shape(None, 0.0, unit=unit)))
    if tiled and not live.adapted:
        calls += [("tiled_norm_product", call_shape(norm)), ("tiled_norm_gate_up", call_shape(norm, activation))]
        calls.append(("tiled_add_product", ()))
    if split and norm is not None:
        calls += [("split_product", ()), ("split_gate_up", (activation,) if activation != "silu" else ())]
        calls += [("norm_rows", call_shape(norm)), ("norm_rows", (norm.offset, True))]
    if live.coded:  # whose adapters are added after the product, which need the norm's result
        groups = [group for layer in live.layers for part in layer.parts for group in part.groups()]
        added = dict.fromkeys(filter(None, (shape_of_adapters(*group) for group in groups)))
        return calls + ([("norm_rows", call_shape(norm))] if added else []) + [("add_adapters", one) for one in added]
    for part in (part for layer in live.layers for part in layer.parts if live.adapted and part.groups()):
        *inputs, output = part.groups()
        first = (gate_up, activation) if isinstance(part, DenseWeights) else (product, 0.0)
        own = (part.activation, False) if isinstance(part, UngatedWeights) else ()
        calls += [(first[0], call_shape(norm, first[1], added=shape_of_adapters(*group), unit=own)) for group in inputs]
        calls.append((add, shape_of_adapters(*output)))
    return calls + [("add_adapters", added) for op, added in calls if many and op == add and added]


def in_product(norm: AnyNorm) -> Norm | None:
    """Return the norm that is part of a product; a LayerNorm is not."""
    return None if isinstance(norm, LayerNorm) else norm


def _same(norm: AnyNorm, other: AnyNorm) -> bool:
    """Return whether two LayerNorms have the same weights."""
    return isinstance(norm, LayerNorm) and isinstance(other, LayerNorm) and norm.weight is other.weight


class Layer(NamedTuple):
    attention: Any  # a part with the methods of layer.CachedAttention
    mlp: Any  # a part with the methods of layer.DenseMLP
    extra: LayerInput | None = None

    @property
    def parts(self) -> list[Any]:
        return [part for part in self if part is not None]


class LayerGroup:
    """Consecutive layers on one device, with their cache, rotary tables and buffers."""

    def __init__(self, live: WeightView | HostView, config: RunnerConfig, stage: LayerStage, rings: bool) -> None:
        self.numbers, self.device = stage.layers, stage.device
        tables = [(cos.to(self.device), sin.to(self.device)) for cos, sin in live.tables(config.max_length)]
        layers = cached_layers(live.layers)
        self.cache = Cache(config, {number: layers[number] for number in stage.layers}, live.dtype, self.device, rings)
        self.workspace = Workspace(live.shape, self.cache, tables, config.max_batch * config.tokens, config.tokens)
        self.workspace.together = not config.same_bits
        self.layers: list[Layer] = []
        self.hidden_states: Any = None  # of draft_head.py, which keeps the stream before some layers

    def report(self, number: int) -> tuple[str, str, str]:
        """Return (stage, device, contents) for the decoder's table."""
        weights = {t.data_ptr(): t.nbytes for layer in self.layers for part in layer.parts for t in part.weights.tensors()}
        return f"stage {number}", str(self.device), described(self.numbers, sum(weights.values()), self.cache.nbytes)

    def read_weights(self, live: WeightView | HostView, form: Any) -> None:
        """Read the model's current weights. Copies of earlier ones are freed layer by layer."""
        self.workspace.adapting.begin(adapter_names(live.model))
        for index, number in enumerate(self.numbers):
            weights = live.layers[number]
            parts = (PARTS[type(part)](part, number, form, self.workspace) for part in weights.parts)
            self.layers[index : index + 1] = [layer := Layer(*parts)]
            layer.parts[-1].factor = weights.factor
            layer.mlp.reads_normed = layer.mlp.weights.parallel and _same(*(part.weights.norm for part in layer.parts[:2]))
        self.workspace.adapting.close()

    def step(self, x: Tensor, position: Tensor, mode: int, own_kernels: bool) -> None:
        """Run the layers on the stream x (B, hidden), in place. own_kernels: without cuBLAS."""
        together: list[Any] = []  # parts that read the same stream, with their inputs of the last product
        states = self.hidden_states
        buffers = [] if states is None else states.buffers_at(self.numbers[0], len(x))
        with entered(self.device):
            for number, (attention, mlp, extra) in zip(self.numbers, self.layers):
                for to in buffers:
                    keep_stream(x, to, EARLY if mode else 0)
                buffers = states.buffers_at(number + 1, len(x)) if states is not None and number + 1 in self.numbers else []
                together.append((attention, (attention.compute if own_kernels else attention.gemm_compute)(x, position, mode)))
                if attention.weights.joined:
                    continue
                if mlp.weights.parallel:
                    together.append((mlp, (mlp.compute if own_kernels else mlp.gemm_compute)(x, mode)))
                for part, y in together:  # all have computed before any adds
                    if own_kernels:
                        part.add_output(part.last, y, x, mode)
                        part.finish(x, mode)
                    else:
                        part.gemm_add(y, x, mode)
                together.clear()
                if not mlp.weights.parallel:
                    mlp.keep = buffers.pop() if len(buffers) == 1 and own_kernels and extra is None and mlp.can_keep else None
                    (mlp.step if own_kernels else mlp.gemm_step)(x, mode)
                if extra is not None:
                    (extra.step if own_kernels else extra.gemm_step)(x, mode)

    def prompt(self, x: Tensor, pending: Tensor | None, start: int) -> tuple[Tensor, Tensor | None]:
        """Return the stream (B, T, hidden) of positions from `start` on, and the output to add to it, if there is one."""
        # torch makes these copies in the devices' current streams, where one waits for the work of both and delays what
        # follows. Devices that read one chunk each meanwhile get the next no later for it; lanes of rows would
        # (placement/pipeline.py).
        x, end = x.to(self.device), start + x.shape[1]
        pending = None if pending is None else pending.to(self.device)
        before, joined = x, False
        with entered(self.device):
            for number, (attention, mlp, extra) in zip(self.numbers, self.layers):
                h, x = add_and_norm(x, pending, attention.weights.norm)
                if joined:
                    h = normed(before, attention.weights.norm)
                before, joined = x, attention.weights.joined
                if self.hidden_states is not None:
                    self.hidden_states.keep_prompt(number, x)
                pending = normed(attention.prompt(h, start, end), attention.weights.post_norm)
                if mlp.weights.parallel:
                    h = h if mlp.reads_normed else normed(x, mlp.weights.norm)
                    pending = pending + normed(mlp.prompt(h), mlp.weights.post_norm)
                else:
                    h, x = add_and_norm(x, pending, mlp.weights.norm)
                    pending = normed(mlp.prompt(h), mlp.weights.post_norm)
                if extra is not None:
                    x = x + pending
                    pending = normed(extra.prompt(x), extra.weights.post_norm)
                if (factor := (extra or mlp).factor) is not None:
                    x, pending = (x + pending) * factor, None
        self.cache.end_prompt()
        return x, pending


def structure_of(weights: Any) -> Any:
    """Return the shapes and dtypes of a layer's weights, with its constants."""
    if isinstance(weights, Tensor):
        return tuple(weights.shape), weights.dtype
    if is_dataclass(weights):
        weights = tuple(getattr(weights, field.name) for field in fields(weights))
    return tuple(map(structure_of, weights)) if isinstance(weights, tuple | list) else weights


def table_bytes(reader: Reader, config: RunnerConfig) -> int:
    """Return the bytes of cos and sin of each kind of angles, and of layers without rotation."""
    width = max(
        (layer.head_dim for layer in cached_layers(reader.layers()).values() if isinstance(layer, CachedLayer)), default=0
    )
    return (len(reader.angles()) + 1) * config.max_length * width * 4


def add_and_norm(x: Tensor, pending: Tensor | None, norm: AnyNorm) -> tuple[Tensor, Tensor]:
    """Return the normed input of a prompt's next part, and the stream x with `pending` added."""
    if isinstance(norm, Norm) and pending is not None:
        return add_rms_norm(x, pending, norm.weight, norm.eps, norm.offset)
    x = x if pending is None else x + pending
    return normed(x, norm), x


class ViewRunner(ModelRunner):
    """Base class of runners that read the weights of a view and write keys and values to a cache."""

    live: Any  # WeightView or HostView
    cache: Cache

    def exact(self) -> Any:
        return self.live

    def locate(self, ids: Tensor) -> str:
        return first_not_finite(self.exact(), ids)

    def numbers(self) -> Any:
        return self.live.numbers()

    def moved(self) -> str | None:
        return self.live.moved()

    def reserve(self, limits: Sequence[int]) -> None:
        self.cache.reserve(limits)

    def check_request(self, limits: list[int]) -> None:
        self.cache.check_request(limits)

    @property
    def paged(self) -> Cache | None:
        return None if self.cache.pages is None else self.cache

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        self.cache.move(sources, targets, length)

    def cache_bytes(self) -> int:
        return self.cache.nbytes

    def poison(self) -> None:
        self.cache.poison()

    @contextmanager
    def trace_routing(self) -> Iterator[RoutingTrace]:
        """Record the experts that the last row of each step and prefill is routed to."""
        yield RoutingTrace()


class FusedRunner(ViewRunner):
    """Run a model by the fused kernels, from its weights in place, over buffers that are allocated once."""

    x: Tensor
    embed: Tensor
    best: Tensor
    arg: Tensor
    measured: Accuracy | None = None
    inputs: InputProduct | None = None  # of the layers' own, where they have some
    hidden_states: Any = None  # see `keep_hidden_states`

    def __init__(self, live: WeightView | HostView, config: RunnerConfig, stages: Sequence[LayerStage] | None = None) -> None:
        """stages: devices of the layers, if there are several."""
        self.live, self.max_batch, self.max_length, self.tokens = live, config.max_batch, config.max_length, config.tokens
        self.config, self.device, self.vocab = config, live.device, live.shape.vocab
        if config.tokens + config.redone > 1 and any((s := layer.attention.state()) and s.matrix for layer in live.layers):
            raise ValueError(
                f"decoder: speculate: got a draft for or by {type(live.model).__name__}, whose recurrent layers cannot go back "
                f"to the state before a rejected token; leave speculate out."
            )
        self.form = weight_format(config.weights)
        rows = config.max_batch * config.tokens
        fp32: Any = {"device": self.device, "dtype": torch.float32}
        self.dense = (
            all(type(layer.mlp) in (DenseWeights, UngatedWeights, NoWeights) for layer in live.layers) and not live.sliced
        )
        plain = config.tokens == 1 and config.cache == PLAIN and (stages is None or len(stages) == 1)
        latent = any(isinstance(layer.attention, LatentAttentionWeights) for layer in live.layers)
        on_host = cpu_step.fits(self.device) and plain and self.dense and not latent
        self.launches_alike = plain and self.dense and not on_host and not live.adapted
        rings = not on_host and not live.sliced  # slices do not get the lengths of prompts
        if stages is None:
            needed = Cache(config, cached_layers(live.layers), live.dtype, META, rings).nbytes
            check_room(needed + table_bytes(live.reader, config) + 4 * rows * self.vocab, self.device, config)
            stages = [LayerStage(self.device, range(len(live.layers)))]
        self.spans = [LayerGroup(live, config, stage, rings) for stage in stages]
        home = self.spans[0]
        self.cache, self.workspace, self.adapting = home.cache, home.workspace, home.workspace.adapting
        self.x = torch.zeros(rows, live.shape.hidden, **fp32)
        self.normed = self.workspace.buffer("normed", rows, live.shape.hidden, dtype=live.dtype)
        self.logits = torch.zeros(rows, self.vocab, **fp32)
        parts = 1 if on_host else -(-self.vocab // PARTIAL_ROWS)
        self.best = torch.zeros(rows, parts, **fp32)
        self.arg = torch.zeros(rows, parts, device=self.device, dtype=torch.int32)
        self.host = cpu_step.CpuStep(self) if on_host else None
        self.can_chain = can_chain(self.device)
        self.rounds = ", ".join(part for part in (config.weights, config.cache.kind and f"{config.cache.kind} cache") if part)
        kernels = "fused kernels" if self.workspace.kernels == "triton" else "reference kernels"
        self.kernels, self.reads = "plain torch" if on_host else kernels, self.form.reads
        self._read_weights()

    @property
    def layers(self) -> list[Layer]:
        return [layer for group in self.spans for layer in group.layers]

    def _read_weights(self) -> None:
        """Read the model's current weights. Copies of earlier ones are freed layer by layer."""
        live = self.live
        if live.adapted and not self.form.adds:
            raise GenerateError(f"decoder: weights: got {self.form.kind!r}, but {UNADDED}.")
        if live.adapted and len(self.spans) > 1:
            raise GenerateError(f"decoder: devices: the model has low-rank adapters, {ON_ONE}.")
        if live.coded and self.form.kind is not None:
            raise GenerateError(
                f"decoder: weights: got {self.form.kind!r}, but the model's weights are quantised already and are read as they "
                "are; pass weights=None."
            )
        self.taken += 1
        self.form.begin(live.model, self.device, on_host=self.host is not None)
        self.tiled_rows = tiled_gemm_rows(live, self.config)
        split = split_gemm_rows(live, self.config) if len(self.spans) == 1 and self.hidden_states is None else range(0)
        self.tiled_rows = min(self.tiled_rows, split.start - 1) if split else self.tiled_rows
        plain_rows = gemv_rows(self.config, live.coded) if self.dense else GEMV_ROWS
        self.gemv_rows = 1 if self.tiled_rows else plain_rows
        self.matmul_rows = MATMUL_ROWS if self.host is None and (self.form.kind is not None or live.coded) else 0
        self.split = range(max(split.start, self.gemv_rows + 1), split.stop)
        # A tiled GEMM reads a 16-bit copy of the stream, unless a post-norm adds to the stream, which writes no copy.
        # Nor do a LayerNorm and a parallel block.
        plain = all(part.post_norm is None for layer in live.layers for part in layer.parts)
        usual = not any(isinstance(layer.attention.norm, LayerNorm) or layer.mlp.parallel for layer in live.layers)
        copied = self.tiled_rows > 0 and plain and usual
        for group in self.spans:
            space = group.workspace
            space.gemv_rows, space.split = self.gemv_rows if self.tiled_rows else None, self.split
            if self.split:
                inputs = [layer.attention.inputs.values() for layer in live.layers]
                widest = max(space.shape.hidden, *(sum(len(one.weight) for one in layer) for layer in inputs))
                space.parts = space.buffer("parts", MOST_PARTS * min(space.rows, self.split[-1]) * widest)
            space.copy = space.buffer("copy", space.rows, space.shape.hidden, dtype=space.dtype) if copied else None
            group.read_weights(live, self.form)
        self.embed, self.head, self.positions = live.embed, self.form.head(live.head), getattr(live, "positions", None)
        self.early_bytes = PackedFormat.early_bytes if live.coded else self.form.early_bytes
        self.gate_up_bytes = max(layer.mlp.gate_up_bytes for layer in self.layers)
        read = [tensor for layer in self.layers for part in layer.parts for tensor in part.tensors()]
        read += [*norm_tensors(live.norm), *self.head.tensors()]
        if live.layer_inputs is not None:
            self.inputs = InputProduct(live.layer_inputs, self.workspace, len(live.layers))
            read += live.layer_inputs.tensors()
        self.weight_bytes = sum({t.data_ptr(): t.nbytes for t in read}.values())  # that every step reads
        self.sparse = [layer for layer in self.layers if type(layer.mlp) not in (DenseMLP, UngatedMLP, NoMLP)]
        self.refills = len(self.spans) == 1
        self.captures_prefill = self.refills and all(part.captures_prompts for layer in self.layers for part in layer.parts)
        self.measured = None
        if self.host:
            self.host.read_weights()

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """Return the logits (B, V) after `token`, whose embedding is in x, at `position`. Its key and value go to the cache.

        Or after T tokens of each row at once, both (B, T): the logits are (B T, V). To products and norms, these are B T rows.
        """
        rows = token.numel()
        if self.adapting.products and (self.host or self.live.coded or rows > self.gemv_rows):
            self.adapting.mark(len(token), rows // len(token))
        if self.host:
            return self.host.step(token, position)
        x = self.x[:rows]
        if self.live.shape.embedded != 1:
            x *= self.live.shape.embedded
        if self.positions is not None:
            x += F.embedding(position.flatten(), self.positions)
        if self.inputs is not None:
            self.inputs.step(token.flatten(), x, rows <= self.gemv_rows)
        mode, own_kernels = self.mode(rows), rows <= max(self.gemv_rows, self.tiled_rows)
        for group in self.spans:
            x, position = x.to(group.device), position.to(group.device)
            group.step(x, position, mode, own_kernels)
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
        """Run a group of layers on the stream x in place. first: the cache's row of x's first row."""
        group, rows = self.spans[number], len(x)
        group.cache.first = first
        group.step(x, position, self.mode(rows), rows <= max(self.gemv_rows, self.tiled_rows))
        group.cache.first = 0

    def leave(self, x: Tensor) -> Tensor:
        """Return the logits (B, V) of the stream x after the last layer."""
        rows, mode = len(x), self.mode(len(x))
        if rows > self.gemv_rows:
            split = rows in self.split
            h = normed_rows(x, self.live.norm, self.normed[:rows], mode * split, self.workspace.take_pending())
            return self.logits_of(h, mode * split)
        best, norm = (self.best[:rows], self.arg[:rows]), self.live.norm
        if isinstance(norm, LayerNorm):
            x, norm = layer_norm_rows(x, norm, self.workspace.layer_normed[:rows], mode), None
        logits = self.head.norm_product(x, norm, self.logits[:rows], mode, best, self.live.shape.logit_cap)
        if (scale := self.live.shape.logit_scale) != 1:
            logits *= scale
            best[0].mul_(scale)
        return logits

    def logits_of(self, h: Tensor, mode: int = 0) -> Tensor:
        """Return the logits of normed h (B, hidden), computed by torch, or in a split chain of few rows by its product."""
        head: Any = self.head
        logits, cap, codes = self.logits[: len(h)], self.live.shape.logit_cap, head.reads_codes(h)
        weight = self.live.head.weight if codes else head.matrices()[0]
        split = len(h) in self.split and len(h) <= SPLIT_HEAD and parts_of(self.vocab, weight, len(h)) == 1
        if split:
            head.split_product(h, self.logits.view(-1), mode)
        elif codes:
            head.multiply(h, logits)
        elif h.dtype == logits.dtype:
            torch.mm(h, weight.detach().t(), out=logits)
        elif h.is_cuda:
            torch.mm(h, weight.t(), out_dtype=torch.float32, out=logits)
        else:
            logits.copy_(F.linear(h, weight))
        if head.biases and not (split or codes):
            logits += head.biases[0].detach()
        if (scale := self.live.shape.logit_scale) != 1:
            logits *= scale
        return capped_(logits, cap) if cap else logits

    def row_counts(self) -> set[int]:
        most = self.tiled_rows, self.split.stop - 1, self.matmul_rows, self.max_batch
        return {1, *(min(self.max_batch, n) for n in most if n > self.gemv_rows)}

    def mode(self, rows: int) -> int:
        """Return the launch mode of a step's kernels: programmatic dependent launch where the GPU has it."""
        if not self.can_chain:
            return 0
        if rows in self.split:
            return EARLY if self.gate_up_bytes <= SPLIT_EARLY else LATE
        return EARLY if rows > self.gemv_rows or self.gate_up_bytes <= self.early_bytes else LATE

    def chained(self, rows: int) -> bool:
        return self.can_chain and self.mode(rows) > 0

    def finds_best(self, rows: int) -> bool:
        return self.host is not None or rows <= self.gemv_rows

    def same_kernels(self, rows: int) -> bool:
        return rows <= self.gemv_rows and self.host is None

    @property
    def adapters(self) -> list[str] | None:
        return list(self.adapting.owners)

    def choose(self, names: Sequence[str | None] | None) -> None:
        if self.adapting.products:
            self.adapting.choose(names)

    def begin(self, token: Tensor) -> None:
        """Embed the first tokens. The sampler embeds those that follow."""
        self.x[: len(token)] = F.embedding(token, self.live.embed)

    def reserve(self, limits: Sequence[int]) -> None:
        for group in self.spans:
            group.cache.reserve(limits)

    def keep_hidden_states(self, states: Any) -> None:
        """Write the stream before some layers to `states`, a HiddenStates of draft_head.py, in each step and prefill."""
        self.hidden_states, self.split = states, range(0)
        for group in self.spans:
            group.hidden_states, group.workspace.split = states, range(0)

    @contextmanager
    def fewer_layers(self) -> Iterator[None]:
        """Have the first two layers and the last one alone, where all are of one form: they launch the kernels of all."""
        (group, *others), layers = self.spans, self.live.layers
        numbers, parts = group.numbers, group.layers
        usual = all(
            (type(layer.attention), type(layer.mlp), layer.extra) == (AttentionWeights, DenseWeights, None) for layer in layers
        )
        shared = any(layer.source is not None for layer in group.cache.layers.values())
        if (
            usual
            and not (others or shared or self.hidden_states)
            and all(structure_of(layer) == structure_of(layers[0]) for layer in layers)
        ):
            group.numbers, group.layers = ([*all_[:2], *all_[2:][-1:]] for all_ in (numbers, parts))
        try:
            yield
        finally:
            group.numbers, group.layers = numbers, parts

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        """Write the keys and values of ids (B, T), right-padded. Positions after a row's length are never read."""
        self._fill(ids, 0, lengths)
        if self.host:
            self.host.finite = ids.shape[1]

    def _fill(self, ids: Tensor, begin: int, lengths: Tensor) -> None:
        for group in self.spans:
            group.cache.ends = (begin + lengths).to(group.device)
        if self.hidden_states is not None:
            self.hidden_states.begin_prompt(lengths)
        try:
            for at in range(0, ids.shape[1], CHUNK):
                self.streamed(ids[:, at : at + CHUNK], begin + at)  # a device may read one while the next has the previous one
                if self.hidden_states is not None:
                    self.hidden_states.end_chunk(ids, at)
        finally:
            for group in self.spans:
                group.cache.ends = None
            if self.hidden_states is not None:
                self.hidden_states.end_prompt()

    @torch.no_grad()
    def refill(self, ids: Tensor, lengths: Tensor, rows: Tensor, start: int = 0) -> None:
        self.cache.aim(rows)
        self.adapting.targets = rows
        try:
            if self.host:
                self.cache.clear_after(start + ids.shape[1])  # NaN would pass through a mask
            self._fill(ids, start, lengths)
        finally:
            self.cache.aim(None)
            self.adapting.targets = None
        if self.host:
            self.host.finite = self.max_length

    @property
    def grouped(self) -> Cache | None:
        usual = self.refills and self.config.tokens == 1 and self.host is None
        return self.cache if usual and self.live.dtype in SIXTEEN_BITS else None

    @property
    def spare(self) -> range:  # type: ignore[override]
        return range(self.max_batch, self.cache.rows) if self.refills and self.keeps_prompts else range(0)

    @property
    def splits_keys(self) -> bool:  # type: ignore[override]
        return self.grouped is not None  # in fp32 a row's bits do not depend on the other rows

    def cache_bytes(self) -> int:
        return sum(group.cache.nbytes for group in self.spans)

    @property
    def keeps_prompts(self) -> bool:
        return not any(group.cache.ringed or group.cache.states for group in self.spans)

    def carried(self) -> list[Tensor]:
        states = [state for group in self.spans for state in group.cache.states.values()]
        kept = [] if self.hidden_states is None else [self.hidden_states.rows, self.hidden_states.position]
        return [*kept, *(state.matrix for state in states if state.matrix is not None)]

    @torch.no_grad()
    def hidden(self, ids: Tensor, start: int = 0) -> Tensor:
        """Return the last hidden state (B, T, hidden) of ids (B, T) at positions from start on, after those in the cache."""
        x, pending = self.streamed(ids, start)
        return add_and_norm(x.to(self.device), None if pending is None else pending.to(self.device), self.live.norm)[0]

    def streamed(self, ids: Tensor, start: int) -> tuple[Tensor, Tensor | None]:
        """Return the stream of ids (B, T) after the last layer, on its device, and the last MLP's output if not yet added."""
        if self.adapting.products:
            self.adapting.mark(len(ids), ids.shape[1])
        x, pending = self.embedded(ids), None
        if self.positions is not None:
            x = x + self.positions[start : start + ids.shape[1]]
        if self.inputs is not None:
            self.workspace.prompt_inputs = self.inputs.of_prompt(ids, x)
        for group in self.spans:
            x, pending = group.prompt(x, pending, start)
        self.workspace.prompt_inputs = None
        return x, pending

    def embedded(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.live.embed)
        return x if self.live.shape.embedded == 1 else x * self.live.shape.embedded

    def logits_after(self, ids: Tensor) -> Iterator[Tensor]:
        for start in range(0, len(ids), CHUNK):
            for hidden in self.hidden(ids[None, start : start + CHUNK], start)[0].split(SCORED):
                logits = F.linear(hidden, self.head.matrices()[0], *self.head.biases).float() * self.live.shape.logit_scale
                yield capped_(logits, self.live.shape.logit_cap)

    def moved(self) -> str | None:
        if self.live.copied is not None:
            self.live.refresh_copies()
        self.form.refresh_copies()
        return self.live.moved() or self.form.changed()

    def rebind(self) -> None:
        self.live.refresh()
        for group in self.spans:
            for tables, current in zip(group.workspace.tables, self.live.tables(self.max_length)):
                for table, now in zip(tables, current):
                    table.copy_(now)  # a cast and its reverse may have rounded the model's frequencies
        self._read_weights()

    def bytes_a_step(self, live: list[int]) -> int:
        """Return the bytes of all weights, of experts those that are chosen, and of the keys and values of these lengths."""
        chosen = sum([layer.mlp.chosen_bytes(len(live) * self.tokens) for layer in self.sparse])
        cached = sum([group.cache.bytes_read(live) for group in self.spans])
        return self.weight_bytes + cached + round(chosen)

    def exact(self) -> Any:
        return self.live if self.form.kind is None else RoundedModel(self)

    def poison(self) -> None:
        for group in self.spans:
            group.cache.poison()

    @contextmanager
    def trace_routing(self) -> Iterator[RoutingTrace]:
        trace = RoutingTrace()
        for group in self.spans:
            group.workspace.routing_trace = trace
        try:
            yield trace
        finally:
            for group in self.spans:
                group.workspace.routing_trace = None

    def report(self) -> list[tuple[str, str, str]]:
        most, kernel_rows = len(self.x), max(self.gemv_rows, self.tiled_rows, self.split.stop - 1)
        own = max(kernel_rows, self.matmul_rows)
        gemm = most > own  # some steps are products of cuBLAS
        unpacked = self.live.bytes_read()
        weights = self.form.report(self.workspace.kernels, self.weight_bytes, unpacked, f", more than {own} rows" * gemm)
        if self.host:
            rows = [(f"{len(self.layers)} layers, head", "torch", "a CPU has no kernels of ours")]
            return [*rows, *self.adapting.report(), *weights, *self._rounding()]
        counted = Counter(row for layer in self.layers for part in layer.parts for row in part.report())
        rows = [group.report(number) for number, group in enumerate(self.spans)] if len(self.spans) > 1 else []
        rows += [(f"{count} x {part}", what, why) for (part, what, why), count in counted.items()]
        rows.append(("norm, head", f"{self.workspace.kernels}: {self.form.prefix}norm_product", ""))
        if most > self.gemv_rows and self.tiled_rows:
            what = f"{self.workspace.kernels}: tiled products; head by torch (cuBLAS)"
            rows.append(
                (f"{self.gemv_rows + 1} to {min(most, self.tiled_rows)} rows", what, "all rows together, on tensor cores")
            )
        if most > self.gemv_rows and self.matmul_rows:
            what = f"{self.workspace.kernels}: quantized_matmul" + "; head by torch (cuBLAS)" * (self.form.kind is None)
            counts = f"{self.gemv_rows + 1} to {min(most, self.matmul_rows)} rows"
            rows.append((counts, what, "all rows together, on tensor cores"))
        if self.split and most >= self.split.start:
            what = f"{self.workspace.kernels}: split products" + "; head by torch (cuBLAS)" * (min(most, own) > SPLIT_HEAD)
            rows.append((f"{self.split.start} to {min(most, own)} rows", what, "programs share sums, on tensor cores"))
        if gemm:
            why = f"; those of one input separately: {self.live.apart}" if self.live.apart else ""
            rows.append((f"more than {own} rows", "products by torch (cuBLAS)", f"they fill tensor cores{why}"))
        special = dict.fromkeys(row for layer in self.layers for row in layer.mlp.report_gemm(most > kernel_rows))
        return [*rows, *special, *self.adapting.report(), *weights, *self._rounding()]

    def _rounding(self) -> list[tuple[str, str, str]]:
        """Return the table's rows about the cache's format and the measured cost of rounding."""
        rows = self.cache.report()
        if self.rounds:
            rows.append(("accuracy", "measured" if self.measured else "not measured", str(self.measured or "")))
        return rows
