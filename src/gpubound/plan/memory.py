"""The memory of one GPU at the peak of a step, part by part.

Weights, masters, gradient and moments are the flat buffers' own counts. The peak is either in the loss, when everything is kept
and a chunk of logits lies beside it, or where backward begins, when the last block's gradients do.
"""

from functools import singledispatch

from ..layers.recompute import LEAST_BYTES
from ..train.objectives.word_loss import CHUNK
from .kept import block_keeps, model_keeps
from .setting import Setting

GIB = 1 << 30
CONTEXT = int(0.6 * GIB)  # assumption: CUDA's context and the kernels loaded into it; the allocator does not count them
COMMUNICATOR = int(0.7 * GIB)  # assumption: NCCL's own buffers, where there is more than one rank
WORKSPACES = int(0.2 * GIB)  # assumption: of cuBLAS and cuDNN, and the update's partial sums
SLACK = 0.03  # assumption: of what comes and goes in a step, the allocator holds so much more
OUTSIDE = ("CUDA context", "NCCL buffers")  # of no allocator: torch.cuda.memory_reserved() does not show them


def memory(setting: Setting) -> dict[str, int]:
    """Bytes by part."""
    parts = held(setting) | gathered(setting)
    parts["kept for backward"] = sum(model_keeps(setting).values())
    passing = {"logits and loss": in_loss(setting), "gradients within a block": in_block(setting)}
    highest = max(passing, key=lambda name: passing[name])
    parts[highest] = passing[highest]
    parts["allocator's slack"] = int(SLACK * (parts["kept for backward"] + parts[highest]))
    parts["workspaces"] = WORKSPACES
    parts["CUDA context"] = CONTEXT
    parts["NCCL buffers"] = COMMUNICATOR if setting.world > 1 else 0
    return {name: size for name, size in parts.items() if size}


@singledispatch
def held(setting: Setting) -> dict[str, int]:
    """What stays from step to step."""
    layout, numbers, c = setting.layout, setting.numbers, setting.config
    parts = layout.bytes(numbers.masters and not setting.sharded) | {"moments": setting.optimizer.moment_bytes(layout)}
    parts["average of the weights"] = 4 * layout.size if setting.average else 0
    parts["weights in 8 bits"] = 2 * c.layers * setting.outline.in_block if numbers.fp8 else 0
    return parts


def reserved(parts: dict[str, int]) -> int:
    """What torch.cuda.memory_reserved() shows of them."""
    return sum(size for name, size in parts.items() if name not in OUTSIDE)


@singledispatch
def gathered(setting: Setting) -> dict[str, int]:
    """What fully sharded ranks hold whole for a while: this block and the next, and what lies outside of blocks. And every
    gradient, where these wait for the last micro-batch."""
    if not setting.sharded or setting.world == 1:
        return {}
    s, outline = setting.numbers.dtype.itemsize, setting.outline
    together = 2 * outline.in_block + outline.outside
    waiting = outline.parameters if setting.once else 0
    return {"gathered weights": s * together, "gradients before they are summed": 4 * (together + waiting)}


def in_loss(setting: Setting) -> int:
    """The head's input, and a chunk's logits, which become their own gradient in place."""
    c, s, tokens = setting.config, setting.numbers.dtype.itemsize, setting.tokens
    words = -(-c.vocabulary // 64) * 64
    return s * (tokens * c.hidden + min(CHUNK, tokens) * words)


@singledispatch
def in_block(setting: Setting) -> int:
    """One block's gradients at their widest, in the MLP; and the block's own kept tensors, where it is computed again."""
    c, s, tokens = setting.config, setting.numbers.dtype.itemsize, setting.tokens
    again = tokens * c.intermediate * s >= LEAST_BYTES and setting.recompute != "none" and not setting.sharded
    wide = 4 if again else 3  # of the result, of gate and up, and the result once more
    made = sum(block_keeps(setting).values()) if setting.recomputed == c.layers else 0
    return made + tokens * s * (2 * c.hidden + wide * c.intermediate)
