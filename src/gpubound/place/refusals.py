"""What a model must be before it is placed, and which of its modules are better left alone.

Each refusal names what it found.
"""

import torch
from torch import Tensor, nn

from ..layers.stacked import overlapping
from .fused import Fused

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
QUANTISERS = (
    "bitsandbytes",
    "torchao",
    "auto_gptq",
    "gptqmodel",
    "awq",
    "hqq",
    "quanto",
    "optimum",
    "compressed_tensors",
    "fbgemm_gpu",
)


def check(model: nn.Module) -> None:
    """Raise ValueError when the model as a whole cannot be placed."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"place: model must be a torch.nn.Module, got {type(model).__name__}; pass the model itself.")
    if any(isinstance(m, Fused) for m in model.modules()):
        raise ValueError(
            "place: this model is placed already; call undo() on its placement first. (model.to(device) moves a placed model: "
            "its fused weights follow.)"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("place: model is a ScriptModule, whose code is frozen; place the nn.Module it was made from.")
    spread = getattr(model, "hf_device_map", None) or {}
    if len(set(spread.values())) > 1:
        raise ValueError(
            f"place: the model is spread over {_listed(set(spread.values()))} by its hf_device_map; "
            f"load it without device_map, so that it is on one device."
        )
    _check_tensors(model)


def _check_tensors(model: nn.Module) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if empty := [name for name, t in tensors if t.is_meta]:
        raise ValueError(
            f"place: {empty[0]}{_and_more(len(empty) - 1)} on the meta device, without values; "
            f"load or initialise the weights (model.to_empty(device=...), then fill them) before placing."
        )
    if sharded := [name for name, t in tensors if hasattr(t, "device_mesh") or hasattr(t, "ds_id")]:
        raise ValueError(
            f"place: {sharded[0]}{_and_more(len(sharded) - 1)} sharded over several devices; "
            f"place the model before sharding it."
        )


def devices(model: nn.Module) -> set[torch.device]:
    return {t.device for t in (*model.parameters(), *model.buffers())}


def check_movable(model: nn.Module, device: torch.device) -> None:
    """Raise ValueError when the model is elsewhere and its quantised weights cannot follow."""
    where = devices(model) - {device}
    found = next((f"{name} ({why})" for name, m in model.named_modules() if (why := quantised(m))), None)
    if where and found and getattr(model, "is_quantized", False):
        raise ValueError(
            f"place: the model is on {_listed(where)} and its quantised weights cannot be moved: {found}; "
            f"load it with device_map={{'': '{device}'}}."
        )


def quantised(module: nn.Module) -> str | None:
    """What in `module` itself holds quantised weights, in words; None when nothing does."""
    home = type(module).__module__.split(".")[0]
    if home in QUANTISERS:
        return f"{home}.{type(module).__name__} holds quantised weights"
    for name, p in module._parameters.items():
        if p is not None and (p.dtype not in FLOATS or type(p.data) not in (Tensor, nn.Parameter)):
            return f"{type(module).__name__}'s {name} is quantised ({type(p.data).__name__}, {p.dtype})"
    for name, b in module._buffers.items():
        if b is not None and "weight" in name and b.dtype not in FLOATS:
            return f"{type(module).__name__}'s {name} is quantised ({b.dtype})"
    return None


def shared_memory(model: nn.Module) -> dict[str, str]:
    """Each parameter or buffer that lies over another one's memory without being the same tensor, and that other's name."""
    pairs = list(overlapping([*model.named_parameters(), *model.named_buffers()]))
    return dict(pairs) | {b: a for a, b in pairs}


def leave_alone(module: nn.Module) -> str | None:
    """Why `module` is not to be swapped, whatever it is; None when it may be."""
    for name, child in module.named_modules():
        if why := quantised(child):
            return f"{name}: {why}" if name else why
    if hasattr(module, "_hf_hook"):
        return "accelerate moves its weights in and out with a hook"
    if "forward" in module.__dict__:
        return "its forward is already patched on this instance"
    return None


def _listed(things: set) -> str:
    return ", ".join(sorted(str(t) for t in things))


def _and_more(count: int) -> str:
    return f" and {count} more tensors are" if count else " is"
