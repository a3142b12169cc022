"""The decoder's loop. The residual add lives inside the next norm, across the borders of sub-layers and blocks.

A pre-norm block is x += attention(norm(x)); x += mlp(norm(x)). Written so, each add is a pass over memory of its own. Here
a sub-layer's result stays *pending* until the next norm, which adds and norms in one pass; the last one is taken up by the
final norm.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..device import constant
from ..trace import fallback
from .attention import Rope
from .fused_weights import Projecting, hooked
from .norm import RMSNorm


class Block(nn.Module):
    """A pre-norm decoder block, its children named as Hugging Face names them."""

    gradient_checkpointing = False
    apart = False  # whether the blocks of its model are on several devices
    gathered: Any = None  # runs a function with the block's weights there, where ranks share them (parallel/sharded.py)

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

    def forward(self, x: Tensor, rope: Rope | None, mask: Tensor | None = None) -> Tensor:
        x, pending = run_block(self, x, None, rope, mask)
        return x + pending.to(x.dtype)


def run_block(
    block: Any, x: Tensor, pending: Tensor | None, rope: Rope | None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One block on the stream (x, what is still to be added to it). `block` has the children of `Block`."""
    children = block._modules
    attention, mlp = children["self_attn"], children["mlp"]
    y, x = normed_for(attention, children["input_layernorm"], x, pending)
    y, x = normed_for(mlp, children["post_attention_layernorm"], x, mixed(attention, y, rope, mask))
    return x, mixed(mlp, y)


def normed_for(part: Any, norm: Any, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor]:
    """norm.add(x, pending), whose norm `part` reads."""
    if heard(norm):
        x = added(x, pending)
        return norm(x), x
    if isinstance(norm, RMSNorm) and rounds(part, x, pending):
        return norm.add(x, pending, rounds=True)
    return norm.add(x, pending)


def mixed(part: Any, *inputs: Any) -> Tensor:
    """part.mix(*inputs); called, where hooks are to run or another forward."""
    return part(*inputs) if heard(part) else part.mix(*inputs)


def heard(module: Any) -> bool:
    """Return whether it must be called, so that its hooks or another forward run. Hooks of sharders and of this package do not
    count: the loop does their work."""
    kind: Any = type(module)
    if outdone(kind):
        return True
    return hooked(module, but=getattr(module, "gathers", ())) and not getattr(module, "apart", False)


@constant
def outdone(kind: Any) -> bool:
    """Return whether it is a user's subclass of one of our modules with its own forward, which the loop would step past. The
    classes that placing makes are not: they stand in for their module's forward."""
    return _outdone(kind)


@cache
def _outdone(kind: Any) -> bool:
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
    """A block that carries hooks, which see all that goes in and comes out. `step` may be told more, as a time is."""
    told = step.keywords if isinstance(step, partial) else {}
    return block(added(x, pending), rope, mask, **told), None


def rounds(part: Any, x: Tensor, pending: Tensor | None) -> bool:
    """Return whether autocast is on, and the part's products would round a norm to the dtype of `pending`.

    Then the norm reads and writes 16 bits, and nothing is cast before it and behind it: of 28 bytes a number that forward
    moves 12 stay, and of 28 that backward moves 20.
    """
    if pending is None or x.dtype != torch.float32 or torch.compiler.is_compiling():
        return False
    device = pending.device.type
    if not torch.is_autocast_enabled(device) or pending.dtype != torch.get_autocast_dtype(device):
        return False
    return isinstance(part, Projecting) and part.rounds()


def run_blocks(
    blocks: Iterable[Any], final_norm: Any, x: Tensor, rope: Any, mask: Any = None, step: Callable = run_block
) -> Tensor:
    """All blocks and the final norm: x (B, T, hidden) -> (B, T, hidden). `step` runs other blocks as `run_block` does."""
    pending = None
    for block in blocks:
        if getattr(block, "apart", False):
            x, pending, rope, mask = brought(block, (x, pending, rope, mask))
        gathered = getattr(block, "gathered", None)
        one: Callable = step if gathered is None else partial(gathered, step)
        if gathered is None and heard(block):
            one = partial(called, step)
        if block.gradient_checkpointing and block.training:
            again = partial(one, block, rope=rope, mask=mask)
            x, pending = block._gradient_checkpointing_func(again, x, pending)
        else:
            x, pending = one(block, x, pending, rope, mask)
    if getattr(final_norm, "apart", False):
        x, pending = brought(final_norm, (x, pending))
    return normed_for(None, final_norm, x, pending)[0]


def brought(module: Any, value: Any) -> Any:
    """Tensors, also in tuples and dicts, on the device where the module's weights are."""
    return sent(value, next(module.parameters()).device)


def sent(value: Any, device: torch.device) -> Any:
    """Tensors, also in tuples and dicts, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) is dict:
        return {key: sent(one, device) for key, one in value.items()}
    return tuple(sent(one, device) for one in value) if type(value) is tuple else value
