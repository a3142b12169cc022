"""A model's layers put on several devices, where they then are; its own forward goes on working.

Devices are GPUs that reach each other's memory. To try a plan on a machine without, a CPU may stand for several devices: then
stages run one after the other in one memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...device import label, resolve, usable_bytes
from ...errors import DeviceError
from ...formatting import readable
from ...layers.block import to_device_of
from ...trace import say
from ..runner import host_bytes
from .plan import DeviceRoom, LayerStage, StageBytes, described

SPARE = 1 << 30  # on a GPU, for what a prompt of 2,048 tokens passes through, graphs, and libraries


SPLITS = {
    "layers": ("stages hand rows over by such copies", lambda devices: pairwise([*devices, devices[0]])),
    "tensors": ("every layer is summed there", lambda devices: combinations(devices, 2)),
}
"""how devices may share a model: why they reach each other's memory, and which pairs do"""


def devices_of(given: Any, split: str = "layers") -> list[torch.device]:
    """What `decoder` was given as devices, checked."""
    if not isinstance(split, str) or split not in SPLITS:
        raise ValueError(f"decoder: split: got {split!r}, wanted {' or '.join(map(repr, SPLITS))}.")
    if isinstance(given, (str, torch.device)) or not isinstance(given, Iterable):
        raise ValueError(f"decoder: devices: got {given!r}, wanted a list of devices, such as ['cuda:0', 'cuda:1'].")
    found = [resolve(one) for one in given]
    if len(found) < 2:
        raise ValueError(f"decoder: devices: got {len(found)}, wanted two or more; leave devices out to decode on one.")
    if len({device.type for device in found}) > 1:
        kinds = " and ".join(dict.fromkeys(str(device) for device in found))
        raise ValueError(f"decoder: devices: got {kinds}, wanted devices of one kind: all GPUs, or a CPU to try a plan.")
    if found[0].type == "cuda":
        _check_gpus(found, *SPLITS[split])
    return found


def _check_gpus(devices: list[torch.device], why: str, pairs: Callable) -> None:
    for number, device in enumerate(devices):
        if device in devices[:number]:
            raise ValueError(f"decoder: devices: got {device} twice, wanted different GPUs; name each once.")
    kinds = {device: torch.cuda.get_device_capability(device) for device in devices}
    other = next((device for device in devices if kinds[device] != kinds[devices[0]]), None)
    if other is not None:
        names = (f"{device} has compute capability {'.'.join(map(str, kinds[device]))}" for device in (devices[0], other))
        raise ValueError(f"decoder: devices: {' and '.join(names)}, wanted GPUs of one kind.")
    for here, there in pairs(devices):
        for one, another in ((here, there), (there, here)):
            if not torch.cuda.can_device_access_peer(one, another):
                raise DeviceError(
                    f"decoder: devices: {one} may not reach the memory of {another}, and {why}. "
                    "What to do: name GPUs that `nvidia-smi topo -p2p r` shows as OK for each other, or leave devices out."
                )


def rooms_of(model: nn.Module, devices: Sequence[torch.device]) -> list[DeviceRoom]:
    """Each device with what is free there, and what the model itself takes of it already."""
    if devices[0].type == "cpu":
        there = sum(tensor.nbytes for tensor in _tensors(model))
        return [DeviceRoom(device, free + there // len(devices)) for device, free in zip(devices, rooms_beside(devices))]
    mine = {device: sum(t.nbytes for t in _tensors(model) if t.device == device) for device in devices}
    return [DeviceRoom(device, free + mine[device]) for device, free in zip(devices, rooms_beside(devices))]


def rooms_beside(devices: Sequence[torch.device]) -> list[int]:
    """What is free on each, beside what lies there."""
    if devices[0].type == "cpu":
        whole = host_bytes()
        return [2**62 if whole is None else whole // len(devices)] * len(devices)
    return [usable_bytes(device) - SPARE for device in devices]


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Each parameter and buffer once."""
    yield from module.parameters()
    yield from module.buffers()


def spread(model: nn.Module, blocks: Sequence[nn.Module], stages: Sequence[LayerStage]) -> None:
    """Put the blocks of each stage on its device and all else on the first; parameters stay the same objects.

    What calls the model hands over what a block reads to where the block lies.
    """
    home = stages[0].device
    inside = {id(module) for block in blocks for module in block.modules()}
    for stage in stages:
        for number in stage.layers:
            blocks[number].to(stage.device)
    for module in model.modules():
        if id(module) not in inside:
            module._apply(lambda tensor: tensor.to(home), recurse=False)
    _let_arrive(model, blocks)


def let_apart(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Let the model's own forward go on working where its layers lie on several devices already."""
    if len({tensor.device for tensor in _tensors(model)}) > 1:
        _let_arrive(model, blocks)


def _let_arrive(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    trunk: Any = getattr(model, "model", model)
    behind = (getattr(trunk, name, None) for name in ("hc_head", "norm"))  # what reads the last block, by family
    for module in (*blocks, *filter(None, behind)):
        module.apart = True  # type: ignore[assignment]  # for a model of ours, whose loop calls no block
        if not any(isinstance(hook, Arrival) for hook in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(Arrival(), with_kwargs=True)


class Arrival:
    """A forward hook: what comes to a module goes to the device of its weights. A cache, which has them all, stays."""

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return to_device_of(module, args), to_device_of(module, kwargs)


def tell(stages: Sequence[LayerStage], sizes: StageBytes, rooms: Sequence[DeviceRoom]) -> None:
    """A line for each stage."""
    for number, (stage, room) in enumerate(zip(stages, rooms)):
        weights, kept = (sum(of[n] for n in stage.layers) for of in (sizes.weights, sizes.kept))
        ends = f"; embedding and head, {readable(sizes.ends)}" if number == 0 else ""
        what = described(stage.layers, weights, kept)
        say(f"decoder: stage {number} on {label(stage.device)}: {what}{ends}; {readable(room.free)} are there for it")
