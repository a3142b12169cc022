"""The body for Llama-shaped models: a decoding step as five launches a layer over the live weights.

Up to NARROW rows, every product is a kernel that reads the weights once (kernels/decode_product.py), in a chain where each
may start while the one before still runs. Above, products are matrices worth a tensor core: cuBLAS takes them.

Legend: B rows, T tokens of a prompt.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import can_launch
from ..kernels import add_product, add_rms_norm, norm_gate_up, norm_product, norm_rows, rms_norm, rope, swiglu
from ..kernels.decode_product import EARLY, LATE
from ..layers.attention import attend
from ..layers.linear_site import fused_linear
from . import host, judge
from .cache import PLAIN, Cache, CacheLayout
from .contract import Body, check_room
from .judge import Accuracy
from .live import BoundModel, Layer

NARROW = 8  # rows
SPLITS = 16  # programs over which the keys of a row and kv head may spread
PARTIAL_ROWS = 16  # of the head's weight, whose greatest logit is found where they are computed
# Largest gate and up of a layer whose kernels let their successors in at once. H200, a whole step: 350m 398 us against 437
# LATE, 1b (67 MB) 745 / 789, but 8b (235 MB) 4,250 / 4,018.
EARLY_BYTES = 96 << 20
CHUNK = 2048  # tokens of a prompt at a time
SCORED = 256  # tokens whose logits are whole in memory while a text is scored


class FusedBody(Body):
    """`step` after `begin`, as often as wanted. The buffers are its own, made once; the weights are the model's."""

    captures_prefill = True
    x: Tensor
    best: Tensor
    arg: Tensor
    kind: str | None = None  # what the weights are rounded to
    measured: Accuracy | None = None

    def __init__(
        self, live: BoundModel, max_batch: int, max_length: int, tokens: int = 1, *, cache: CacheLayout = PLAIN
    ) -> None:  # fmt: skip
        self.original = live  # the model's own weights
        self.live, self.max_batch, self.max_length = live, max_batch, max_length
        self.device, self.vocab = live.device, live.shape.vocab
        s, B = live.shape, max_batch * tokens
        cache.check(max_batch, max_length)
        held = cache.nbytes(len(live.layers), max_batch, s.kv_heads, max_length, s.head_dim, live.dtype)
        tables = 4 * max_length * s.head_dim // 2 * 4  # cos and sin, and those of layers that do not turn
        check_room(held + tables + 4 * B * self.vocab, self.device, max_batch, max_length)
        self.cos, self.sin = live.rope(max_length)
        self.still = torch.ones_like(self.cos), torch.zeros_like(self.sin)  # for layers that do not turn their heads
        self.cache = Cache(
            cache, len(live.layers), max_batch, s.kv_heads, max_length, s.head_dim, live.dtype, self.device
        )  # fmt: skip
        wide: Any
        half: Any
        wide, half = {"device": self.device, "dtype": torch.float32}, {"device": self.device, "dtype": live.dtype}
        self.x = torch.zeros(B, s.hidden, **wide)
        self.qkv = torch.zeros(B, (s.heads + 2 * s.kv_heads) * s.head_dim, **wide)
        self.normed = torch.zeros(B, s.hidden, **half)
        self.mixed = torch.zeros(B, s.heads * s.head_dim, **half)
        self.gated = torch.zeros(B, s.intermediate, **half)
        self.logits = torch.zeros(B, self.vocab, **wide)
        on_host = host.fits(self.device) and tokens == 1 and cache == PLAIN and s.routing is None
        parts = 1 if on_host else -(-self.vocab // PARTIAL_ROWS)
        self.best = torch.zeros(B, parts, **wide)
        self.arg = torch.zeros(B, parts, device=self.device, dtype=torch.int32)
        self.partial = torch.zeros(B, s.kv_heads, SPLITS, s.heads // s.kv_heads, s.head_dim + 2, **wide)
        self.count = torch.zeros(B * s.kv_heads, device=self.device, dtype=torch.int32)
        self.host = host.HostStep(self) if on_host else None

    @property
    def embed(self) -> Tensor:  # type: ignore[override]
        return self.live.embed

    def exact(self) -> BoundModel:
        """The weights that the kernels read, for judge.py."""
        return self.live

    @property
    def rounds(self) -> str:
        """What is rounded to less than the model's dtype: weights, cache, both, or nothing."""
        held = self.cache.layout.kind
        return ", ".join(part for part in (self.kind, held and f"{held} cache") if part)

    def moved(self) -> str | None:
        return self.live.moved()

    def rebind(self) -> None:
        self.live.refresh()
        for table, now in zip((self.cos, self.sin), self.live.rope(self.max_length)):
            table.copy_(now)  # a cast there and back may have rounded the model's own frequencies
        if self.host:
            self.host.forget()

    def bytes_a_step(self, live: list[int]) -> int:
        return self.live.bytes_read() + self.cache.bytes_a_token * sum(live)

    def locate(self, ids: Tensor) -> str:
        return judge.first_not_finite(self.live, ids)

    def narrow(self, rows: int) -> bool:
        return rows <= NARROW

    def chained(self, rows: int) -> bool:
        return self._dependent(rows) > 0

    def _dependent(self, rows: int) -> int:
        """How a step's kernels are launched: each may start while the one before runs, on a GPU that can."""
        if not self.narrow(rows) or self.device.type != "cuda" or torch.cuda.get_device_capability(self.device) < (9, 0):
            return 0
        return EARLY if 2 * self.live.layers[0].gate.nbytes <= EARLY_BYTES else LATE

    def finds_best(self, rows: int) -> bool:
        return self.host is not None or self.narrow(rows)

    def same_kernels(self, rows: int) -> bool:
        return self.narrow(rows) and self.host is None

    def begin(self, token: Tensor) -> None:
        """Embed the first tokens; from then on the sampler does."""
        self.x[: len(token)] = F.embedding(token, self.live.embed)

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """The logits (B, V) after `token`, whose embedding is in x, at `position`; its keys and values go to the cache.

        Or after T tokens of each row at once, both (B, T) and T up to the body's `tokens`: the logits are (B T, V). To the
        products and norms, B T tokens are as many rows.
        """
        if self.host:
            return self.host.step(token, position)
        rows = token.numel()
        block = self._narrow_block if self.narrow(rows) else self._wide_block
        for number in range(len(self.live.layers)):
            block(number, position)
        return self._head(rows)

    def _narrow_block(self, number: int, position: Tensor) -> None:
        rows, layer = position.numel(), self.live.layers[number]
        x, qkv, mixed, mode = self.x[:rows], self.qkv[:rows], self.mixed[:rows], self._dependent(rows)
        norm_product(
            x, layer.norm, self.live.shape.eps, layer.q, layer.k, layer.v, layer.q_bias, layer.k_bias, layer.v_bias, qkv,
            dependent=mode,
        )  # fmt: skip
        self._attend(number, qkv, position, mode)
        add_product(mixed, layer.o, layer.o_bias, x, mode)
        self._narrow_mlp(number, x, mode)

    def _narrow_mlp(self, number: int, x: Tensor, mode: int) -> None:
        layer, gated = self.live.layers[number], self.gated[: len(x)]
        norm_gate_up(x, layer.mlp_norm, self.live.shape.eps, layer.gate, layer.up, layer.gate_bias, layer.up_bias, gated, mode)
        add_product(gated, layer.down, layer.down_bias, x, mode)

    def _wide_block(self, number: int, position: Tensor) -> None:
        rows, layer = position.numel(), self.live.layers[number]
        x, mixed = self.x[:rows], self.mixed[:rows]
        h = norm_rows(x, layer.norm, self.live.shape.eps, self.normed[:rows])
        biases = [b for b in (layer.q_bias, layer.k_bias, layer.v_bias) if b is not None]
        qkv = fused_linear(h, [layer.q, layer.k, layer.v], biases or None)
        self._attend(number, qkv, position, 0)
        accumulate(x, mixed, layer.o, layer.o_bias)
        self._wide_mlp(number, x)

    def _wide_mlp(self, number: int, x: Tensor) -> None:
        layer = self.live.layers[number]
        h = norm_rows(x, layer.mlp_norm, self.live.shape.eps, self.normed[: len(x)])
        biases = [b for b in (layer.gate_bias, layer.up_bias) if b is not None]
        accumulate(x, swiglu(fused_linear(h, [layer.gate, layer.up], biases or None)), layer.down, layer.down_bias)

    def _attend(self, number: int, qkv: Tensor, position: Tensor, mode: int) -> None:
        s, rows, layer = self.live.shape, position.numel(), self.live.layers[number]
        cos, sin = (self.cos, self.sin) if layer.turned else self.still
        self.cache.attend(
            number, qkv, position, cos, sin, layer.q_norm, layer.k_norm, s.head_eps, s.scale, layer.window,
            self.partial[:rows], self.count[: rows * s.kv_heads], self.mixed[:rows], mode,
        )  # fmt: skip

    def _head(self, rows: int) -> Tensor:
        x, logits, eps = self.x[:rows], self.logits[:rows], self.live.shape.eps
        if self.narrow(rows):
            best, arg = self.best[:rows], self.arg[:rows]
            return norm_product(
                x, self.live.norm, eps, self.live.head, out=logits, best=best, arg=arg, dependent=self._dependent(rows)
            )
        h = norm_rows(x, self.live.norm, eps, self.normed[:rows])
        if h.is_cuda and h.dtype != torch.float32:
            return torch.mm(h, self.live.head.t(), out_dtype=torch.float32, out=logits)
        return logits.copy_(F.linear(h, self.live.head))

    def reserve(self, limits: Tensor) -> None:
        self.cache.reserve(limits)

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        """Write the keys and values of ids (B, T), right-padded. What lies behind a row's length is never read."""
        for start in range(0, ids.shape[1], CHUNK):
            self.hidden(ids[:, start : start + CHUNK], start)
        if self.host:
            self.host.finite = ids.shape[1]

    @torch.no_grad()
    def hidden(self, ids: Tensor, start: int = 0) -> Tensor:
        """The last hidden state (B, T, hidden) of ids (B, T) at places start.., behind what the cache holds."""
        s, eps = self.live.shape, self.live.shape.eps
        end = start + ids.shape[1]
        x, pending = F.embedding(ids, self.live.embed), None
        for number, layer in enumerate(self.live.layers):
            h, x = (rms_norm(x, layer.norm, eps), x) if pending is None else add_rms_norm(x, pending, layer.norm, eps)
            q, k, v = self._project(layer, h, start, end)
            k, v = self.cache.extend(number, start, k, v)
            mixed = attend(q.transpose(1, 2), k, v, _mask(start, end, layer.window, x.device), s.scale)
            h, x = add_rms_norm(x, F.linear(mixed.flatten(2), layer.o, layer.o_bias), layer.mlp_norm, eps)
            pending = self._prompt_mlp(number, h)
        assert pending is not None
        return add_rms_norm(x, pending, self.live.norm, eps)[0]

    def _prompt_mlp(self, number: int, h: Tensor) -> Tensor:
        layer = self.live.layers[number]
        gated = swiglu(F.linear(h, layer.gate, layer.gate_bias), F.linear(h, layer.up, layer.up_bias))
        return F.linear(gated, layer.down, layer.down_bias)

    @torch.no_grad()
    def score(self, ids: Tensor) -> Tensor:
        self.reserve(torch.full((1,), len(ids) - 1, device=ids.device))
        found = []
        for start in range(0, len(ids) - 1, CHUNK):
            piece = ids[start : min(start + CHUNK, len(ids) - 1)]
            hidden = self.hidden(piece[None], start)[0]
            for at in range(0, len(piece), SCORED):
                logits = F.linear(hidden[at : at + SCORED], self.live.head).float()
                next_ids = ids[start + at + 1 : start + at + 1 + len(logits)]
                found.append(logits.log_softmax(-1).gather(-1, next_ids[:, None])[:, 0])
        return torch.cat(found)

    def _project(self, layer: Layer, h: Tensor, start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        s = self.live.shape
        pairs = (layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias)
        q, k, v = (F.linear(h, w, b).unflatten(-1, (-1, s.head_dim)) for w, b in pairs)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, s.head_eps), rms_norm(k, layer.k_norm, s.head_eps)
        if layer.turned:
            q, k = rope(q, k, self.cos[start:end], self.sin[start:end])
        return q, k, v

    def report(self) -> list[tuple[str, str, str]]:
        if self.host:
            return [(f"{len(self.live.layers)} layers, head", "torch", "a CPU has no kernels of ours"), *self._rounding()]
        kernel = "triton" if can_launch(self.device) else "reference"
        layers = len(self.live.layers)
        rows = [
            (f"{layers} x norm, q k v", f"{kernel}: norm_product", ""),
            (f"{layers} x rotation, cache, attention", f"{kernel}: {self.cache.layout.op.split('.')[-1]}", ""),
            *self._mlp_report(kernel),
            ("norm, head", f"{kernel}: norm_product", ""),
        ]
        if len(self.x) > NARROW:
            why = f"; those of one input one by one: {self.live.apart}" if self.live.apart else ""
            rows.append((f"more than {NARROW} rows", "products by torch (cuBLAS)", f"they fill tensor cores{why}"))
        return [*rows, *self._rounding()]

    def _rounding(self) -> list[tuple[str, str, str]]:
        """What the cache is, if it is no plain one, and what all the rounding costs."""
        rows = self.cache.report()
        if self.rounds:
            rows.append(("accuracy", "measured" if self.measured else "not measured", str(self.measured or "")))
        return rows

    def _mlp_report(self, kernel: str) -> list[tuple[str, str, str]]:
        layers = len(self.live.layers)
        return [
            (f"{layers} x output, down", f"{kernel}: add_product", ""),
            (f"{layers} x norm, gate, up", f"{kernel}: norm_gate_up", ""),
        ]


def accumulate(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """x (fp32) += h weightᵀ + bias, summed in fp32."""
    if h.is_cuda and h.dtype != torch.float32:
        torch.addmm(x, h, weight.t(), out_dtype=torch.float32, out=x)
        if bias is not None:
            x.add_(bias)
    else:
        x.add_(F.linear(h, weight, bias))


def _mask(start: int, end: int, window: int, device: torch.device) -> Tensor | None:
    """Who sees whom among the places start..end and all before: None for plain causal from the beginning."""
    if start == 0 and not (window and end > window):
        return None
    age = torch.arange(start, end, device=device)[:, None] - torch.arange(end, device=device)
    return (age >= 0) & (age < (window or end))
