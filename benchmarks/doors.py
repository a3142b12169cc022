"""Each kernel door as a benchmark case: its inputs, ours, the op in torch eager and from other libraries, what it must move."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpubound import kernels
from gpubound.layers.attention import attend
from gpubound.layers.block import gated_down
from gpubound.layers.linear_product import DENSE, Joined
from gpubound.measure import Prepared
from gpubound.models.richards import kernels as richards_kernels
from gpubound.models.richards.kernels.richards import GATE, LEAST, VALUE

from . import cute_ops, liger_ops
from .door import Door, Drawer
from .shapes import Shape

EPS = 1e-6
GROUPS = 32
ROPE_THETA = 500000.0


def _liger(name: str) -> Callable[..., Any]:
    """Return Liger's function of that name, imported at its first call, in the implementation that is chosen then."""
    return lambda *arguments, **options: liger_ops.function(name)(*arguments, **options)


def rms_norm(shape: Shape, draw: Drawer) -> Door:
    x, weight = draw(draw.tokens, shape.hidden), draw(shape.hidden)
    return Door(
        [x, weight],
        ours=lambda x, w: kernels.rms_norm(x, w, EPS),
        eager=lambda x, w: F.rms_norm(x, w.shape, w, EPS),
        liger=lambda x, w: _liger("liger_rms_norm")(x, w, EPS),
        others={"quack": lambda x, w: cute_ops.rms_norm(x, w, EPS)},
        saved_bytes=x.nbytes + weight.nbytes,
    )


