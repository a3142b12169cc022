"""Memory of one GPU at the peak of a step, part by part.

The peak is either in the loss, where all activations and a chunk of logits exist, or where backward begins, with the gradients
of the last block.

h hidden, f the MLP's inner width, s bytes of a number; q and kv the widths of all query heads and of all keys.
"""

from ..device import CONTEXT
from ..kernels.nf4 import CHUNK as QUANTISED
from ..kernels.quantize import MULTIPLE
from ..layers.linear_product import KEEP_ALL, LEAST_BYTES
from ..train.objectives.chunked_head import CHUNK
from ..train.offload import PART
from .gpus import GIB
from .step import StepConfig

FP32 = 4  # bytes: statistics that norms and attention save of a row
COMMUNICATOR = int(0.7 * GIB)  # assumption: NCCL's buffers, outside of it, too
WORKSPACES = int(0.3 * GIB)  # assumption: of cuBLAS and cuDNN, and the update's partial sums
LAUNCHED = int(0.11 * GIB)  # of what was launched so far, such as cuBLAS's workspace: measured on an H200
PLACING = int(0.105 * GIB)  # the same while a model is placed, with the activations of a few tokens
QUANTISING = 16  # bytes of an element of a weight's part that is widened to fp32 (kernels/nf4.py)
SLACK = 0.03  # assumption: of what a step allocates and frees, the allocator reserves so much more
# Of frozen weights: each is packed or quantised by itself, and leaves gaps between those that stay. Adapters of 8b on an H200
# reserved 0.9 GiB more than they allocated, and on an nf4 base 0.8.
FRAGMENTS, FRAGMENTS_QUANTISED = 0.03, 0.15
OUTSIDE = ("CUDA context", "NCCL buffers")  # not in torch.cuda.memory_reserved()


def memory(step: StepConfig) -> dict[str, int]:
    """Return bytes by part."""
    parts = _state(step) | _gathered(step)
    parts["activations"] = saved(step)
    passing = {"logits and loss": _loss(step), "gradients within a block": _block_backward(step)}
    highest = max(passing, key=lambda name: passing[name])
    parts[highest] = passing[highest]
    parts["allocator's slack"] = int(SLACK * (parts["activations"] + parts[highest]))
    parts["workspaces"] = WORKSPACES
    parts["CUDA context"] = CONTEXT
    parts["NCCL buffers"] = COMMUNICATOR if step.world > 1 else 0
    return {name: size for name, size in parts.items() if size}


def total(step: StepConfig) -> int:
    return sum(memory(step).values())


