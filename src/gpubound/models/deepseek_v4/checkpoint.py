"""Load a quantised DeepSeek-V4 checkpoint: fp8 weights with a scale per block, and fp4 experts with a scale per 32 weights.

On a GPU, fp4 experts and fp8 linear layers stay quantised (family.py). All other tensors are dequantised to the
model's dtype one at a time, so the peak memory is the model and one tensor. Names are those of the published files, for which
transformers has a table, or transformers' names: layers.0.ffn.experts.3.w1.weight and .scale, or
model.layers.0.mlp.experts.gate_up_proj and gate_up_proj_scale_inv.

    value = code · scale of its block          an fp4 byte holds two, the lower half first; an e8m0 scale is a power of two
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import DataError
from ...kernels.packed_weights import E2M1, MX, Packed
from ...kernels.quantize import has_cores
from ...trace import fallback, notice
from ..folder import CURE, Stored, opened, stored_tensors
from ..quantized.experts import keep_fp4
from ..quantized.schemes import wide
from .family import Fp8Linear, in_fp4, keep_in_fp32
from .kernels.products import BLOCK, Fp8Blocks, scales_shape

BYTES = {torch.int8, torch.uint8}  # that hold two fp4 values each
CODES = {"F8_E4M3": "fp8", "F8_E5M2": "fp8", "I8": "fp4", "U8": "fp4", "F4": "fp4"}  # by safetensors' dtype names
POWERS = {"F8_E8M0", "U8"}  # scales that are powers of two, a byte each
WHOSE = {"fp8": "weights of linear layers", "fp4": "weights of experts"}
META = torch.device("meta")


def load_coded(
    folder: Path,
    device: torch.device | Sequence[torch.device],
    dtype: torch.dtype | None = None,
    codes: bool | None = None,
    computes: torch.device | None = None,
) -> nn.Module:
    """Load the folder's weights into transformers' DeepseekV4ForCausalLM. `dtype` None: the config's.

    device    one device; or several, which share the layers equally, the first with all other modules. Pass the same devices
              to `gb.decoder`
    codes     True: fp4 experts and fp8 linear layers stay quantised. None: if a kernel reads them, which is on a GPU, for fp8
              of compute capability 8.9 or later
    computes  the GPU, or one of the GPUs, that computes with the weights, if the weights are stored elsewhere, in host memory
    """
    from transformers import AutoConfig, DeepseekV4ForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    block = _block_size(config.quantization_config, folder)
    del config.quantization_config
    stored = stored_tensors(folder)
    devices = [device] if isinstance(device, torch.device) else list(device)
    if not devices:
        raise ValueError("load_coded: device: got no device, wanted one, or several that share the layers.")
    first = devices[0]
    computes = computes or first
    stay = (computes.type == "cuda" if codes is None else codes) and _experts_in_fp4(stored)
    with first if len(devices) == 1 else META, no_init_weights(), in_fp4(stay):
        model: Any = DeepseekV4ForCausalLM._from_config(config, dtype=dtype or config.dtype or torch.bfloat16).eval()
    keep_in_fp32(model)
    own = own_name(model, destinations(model)[0])
    if has_cores(computes) if codes is None else codes:
        _keep_layers(model, stored, own, block)
    if len(devices) > 1:
        deal(model, devices)
    why = "no kernel reads codes on a CPU" if computes.type == "cpu" else "no kernel of its step reads them on this GPU"
    _fill(model, folder, stored, block, own, why)
    if stay or any(isinstance(module, Fp8Linear) for module in model.modules()):
        model.save_pretrained = partial(_unsaved, folder)
    return model


def _unsaved(folder: Path, *given: Any, **named: Any) -> None:
    raise DataError(
        f"save_pretrained: the model has the codes of {folder}, for which transformers' files have no form; keep that folder, "
        f"or load it with codes=False and save its numbers."
    )


def _block_size(config: dict[str, Any], folder: Path) -> tuple[int, int]:
    block = config.get("weight_block_size")
    if block is None:
        return BLOCK
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise DataError(
            f"{folder / 'config.json'}: weight_block_size: got {block!r}, wanted the rows and columns of a block, such as "
            f"{list(BLOCK)}; {CURE}."
        )
    return block[0], block[1]


def _keep_layers(model: nn.Module, stored: dict[str, Stored], own: Callable[[str], str], block: tuple[int, int]) -> None:
    """Replace linear layers whose weights are in fp8 by Fp8Linear."""
    modules = dict(model.named_modules())
    for name, about in stored.items():
        if about.dtype == "F8_E4M3" and not is_scale(name, stored) and any(s in stored for s in scales_of(name)):
            stem, _, last = own(name).rpartition(".")
            layer = modules.get(stem) if last == "weight" else None
            if isinstance(layer, nn.Linear) and layer.bias is None and layer is not model.lm_head:
                parent, _, key = stem.rpartition(".")
                setattr(model.get_submodule(parent), key, Fp8Linear(layer, block))


def _experts_in_fp4(stored: dict[str, Stored]) -> bool:
    """Return True if all experts are in fp4 with power-of-two scales, the only format that the kernels read."""
    experts = {name: about.dtype for name, about in stored.items() if ".experts." in name}
    scales = {name for name in experts if is_scale(name, stored)}
    formats = {CODES.get(dtype) for name, dtype in experts.items() if name not in scales}
    return formats == {"fp4"} and {experts[name] for name in scales} <= POWERS


@torch.no_grad()
def _fill(
    model: Any, folder: Path, stored: dict[str, Stored], block: tuple[int, int], own: Callable[[str], str], why: str
) -> None:
    """Read the checkpoint into the model. why: reason for dequantising weights, for the warning."""
    targets, stacks = destinations(model)
    missing, unread = set(targets) - set(stacks), []
    coded, stayed = dict.fromkeys(CODES.values(), 0), dict.fromkeys(CODES.values(), 0)
    for file in dict.fromkeys(about.file for about in stored.values()):
        with opened(file) as tensors:
            for name in (name for name, about in stored.items() if about.file == file):
                if is_scale(name, stored):
                    continue  # read with its quantised weight
                target = own(name)
                if target not in targets:
                    unread.append(name)
                    continue
                place = targets[target]
                memory = place if isinstance(place, Tensor) else place[0]
                values = tensors.get_tensor(name).to(memory.device)
                scale = _scales(name, stored, file, tensors)
                if scale is None and stored[name].dtype in CODES and not holds_integers(place):
                    raise DataError(f"{file}: {name}: got {values.dtype} codes without their scales; {CURE}.")
                scale = None if scale is None else scale.to(memory.device)
                if isinstance(place, Packed):
                    stayed["fp4"] += 1
                    keep_fp4(place, values, scale, f"{file}: {name}")
                elif isinstance(place, Fp8Blocks):
                    stayed["fp8"] += 1
                    _keep_blocks(place, values, scale, f"{file}: {name}")
                else:
                    coded[CODES.get(stored[name].dtype, "fp8")] += scale is not None
                    values = values if scale is None else numbers(values, scale, block, name)
                    _check_shape(values.shape, place.shape, f"{file}: {name}")
                    place.copy_(values)
                missing.difference_update(stacks.get(target, [target]))
    if missing:
        raise DataError(f"{folder} lacks {sorted(missing)[:3]} ({len(missing)} tensors in all); {CURE}.")
    if unread:
        notice(f"{folder.name}: {len(unread)} tensors are no part of transformers' model and are not read, first {unread[0]}")
    if stays := " and ".join(f"{count:,} {WHOSE[kind]} in {kind}" for kind, count in stayed.items() if count):
        notice(f"{folder.name}: {stays} stay as they are")
    counts = ", ".join(f"{count} in {kind}" for kind, count in coded.items() if count)
    if counts:
        dtype = str(model.lm_head.weight.dtype).removeprefix("torch.")
        fallback(f"weights of {folder.name}: {counts}", f"read as {dtype}, for {why}")


def _keep_blocks(place: Fp8Blocks, codes: Tensor, scales: Tensor | None, name: str) -> None:
    _check_shape(codes.shape, place.shape, name)
    wanted = scales_shape(place.shape, place.block)
    if scales is None or scales.shape != wanted or codes.dtype != torch.float8_e4m3fn:
        got = None if scales is None else tuple(scales.shape)
        raise DataError(
            f"{name}: got {codes.dtype} and scales {got}, wanted e4m3 and {wanted}: one for each block of {place.block[0]} x "
            f"{place.block[1]}; {CURE}."
        )
    place.codes.copy_(codes)
    place.scale.copy_(wide(scales))


def _check_shape(got: Sequence[int], wanted: Sequence[int], name: str) -> None:
    if tuple(got) != tuple(wanted):
        raise DataError(f"{name}: got {tuple(got)}, wanted {tuple(wanted)}, by config.json; {CURE}.")


def numbers(codes: Tensor, scales: Tensor, block: tuple[int, int], name: str = "weight") -> Tensor:
    """Dequantise codes (..., rows, columns), or fp4 (..., rows, columns / 2), to fp32 (..., rows, columns)."""
    if codes.dtype == getattr(torch, "float4_e2m1fn_x2", None):
        codes = codes.view(torch.uint8)
    if codes.dtype in BYTES:
        block, codes = (1, MX), codes.view(torch.uint8)
        table = torch.tensor([*E2M1, *(-x for x in E2M1)], device=codes.device, dtype=torch.float32)
        values = table[torch.stack([codes & 0xF, codes >> 4], -1).flatten(-2).long()]
    else:
        values = codes.float()
    scales32 = wide(scales)
    rows, columns = values.shape[-2:]
    wanted = (*values.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    if scales32.shape != wanted:
        raise DataError(
            f"{name}: got scales {tuple(scales32.shape)} for {tuple(values.shape)} values, wanted {wanted}: one for each block "
            f"of {block[0]} x {block[1]}; {CURE}."
        )
    scales32 = scales32.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
    return values.mul_(scales32)


def _scales(name: str, stored: dict[str, Stored], file: Path, tensors: Any) -> Tensor | None:
    """Read the scales of a quantised tensor; None if the folder has none."""
    scale_name = next((s for s in scales_of(name) if s in stored), None)
    if scale_name is None:
        return None
    scales = _read(stored, scale_name, file, tensors)
    if not scales.is_floating_point() and scales.dtype != torch.uint8:
        raise DataError(
            f"{stored[scale_name].file}: {scale_name}: got {scales.dtype}, wanted scales: floating-point numbers, or e8m0 "
            f"in bytes; {CURE}."
        )
    return scales


def _read(stored: dict[str, Stored], name: str, file: Path, tensors: Any) -> Tensor:
    if stored[name].file == file:
        return tensors.get_tensor(name)
    with opened(stored[name].file) as others:
        return others.get_tensor(name)


Place = Tensor | Packed | Fp8Blocks


def destinations(model: Any) -> tuple[dict[str, Place], dict[str, list[str]]]:
    """Return the destination of each checkpoint tensor by name, and the single experts' names of each stack of experts."""
    targets: dict[str, Place] = {name: tensor.data for name, tensor in model.state_dict().items()}
    stacks = {}
    for stem, layer in ((name, module) for name, module in model.named_modules() if isinstance(module, Fp8Linear)):
        del targets[f"{stem}.codes"], targets[f"{stem}.scale"]
        targets[f"{stem}.weight"] = layer.blocks
    for stem, experts in ((name, module) for name, module in model.named_modules() if name.endswith(".experts")):
        if (packed := getattr(experts, "packed", None)) is not None:
            for part in ("gate_up", "down"):
                del targets[f"{stem}.{part}_words"], targets[f"{stem}.{part}_scale"]
                targets[f"{stem}.{part}_proj"] = packed(part)
        gate_up, down = (_apart(targets[f"{stem}.{part}_proj"], experts.num_experts) for part in ("gate_up", "down"))
        halves = [_apart(both, 2) for both in gate_up]
        gate, up = ([both[half] for both in halves] for half in (0, 1))
        for part, singles in (("gate_up", {"w1": gate, "w3": up}), ("down", {"w2": down})):
            single = {f"{stem}.{n}.{w}.weight": one for w, those in singles.items() for n, one in enumerate(those)}
            stacks[f"{stem}.{part}_proj"] = list(single)
            targets |= single
    return targets, stacks