def add_rms_norm(shape: Shape, draw: Drawer) -> Door:
    x, residual, weight = draw(draw.tokens, shape.hidden), draw(draw.tokens, shape.hidden), draw(shape.hidden)

    def eager(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        return F.rms_norm(s, w.shape, w, EPS), s

    return Door(
        [x, residual, weight],
        ours=lambda x, r, w: kernels.add_rms_norm(x, r, w, EPS),
        eager=eager,
        liger=lambda x, r, w: _liger("liger_fused_add_rms_norm")(x, r, w, EPS),
        others={"quack": lambda x, r, w: cute_ops.add_rms_norm(x, r, w, EPS)},
        saved_bytes=x.nbytes + weight.nbytes,  # their sum, which the forward returns
        gradient_bytes=x.nbytes + weight.nbytes,  # x and the residual have one gradient
    )


def layer_norm(shape: Shape, draw: Drawer) -> Door:
    x, weight, bias = draw(draw.tokens, shape.hidden), draw(shape.hidden), draw(shape.hidden)
    return Door(
        [x, weight, bias],
        ours=lambda x, w, b: kernels.layer_norm(x, w, b, EPS),
        eager=lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
        liger=lambda x, w, b: _liger("liger_layer_norm")(x, w, b, EPS),
        others={"quack": lambda x, w, b: cute_ops.layer_norm(x, w, b, EPS)},
        saved_bytes=x.nbytes + weight.nbytes,
    )


def group_norm(shape: Shape, draw: Drawer) -> Door:
    """Liger's adds blocks of up to 65536 elements, and their squares, in x's own dtype: compiled for compute capability 9.0 it
    holds 525 add.bf16 and 511 fma.rn.bf16. Its backward takes x̂ and its sums in that dtype too.
    """
    channels, groups = shape.hidden, min(GROUPS, shape.hidden)
    x, weight, bias = draw(draw.batch, channels, draw.seq), draw(channels), draw(channels)
    return Door(
        [x, weight, bias],
        ours=lambda x, w, b: kernels.group_norm(x, groups, w, b, EPS),
        eager=lambda x, w, b: F.group_norm(x, groups, w, b, EPS),
        liger=(lambda x, w, b: _liger("liger_group_norm")(x, w, b, channels, groups, EPS))
        if draw.dtype == torch.float32
        else None,
        saved_bytes=x.nbytes + weight.nbytes,
        without_liger="Liger sums 16-bit x and x² in 16 bits and keeps mean and rstd in them: its results are off by 1 to 4 %",
    )


def dynamic_tanh(shape: Shape, draw: Drawer) -> Door:
    x, alpha, weight, bias = draw(draw.tokens, shape.hidden), draw(1, scale=0.5), draw(shape.hidden), draw(shape.hidden)
    return Door(
        [x, alpha, weight, bias],
        ours=richards_kernels.dynamic_tanh,
        eager=lambda x, a, w, b: torch.tanh(a * x) * w + b,
        liger=_liger("liger_dyt"),
        saved_bytes=x.nbytes + weight.nbytes,
    )


def _angles(shape: Shape, draw: Drawer) -> tuple[Tensor, Tensor]:
    """cos and sin (T, D/2), fp32."""
    half = shape.head_dim // 2
    frequency = ROPE_THETA ** (-torch.arange(half, device=draw.device) / half)
    angle = torch.arange(draw.seq, device=draw.device)[:, None] * frequency
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face's form, on (B, T, H, D) with cos and sin (T, D) in x's dtype."""
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]


def rope(shape: Shape, draw: Drawer) -> Door:
    q, k = (draw(draw.batch, draw.seq, heads, shape.head_dim) for heads in (shape.heads, shape.kv_heads))
    cos, sin = _angles(shape, draw)
    wide = [torch.cat((t, t), -1).to(draw.dtype) for t in (cos, sin)]  # as Hugging Face makes them, once a model's forward

    def liger(q: Tensor, k: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        q, k = _liger("liger_rope")(q.transpose(1, 2), k.transpose(1, 2), *wide)
        return q.transpose(1, 2), k.transpose(1, 2)

    return Door(
        [q, k, cos, sin],
        ours=kernels.rope,
        eager=lambda q, k, *_: (_rotate(q, *wide), _rotate(k, *wide)),
        liger=liger,
        saved_bytes=cos.nbytes + sin.nbytes,
    )


def rope_qkv(shape: Shape, draw: Drawer) -> Door:
    """The packed product of q, k and v cut and rotated in one pass. Liger has no such op."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    qkv = draw(draw.batch, draw.seq, sum(heads) * shape.head_dim)
    cos, sin = _angles(shape, draw)
    wide = [torch.cat((t, t), -1).to(draw.dtype) for t in (cos, sin)]

    def eager(qkv: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.unflatten(-1, (-1, shape.head_dim)).split(heads, dim=2)
        return _rotate(q, *wide), _rotate(k, *wide), v.contiguous()

    return Door(
        [qkv, cos, sin],
        ours=lambda qkv, cos, sin: kernels.rope_qkv(qkv, cos, sin, shape.heads, shape.kv_heads),
        eager=eager,
        saved_bytes=cos.nbytes + sin.nbytes,
    )


def swiglu(shape: Shape, draw: Drawer) -> Door:
    gate, up = draw(draw.tokens, shape.intermediate), draw(draw.tokens, shape.intermediate)
    return Door(
        [gate, up],
        ours=kernels.swiglu,
        eager=lambda g, u: F.silu(g) * u,
        liger=_liger("liger_swiglu"),
        saved_bytes=gate.nbytes + up.nbytes,
    )


def swiglu_packed(shape: Shape, draw: Drawer) -> Door:
    """[gate | up] as one product leaves them. Liger has no such op."""
    gate_up = draw(draw.tokens, 2 * shape.intermediate)

    def eager(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    return Door([gate_up], ours=kernels.swiglu, eager=eager, saved_bytes=gate_up.nbytes)


def geglu(shape: Shape, draw: Drawer) -> Door:
    gate, up = draw(draw.tokens, shape.intermediate), draw(draw.tokens, shape.intermediate)
    return Door(
        [gate, up],
        ours=kernels.geglu,
        eager=lambda g, u: F.gelu(g, approximate="tanh") * u,
        liger=_liger("liger_geglu"),
        saved_bytes=gate.nbytes + up.nbytes,
    )


def _curve(x: Tensor, free: Tensor) -> Tensor:
    """A Richards curve that learns nu, k, m, as one writes it: in fp32, from softplus and exp."""
    nu, k, m = (F.softplus(free[0]) + LEAST, F.softplus(free[1]) + LEAST, free[2])
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.exp(-F.softplus(-k * nu * (x - m)) / nu)


def richards_glu(shape: Shape, draw: Drawer) -> Door:
    packed, value, gate = draw(draw.tokens, 2 * shape.intermediate), draw(4, scale=0.3), draw(3, scale=0.3)

    def eager(packed: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        x1, x2 = packed.chunk(2, dim=-1)
        return (x1 * (_curve(x1, value) + value[3]) * _curve(x2, gate)).to(packed.dtype)

    return Door(
        [packed, value, gate],
        ours=lambda packed, value, gate: richards_kernels.richards_glu(packed, value, gate, VALUE, GATE),
        eager=eager,
        saved_bytes=packed.nbytes + value.nbytes + gate.nbytes,
    )


def cross_entropy(shape: Shape, draw: Drawer) -> Door:
    logits, labels = draw(draw.tokens, shape.vocab), draw.labels(shape.vocab)
    return Door(
        [logits, labels],
        ours=kernels.cross_entropy,
        eager=F.cross_entropy,
        liger=_liger("liger_cross_entropy"),
        others={"quack": cute_ops.cross_entropy},
        whole=True,  # Liger writes the gradient in the forward
    )


def linear_cross_entropy(shape: Shape, draw: Drawer) -> Door:
    x, weight = draw(draw.tokens, shape.hidden), draw(shape.vocab, shape.hidden, scale=shape.hidden**-0.5)
    return Door(
        [x, weight, draw.labels(shape.vocab)],
        ours=kernels.linear_cross_entropy,
        eager=lambda x, w, labels: F.cross_entropy((x @ w.t()).float(), labels),
        liger=_liger("liger_fused_linear_cross_entropy"),
        others={"quack": cute_ops.linear_cross_entropy},
        whole=True,
    )


def into_main_grad(door: Door) -> Prepared:
    """linear_cross_entropy as the trainer calls it: the weight's gradient is added to `weight.main_grad`, the trainer's fp32
    accumulator, which lies there before and after; the loss's factor is given beforehand. Returns what `door.both` returns.
    """
    x, weight, labels = door.inputs
    main, one = torch.zeros_like(weight, dtype=torch.float32), torch.ones((), device=x.device)

    def prepare() -> list[Tensor]:
        main.zero_()
        return door.fresh()

    def run(_: list[Tensor]) -> tuple[Tensor, ...]:
        weight.main_grad = main  # type: ignore[attr-defined]
        try:
            loss = kernels.linear_cross_entropy(x, weight, labels, grad_scale=one)
            (dx,) = torch.autograd.grad(loss, [x])
        finally:
            del weight.main_grad  # type: ignore[attr-defined]
        return loss, dx, main

    return Prepared(prepare, run)


def gated_mlp(shape: Shape, draw: Drawer) -> Door:
    """The products of an MLP and the SwiGLU between them, as its layer calls them in training."""
    x = draw(draw.tokens, shape.hidden)
    gate_up = draw(2 * shape.intermediate, shape.hidden, scale=shape.hidden**-0.5)
    down = draw(shape.hidden, shape.intermediate, scale=shape.intermediate**-0.5)

    def eager(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, down)

    def ours(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        y = DENSE.gated(x, *(Joined(weight.detach(), None, [weight], ()) for weight in (gate_up, down)), least=0)
        return gated_down(F.linear(x, gate_up), down) if y is None else y

    return Door(
        [x, gate_up, down],
        ours=ours,
        eager=eager,
        others={"quack": cute_ops.gated_mlp, "quack-untuned": partial(cute_ops.gated_mlp, tuned=False)},
    )


def attention(shape: Shape, draw: Drawer) -> Door:
    """Causal attention of grouped heads, as the layers call it in training."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (draw(draw.batch, draw.seq, of_one, shape.head_dim) for of_one in heads)
    hidden = torch.ones(draw.seq, draw.seq, dtype=torch.bool, device=draw.device).triu(1)
    scale = shape.head_dim**-0.5

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, scale)

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As written out before SDPA: all scores in memory."""
        k, v = (t.repeat_interleave(shape.heads // shape.kv_heads, dim=2).transpose(1, 2) for t in (k, v))
        scores = (q.transpose(1, 2) @ k.transpose(2, 3)).mul(scale).masked_fill(hidden, float("-inf"))
        weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        return (weights @ v).transpose(1, 2)

    return Door([q, k, v], ours=ours, eager=eager, others={"flash-attn-4": partial(cute_ops.attention, scale=scale)})


DOORS: dict[str, Callable[[Shape, Drawer], Door]] = {
    build.__name__: build
    for build in (
        rms_norm,
        add_rms_norm,
        layer_norm,
        group_norm,
        dynamic_tanh,
        rope,
        rope_qkv,
        swiglu,
        swiglu_packed,
        geglu,
        richards_glu,
        cross_entropy,
    )
}
