"""The time of a step, part by part.

Products and attention take their operations at the rate that they reach, everything else its bytes at the memory's. Each kernel
costs a little more than its work. Nothing is fitted to a whole step but that little (RAMP_US).

Legend: h hidden, f the MLP's inner width, s bytes of a number; q and kv the widths of all query heads and of all keys.
"""

from functools import singledispatch

from ..layers.recompute import LEAST_BYTES
from ..train.adamw8 import AdamW8bit
from ..train.muon import Muon
from .cards import Card, Network
from .setting import Setting
from .wire import FP32, collectives

KERNELS = 33  # of a block, forward and backward: 1,004 nodes in the graph of 30 blocks
KERNELS_AGAIN = 9  # more where the block is computed again
EAGER = 4  # assumption: bare launches that the host needs for a kernel of a step that is not captured
RAMP_US = 1.6  # of a kernel that begins and ends, beside a graph's node: what a step of 135m, 1,024 tokens, takes over its work
BACKWARD = 2 / 3  # of a micro-batch's time
LAST_BUCKET = 64 << 20  # bytes: what is summed when no backward runs any more

GROUPS = {
    "matrix products": "arithmetic",
    "attention": "arithmetic",
    "passes over activations": "memory traffic",
    "adapters": "memory traffic",
    "weights written out": "memory traffic",
    "rounding to 8 bits": "memory traffic",
    "copies of shards": "memory traffic",
    "loss": "memory traffic",
    "gradient sums": "memory traffic",
    "update": "memory traffic",
    "launches": "launches",
    "communication": "communication",
}
"""A part of a step -> what it is bound by."""


def pace(setting: Setting, card: Card, network: Network) -> dict[str, float]:
    """Seconds of a step by part."""
    parts, n = work(setting, card), setting.accumulate
    if setting.sharded and setting.world > 1:
        parts["copies of shards"] = copied_bytes(setting) / card.copy
    working = sum(parts.values())
    parts["launches"] = n * kernels(setting) * (card.node_us + RAMP_US) * 1e-6
    if not setting.captured or setting.sharded:  # what fully_shard does between blocks is not captured
        parts["launches"] = max(parts["launches"], n * host_seconds(setting, card) - working)
    micro_batch = (sum(parts.values()) - parts["update"]) / n
    parts["communication"] = exposed(setting, network, micro_batch)
    return {name: seconds for name, seconds in parts.items() if seconds}


@singledispatch
def work(setting: Setting, card: Card) -> dict[str, float]:
    """Seconds of a step in which kernels compute or move memory."""
    n, tokens = setting.accumulate, setting.accumulate * setting.tokens
    return {
        "matrix products": tokens * product_seconds(setting, card),
        "attention": tokens * attention_operations(setting) / card.attention(setting.config.head_dim, setting.seq),
        "passes over activations": tokens * pass_bytes(setting) / card.copy,
        "loss": tokens * 4 * setting.config.vocabulary * setting.numbers.dtype.itemsize / card.copy,
        "gradient sums": (8 * n if n > 1 else 4) * setting.trained / card.copy,
        "update": setting.layout.size * update_bytes(setting) / card.copy + muon_seconds(setting, card),
    }


@singledispatch
def copied_bytes(setting: Setting) -> float:
    """Of a step: what fully_shard copies on a rank around its collectives.

    Shards are cast, laid side by side, gathered, and copied to where each weight is whole; those of blocks twice a micro-batch.
    Gradients are laid side by side in fp32, and a rank's part of each sum is added to what it has.
    """
    whole, s, n = setting.outline.parameters, setting.numbers.dtype.itemsize, setting.accumulate
    gathered = 2 * setting.config.layers * setting.outline.in_block + setting.outline.outside
    gathering = gathered / setting.world * (FP32 + 3 * s) + gathered * 2 * s
    summing = whole * (s + FP32) + whole / setting.world * 3 * FP32
    return n * gathering + (1 if setting.once else n) * summing


@singledispatch
def kernels(setting: Setting) -> int:
    """Of a micro-batch."""
    return setting.config.layers * KERNELS + setting.recomputed * KERNELS_AGAIN


@singledispatch
def host_seconds(setting: Setting, card: Card) -> float:
    """Of a micro-batch that is not captured: what launching takes."""
    return kernels(setting) * EAGER * card.launch_us * 1e-6


