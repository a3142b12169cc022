"""Plans of a model over several devices, checks of the devices, and the move of its layers.

A plan is a pure function of sizes, so it can be tested without the devices.

`plan` splits layers into stages of consecutive layers: a token changes device once a stage, where layers assigned alternately
would change it at every layer. The first device also has the embedding, the norm and the head, so the stream returns to it,
tokens are chosen where they are embedded, and a tied head stays one tensor. While lanes of rows go round, every stage works on
one of them, and the slowest sets the pace. A step is bound by what it reads: of the plans that fit, `plan` returns the one
whose busiest device reads least.

`plan_slices` splits every layer. Attention heads and MLP columns are divided evenly, so that each device finishes its term of a
sum when the others do; the vocabulary is divided in units of the rows whose greatest logit one kernel finds.

Devices are GPUs that can access each other's memory. To try a plan without them, a CPU may be listed several times.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...device import host_bytes, label, resolve, usable_bytes
from ...errors import DeviceError
from ...formatting import readable
from ...kernels.row_ops import LayerNorm
from ...layers.block import to_device_of
from ...models.decoding import DenseWeights, LatentAttentionWeights, LayerWeights
from ...models.reader import text_stack
from ...trace import say
from ..runner import lanes

SPARE = 1 << 30  # bytes of a GPU for the activations of a prompt of 2,048 tokens, graphs, and libraries
SPLITS = {"layers": "stages hand rows over by such copies", "tensors": "every layer is summed there"}
"""how devices may share a model, and why they access each other's memory"""


@dataclass(frozen=True)
class LayerStage:
    """Consecutive layers on one device."""

    device: torch.device
    layers: range


class DeviceMemory(NamedTuple):
    """A device, and the bytes for its stage: free ones, and those that the model occupies already."""

    device: torch.device
    free: int


@dataclass(frozen=True)
class StageBytes:
    """Sizes of a model's parts, in bytes."""

    weights: Sequence[int]  # of each layer
    cached: Sequence[int]  # by each layer: keys and values of all rows
    ends: int  # of the embedding, the final norm and the head
    read: int  # of the ends, what a step reads: all but the embedding
    scratch: int = 0  # on each device, besides its layers
    first: int = 0  # on the first device alone: logits

    def needed(self, layers: range, first: bool) -> int:
        """Return the bytes that a stage takes of its device."""
        return sum(self.weights[n] + self.cached[n] for n in layers) + self.scratch + first * (self.ends + self.first)


def plan(sizes: StageBytes, devices: Sequence[DeviceMemory]) -> list[LayerStage]:
    """Return a stage for each device, in their order. Raise ValueError where no plan fits."""
    count, stages = len(sizes.weights), len(devices)
    if stages > count:
        raise ValueError(
            f"decoder: devices: got {stages} devices for {count} layers, and each needs one at least; name fewer devices."
        )
    before = [0, *accumulate(sizes.weights)]
    # best[end]: of plans for the layers up to `end` on the devices so far, the one whose busiest device reads least.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for number, device in enumerate(devices):
        longer: dict[int, tuple[int, list[int]]] = {}
        for end in range(number + 1, count - (stages - number - 1) + 1):
            for start, (most, ends) in best.items():
                if start >= end or sizes.needed(range(start, end), number == 0) > device.free:
                    continue
                reads = before[end] - before[start] + (sizes.read if number == 0 else 0)
                if end not in longer or max(most, reads) < longer[end][0]:
                    longer[end] = max(most, reads), [*ends, end]
        best = longer
    if count not in best:
        raise ValueError(_misfit(sizes, devices))
    ends = best[count][1]
    return [LayerStage(device.device, range(start, end)) for device, start, end in zip(devices, [0, *ends], ends)]


