"""The memory of a step that trains adapters: the frozen base, what trains, and what backward finds kept, by what keeps it.

Legend: h hidden, f the MLP's inner width, s bytes of a number; q and kv the widths of all query heads and of all keys.
"""

from collections import Counter

from ..layers.recompute import KEEP_ALL, LEAST_BYTES
from .kept import FP32, model_keeps
from .lora import LoraSetting
from .lora_left import between_weights
from .memory import gathered, held, in_block


@held.register
def _(setting: LoraSetting) -> dict[str, int]:
    weights = setting.config.layers * setting.in_block + setting.around
    parts = {"frozen weights": -(-weights // setting.parts), "what codes are read by": setting.beside}
    of_adapters = setting.layout.bytes(setting.numbers.masters)
    parts |= {"adapters": of_adapters.pop("weights"), **of_adapters}
    parts["moments"] = setting.optimizer.moment_bytes(setting.layout)
    parts["average of the adapters"] = 4 * setting.layout.size if setting.average else 0
    parts["free between frozen weights"] = between_weights(setting)
    return parts


@gathered.register
def _(setting: LoraSetting) -> dict[str, int]:
    """This block and the next, and what lies outside of blocks."""
    if not setting.sharded or setting.world == 1:
        return {}
    return {"gathered weights": 2 * setting.in_block + setting.around}


@model_keeps.register
def _(setting: LoraSetting, least: float = LEAST_BYTES) -> dict[str, int]:
    least = KEEP_ALL if setting.recompute == "none" else least
    c, s, again = setting.config, setting.numbers.dtype.itemsize, setting.recomputed
    a_row, whole = setting.tokens * c.hidden * s, Counter[str]()
    for i in range(again, c.layers):
        whole.update(block_keeps(setting, least, first=i == 0))
    whole["inputs of recomputed blocks"] = (2 * again - 1) * a_row if again else 0
    whole["last norm and head"] = 2 * a_row + setting.tokens * FP32  # the gradient of the head's input is made in forward
    return {name: size for name, size in whole.items() if size}


def block_keeps(setting: LoraSetting, least: float, first: bool = False) -> dict[str, int]:
    """Bytes of one block. Into the first one comes no gradient: what lies before its first adapter keeps nothing."""
    c, s, tokens, products = setting.config, setting.numbers.dtype.itemsize, setting.tokens, setting.products
    h, f, q, kv = c.hidden, c.intermediate, c.heads * c.head_dim, c.kv_heads * c.head_dim
    found, learns = Counter[str](), not first  # whether what follows has a gradient

    def read(product: str, name: str, width: int) -> bool:
        """An adapter keeps its input, or that is computed again, and x aᵀ."""
        ranks = products[product].ranks
        again = learns and tokens * width * s >= least
        found[name] += width * s if ranks and not again else 0
        found["adapters"] += ranks * s
        return learns or ranks > 0

    norm = h * s + FP32  # what was normed, and by how much
    found["residual stream"] += norm if learns else 0
    learns = read("q, k, v", "norms' results", h)
    attended = learns
    if attended:
        found["queries, keys and values"] = (q + 2 * kv) * s
        found["attention"] = q * s + c.heads * FP32
        if c.qk_norm:
            found["norms of queries and keys"] = 2 * (q + kv) * s + (c.heads + c.kv_heads) * FP32
    elif products["o"].ranks:
        found["attention"] = q * s
    found["adapters"] += products["o"].ranks * s
    learns = learns or products["o"].ranks > 0
    found["residual stream"] += norm if learns else 0
    learns = read("gate, up", "norms' results", h)
    found["gate and up"] = 2 * f * s if learns else 0
    read("down", "activation's result", f)
    return {name: tokens * size for name, size in found.items() if size}


@in_block.register
def _(setting: LoraSetting) -> int:
    """Gradients at their widest, in the MLP: of the result, of gate and up, and the result once more; or, where weights are in
    codes, of gate and up beside their weights in numbers."""
    c, s, tokens = setting.config, setting.numbers.dtype.itemsize, setting.tokens
    widest = tokens * s * 3 * c.intermediate
    if setting.base is not None:
        widest = max(widest, tokens * s * 2 * c.intermediate + written(setting, 2 * c.intermediate, c.hidden))
    least = KEEP_ALL if setting.recompute == "none" else LEAST_BYTES
    made = sum(block_keeps(setting, least).values()) if setting.recomputed == c.layers else 0
    return made + tokens * s * 2 * c.hidden + widest


def written(setting: LoraSetting, outputs: int, inputs: int) -> int:
    """Bytes beside a product in backward: its weight in numbers; in fp8 the weight turned, and the gradient rounded."""
    if setting.in_8_bits:
        return outputs * (inputs + setting.tokens)
    return outputs * inputs * setting.numbers.dtype.itemsize
