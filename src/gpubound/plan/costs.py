"""Memory of one GPU at the peak of a step, part by part; time of a step, part by part, and what the ranks send each other.

The peak is either in the loss, where all activations and a chunk of logits exist, or where backward begins, with the gradients
of the last block.

Products and attention take their operations at the rate that they reach, everything else its bytes at the memory's rate. Each
kernel costs a little more than its work. Only that little (RAMP_US, ADAPTER_US) was fitted to whole steps.

h hidden, f the MLP's inner width, s bytes of a number; q and kv the widths of all query heads and of all keys.
"""

import math
from dataclasses import dataclass

from ..device import CONTEXT
from ..kernels.gated import LEAST_ROWS
from ..kernels.quantize import CHUNK as QUANTISED, MULTIPLE
from ..layers.linear_product import KEEP_ALL, LEAST_BYTES
from ..train.adamw import AdamW8bit, Muon
from ..train.objectives.chunked_head import CHUNK
from ..train.offload import PART
from .step import GIB, HOP_US, LINK, NVLINK, PRODUCTS, GpuRates, StepConfig, layer_shapes

FP32 = 4  # bytes: statistics that norms and attention save of a row
COMMUNICATOR = int(0.7 * GIB)  # assumption: NCCL's buffers, outside of it, too
WORKSPACES = int(0.3 * GIB)  # assumption: of cuBLAS and cuDNN, and the update's partial sums
LAUNCHED = int(0.11 * GIB)  # of what was launched so far, such as cuBLAS's workspace: measured on an H200
PLACING = int(0.105 * GIB)  # the same while a model is placed, with the activations of a few tokens
QUANTISING = 16  # bytes of an element of a weight's part that is widened to fp32 (kernels/quantize.py)
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
        inputs = ((2, h),) if _recomputes_unit(step) else ((2, h), (1, f))
        row += sum(count * width * s for count, width in inputs if tokens * width * s < least)
    return tokens * row


def _recomputes_unit(step: StepConfig) -> bool:
    """Return whether a dense MLP's backward computes the gated activation with a product, whatever else is recomputed."""
    return step.tokens >= LEAST_ROWS and not step.sharded and not step.numbers.fp8


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
        large = tokens * f * s >= LEAST_BYTES and step.recompute != "none" and not step.sharded
        recomputes = large or _recomputes_unit(step)
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


KERNELS = 33  # of a block, forward and backward: 1,004 nodes in the graph of 30 blocks
KERNELS_AGAIN = 9  # more where the block is recomputed
FROZEN_KERNELS = 29  # of a block without weight gradients
EAGER = 4  # assumption: bare launches that the host needs for a kernel of a step that is not captured
RAMP_US = 1.6  # of a kernel's start and end, on top of a graph's node: fitted to a step of 135m, 1,024 tokens
ADAPTER_US = 5.0  # the same of an adapter's kernel: fitted to a step of 135m with adapters, 512 tokens
ADAPTER_HOST_S = 1.3e-3  # of an adapted product, forward and backward, that is not captured: five launches (LOG.md)
FUSED_ADD = 1.035  # a product that adds h bᵀ as it writes y: 349 -> 361 us at 8192 x 4096 x 4096
BACKWARD = 2 / 3  # of a micro-batch's time
LAST_BUCKET = 64 << 20  # bytes that are summed when no backward runs any more
PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
ARITHMETIC, TRAFFIC = ("matrix products", "attention"), "memory traffic"


@dataclass(frozen=True)
class Collective:
    """One call of all ranks, `times` a step, on a tensor of `bytes` in all."""

    what: str
    kind: str
    bytes: int
    times: int

    def sent(self, world: int) -> float:
        """Return the bytes that each rank sends in a step around a ring."""
        return PASSES[self.kind] * (world - 1) / world * self.bytes * self.times

    def seconds(self, world: int) -> float:
        """Return its time in a step. A sum goes up and down a tree where that is shorter."""
        hops = world - 1 if self.kind != "all-reduce" else min(2 * (world - 1), 2 * math.ceil(math.log2(world)))
        return self.sent(world) / NVLINK + self.times * hops * HOP_US * 1e-6


def collectives(step: StepConfig) -> list[Collective]:
    """Return every collective of a step that carries weights or gradients."""
    if step.world == 1:
        return []
    gradient = Collective("gradient", "all-reduce", FP32 * step.trained, 1)
    if not step.sharded:
        return [gradient]
    n, layers, s, other = step.accumulate, step.config.layers, step.itemsize, step.other_parameters
    block = s * step.block_parameters if step.adapters is None else step.adapters.frozen_bytes
    gathers = [
        Collective("weights of a block, forward and backward", "all-gather", block, 2 * layers * n),
        Collective("other weights", "all-gather", s * other, n),
    ]
    if step.adapters is not None:
        return [*gathers, gradient]
    sums = 1 if step.sum_once else n
    return [
        *gathers,
        Collective("gradient of a block", "reduce-scatter", FP32 * step.block_parameters, layers * sums),
        Collective("other gradients", "reduce-scatter", FP32 * other, sums),
    ]