def _misfit(sizes: StageBytes, devices: Sequence[DeviceMemory]) -> str:
    """Describe the first stage whose device has no memory even for one layer, or else all of them together."""
    layer = min(range(len(sizes.weights)), key=lambda n: sizes.weights[n] + sizes.cached[n])
    for number, device in enumerate(devices):
        least = sizes.needed(range(layer, layer + 1), number == 0)
        if least > device.free:
            what = "the embedding, the head and one layer" if number == 0 else "one layer"
            return (
                f"decoder: devices: stage {number} does not fit: {what} take {readable(least)}, but {readable(device.free)} "
                f"are free on {device.device}; free memory there, name another device, or ask for fewer or shorter sequences."
            )
    needed = sizes.needed(range(len(sizes.weights)), True) + (len(devices) - 1) * sizes.scratch
    free = ", ".join(f"{readable(device.free)} on {device.device}" for device in devices)
    return (
        f"decoder: devices: the model does not fit: its weights, keys, values and logits take {readable(needed)}, but there "
        f"are {free}, and a layer lies whole on one device; name more devices, or ask for fewer or shorter sequences."
    )


def described(layers: range, weights: int, cached: int) -> str:
    """Return a stage in words."""
    what = f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
    return f"{what}: {readable(weights)} of weights, {readable(cached)} of keys and values"


def devices_of(devices: Any, split: str = "layers") -> list[torch.device]:
    """Return the devices that `decoder` was passed. Raise ValueError or DeviceError where they cannot share a model."""
    if not isinstance(split, str) or split not in SPLITS:
        raise ValueError(f"decoder: split: got {split!r}, wanted {' or '.join(map(repr, SPLITS))}.")
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Iterable):
        raise ValueError(f"decoder: devices: got {devices!r}, wanted a list of devices, such as ['cuda:0', 'cuda:1'].")
    result = [resolve(one) for one in devices]
    if len(result) < 2:
        raise ValueError(f"decoder: devices: got {len(result)}, wanted two or more; leave devices out to decode on one.")
    if len({device.type for device in result}) > 1:
        types = " and ".join(dict.fromkeys(str(device) for device in result))
        raise ValueError(f"decoder: devices: got {types}, wanted devices of one kind: all GPUs, or a CPU to try a plan.")
    if result[0].type != "cuda":
        return result
    for number, device in enumerate(result):
        if device in result[:number]:
            raise ValueError(f"decoder: devices: got {device} twice, wanted different GPUs; name each once.")
    capability = {device: torch.cuda.get_device_capability(device) for device in result}
    for device in result:
        if capability[device] != capability[result[0]]:
            names = (f"{one} has compute capability {'.'.join(map(str, capability[one]))}" for one in (result[0], device))
            raise ValueError(f"decoder: devices: {' and '.join(names)}, wanted GPUs of one kind.")
    for pair in pairwise([*result, result[0]]) if split == "layers" else combinations(result, 2):
        for source, target in (pair, pair[::-1]):
            if not torch.cuda.can_device_access_peer(source, target):
                raise DeviceError(
                    f"decoder: devices: {source} may not reach the memory of {target}, and {SPLITS[split]}. "
                    "What to do: name GPUs that `nvidia-smi topo -p2p r` shows as OK for each other, or leave devices out."
                )
    return result