def _state(step: StepConfig) -> dict[str, int]:
    """Return what lasts from step to step: the flat buffers, by their own count, and frozen weights."""
    layout, numbers, layers = step.layout, step.numbers, step.config.layers
    masters = numbers.masters if not step.sharded or step.adapters is not None else None
    parts = layout.bytes(masters) | {"moments": step.optimizer.moment_bytes(layout)}
    if step.offload:
        passing = in_host_memory(step) * min(PART, layout.size) // layout.size
        parts |= {"masters": 0, "moments": 0, "buffers of offloaded state": 2 * passing}
    if step.in_backward and step.adapters is None:
        parts["gradient"] = FP32 * (step.block_parameters + step.config.vocabulary * step.config.hidden)
    parts["average of the weights"] = 4 * layout.size if step.average else 0
    if step.adapters is None:
        parts["weights in 8 bits"] = 2 * layers * step.block_parameters if numbers.fp8 else 0
        return parts
    share = FRAGMENTS if step.adapters.base is None else FRAGMENTS_QUANTISED
    fragments = share * layers * step.adapters.frozen_bytes if step.captured and not step.sharded else 0
    return {
        "frozen weights": -(-_frozen(step) // (step.world if step.sharded else 1)),
        "scales of quantised weights": layers * step.adapters.scale_bytes,
        "adapters": parts.pop("weights"), **parts, "fragmentation of frozen weights": int(fragments),
    }  # fmt: skip


def in_host_memory(step: StepConfig) -> int:
    """Return the bytes of moments and masters that the step holds in host memory."""
    if not step.offload:
        return 0
    return step.layout.bytes(step.numbers.masters)["masters"] + step.optimizer.moment_bytes(step.layout)


def _frozen(step: StepConfig) -> int:
    assert step.adapters is not None
    return step.config.layers * step.adapters.frozen_bytes + step.itemsize * step.other_parameters


def _gathered(step: StepConfig) -> dict[str, int]:
    """Return what fsdp gathers for a while: this block, the next, and the weights outside of blocks. And every gradient, where
    these are summed after the last micro-batch."""
    if not step.sharded or step.world == 1:
        return {}
    if step.adapters is not None:
        return {"gathered weights": 2 * step.adapters.frozen_bytes + step.itemsize * step.other_parameters}
    gathered = 2 * step.block_parameters + step.other_parameters
    waiting = step.parameters if step.sum_once else 0
    return {"gathered weights": step.itemsize * gathered, "gradients before their sum": FP32 * (gathered + waiting)}


def saved_by_block(step: StepConfig, least: float = LEAST_BYTES) -> int:
    """Return the bytes that one block saves for backward. `least` as in layers/linear_product.py."""
    c, s, tokens = step.config, step.itemsize, step.tokens
    h, f, q, kv = c.hidden, c.intermediate, c.heads * c.head_dim, c.kv_heads * c.head_dim
    if step.recompute == "none":
        least = KEEP_ALL
    row = 2 * (h * s + FP32)  # both norms: their input and its scale
    row += (q + 2 * kv) * s + q * s + c.heads * FP32 + 2 * f * s  # attention's inputs and output; gate and up
    if c.qk_norm:
        row += 2 * (q + kv) * s + (c.heads + c.kv_heads) * FP32
    if step.adapters is not None:  # a frozen weight needs no input, but its adapter does, and x aᵀ
        ranks = step.adapters.ranks
        read = [(("q_proj", "k_proj", "v_proj"), h), (("gate_proj", "up_proj"), h), (("down_proj",), f)]
        row += sum(width * s for names, width in read if any(ranks[n] for n in names) and tokens * width * s < least)
        row += sum(ranks.values()) * s
    elif step.numbers.fp8 and tokens % MULTIPLE == 0:
        row += h + q + h + f  # inputs of products, in 8 bits
    else:
        row += sum(count * width * s for count, width in ((2, h), (1, f)) if tokens * width * s < least)
    return tokens * row


def saved(step: StepConfig, least: float = LEAST_BYTES) -> int:
    """Return the bytes that the model's forward saves for backward."""
    again, a_row = step.recomputed, step.tokens * step.config.hidden * step.itemsize
    blocks = (step.config.layers - again) * saved_by_block(step, least)
    inputs = (2 * again - 1) * a_row if again else 0  # of recomputed blocks: the stream, and what is still to be added to it
    return blocks + inputs + 2 * a_row + step.tokens * FP32  # last norm and head, whose own gradient is computed in forward


def _loss(step: StepConfig) -> int:
    """Return the bytes of the head's input and of a chunk's logits, which become their own gradient in place."""
    c, s, tokens = step.config, step.itemsize, step.tokens
    return s * (tokens * c.hidden + min(CHUNK, tokens) * (-(-c.vocabulary // 64) * 64))


def _block_backward(step: StepConfig) -> int:
    """Return the bytes of one block's gradients at their largest, in the MLP, and of its activations where it is recomputed."""
    c, s, tokens = step.config, step.itemsize, step.tokens
    h, f = c.hidden, c.intermediate
    again = saved_by_block(step) if step.recomputed == c.layers else 0
    if step.adapters is None:
        recomputes = tokens * f * s >= LEAST_BYTES and step.recompute != "none" and not step.sharded
        # Of the result, of gate and up, the result again; but for fp8 these are in memory that is no longer needed.
        widest = 3 if not recomputes else 4 if step.numbers.fp8 else 1
        return again + tokens * s * (2 * h + widest * f)
    widest = tokens * s * 3 * f
    if step.adapters.base is not None:  # gate and up, and their weight dequantised; in fp8 transposed, with a rounded gradient
        weight = 2 * f * (h + tokens) if step.fp8_base else 2 * f * h * s
        widest = max(widest, tokens * s * 2 * f + weight)
    return again + tokens * s * 2 * h + widest


def phases(step: StepConfig, stored: int) -> dict[str, int]:
    """Return the peak bytes of torch's allocator in each phase of a run on one GPU; a model in shards is not placed there.

    stored  bytes of a number of the placed model

    Placing verifies the model with the gradient of one weight at a time next to that of gate and up, and a block's MLP in
    fp32, by the gradients of its three weights and one of these. Making the step moves trained weights before it makes
    moments. The first step takes what all others do.
    """
    c, h, f = step.config, step.config.hidden, step.config.intermediate
    weights, largest = stored * step.parameters, stored * c.vocabulary * h
    if step.adapters is not None and step.adapters.base is not None:  # quantised as they are read: they have no gradients
        weights = _frozen(step)
        largest = max(largest, QUANTISING * min(QUANTISED, h * f) + stored * h * f)
    state = sum(size for name, size in _state(step).items() if not name.startswith("fragmentation"))
    moved = 0 if step.adapters is not None else sum(_state(step).get(n, 0) for n in ("weights", "masters", "gradient"))
    # Offloaded, the weights have left for host memory before, and return individually.
    moving = moved + (stored * c.vocabulary * h if step.offload else weights) if moved else 0
    steps = reserved(memory(step))
    before = {
        "place": weights + max(largest, 4 * FP32 * h * f) + 2 * stored * h * f + PLACING,
        "make step": max(state, moving) + LAUNCHED,
    }
    return {} if step.sharded else before | {"first step": steps, "steps": steps}


def reserved(parts: dict[str, int]) -> int:
    """Return what torch.cuda.memory_reserved() shows of them."""
    return sum(size for name, size in parts.items() if name not in OUTSIDE)