def product_seconds(setting: Setting, card: Card) -> float:
    """Of a token: forward, and both gradients; forward once more where a block is computed again."""
    c = setting.config
    head = c.vocabulary * c.hidden
    a_block = (c.product_parameters - head) / c.layers
    in_head = "bf16" if setting.numbers.fp8 else setting.precision
    passes = 6 * c.layers + 2 * setting.recomputed
    return passes * a_block / card.products(setting.precision) + 6 * head / card.products(in_head)


def attention_operations(setting: Setting) -> float:
    """Of a token, of the half that is seen: two products forward, five backward, two more where a block is computed again."""
    c = setting.config
    return (7 * c.layers + 2 * setting.recomputed) * setting.seq * c.heads * c.head_dim


def pass_bytes(setting: Setting) -> float:
    """Of a token: what norms, rotary positions, the gated activation and fp8's rounding read and write."""
    c, s = setting.config, setting.numbers.dtype.itemsize
    h, f, q, kv = c.hidden, c.intermediate, c.heads * c.head_dim, c.kv_heads * c.head_dim
    forward = 2 * 4 * h + 2 * (q + kv + kv) + 3 * f
    backward = 2 * 4 * h + 2 * (q + kv + kv) + 5 * f
    backward += remade(setting)
    elements = c.layers * (forward + backward) + setting.recomputed * forward
    rounded = 4 * (2 * h + q + (q + 2 * kv) + 2 * h) if setting.numbers.fp8 else 0  # read in 16 bits, written twice in 8
    return s * elements + c.layers * rounded


@singledispatch
def remade(setting: Setting) -> int:
    """Of a token and block: elements that are read and written where norms and the activation are computed again.

    The activation's gradient gives its result in the same pass. In shards each product by itself has its input again: q, k and
    v, gate and up, and down.
    """
    c, row = setting.config, setting.tokens * setting.numbers.dtype.itemsize
    if setting.recompute == "none" or setting.numbers.fp8:
        return 0
    h, f = c.hidden, c.intermediate
    norms, activation = (5, 3) if setting.sharded else (2, 1)
    return norms * 2 * h * (row * h >= LEAST_BYTES) + activation * f * (row * f >= LEAST_BYTES)


def update_bytes(setting: Setting) -> float:
    """Of a parameter: gradient read for the norm and for the update, moments and the finest weights read and written."""
    numbers = setting.numbers
    moments = 4 if isinstance(setting.optimizer, AdamW8bit) else 16
    finest = 8 if numbers.masters or numbers.dtype.itemsize == 4 else 4
    return 8 + moments + finest + (2 if numbers.masters else 0) + (12 if setting.average else 0)


def muon_seconds(setting: Setting, card: Card) -> float:
    """The Newton-Schulz steps: three products each, of every matrix (rows, columns) turned so that rows are fewer."""
    if not isinstance(setting.optimizer, Muon):
        return 0.0
    c = setting.config
    h, f, q, kv = c.hidden, c.intermediate, c.heads * c.head_dim, c.kv_heads * c.head_dim
    operations = 0
    for sides in ((q, h), (kv, h), (kv, h), (h, q), (f, h), (f, h), (h, f)):
        rows, columns = min(sides), max(sides)
        operations += 4 * rows * rows * columns + 2 * rows**3
    return c.layers * setting.optimizer.iterations * operations / card.products("bf16")


def exposed(setting: Setting, network: Network, micro_batch: float) -> float:
    """Seconds of a step in which the GPU waits for other ranks.

    Replicas sum buckets beside the backward of the last micro-batch, all but the last one. Sharded ranks gather the next block
    beside this one, all but the first, and sum the last block's gradient beside nothing.
    """
    world, calls = setting.world, collectives(setting)
    if not calls:
        return 0.0
    whole = sum(call.seconds(world, network) for call in calls)
    if not setting.sharded:
        last = whole * min(1.0, LAST_BUCKET / calls[0].bytes)
        return max(whole - BACKWARD * micro_batch, last)
    ends = sum(call.seconds(world, network) for call in calls if "block" not in call.what)
    return max(whole - setting.accumulate * micro_batch, 0.0) + ends
