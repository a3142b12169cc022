"""The time of a step that trains adapters, and what its ranks send each other.

Of six operations a frozen weight takes four: forward, and the gradient of its input. Beside that its adapter reads x and the
gradient of y twice each, and its products are narrow: memory bounds them up to ranks of about a hundred.

Legend: x (N, K), a weight (O, K), y (N, O); s bytes of a number.
"""

from ..layers.recompute import LEAST_BYTES
from .cards import Card
from .lora import ADAPTED_HOST_S, PRODUCTS, LoraSetting
from .pace import (
    EAGER,
    KERNELS,
    KERNELS_AGAIN,
    attention_operations,
    copied_bytes,
    host_seconds,
    kernels,
    pass_bytes,
    remade,
    update_bytes,
    work,
)
from .wire import FP32, Collective, collectives

ADDS = 1.035  # a product that adds h b' as it writes y: 349 -> 361 us at 8192 x 4096 x 4096, 362 -> 376 at 8192 x 2048 x 8192
WEIGHT_GRADIENTS = 4  # kernels of a block that a frozen one has not
ADAPTING = 3  # kernels of a product's adapters: x a', g b, and both gradients. Their sums are added by the product
ADDING = 2  # more where the product is in codes: y += h b', and the same to dx
MORE_US = 5.0  # of each of those beside another kernel: what a step of 135m, 512 tokens, takes over its work and 360 of them


@work.register
def _(setting: LoraSetting, card: Card) -> dict[str, float]:
    n, tokens, s = setting.accumulate, setting.accumulate * setting.tokens, setting.numbers.dtype.itemsize
    return {
        "matrix products": tokens * product_seconds(setting, card),
        "attention": tokens * attention_operations(setting) / card.attention(setting.config.head_dim, setting.seq),
        "passes over activations": tokens * pass_bytes(setting) / card.copy,
        "adapters": tokens * adapter_seconds(setting, card) + n * adapting(setting) * MORE_US * 1e-6,
        "weights written out": n * written_bytes(setting) / card.copy,
        "rounding to 8 bits": n * rounded_bytes(setting) / card.copy,
        "loss": tokens * 4 * setting.config.vocabulary * s / card.copy,
        "gradient sums": (8 * n if n > 1 else 4) * setting.trained / card.copy,
        "update": setting.layout.size * update_bytes(setting) / card.copy,
    }


def product_seconds(setting: LoraSetting, card: Card) -> float:
    """Of a token: forward and the gradient of the input; forward once more where a block is computed again."""
    c = setting.config
    head = c.vocabulary * c.hidden
    a_block = (c.product_parameters - head) / c.layers
    passes = 4 * c.layers + 2 * setting.recomputed
    in_block = ADDS / card.products(setting.precision) if setting.base is None else 1 / rate(setting, card)
    return passes * a_block * in_block + 4 * head / card.products(setting.precision)


def rate(setting: LoraSetting, card: Card) -> float:
    return card.products("fp8" if setting.in_8_bits else setting.precision)


def adapter_seconds(setting: LoraSetting, card: Card) -> float:
    """Of a token: what adapters read and write, or their operations where these take longer."""
    layers, again, s = setting.config.layers, setting.recomputed, setting.numbers.dtype.itemsize
    adds = setting.base is not None  # in passes of their own
    seconds = 0.0
    for p in (p for p in setting.multiplied if p.ranks):
        forward, backward = p.inputs + adds * 2 * p.outputs, p.inputs + 2 * p.outputs + adds * 2 * p.inputs
        moved = s * (layers * (forward + backward) + again * forward) / card.copy
        computed = (6 * layers + 2 * again) * p.adapted / card.products(setting.precision)
        seconds += max(moved, computed)
    return seconds


def written_bytes(setting: LoraSetting) -> float:
    """Of a micro-batch: codes read and numbers written, forward and backward."""
    if setting.base is None or setting.in_8_bits:
        return 0.0
    a_block = sum(
        p.stored + p.beside + setting.numbers.dtype.itemsize * p.inputs * p.outputs for p in setting.projections.values()
    )
    return (2 * setting.config.layers + setting.recomputed) * a_block


def rounded_bytes(setting: LoraSetting) -> float:
    """Of a micro-batch: x and the gradient of y read in 16 bits and written in 8, and each weight turned for backward."""
    if not setting.in_8_bits:
        return 0.0
    layers, again, tokens = setting.config.layers, setting.recomputed, setting.tokens
    return sum(
        3 * tokens * ((layers + again) * p.inputs + layers * p.outputs) + 2 * layers * p.inputs * p.outputs
        for p in setting.multiplied
    )


@copied_bytes.register
def _(setting: LoraSetting) -> float:
    """Frozen weights as they are: laid side by side, then copied to where each is whole; of blocks twice a micro-batch."""
    gathered = 2 * setting.config.layers * setting.in_block + setting.around
    return setting.accumulate * (2 * gathered / setting.world + 2 * gathered)


@kernels.register
def _(setting: LoraSetting) -> int:
    c, coded = setting.config, setting.base is not None
    adapted = sum(p.ranks > 0 for p in setting.multiplied)
    a_block = KERNELS - WEIGHT_GRADIENTS + coded * adapted * ADDING
    if setting.in_8_bits:
        a_block += 3 * len(setting.multiplied)
    elif coded:
        a_block += 2 * len(setting.projections)
    return c.layers * a_block + adapting(setting) + setting.recomputed * KERNELS_AGAIN


@host_seconds.register
def _(setting: LoraSetting, card: Card) -> float:
    products = setting.config.layers * sum(p.ranks > 0 for p in setting.multiplied)
    return (kernels(setting) - adapting(setting)) * EAGER * card.launch_us * 1e-6 + products * ADAPTED_HOST_S


def adapting(setting: LoraSetting) -> int:
    """Kernels of a micro-batch that multiply by adapters alone; forward's once more where a block is computed again."""
    adapted = sum(p.ranks > 0 for p in setting.multiplied)
    return adapted * (ADAPTING * setting.config.layers + setting.recomputed)


@remade.register
def _(setting: LoraSetting) -> int:
    """The activation in a pass of its own: gate and up read, the result written. In shards each layer has its norm again."""
    if setting.recompute == "none":
        return 0
    row, products = setting.tokens * setting.numbers.dtype.itemsize, setting.products
    norms = [products[name] for name in ("q, k, v", "gate, up") for _ in (PRODUCTS[name] if setting.sharded else (name,))]
    elements = sum(2 * p.inputs for p in norms if p.ranks and row * p.inputs >= LEAST_BYTES)
    down = products["down"]
    return elements + 3 * down.inputs * (down.ranks > 0 and row * down.inputs >= LEAST_BYTES)


@collectives.register
def _(setting: LoraSetting) -> list[Collective]:
    """Codes are gathered as codes. Gradients of adapters are summed once a step; in shards behind backward."""
    if setting.world == 1:
        return []
    sums = Collective("gradient of the adapters", "all-reduce", FP32 * setting.trained, 1)
    if not setting.sharded:
        return [sums]
    layers, accumulate = setting.config.layers, setting.accumulate
    return [
        Collective("frozen weights of a block, forward and backward", "all-gather", setting.in_block, 2 * layers * accumulate),
        Collective("other frozen weights", "all-gather", setting.around, accumulate),
        sums,
    ]