def seconds(step: StepConfig, gpu: GpuRates) -> dict[str, float]:
    """Return seconds of a step by part."""
    c, n, layers, again = step.config, step.accumulate, step.config.layers, step.recomputed
    tokens, lora = n * step.tokens, step.adapters is not None
    head = c.vocabulary * c.hidden
    in_block = (c.product_parameters - head) / layers
    rate, head_rate = gpu.product_rate(step.precision), gpu.product_rate("bf16" if step.numbers.fp8 else step.precision)
    if step.fp8_base:
        rate = gpu.product_rate("fp8")
    elif lora and step.adapters.base is None:  # type: ignore[union-attr]
        rate /= FUSED_ADD
    passes = 4 if lora else 6  # forward, the gradient of the input and, unless it is frozen, that of the weight
    attention = (7 * layers + 2 * again) * step.seq * c.heads * c.head_dim  # of the half that is not masked
    parts = {
        "matrix products": tokens * ((passes * layers + 2 * again) * in_block / rate + passes * head / head_rate),
        "attention": tokens * attention / gpu.attention_rate(c.head_dim, step.seq),
        "activations": tokens * _activation_bytes(step) / gpu.copy,
        "loss": tokens * 4 * c.vocabulary * step.itemsize / gpu.copy,
        "gradient sums": (8 * n if n > 1 else 4) * step.trained / gpu.copy,
        "update": step.layout.size * _update_bytes(step) / gpu.copy + _muon_seconds(step, gpu),
    }
    kernels = layers * (FROZEN_KERNELS if lora else KERNELS) + again * KERNELS_AGAIN
    host = kernels * EAGER * gpu.launch_us * 1e-6
    if lora:
        more, of_adapters = _adapter_parts(step, gpu)
        parts |= more
        kernels += of_adapters
        host += layers * len(_adapted(step)) * ADAPTER_HOST_S
    if step.sharded and step.world > 1:
        parts["copies of shards"] = _shard_copies(step) / gpu.copy
    working = sum(parts.values())
    parts["launches"] = n * kernels * (gpu.node_us + RAMP_US) * 1e-6
    if not step.captured or step.sharded:  # what fully_shard does between blocks is not captured
        parts["launches"] = max(parts["launches"], n * host - working)
    # Offloaded state passes both ways at once: within backward, where that updates the weights, else after it.
    passing = in_host_memory(step) / LINK
    parts["host link"] = max(passing - BACKWARD * working, 0.0) if step.in_backward else passing
    parts["communication"] = _exposed(step, (sum(parts.values()) - parts["update"] - parts["host link"]) / n)
    return {name: value for name, value in parts.items() if value}


def bound_by(parts: dict[str, float]) -> str:
    """Return what takes most of a step: arithmetic, memory traffic, launches, the host link or communication."""
    groups = dict.fromkeys(("arithmetic", TRAFFIC, "launches", "host link", "communication"), 0.0)
    for name, value in parts.items():
        groups["arithmetic" if name in ARITHMETIC else name if name in groups else TRAFFIC] += value
    return max(groups, key=lambda group: groups[group])


def _activation_bytes(step: StepConfig) -> float:
    """Return the bytes a token that norms, rotary positions, the gated activation and fp8's rounding read and write."""
    c, s, layers, again = step.config, step.itemsize, step.config.layers, step.recomputed
    h, f, q, kv = c.hidden, c.intermediate, c.heads * c.head_dim, c.kv_heads * c.head_dim
    forward = 2 * 4 * h + 2 * (q + 2 * kv) + 3 * f
    backward = forward + 2 * f
    if step.recompute != "none" and not step.numbers.fp8:  # recomputed norms and activation; in shards once a layer
        norms, activation = (5, 3) if step.sharded else (2, 3 if step.adapters else 1)
        row = step.tokens * s
        backward += norms * 2 * h * (row * h >= LEAST_BYTES) + activation * f * (row * f >= LEAST_BYTES)
    rounded = 4 * (4 * h + 2 * q + 2 * kv) if step.numbers.fp8 else 0  # read in 16 bits, written twice in 8
    return s * (layers * (forward + backward) + again * forward) + layers * rounded