def _apart(stack: Place, count: int) -> Sequence[Any]:
    """Split a stack into `count` equal parts of its rows."""
    if isinstance(stack, Tensor):
        return stack.unbind() if stack.dim() == 3 else stack.chunk(count)
    assert isinstance(stack, Packed)
    rows = stack.rows // count
    return [stack.part(slice(first, first + rows)) for first in range(0, stack.rows, rows)]


def own_name(model: Any, known: Collection[str]) -> Callable[[str], str]:
    """Return a function that maps a checkpoint name to transformers' name, by transformers' conversion table."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    table = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]

    def own(name: str) -> str:
        renamed = name
        for rule in table:
            renamed, _ = rule.rename_source_key(renamed)
        return next((one for one in (name, renamed, f"model.{renamed}", f"model.{name}") if one in known), renamed)

    return own


def scales_of(name: str) -> Iterator[str]:
    yield f"{name}_scale_inv"
    yield f"{name.removesuffix('weight')}scale"


def _scaled_by(name: str) -> str:
    """Return the name of the weight that has these scales."""
    return name.removesuffix("_scale_inv") if name.endswith("_scale_inv") else f"{name.removesuffix('scale')}weight"


def holds_integers(place: Place) -> bool:
    """Return True for an integer tensor, such as the table of a router that chooses experts by token."""
    return isinstance(place, Tensor) and not place.is_floating_point()


def is_scale(name: str, stored: dict[str, Stored]) -> bool:
    return name.endswith(("scale", "scale_inv")) and _scaled_by(name) in stored


def deal(model: Any, devices: Sequence[torch.device]) -> None:
    """Allocate equal shares of the layers on each device, and all other modules on the first.

    Buffers that are not in the state dict (rotary angles) are computed; all other memory is uninitialised.
    """
    blocks, stored = model.model.layers, set(model.state_dict())
    inside = {id(module) for block in blocks for module in block.modules()}
    for number, block in enumerate(blocks):
        block.to_empty(device=devices[number * len(devices) // len(blocks)])
    for module in model.modules():
        if id(module) not in inside:
            module.to_empty(device=devices[0], recurse=False)
    for name, module in model.named_modules():
        if any(f"{name}.{key}" not in stored for key, buffer in module._buffers.items() if buffer is not None):
            model._init_weights(module)
