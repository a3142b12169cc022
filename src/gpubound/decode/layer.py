"""Parts of a layer: attention and a dense MLP, each with its norm and its addition to the residual stream.

Each part has three forms. `step` is for few rows: kernels read the weights once, and each may start while the previous one
still runs. `gemm_step` is for more, by cuBLAS. Both compute the input of the part's last product (`compute`), and add that
product to the stream: parts of a parallel block compute first, and then add. `prompt` is for prefill. Weights come in any
format (weights.py), and keys and values go to any cache (kv_cache.py). models/decoding.py defines the results in plain fp32.

moe.py has an MLP of experts, with the same methods.

Legend: B rows, T tokens of a prompt, H query heads, K key and value heads, D width of a head.

`CachedLatentAttention` is multi-head latent attention with the methods of `CachedAttention`. A step is in the absorbed form
(kernels/latent_attention.py): it multiplies queries by W_K and results by W_V, over a cache of latents. A prompt is in the
expanded form: keys and values of all its positions are computed from the latents, a layer at a time, for scaled dot-product
attention. In 16 bits both round a head's query or key once more than the other does.

Legend: B rows, T tokens of a prompt, S positions so far, H query heads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import (
    add_norm,
    latent_attention,
    latent_queries,
    layer_norm,
    layer_norm_rows,
    norm_rows,
    rms_norm,
    rope,
    sink_attention,
)
from ..kernels.decode_attention import MANY, Heads, Scratch
from ..kernels.decode_product import EARLY, FENCE, LATE, Norm, capped_
from ..kernels.dispatch import SIXTEEN_BITS, can_launch
from ..kernels.gated import gated
from ..kernels.latent_attention import LatentScratch, unable
from ..kernels.rope import apart
from ..kernels.row_ops import ACTIVATED, LayerNorm
from ..layers.attention import attend
from ..models.decoding import (
    AnyNorm,
    AttentionWeights,
    DenseWeights,
    LatentAttentionWeights,
    LayerInputWeights,
    Linear,
    Shape,
    UngatedWeights,
)
from .kv_cache import Cache
from .lora import AdapterRouter
from .request import CHUNK

GEMV_ROWS = 8  # the most rows of a GEMV, whose kernels give a row the same bits among 1 row or 8
# Programs that share the keys of a row and kv head, and the tiles that each takes at least, up to GEMV_ROWS rows and beyond.
# H200, a step of 1 row at 4,200 tokens, 16 and 32 programs: 350m 517 and 513 us, 1b 858 and 836. More rows fill the GPU by
# themselves, those of SEVERAL heads of keys with larger parts: plans/defaults.py has figures.
GEMV_SPLITS, GEMM_SPLITS, LARGE_SPLITS = (32, 1), (16, 4), (16, 16)
SEVERAL = 8
MANY_SPLITS = 16, 64  # where every row and kv head has a program already: those that find no part only take time
# Attention by query, of few rows in a LATE chain: least width of heads, most heads of keys, and most places, which the programs
# of several queries read again. There products of so few bytes let their successors begin at once: gate and up stream beside
# attention. H200, 12 layers of Gemma 4 E4B, us a step: 1,126; by query 1,119; with such products 1,103, and 1,133 where
# attention is on tensor cores, of 8 warps with 128 registers.
BY_QUERY = 256, 2, 2048
EARLY_BYTES = 12_000_000
CUDNN: Any = torch._C._SDPBackend.CUDNN_ATTENTION.value  # as SDPA's choice
SCORES = 1 << 26  # capped scores of a prompt that are in memory at a time


class Workspace:
    """Tables, cache and buffers that all layers share, allocated once so that graphs can hold their addresses."""

    def __init__(self, shape: Shape, cache: Cache, tables: list[tuple[Tensor, Tensor]], rows: int, tokens: int = 1) -> None:
        self.shape, self.cache, self.tables, self.rows = shape, cache, tables, rows
        self.dtype, self.device = cache.dtype, cache.device
        cos, sin = tables[0]
        self.no_rotation = torch.ones_like(cos), torch.zeros_like(sin)  # for layers without positions
        self.adapting = AdapterRouter(rows // tokens, tokens, self.device)
        self.routing_trace: Any = None  # a RoutingTrace that records the chosen experts
        self.peer: Any = None  # of placement/peers.py, where other devices have other slices of the same layers
        self.gemv_rows: int | None = None  # more rows are a tiled GEMM; None: there is none
        self.copy: Tensor | None = None  # of the stream in `dtype`, which a tiled GEMM reads
        self.split = range(0)  # rows of steps whose products are in parts (kernels/split_product.py)
        self.parts: Tensor | None = None  # room for those of a product, fp32
        self.together = False  # attention may sum a row's tokens in another order than separate ones
        self.pending: Tensor | None = None  # parts that the stream still lacks: the next norm adds them
        self.step_inputs: Any = None  # (layers, rows, width): the layers' own inputs in a step (weights.py)
        self.prompt_inputs: Any = None  # (B, T, layers, width)
        self._buffers: dict[tuple, Tensor] = {}

    @property
    def kernels(self) -> str:
        """The implementation of the kernels on this device, for the table."""
        return "triton" if can_launch(self.device) else "reference"

    @property
    def layer_normed(self) -> Tensor:
        """The stream after a LayerNorm, in fp32."""
        return self.buffer("layer_normed", self.rows, self.shape.hidden)

    def take_pending(self) -> Tensor | None:
        pending, self.pending = self.pending, None
        return pending

    def buffer(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return zeros, one buffer for all layers that ask for the same name and shape."""
        key = (name, *shape, dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(shape, device=self.device, dtype=dtype)
        return self._buffers[key]


class Part:
    """Base class of attention and MLP: a norm, products, and the addition to the residual stream, directly or after a norm.

    A subclass has the methods `compute` and `gemm_compute`, which return the input of the part's last product.
    """

    last: Any  # product
    compute: Any
    gemm_compute: Any
    captures_prompts = True  # whether a graph can hold `prompt`
    factor: Tensor | None = None  # (1,): the stream is multiplied by it after the part
    early_bytes = 0  # of a product in a LATE chain that lets its successor begin at once
    output: Tensor | None = None  # a sum of parts that it is added to, in the place of the stream
    keep: Tensor | None = None  # a second place for the stream after the part

    def __init__(self, weights: Any, number: int, form: Any, workspace: Workspace) -> None:
        self.weights, self.number, self.form, self.workspace = weights, number, form, workspace
        self.products: list[Any] = []
        self.multiplied: list[Linear] = []  # the weights' layers, in the products' order
        self._normed = workspace.buffer("normed", workspace.rows, workspace.shape.hidden, dtype=workspace.dtype)
        self.reads_normed = False  # whether the part before has normed the same stream by the same LayerNorm
        if isinstance(weights.norm, LayerNorm):
            _ = workspace.layer_normed  # now, since no graph may allocate it
        summed = weights.post_norm is not None
        # Zeros before and after a step.
        self._sum = workspace.buffer("sum", workspace.rows, workspace.shape.hidden) if summed else None

    def product(self, product: Any, *layers: Linear) -> Any:
        """Add the adapters of `layers` to a product of a weight format, and return it."""
        product.added, product.gemv_rows = self.workspace.adapting.added(*layers), self.workspace.gemv_rows
        product.copy = self.workspace.copy
        self.products.append(product)
        self.multiplied += layers
        return product

    def step(self, x: Tensor, *arguments: Any) -> None:
        """Run the part on the stream x (B, hidden), in place. The last argument is the launch mode."""
        self.send(x, *arguments)
        self.finish(x, arguments[-1])

    def send(self, x: Tensor, *arguments: Any) -> None:
        """Run the part up to its last product, which is added to its target, or sent to the other devices."""
        self.add_output(self.last, self.compute(x, *arguments), x, arguments[-1])

    def gemm_step(self, x: Tensor, *arguments: Any) -> None:
        """Run the part as `step` does, by cuBLAS."""
        self.gemm_add(self.gemm_compute(x, *arguments), x, arguments[-1])

    def gemm_add(self, h: Tensor, x: Tensor, mode: int) -> None:
        """Add the last product of h to the stream x, or leave it to the next norm."""
        if len(h) in self.workspace.split:
            self.workspace.pending = self.split(self.last, h, mode)
            return
        self.last.accumulate(self.target(x), h)
        if self.last.added is not None:
            self.last.added.add(h, self.target(x))
        self.finish(x, mode)

    def read(self, x: Tensor, mode: int = 0) -> Tensor:
        """Return the normed stream, which GEMMs of many rows read. A norm that cuBLAS precedes begins 0.97 us after it by a
        dependent launch, other kernels 0.46 by a plain one (H200, 0.6b, 256 rows)."""
        h = self._normed[: len(x)]
        return h if self.reads_normed else normed_rows(x, self.weights.norm, h, mode, self.workspace.take_pending())

    def split(self, product: Any, h: Tensor, mode: int) -> Tensor:
        """Return the parts (P, B, rows) of a product of h."""
        return product.split_product(h, self.workspace.parts, mode)

    def operand(self, x: Tensor, mode: int, first: bool = False) -> tuple[Tensor, Norm | None]:
        """Return what the first product of few rows reads: the stream and its norm, or the stream after a LayerNorm."""
        norm = self.weights.norm
        if not isinstance(norm, LayerNorm):
            return self.stream(x, first), norm
        h = self.workspace.layer_normed[: len(x)]
        return h if self.reads_normed else layer_norm_rows(x, norm, h, mode), None

    def target(self, x: Tensor) -> Tensor:
        """Return the tensor that the last product is added to."""
        return x if self._sum is None else self._sum[: len(x)]

    def stream(self, x: Tensor, first: bool = False) -> Tensor:
        """Return the stream x or its 16-bit copy, as the next GEMV reads it. first: no product has written a copy yet."""
        workspace = self.workspace
        if first or workspace.gemv_rows is None or workspace.copy is None or len(x) <= workspace.gemv_rows:
            return x
        return workspace.copy[: len(x)]

    def add_output(self, product: Any, h: Tensor, x: Tensor, mode: int) -> None:
        """Add the last product of h to its target. With a peer, send it: `finish` adds those of all devices."""
        if self.workspace.peer is None:
            copies = () if self.keep is None else (self.keep,)
            product.add_product(h, self.target(x), self.mode_of(product, mode), *copies)
        else:
            product.send_product(h, self.workspace.peer.sum(), mode)

    def finish(self, x: Tensor, mode: int = 0) -> None:
        """Add the outputs of all devices, and the post-normed output to the stream x."""
        if self.workspace.peer is not None:
            self.workspace.peer.add(self.target(x), mode)
        if self._sum is not None:
            to = x if self.output is None else self.output[: len(x)]
            add_norm(self.target(x), self.weights.post_norm, to, mode, self.factor)
        elif self.factor is not None:
            x *= self.factor

    @property
    def can_keep(self) -> bool:
        """Return whether the last product of few rows also writes the stream after the part to `keep`."""
        direct = self._sum is None and self.factor is None and self.workspace.peer is None
        return direct and getattr(self.last, "keeps", False)

    def linear(self, product: Any, x: Tensor) -> list[Tensor]:
        """Return x (..., K) times each weight of a product, with biases and adapters: of a prompt, by torch."""
        results = [F.linear(x, weight, layer.bias) for weight, layer in zip(product.matrices(), product.layers)]
        if product.added is not None:
            product.added.add(x, *results)
        return results

    def gemm(self, product: Any, h: Tensor) -> Tensor:
        """Return h (B, K) times the weights of a product side by side, with biases and adapters."""
        rows = product.multiply(h)
        if product.added is not None:
            product.added.add(h, *rows.split([len(layer.weight) for layer in product.layers], -1))
        return rows

    def exact(self) -> Any:
        """Return the weights with the values that a rounded format represents."""
        exact = [layer for product in self.products for layer in product.exact()]
        by_layer = {id(layer): one for layer, one in zip(self.multiplied, exact, strict=True)}
        return self.weights.mapped(lambda value: by_layer.get(id(value), value))

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a step reads completely."""
        return self.weights.norms() + [tensor for product in self.products for tensor in product.tensors()]

    def chosen_bytes(self, tokens: int) -> float:
        """Return the bytes of experts that a step of this many tokens reads."""
        return 0.0

    def mode_of(self, product: Any, mode: int) -> int:
        """Return the mode of a product of few bytes: in a LATE chain EARLY, if it reads weights of the model's own dtype."""
        if mode != LATE or not self.early_bytes or product.prefix:
            return mode
        return EARLY if product.nbytes <= self.early_bytes else LATE

    @property
    def first(self) -> bool:
        """Return whether the part is the first of its group of layers."""
        return self.number == self.workspace.cache.numbers[0]

    def fenced(self, mode: int) -> int:
        """Return the mode of a layer's first product, which is the fence (triton/_launch.py) in a group's first layer."""
        return FENCE if self.first and mode == EARLY else mode

    @property
    def norm_in_product(self) -> str:
        """The name of a norm that is part of the first product, for the table."""
        return "norm, " if isinstance(self.weights.norm, Norm) else ""

    def ops(self) -> list[tuple[str, str, str]]:
        """Return (operation, op, reason) for each part of a step."""
        raise NotImplementedError

    def report(self) -> list[tuple[str, str, str]]:
        """Return (operation, implementation, reason) for the decoder's table."""
        rows = self.ops() if self._sum is None else [*self.ops(), ("norm, residual add", "add_norm", "")]
        if isinstance(self.weights.norm, LayerNorm) and not self.reads_normed:
            rows = [("norm", "layer_norm_rows", ""), *rows]
        return [(what, f"{self.workspace.kernels}: {op}", why) for what, op, why in rows]

    def report_gemm(self, gemm: bool) -> list[tuple[str, str, str]]:
        """Return the table's rows about experts, of prompts and, with `gemm`, of more than GEMV_ROWS rows."""
        return []


class CachedAttention(Part):
    """Norm, q k v, rotation, cache, attention, output."""

    def __init__(self, weights: AttentionWeights, number: int, form: Any, workspace: Workspace) -> None:
        super().__init__(weights, number, form, workspace)
        w, rows, inputs = weights, workspace.rows, list(weights.inputs.values())
        self.qkv = self.product(form.stacked(*inputs), *inputs)
        self.o = self.last = self.product(form.stacked(w.o), w.o)
        self.kv_heads = workspace.cache.layers[number].kv_heads
        self._qkv = workspace.buffer("qkv", rows, sum(len(layer.weight) for layer in inputs))
        self._mixed = workspace.buffer("mixed", rows, w.query_heads * w.head_dim, dtype=workspace.dtype)
        most = max(n * _splits(n, self.kv_heads)[0] for n in (rows, min(rows, GEMV_ROWS)))
        self._partial = workspace.buffer("partial", most, self.kv_heads, w.query_heads // self.kv_heads, w.head_dim + 2)
        width, heads, most = BY_QUERY
        length = min(workspace.cache.length, w.window or workspace.cache.length)
        self.by_query = w.head_dim >= width and self.kv_heads <= heads and length <= most and workspace.cache.kind is None
        self.by_query &= workspace.dtype in SIXTEEN_BITS
        if self.by_query:
            self.early_bytes = EARLY_BYTES
        self._finished = workspace.buffer("finished", rows * w.query_heads, dtype=torch.int32)
        self._angles = workspace.no_rotation if w.table is None else workspace.tables[w.table]

    def compute(self, x: Tensor, position: Tensor, mode: int) -> Tensor:
        """Return the input of the last product in a step."""
        rows, qkv = len(x), self._qkv[: len(x)]
        h, norm = self.operand(x, mode, self.first)
        self.qkv.norm_product(h, norm, qkv, self.fenced(self.mode_of(self.qkv, mode)))
        self._attend(rows, qkv, position, mode)
        return self._mixed[:rows]

    def gemm_compute(self, x: Tensor, position: Tensor, mode: int) -> Tensor:
        if len(x) in self.workspace.split:
            parts = self.split(self.qkv, self.read(x, mode), self.fenced(mode))
            self._attend(len(x), parts, position, mode)
            return self._mixed[: len(x)]
        qkv = self.gemm(self.qkv, self.read(x))
        self._attend(len(x), qkv, position, 0)  # a dependent launch after cuBLAS takes 0.4 us longer (H200, 350m, 32 rows)
        return self._mixed[: len(x)]

    def prompt(self, h: Tensor, start: int, end: int) -> Tensor:
        """Return the attention's output for normed h (B, T, hidden) at positions start to end."""
        w, cache = self.weights, self.workspace.cache
        gate, rows = w.apart(self.linear(self.qkv, h))
        q, *own = w.heads(rows, normed)
        if w.table is not None:
            cos, sin = self._angles
            keys = own[0] if own else q[..., :1, :]  # shared keys are rotated: a head that is not read takes their place
            q, keys = rope(q, keys, cos[start:end], sin[start:end])
            own = [keys, *own[1:]] if own else own
        k, v = cache.extend(self.number, start, *own) if own else cache.extended(self.number)
        before = k.shape[2] - (end - start)  # keys that the cache has returned with the prompt's own
        mixed = attend_prompt(q.transpose(1, 2), k, v, before, w.window, w.scale, w.cap, w.sinks).flatten(2)
        return self.linear(self.o, mixed if gate is None else mixed * gate.sigmoid())[0]

    def _attend(self, rows: int, qkv: Tensor, position: Tensor, mode: int) -> None:
        w, kv_heads = self.weights, self.kv_heads
        how = w.interleaved > 0, w.sinks, w.gated, w.v_eps
        heads = Heads(*self._angles, w.q_norm, w.k_norm, w.scale, w.window, w.cap, *how)
        splits, tiles = _splits(rows, kv_heads, position.numel() // len(position))
        partial = self._partial[: rows * splits].view(rows, kv_heads, splits, *self._partial.shape[2:])
        by_query = self.by_query and mode == LATE and rows <= GEMV_ROWS
        finished = self._finished[: rows * (w.query_heads if by_query else kv_heads)]
        scratch = Scratch(partial, finished, tiles, together=self.workspace.together, by_query=by_query)
        self.workspace.cache.attend(self.number, qkv, position, heads, scratch, self._mixed[:rows], mode)

    def ops(self) -> list[tuple[str, str, str]]:
        attention = self.workspace.cache.layout.op
        return [
            (f"{self.norm_in_product}{' '.join(self.weights.inputs)}", f"{self.qkv.prefix}norm_product", ""),
            ("rotation, cache, attention", attention, ""),
            ("output", f"{self.o.prefix}add_product", ""),
        ]


class DenseMLP(Part):
    """Norm, gate and up, down."""

    def __init__(self, weights: DenseWeights, number: int, form: Any, workspace: Workspace) -> None:
        super().__init__(weights, number, form, workspace)
        self.gate_up = self.product(form.gate_up(weights.gate, weights.up), weights.gate, weights.up)
        self.down = self.last = self.product(form.stacked(weights.down), weights.down)
        self._gated = workspace.buffer("gated", workspace.rows, len(weights.gate.weight), dtype=workspace.dtype)
        self.gate_up_bytes = self.gate_up.nbytes  # that a step reads

    def compute(self, x: Tensor, mode: int) -> Tensor:
        """Return the input of the last product in a step."""
        y, (h, norm) = self._gated[: len(x)], self.operand(x, mode)
        self.gate_up.norm_gate_up(h, norm, self.weights.activation, y, mode)
        return y

    def gemm_compute(self, x: Tensor, mode: int) -> Tensor:
        if len(x) not in self.workspace.split:
            return gated(self.weights.activation, self.gemm(self.gate_up, self.read(x)))
        y = self._gated[: len(x)]
        self.gate_up.split_gate_up(self.read(x, mode), self.weights.activation, y, mode)
        return y

    def prompt(self, h: Tensor) -> Tensor:
        """Return the MLP's output for normed h (B, T, hidden)."""
        h = gated(self.weights.activation, *self.linear(self.gate_up, h))
        return self.linear(self.down, h)[0]

    def ops(self) -> list[tuple[str, str, str]]:
        first = f"{self.norm_in_product}gate, up"
        return [(first, f"{self.gate_up.prefix}{self.gate_up.gates}", ""), ("down", f"{self.down.prefix}add_product", "")]


class UngatedMLP(Part):
    """Norm, up, activation, down."""

    def __init__(self, weights: UngatedWeights | LayerInputWeights, number: int, form: Any, workspace: Workspace) -> None:
        super().__init__(weights, number, form, workspace)
        self.up = self.product(form.stacked(weights.up), weights.up)
        self.down = self.last = self.product(form.stacked(weights.down), weights.down)
        width = len(weights.up.weight)
        self._up = workspace.buffer("up", workspace.rows, width)
        self._activated = workspace.buffer("activated", workspace.rows, width, dtype=workspace.dtype)
        self.gate_up_bytes = self.up.nbytes  # that a step reads

    def compute(self, x: Tensor, mode: int) -> Tensor:
        """Return the input of the last product in a step."""
        (h, norm), rows = self.operand(x, mode), len(x)
        up, y = self._up[:rows], self._activated[:rows]
        return self.up.norm_up(h, norm, self.weights.activation, self.inputs(rows), up, y, self.mode_of(self.up, mode))

    def gemm_compute(self, x: Tensor, mode: int) -> Tensor:
        return self._activate(self.read(x), self.inputs(len(x)))

    def inputs(self, rows: int) -> Tensor | None:
        """Return what a step's activations are multiplied by; None: nothing."""
        return None

    def _activate(self, h: Tensor, by: Tensor | None = None) -> Tensor:
        """Return the input of the last product for normed h."""
        y = ACTIVATED[self.weights.activation](self.linear(self.up, h)[0])
        return y if by is None else y * by.to(y.dtype)

    def prompt(self, h: Tensor) -> Tensor:
        """Return the MLP's output for normed h (B, T, hidden)."""
        return self.linear(self.down, self._activate(h))[0]

    def ops(self) -> list[tuple[str, str, str]]:
        first = (f"{self.norm_in_product}up", f"{self.up.prefix}norm_product", "")
        return [first, *self.activation("activation"), ("down", f"{self.down.prefix}add_product", "")]

    def activation(self, what: str) -> list[tuple[str, str, str]]:
        """Return the row of `ops` for it, which is a launch only after products of packed weights."""
        return [(what, "activate_rows", "")] if self.up.prefix else []


class NoMLP(Part):
    """MLP of a layer that has none."""

    gate_up_bytes = 0

    def step(self, x: Tensor, *arguments: Any) -> None:
        pass

    gemm_step = step

    def prompt(self, h: Tensor) -> Tensor:
        return torch.zeros_like(h)

    def ops(self) -> list[tuple[str, str, str]]:
        return []


def add_linear(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Add h weightᵀ + bias to x (fp32), in place."""
    if h.is_cuda and h.dtype != torch.float32:
        torch.addmm(x, h, weight.t(), out_dtype=torch.float32, out=x)
        if bias is not None:
            x.add_(bias)
    else:
        x.add_(F.linear(h, weight, bias))


def normed(x: Tensor, norm: AnyNorm) -> Tensor:
    if isinstance(norm, LayerNorm):
        return layer_norm(x, norm.weight + norm.offset if norm.offset else norm.weight, norm.bias, norm.eps)
    return x if norm is None else rms_norm(x, norm.weight, norm.eps, norm.offset)


def normed_rows(x: Tensor, norm: AnyNorm, out: Tensor, mode: int = 0, parts: Tensor | None = None) -> Tensor:
    """Write the normed stream to `out` and return it. With parts, those of an RMSNorm's op, add them to the stream first."""
    if isinstance(norm, LayerNorm):
        return layer_norm_rows(x, norm, out, mode)
    return out.copy_(x) if norm is None else norm_rows(x, norm, out, mode, parts)


def attend_prompt(
    q: Tensor, k: Tensor, v: Tensor, start: int, window: int, scale: float, cap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Return the causal attention (B, T, H, D) of a prompt's queries (B, H, T, D).

    k and v (B, K, start + T, D) hold all positions before theirs, or as many as a window shows, and theirs. window: each token
    sees this many of the nearest; 0: all. Without flash attention, a window makes a mask in memory, of T + window keys at most.
    """
    end, mask = k.shape[2], None
    flash = q.is_cuda and q.dtype in SIXTEEN_BITS and 0 < window < end
    if (sinks is not None or flash) and not cap and unable(q) is None:
        sinks = q.new_full(q.shape[1:2], float("-inf")) if sinks is None else sinks  # SDPA's flash attention has no window
        return sink_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), sinks, scale, window or None)
    if window and end > window:
        first = max(0, start + 1 - window)  # no query sees an earlier key
        k, v = k[:, :, first:], v[:, :, first:]
        age = torch.arange(start, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
        mask = (age >= 0) & (age < window)
    if cap or sinks is not None:
        return capped_attend(q, k, v, mask, scale, cap, sinks)
    return attend(q, k, v, mask, scale) if mask is not None or start == 0 else attend_lower_right(q, k, v, scale)


def attend_lower_right(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return the attention of the last T of S positions, whose causal mask ends in the lower right corner of (T, S).

    torch's bias of that name runs flash attention on a GPU: a dense mask of 2,048 x 32,768 would be 64 MB in each layer, and
    rule flash attention out. Without flash attention (fp32, heads wider than 256) the memory-efficient kernel takes the bias,
    for equal head counts alone.

    Where SDPA runs cuDNN's attention, which has no such mask, whole chunks do, too: by themselves, and over the keys before
    them. It compiles each shape, in 0.06 s. H200, 32,768 tokens by flash attention: 0.53 of SDPA's rate with heads of 128.
    """
    (T, S), sixteen_bits = (q.shape[2], k.shape[2]), q.dtype in SIXTEEN_BITS
    if not q.is_cuda:
        return attend(q, k, v, torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T), scale)
    if sixteen_bits and T == CHUNK and S % T == 0 and torch._fused_sdp_choice(q, k, v, enable_gqa=True) == CUDNN:
        run = torch.ops.aten._scaled_dot_product_cudnn_attention
        own = run(q, k[:, :, S - T :], v[:, :, S - T :], None, True, 0.0, True, scale=scale)
        before = run(q, k[:, :, : S - T], v[:, :, : S - T], None, True, scale=scale)
        return merged(*own[:2], *before[:2]).transpose(1, 2)
    if not sixteen_bits or q.shape[-1] > 256:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    from torch.nn.attention.bias import causal_lower_right  # with dynamo, as long as torch itself

    bias = causal_lower_right(T, S)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return y.transpose(1, 2)


def merged(y: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Return the attention to two sets of keys from that to each, (B, H, T, D), and its logarithms of sums, (B, H, T, 1).

    Each share is rounded by itself. lerp takes one as 1 minus the other, rounded: of the 3 % that 2,048 of 65,536 keys have a
    tenth was lost in bf16, and the mean of so few keys is the larger one: 1e-2 of the result (H200). `y` is overwritten.
    """
    share, other_share = ((one - two).sigmoid().to(y.dtype) for one, two in ((lse, other_lse), (other_lse, lse)))
    return y.mul_(share).addcmul_(other, other_share)


def capped_attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float, sinks: Tensor | None = None
) -> Tensor:
    """Return `attend` with capped scores, which SDPA lacks, and sinks. Queries are chunked: their scores are in memory."""
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    step, outputs = max(1, SCORES // (B * H * S)), []
    for at in range(0, T, step):
        some = q[:, :, at : at + step].reshape(B, K, -1, D)  # a group's heads as queries of its one key head
        if mask is None:
            sees = torch.ones(min(step, T - at), S, device=q.device, dtype=torch.bool).tril(S - T + at)
        else:
            sees = mask[..., at : at + step, :]
        scores = capped_((some @ k.transpose(2, 3)).view(B, H, -1, S).float() * scale, cap)
        scores = scores.masked_fill(~sees, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(B, H, scores.shape[2], 1)], -1)
        weights = scores.softmax(-1)[..., :S].to(q.dtype)
        outputs.append((weights.view(B, K, -1, S) @ v).view(B, H, -1, D))
    return torch.cat(outputs, 2).transpose(1, 2)


def _splits(rows: int, kv_heads: int, tokens: int = 1) -> tuple[int, int]:
    if rows <= GEMV_ROWS:
        return GEMV_SPLITS
    if rows * kv_heads >= MANY:
        return MANY_SPLITS
    return LARGE_SPLITS if kv_heads >= SEVERAL and tokens == 1 else GEMM_SPLITS  # a row's tokens may share programs


# Programs that share the keys of a row, and the tiles of keys that each takes at least: up to GEMV_ROWS rows, and beyond.
# A part of 128 keys has 147 KB of latents, and leaves 33 KB of sums (16 heads of 512).
LATENT_GEMV_SPLITS, LATENT_GEMM_SPLITS = (64, 4), (16, 4)


class CachedLatentAttention(Part):
    """Norm, products with the stream, latents to the cache, attention, output."""

    def __init__(self, weights: LatentAttentionWeights, number: int, form: object, workspace: Workspace) -> None:
        super().__init__(weights, number, form, workspace)
        w, rows, heads = weights, workspace.rows, weights.query_heads
        first, *rest, _ = w.groups()
        self.down = self.product(self.form.stacked(*first), *first)
        self.q = self.product(self.form.stacked(*rest[0]), *rest[0]) if rest else None
        self.o = self.last = self.product(self.form.stacked(w.o), w.o)
        self.widths = [len(layer.weight) for layer in first]
        self.up = w.up.weight.detach().to(workspace.device)  # in its own format; a copy only of a model in host memory
        self.rank, self.heads = self.up.shape[1], heads
        self._projected = workspace.buffer("projected", rows, sum(self.widths))
        if self.q is not None:
            self._low = workspace.buffer("low", rows, self.widths[0])
            self._q = workspace.buffer("q", rows, heads * w.head_dim)
        self._queries = workspace.buffer("queries", rows, heads, len(w.latent.weight), dtype=workspace.dtype)
        self._mixed = workspace.buffer("mixed", rows, heads * w.value, dtype=workspace.dtype)
        counts = {n: _latent_splits(n, heads)[0] for n in (rows, min(rows, GEMV_ROWS))}
        most = max(n * splits for n, splits in counts.items())
        self._sums = workspace.buffer("sums", most, heads, self.rank)
        self._weights = workspace.buffer("weights", most, heads, 2)
        self._angles = workspace.tables[w.table]

    def compute(self, x: Tensor, position: Tensor, mode: int) -> Tensor:
        """Return the input of the last product in a step."""
        projected = self._projected[: len(x)]
        h, norm = self.operand(x, mode, self.first)
        self.down.norm_product(h, norm, projected, self.fenced(mode))
        q, latent = projected.split(self.widths, -1)
        if self.q is not None:
            # A product reads contiguous rows. Those of one row are.
            low = q if len(x) == 1 else self._low[: len(x)].copy_(q)
            q = self.q.norm_product(low, self.weights.q_norm, self._q[: len(x)], mode)
        return self._attend(q, latent, position, mode)

    def gemm_compute(self, x: Tensor, position: Tensor, mode: int) -> Tensor:
        q, latent = self.gemm(self.down, self.read(x)).split(self.widths, -1)
        if self.q is not None:
            (q,) = self.linear(self.q, normed(q, self.weights.q_norm))
        return self._attend(q, latent, position, 0)

    def _attend(self, q: Tensor, latent: Tensor, position: Tensor, mode: int) -> Tensor:
        w, rows, cache = self.weights, len(q), self.workspace.cache.latents(self.number, len(position))
        queries, mixed = self._queries[:rows], self._mixed[:rows]
        latent_queries(q, latent, position, w.latent_norm, self.up, *self._angles, cache, queries, w.interleaved, mode)
        splits, tiles = _latent_splits(rows, self.heads)
        sums, weights = (t[: rows * splits].view(rows, splits, *t.shape[1:]) for t in (self._sums, self._weights))
        return latent_attention(queries, position, cache, self.up, w.scale, LatentScratch(sums, weights, tiles), mixed, mode)

    def prompt(self, h: Tensor, start: int, end: int) -> Tensor:
        """Return the attention's output for normed h (B, T, hidden) at positions start to end."""
        w, width = self.weights, self.weights.rotated
        q, latent = self.linear(self.down, h)
        if self.q is not None:
            (q,) = self.linear(self.q, normed(q, w.q_norm))
        latent, key = latent.split([self.rank, width], -1)
        plain, turning = q.unflatten(-1, (self.heads, -1)).split([w.head_dim - width, width], -1)
        pair = turning, key.unsqueeze(-2)
        if w.interleaved:
            pair = apart(turning, width // 2), apart(pair[1], width // 2)
        cos, sin = self._angles
        turned, key = rope(*pair, cos[start:end], sin[start:end])
        new = torch.cat([normed(latent, w.latent_norm).unsqueeze(-2), key], -1)
        cached = self.workspace.cache.extend_latents(self.number, start, new)[:, 0]  # (B, S, width of both)
        expanded = F.linear(cached[..., : self.rank], self.up).unflatten(-1, (self.heads, -1))
        k, v = expanded.split([w.head_dim - width, w.value], -1)
        k = torch.cat([k, cached[:, :, None, self.rank :].expand(-1, -1, self.heads, -1)], -1)
        v = F.pad(v, (0, max(0, w.head_dim - w.value)))  # flash attention takes values as wide as keys
        q, k, v = (t.transpose(1, 2) for t in (torch.cat([plain, turned], -1), k, v))
        mixed = attend_prompt(q, k, v, cached.shape[1] - (end - start), 0, w.scale)
        return self.linear(self.o, mixed[..., : w.value].flatten(2))[0]

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), self.up]

    def ops(self) -> list[tuple[str, str, str]]:
        low = [] if self.q is None else [("norm, q", f"{self.q.prefix}norm_product", "")]
        over = f"over latents of {self.rank} + {self.weights.rotated}, for {self.heads} heads"
        return [
            (f"{self.norm_in_product}q, latent", f"{self.down.prefix}norm_product", ""),
            *low,
            ("q W_K, rotation, cache", "latent_queries", ""),
            ("attention, W_V", "latent_attention", over),
            ("output", f"{self.o.prefix}add_product", ""),
        ]


def _latent_splits(rows: int, heads: int) -> tuple[int, int]:
    """Return how many programs share a row's keys, and the least tiles of each. Rows of many heads fill a GPU by themselves."""
    if rows <= GEMV_ROWS:
        return LATENT_GEMV_SPLITS
    most, tiles = LATENT_GEMM_SPLITS
    return max(1, min(most, MANY // (rows * -(-heads // 32)))), tiles