def memory_for(model: nn.Module, devices: Sequence[torch.device]) -> list[DeviceMemory]:
    """Return each device with its free bytes and those that the model occupies there."""
    if devices[0].type == "cpu":
        used = dict.fromkeys(devices, sum(tensor.nbytes for tensor in _tensors(model)) // len(devices))
    else:
        used = {device: sum(t.nbytes for t in _tensors(model) if t.device == device) for device in devices}
    return [DeviceMemory(device, free + used[device]) for device, free in zip(devices, free_bytes(devices))]


def free_bytes(devices: Sequence[torch.device]) -> list[int]:
    """Return the free bytes of each device. A CPU's are divided among its listings."""
    if devices[0].type == "cpu":
        total = host_bytes()
        return [2**62 if total is None else total // len(devices)] * len(devices)
    return [usable_bytes(device) - SPARE for device in devices]


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def move_layers(model: nn.Module, blocks: Sequence[nn.Module], stages: Sequence[LayerStage]) -> None:
    """Move the blocks of each stage to its device and all else to the first. Parameters stay the same objects.

    The model's own forward keeps working: hooks move a block's inputs to the block's device.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    for stage in stages:
        for number in stage.layers:
            blocks[number].to(stage.device)
    for module in model.modules():
        if id(module) not in inside:
            module._apply(lambda tensor: tensor.to(stages[0].device), recurse=False)
    _move_inputs(model, blocks)


def let_apart(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Make the model's own forward work where its layers are on several devices already."""
    if len({tensor.device for tensor in _tensors(model)}) > 1:
        _move_inputs(model, blocks)


def _move_inputs(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    trunk: Any = text_stack(model) if hasattr(model, "model") else model
    after = (getattr(trunk, name, None) for name in ("hc_head", "norm"))  # the module that reads the last block, by family
    for module in (*blocks, *filter(None, after)):
        module.apart = True  # type: ignore[assignment]  # for a model of ours, whose loop calls no block
        if not any(isinstance(hook, Arrival) for hook in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(Arrival(), with_kwargs=True)


class Arrival:
    """Forward hook that moves a module's inputs to the device of its weights, except a cache, which is on all of them."""

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return to_device_of(module, args), to_device_of(module, kwargs)


@dataclass(frozen=True)
class SlicePlan:
    """One device's slice of every layer, and of the head."""

    device: torch.device
    number: int
    count: int  # of slices
    words: range  # of the vocabulary

    def of(self, size: int) -> slice:
        """Return the device's range of `size` heads or columns."""
        each = size // self.count
        return slice(self.number * each, (self.number + 1) * each)


def plan_slices(vocab: int, layers: Sequence[LayerWeights], devices: Sequence[torch.device], unit: int) -> list[SlicePlan]:
    """Return a slice for each device. Raise ValueError where the model does not divide. unit: tokens that stay together."""
    return split_vocabulary(vocab, devices, unit, indivisible(layers, len(devices)))


def split_vocabulary(vocab: int, devices: Sequence[torch.device], unit: int, why: str | None) -> list[SlicePlan]:
    """Return a slice for each device. why: what of the model does not divide, for a ValueError."""
    count = len(devices)
    if why is None and vocab <= unit * (count - 1):
        why = f"its {vocab} words are fewer than {unit} a device"
    if why is not None:
        raise ValueError(
            f"decoder: split: got 'tensors' over {count} devices, and {why}; name another number of devices, or pass "
            "split='layers'."
        )
    units = lanes(-(-vocab // unit), count)
    words = [range(part.start * unit, min(part.stop * unit, vocab)) for part in units]
    return [SlicePlan(device, number, count, words[number]) for number, device in enumerate(devices)]


def fit_slice(plan: SlicePlan, needed: int, free: int, parts: str, described: str) -> None:
    """Log a slice, or raise ValueError where its device has too little memory. parts: what takes the memory."""
    if needed > free:
        raise ValueError(
            f"decoder: devices: slice {plan.number} does not fit: its {parts} take {readable(needed)}, but {readable(free)} "
            f"are free on {plan.device}; free memory there, name more devices, or ask for fewer or shorter sequences."
        )
    say(f"decoder: slice {plan.number} on {label(plan.device)}: {described}")


def indivisible(layers: Sequence[LayerWeights], count: int) -> str | None:
    """Return why `count` devices cannot share the model by slices; None if they can."""
    for number, (attention, mlp, *rest) in enumerate(layers):
        if isinstance(attention, LatentAttentionWeights):
            return "its cache keeps latents of all heads, which no slice shares out"
        if attention.state() is not None or attention.gated:
            return f"layer {number} keeps a state instead of keys and values, or has gated heads, of which none is sliced"
        if any(one is not None for one in rest) or attention.v is None or attention.v_eps:
            return f"layer {number} has shared keys and values, a separate input, or a factor, which slices do not"
        if attention.kv_heads % count:
            return f"its {attention.kv_heads} key and value heads do not divide by {count}"
        if isinstance(attention.norm, LayerNorm) or mlp.parallel:
            return f"layer {number} has a LayerNorm or reads the stream before attention, which slices do not"
        if type(mlp) is not DenseWeights:
            return f"layer {number} is a mixture of experts, of which none is sliced"
        if any(norm is not None and len(norm.weight) != attention.head_dim for norm in (attention.q_norm, attention.k_norm)):
            return f"layer {number} norms all heads of a row together, which are on different devices"
        if len(mlp.gate.weight) % count:
            return f"layer {number} has {len(mlp.gate.weight)} columns in its MLP, which do not divide by {count}"
    return None
