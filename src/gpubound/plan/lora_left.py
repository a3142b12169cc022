"""What a model's frozen weights leave free between each other: they are made, joined and put into codes one by one, and stay.

Weights that train move into flat buffers, so that their segments go back to the GPU. Of 8b that was drawn in fp32 and cast on
the GPU, as the benchmark makes it, 6.0 GiB lie between the bf16 weights.
"""

from collections.abc import Sequence

from .allocator import Extent, Heap
from .lora import PRODUCTS, LoraSetting

Homes = dict[str, Extent]


def between_weights(setting: LoraSetting) -> int:
    """Bytes. Of a captured step, whose activations have memory of their own; any other may use them."""
    if not setting.captured or setting.sharded:
        return 0
    heap, size, numbers = Heap(), setting.numbers.dtype.itemsize, numbers_of(setting)
    homes = {name: heap.take((setting.cast_from or size) * count) for name, count in numbers.items()}
    if setting.cast_from is not None:
        for name, count in numbers.items():
            move(heap, homes, [name], name, size * count)
    blocks = range(setting.config.layers)
    join(heap, homes, blocks, {name: size * count for name, count in numbers.items()})
    if setting.base is not None:
        encode(heap, homes, blocks, setting)
    heap.empty()
    return heap.reserved - heap.in_use


def numbers_of(setting: LoraSetting) -> dict[str, int]:
    """Of each matrix, in the order in which they are made. Norms and biases are small."""
    c = setting.config
    layers = {key: p.inputs * p.outputs for key, p in setting.projections.items()}
    of_blocks = {f"{i}.{key}": count for i in range(c.layers) for key, count in layers.items()}
    head = {} if c.tied else {"head": c.vocabulary * c.hidden}
    return {"embedding": c.vocabulary * c.hidden} | of_blocks | head


def move(heap: Heap, homes: Homes, names: Sequence[str], to: str, size: int) -> None:
    """What lies under `names` is written to new memory, and theirs is given back."""
    new = heap.take(size)
    for name in names:
        heap.give(homes.pop(name))
    homes[to] = new


def join(heap: Heap, homes: Homes, blocks: range, sizes: dict[str, int]) -> None:
    """Layers that are multiplied as one come to lie one behind the other, under the first one's name."""
    for i in blocks:
        for keys in PRODUCTS.values():
            names = [f"{i}.{key}" for key in keys]
            if len(names) > 1:
                move(heap, homes, names, names[0], sum(sizes[name] for name in names))


def encode(heap: Heap, homes: Homes, blocks: range, setting: LoraSetting) -> None:
    """Layer by layer; joined numbers are held until the last of them is in codes. Then codes are joined."""
    stored = {f"{i}.{key}": p.stored for i in blocks for key, p in setting.projections.items()}
    for i in blocks:
        for keys in PRODUCTS.values():
            codes = {f"{i}.{key}": heap.take(stored[f"{i}.{key}"]) for key in keys}
            heap.give(homes.pop(f"{i}.{keys[0]}"))
            homes |= codes
    join(heap, homes, blocks, stored)