def _adapted(step: StepConfig) -> list[tuple[int, int, int]]:
    """Return (inputs, outputs, parameters of the adapters) of each product of a block that has adapters."""
    shapes, ranks = layer_shapes(step.config), step.adapters.ranks  # type: ignore[union-attr]
    groups = [[name] for names in PRODUCTS for name in names] if step.sharded else [list(names) for names in PRODUCTS]
    return [
        (shapes[names[0]][0], sum(shapes[n][1] for n in names), sum(ranks[n] * sum(shapes[n]) for n in names))
        for names in groups
        if any(ranks[name] for name in names)
    ]


def _adapter_parts(step: StepConfig, gpu: GpuRates) -> tuple[dict[str, float], int]:
    """Return (seconds of adapters and of a quantised base, kernels of a micro-batch)."""
    assert step.adapters is not None
    n, layers, again, s = step.accumulate, step.config.layers, step.recomputed, step.itemsize
    tokens, base = n * step.tokens, step.adapters.base
    adapted, adds = _adapted(step), base is not None  # where y += h bᵀ is a pass by itself
    work = 0.0
    for inputs, outputs, numbers in adapted:
        forward, backward = inputs + adds * 2 * outputs, inputs + 2 * outputs + adds * 2 * inputs
        moved = s * (layers * (forward + backward) + again * forward) / gpu.copy
        work += max(moved, (6 * layers + 2 * again) * numbers / gpu.product_rate(step.precision))
    own = len(adapted) * (3 * layers + again)  # x aᵀ, g b, and both gradients
    parts = {"adapters": tokens * work + n * own * ADAPTER_US * 1e-6}
    weights = sum(inputs * outputs for inputs, outputs in layer_shapes(step.config).values())
    if step.fp8_base:  # x and the gradient of y rounded, and each weight transposed for backward
        rows = sum(3 * step.tokens * ((layers + again) * i + layers * o) for i, o, _ in adapted)
        parts["rounding to 8 bits"] = n * (rows + 2 * layers * weights) / gpu.copy
    elif adds:
        block = step.adapters.frozen_bytes + step.adapters.scale_bytes + s * weights
        parts["dequantised weights"] = n * (2 * layers + again) * block / gpu.copy
    per_block = 2 * adds * len(adapted) + (3 * len(PRODUCTS) if step.fp8_base else 2 * len(layer_shapes(step.config)) * adds)
    return parts, own + layers * per_block


def _shard_copies(step: StepConfig) -> float:
    """Return the bytes of a step that fully_shard copies around its collectives.

    Shards are cast, concatenated, gathered and copied to each full weight, those of blocks twice a micro-batch. Gradients are
    concatenated in fp32, and a rank's part of each sum is added to its own.
    """
    layers, n, s = step.config.layers, step.accumulate, step.itemsize
    if step.adapters is not None:  # frozen weights as they are stored
        gathered = 2 * layers * step.adapters.frozen_bytes + s * step.other_parameters
        return n * (2 * gathered / step.world + 2 * gathered)
    gathered = 2 * layers * step.block_parameters + step.other_parameters
    gathering = gathered / step.world * (FP32 + 3 * s) + gathered * 2 * s
    summing = step.parameters * (s + FP32) + step.parameters / step.world * 3 * FP32
    return n * gathering + (1 if step.sum_once else n) * summing


def _update_bytes(step: StepConfig) -> float:
    """Return the bytes a parameter: gradient read for the norm and the update; moments and finest weights read and written."""
    numbers = step.numbers
    moments = 4 if isinstance(step.optimizer, AdamW8bit) else 16
    finest = 8 if (numbers.masters and not numbers.split) or step.itemsize == 4 else 6 if numbers.split else 4
    return 8 + moments + finest + (2 if numbers.masters else 0) + (12 if step.average else 0)


def _muon_seconds(step: StepConfig, gpu: GpuRates) -> float:
    """Return the time of Newton-Schulz: three products an iteration, of every matrix with fewer rows than columns."""
    if not isinstance(step.optimizer, Muon):
        return 0.0
    sides = [(min(shape), max(shape)) for shape in layer_shapes(step.config).values()]
    operations = sum(4 * rows * rows * columns + 2 * rows**3 for rows, columns in sides)
    return step.config.layers * step.optimizer.iterations * operations / gpu.product_rate("bf16")


def _exposed(step: StepConfig, micro_batch: float) -> float:
    """Return the seconds of a step in which the GPU waits for other ranks.

    ddp sums buckets during the backward of the last micro-batch, all but the last one. fsdp gathers the next block during this
    one, all but the first, and nothing hides the sum of the last block's gradient.
    """
    world, calls = step.world, collectives(step)
    if not calls:
        return 0.0
    total = sum(call.seconds(world) for call in calls)
    if not step.sharded:
        return max(total - BACKWARD * micro_batch, total * min(1.0, LAST_BUCKET / calls[0].bytes))
    ends = sum(call.seconds(world) for call in calls if "block" not in call.what)
    return max(total - step.accumulate * micro_batch, 0.0) + ends
