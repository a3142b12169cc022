"""RMSNorm, the gated MLP, and the decoder's blocks. The residual add is part of the next norm, across sub-layers and blocks.

A pre-norm block is x += attention(norm(x)); x += mlp(norm(x)). Written so, each add is a separate pass over memory. Here a
sub-layer's result stays *pending* until the next norm, which adds and norms in one pass; the final norm adds the last one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..device import constant
from ..kernels import add_rms_norm, rms_norm, swiglu, swiglu_backward
from ..kernels.accumulate import deliver, weight_gradient
from ..kernels.dispatch import Call, transformed
from ..kernels.gated import PRODUCT, gated
from ..trace import fallback
from .fused_weights import Kernels, Projecting, Stacked, bare, hooked, run_linear
from .linear_product import (
    DENSE,
    LEAST_BYTES,
    VERSION,
    Joined,
    attach_recipe,
    changed_in_place,
    check_dtypes,
    format_of,
    multiply,
)
from .packed_attention import Segments

if TYPE_CHECKING:
    from .attention import Mask, Rope


class RMSNorm(nn.Module):
    """RMSNorm: y = x / sqrt(mean(x²) + eps) · (weight + offset).

    `add` adds the last sub-layer's result to the residual stream and norms the sum, in one pass over memory.
    """

    OPS = ("rms_norm", "add_rms_norm")

    offset: float = 0.0  # 1 for Gemma, whose gain is weight + 1
    eps: float
    recompute_bytes = LEAST_BYTES

    def __init__(self, hidden: int, eps: float = 1e-6, device=None, dtype=None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight  # once: a parametrization computes it
        y = rms_norm(x, weight, self.eps, self.offset)
        return attach_recipe(y, self.recompute_bytes, partial(rms_norm, eps=self.eps, offset=self.offset), x, weight)

    def add(self, x: Tensor, pending: Tensor | None, rounds: bool = False) -> tuple[Tensor, Tensor]:
        """Return (norm of the new stream, the new stream); the stream stays x when nothing is pending.

        rounds: return the norm in the dtype of `pending`, to which its readers would round it
        """
        if pending is None:
            return self.forward(x), x
        if pending.dtype != x.dtype and not rounds:  # autocast: products give 16 bits, the stream stays fp32
            pending = pending.to(x.dtype)
        weight: Any = self.weight  # once: a parametrization computes it
        y, stream = add_rms_norm(x, pending, weight, self.eps, self.offset)
        if y.dtype != stream.dtype:  # saved for backward, as torch's autocast saves its cast: recomputation would read fp32
            return y, stream
        op = partial(rms_norm, eps=self.eps, offset=self.offset)
        return attach_recipe(y, self.recompute_bytes, op, stream, weight), stream

    def fused_kernels(self) -> Kernels:
        return "{}", self.OPS

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class MLP(Projecting):
    """Gate and up as one product, the activation and the multiplication as one kernel, then down."""

    PROJECTIONS: tuple[str, ...] = ("gate_proj", "up_proj")  # together [gate | up]

    activation: str = "silu"
    recompute_bytes = LEAST_BYTES

    def __init__(
        self, hidden: int, intermediate: int, bias: bool = False, activation: str = "silu", device=None, dtype=None
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"MLP: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
        where = {"device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias, **where)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias, **where)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias, **where)
        self.activation = activation
        self.stacked = Stacked()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)

    def mix(self, x: Tensor) -> Tensor:
        down: Any = self._modules["down_proj"]
        gates = self.stacked.joined(self.projections())
        if gates is None:
            packed = tuple(self.one_by_one(x))
        else:
            trained = trained_weight(down) if self.activation == "silu" and torch.is_grad_enabled() else None
            if trained is not None and not any(gates.adapters):
                down_joined = Joined(trained.detach(), None, [trained], ())
                result = format_of(trained).gated(x, gates, down_joined, self.recompute_bytes)
                if result is not None:
                    return result
            full = multiply(x, gates)
            if trained is not None and full.nbytes // 2 >= self.recompute_bytes and format_of(trained) is DENSE:
                return gated_down(full, trained)
            packed = (full,)
        y = gated(self.activation, *packed)
        return run_linear(down, attach_recipe(y, self.recompute_bytes, partial(gated, self.activation), *packed))

    def fused_kernels(self) -> Kernels:
        return f"{self.product_words('gate and up')}; {{}}", ("swiglu" if self.activation == "silu" else "geglu",)


def gated_calls(activation: str | None, inner: int) -> tuple[Call, ...]:
    """Return the ops that an MLP of width `inner` will call, so that a first step compiles their kernels in parallel."""
    if activation == "silu":
        products = ("swiglu_product", PRODUCT), ("swiglu_product_backward", PRODUCT)
        return *products, ("swiglu", (inner, True)), ("swiglu_backward", (inner,))
    return (("geglu", (inner, True)),)


def trained_weight(down: Any) -> Tensor | None:
    """Return the weight of `down` if it trains and calling `down` computes its product alone."""
    weight = down._parameters["weight"] if bare(down) and down._parameters["bias"] is None else None
    return weight if weight is not None and weight.requires_grad else None


class Unit:
    """Gated unit between the products of an MLP, applied to packed [gate | up]. This one is SwiGLU.

    `small` are its parameters, such as those of curves: small tensors, or None.
    """

    def forward(self, packed: Tensor, *small: Tensor | None) -> Tensor:
        return swiglu(packed)

    def backward(
        self, dh: Tensor, packed: Tensor, *small: Tensor | None, overwrite: bool = False
    ) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        """Return (gradient of packed, forward's result again, the gradients of `small`), with `overwrite` perhaps in the memory
        of the first two arguments."""
        return *swiglu_backward(dh, packed, overwrite), ()


SWIGLU = Unit()


def gated_down(packed: Tensor, weight: Tensor, unit: Unit = SWIGLU, small: Sequence[Tensor | None] = ()) -> Tensor:
    """Return unit(packed) weightᵀ, saving neither the unit's result nor its intermediate results."""
    check_dtypes(packed, weight)
    if transformed():  # torch.func cannot trace _GatedDown
        return F.linear(unit.forward(packed, *small), weight)
    return _GatedDown.apply(packed, weight.detach(), weight, unit, *small)


class _GatedDown(torch.autograd.Function):
    """The Parameters are kept on ctx for their main_grad, as in layers/linear_product.py."""

    @staticmethod
    def forward(ctx, packed, plain, weight, unit, *small):
        ctx.save_for_backward(packed)
        ctx.plain, ctx.unit, ctx.small = plain, unit, small
        ctx.parameters = [p for p in (weight, *small) if p is not None]
        ctx.versions = [*map(VERSION, ctx.parameters)]
        return unit.forward(packed, *small) @ plain.to(packed.dtype).t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (packed,) = ctx.saved_tensors
        if [*map(VERSION, ctx.parameters)] != ctx.versions:
            raise changed_in_place()
        # The last backward of a graph needs its saved tensors no longer. The peak of a step is here: by three times h less.
        last = not torch._C._autograd._get_current_graph_task_keep_graph()
        dh = g @ ctx.plain.to(g.dtype)
        gradient, h, of_small = ctx.unit.backward(dh, packed, *ctx.small, overwrite=last)
        del dh
        wanted = ctx.needs_input_grad[4:]
        small = [deliver(p, d) if want else None for p, d, want in zip(ctx.small, of_small, wanted)]
        dw = weight_gradient(ctx.parameters[0], g.reshape(-1, g.shape[-1]), h.reshape(-1, h.shape[-1]))
        return gradient, None, dw, None, *small


class Block(nn.Module):
    """A pre-norm decoder block, its children named as Hugging Face names them."""

    gradient_checkpointing = False
    apart = False  # whether the blocks of its model are on several devices
    gathered: Any = None  # runs a function with the block's weights gathered, where ranks shard them (distributed/fsdp.py)

    def __init__(
        self,
        attention: Any,
        mlp: Any,
        hidden: int,
        eps: float = 1e-6,
        device=None,
        dtype=None,
        norm: Callable = RMSNorm,
    ) -> None:
        """`attention` and `mlp` are parts with a `mix`; `norm` makes another norm with RMSNorm's two methods."""
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm = norm(hidden, eps, device=device, dtype=dtype)
        self.post_attention_layernorm = norm(hidden, eps, device=device, dtype=dtype)

    def forward(self, x: Tensor, rope: "Rope | None", mask: "Mask" = None) -> Tensor:
        x, pending = run_block(self, x, None, rope, mask)
        return x + pending.to(x.dtype)


def run_block(block: Any, x: Tensor, pending: Tensor | None, rope: "Rope | None", mask: "Mask" = None) -> tuple[Tensor, Tensor]:
    """Run a block on the stream (x, its pending addend). `block` has the children of `Block`."""
    children = block._modules
    attention, mlp = children["self_attn"], children["mlp"]
    y, x = normed_for(attention, children["input_layernorm"], x, pending)
    y = attention(y, rope, mask) if must_be_called(attention) else attention.mix(y, rope, mask)
    y, x = normed_for(mlp, children["post_attention_layernorm"], x, y)
    return x, mlp(y) if must_be_called(mlp) else mlp.mix(y)


def normed_for(part: Any, norm: Any, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return norm.add(x, pending), whose norm `part` reads."""
    if must_be_called(norm):
        x = added(x, pending)
        return norm(x), x
    if pending is not None and pending.dtype != x.dtype and isinstance(norm, RMSNorm) and rounds(part, x, pending):
        return norm.add(x, pending, rounds=True)
    return norm.add(x, pending)


def must_be_called(module: Any) -> bool:
    """Return whether the module must be called, so that its hooks or another forward run. Hooks of sharding and of this package
    do not count: the loop does their work."""
    kind: Any = type(module)
    if has_other_forward(kind):
        return True
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if not hooks and "forward" not in module.__dict__:
        return False
    return hooked(module, but=getattr(module, "gathers", ())) and not getattr(module, "apart", False)


@constant
def has_other_forward(kind: Any) -> bool:
    """Return whether the class is a user's subclass of one of our modules with its own forward, which the loop would skip. The
    classes of swapped modules are not."""
    return _has_other_forward(kind)


@cache
def _has_other_forward(kind: Any) -> bool:
    if hasattr(kind, "forwards"):
        return False
    at = next(i for i, base in enumerate(kind.__mro__) if "forward" in vars(base))
    own, below = kind.__mro__[at], kind.__mro__[at + 1 :]
    theirs = not own.__module__.startswith("gpubound.") and not {"mix", "add"} & vars(own).keys()
    return theirs and any(base.__module__.startswith("gpubound.") for base in below)


def added(x: Tensor, pending: Tensor | None) -> Tensor:
    """Return the stream that hooks see: the add is a separate pass."""
    if pending is None:
        return x
    if not torch.compiler.is_compiling():  # the compiler does its own fusing
        fallback("layers: the residual add in a norm", "hooks on the norm or its block are to see the stream")
    return x + pending.to(x.dtype)


def called(
    step: Callable, block: Any, x: Tensor, pending: Tensor | None, rope: Any, mask: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Call a block that carries hooks, which see its inputs and outputs, with the keywords of `step`, such as a time."""
    keywords = step.keywords if isinstance(step, partial) else {}
    return block(added(x, pending), rope, mask, **keywords), None


class StreamBefore:
    """A forward pre-hook that keeps the stream before a block. `run_blocks` gives it the stream, and does not call the block
    for it."""

    in_loop = True  # no hook to layers/fused_weights.py
    x: Tensor

    def __call__(self, block: Any, arguments: tuple, keywords: dict[str, Any]) -> None:
        self.x = arguments[0] if arguments else keywords["hidden_states"]


def rounds(part: Any, x: Tensor, pending: Tensor) -> bool:
    """Return whether autocast is on, and the part's products would round a norm to the dtype of `pending`.

    Then the norm reads and writes 16 bits, without casts: forward moves 12 bytes an element instead of 28, and backward 20
    instead of 28.
    """
    if x.dtype != torch.float32 or torch.compiler.is_compiling():
        return False
    device = pending.device.type
    if not torch.is_autocast_enabled(device) or pending.dtype != torch.get_autocast_dtype(device):
        return False
    return isinstance(part, Projecting) and part.rounds()


def run_blocks(
    blocks: Iterable[Any], final_norm: Any, x: Tensor, rope: Any, mask: Any = None, step: Callable = run_block
) -> Tensor:
    """Run all blocks and the final norm: x (B, T, hidden) -> (B, T, hidden). step: a replacement of `run_block`"""
    pending = None
    for block in blocks:
        if getattr(block, "apart", False):
            x, pending, rope, mask = to_device_of(block, (x, pending, rope, mask))
        for hook in block._forward_pre_hooks.values():
            if isinstance(hook, StreamBefore):
                x, pending = x if pending is None else x + pending.to(x.dtype), None
                hook.x = x
        gathered = getattr(block, "gathered", None)
        one: Callable = step if gathered is None else partial(gathered, step)
        if gathered is None and must_be_called(block):
            one = partial(called, step)
        if block.gradient_checkpointing and block.training:
            run = partial(one, block, rope=rope, mask=mask)
            x, pending = block._gradient_checkpointing_func(run, x, pending)
        else:
            x, pending = one(block, x, pending, rope, mask)
    if getattr(final_norm, "apart", False):
        x, pending = to_device_of(final_norm, (x, pending))
    return normed_for(None, final_norm, x, pending)[0]


def to_device_of(module: Any, value: Any) -> Any:
    """Move tensors, also in tuples and dicts, to the device of the module's weights."""
    return to_device(value, next(module.parameters()).device)


def to_device(value: Any, device: torch.device) -> Any:
    """Move tensors, also in tuples and dicts, to a device."""
    if isinstance(value, Tensor | Segments):
        return value.to(device)
    if type(value) is dict:
        return {key: to_device(one, device) for key, one in value.items()}
    return tuple(to_device(one, device) for one in value) if type(value) is tuple else value


@contextmanager
def visiting(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Compute modules on another kind of device on `device` inside. Their weights are there for their call, and outputs return.

    So the forward of a model that no device has memory for takes as long as its weights are copied.
    """
    others = [module for module in modules if next(module.parameters()).device.type != device.type]
    with ExitStack() as hooks:
        for handle in (handle for module in others for handle in _visit(module, device)):
            hooks.enter_context(handle)
        yield


def _visit(module: nn.Module, device: torch.device) -> tuple[Any, Any]:
    """Register the hooks of `visiting` on a module."""
    home = next(module.parameters()).device
    saved: list[tuple[dict, dict]] = []  # registries of tensors by name, and their contents

    def begin(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        for part in module.modules():
            registries: tuple[dict[str, Any], ...] = part._parameters, part._buffers
            for registry in registries:
                saved.append((registry, dict(registry)))
                registry.update({name: None if t is None else t.to(device) for name, t in registry.items()})
        return to_device_of(module, args), to_device_of(module, kwargs)

    def end(module: nn.Module, args: tuple, output: Any) -> Any:
        """Restore the weights, also after a call that failed and has no output."""
        while saved:
            registry, tensors = saved.pop()
            registry.update(tensors)
        return to_device(output, home)

    return module.register_forward_pre_hook(begin, with_kwargs=True), module.register_forward_hook(end, always_call=True)
