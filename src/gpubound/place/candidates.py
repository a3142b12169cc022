"""The modules of a model that can be swapped, and how a module is swapped.

Candidates are modules of the families that models/ knows, torch's norms, and the loss of language models of transformers. In
models of other families and in plain modules, norms are recognised by what they compute (norms.py), and the loss of a
transformers model is a candidate where a trial shows that its logits are its head's product alone.

A module is swapped by changing its class, on this instance alone. The new class inherits from the part that computes faster and
from the module's own class, and from `Fused`. So the instance keeps its parameters, buffers, hooks, attributes and name in the
tree; isinstance() and code that goes by the class's name hold; the original forward stays available
(`self.original.forward(self, ...)`); and undoing sets the class back. Nothing is patched for other instances.
"""

from collections.abc import Iterator
from functools import cache, wraps
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers.fused_weights import overlapping
from ..layers.linear_product import format_of
from ..models.registry import WRAPPER, Swap, is_wrapper, reads_tokens, role_of, swaps_of
from ..watch.pretend import PARAMETERS
from .norms import TORCH_NORMS, custom_norm, torch_norm

STACKS = ("Model", "TextModel")  # roles of decoder stacks
WHOLES = (*STACKS, "ForCausalLM")  # verified by exercise, in this order, once their leaves are swapped

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
QUANTISERS = (
    "bitsandbytes", "torchao", "auto_gptq", "gptqmodel", "awq", "hqq", "quanto", "optimum", "compressed_tensors", "fbgemm_gpu",
)  # fmt: skip


class Candidate(NamedTuple):
    name: str
    module: nn.Module
    swap: Swap

    def adopt(self) -> None:
        adopt(self.module, self.swap.part, self.swap.attributes)


class Fused:
    """Base of the class of a swapped module, which also inherits from `part` and `original`."""

    part: type
    original: Any
    forwards: tuple[Any, Any]  # the class's and the original's, when the class was made
    _added: tuple[str, ...]  # names of the attributes of the swap

    def __repr__(self) -> str:  # not by _get_name(), by which Trainer knows whether labels are to be shifted
        return f"Fused{super().__repr__()}"

    def __reduce_ex__(self, protocol):  # the class is made at run time: pickle and copy find it by its two bases
        return _blank, (self.part, self.original), object.__reduce_ex__(self, 2)[2]


@cache
def fused_class(part: Any, original: Any) -> Any:
    """Return the class of an `original` swapped for `part`, under the original's name: save_pretrained writes that name into
    config.json, and wrapping policies look for it."""
    names = {key: getattr(original, key) for key in ("__module__", "__qualname__", "__doc__")}
    forward = wraps(original.forward)(_copy(part.forward))  # Trainer and generate read the signature
    forwards = {"forward": forward, "forwards": (forward, original.forward)}
    return type(original.__name__, (Fused, part, original), {**names, "part": part, "original": original, **forwards})


def _copy(function: Any) -> FunctionType:
    """Return a copy of a function, so that wrapping it for one class does not change it for the next."""
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _blank(part: Any, original: Any) -> nn.Module:
    cls = fused_class(part, original)
    return cls.__new__(cls)


def adopt(module: Any, part: type, attributes: dict[str, Any]) -> None:
    """Make `module` a `part`, with these additional attributes."""
    conflicts = [
        name for name in attributes if name in module.__dict__ or name in module._modules or name in module._parameters
    ]
    assert not conflicts, f"{type(module).__name__} has {conflicts} already"
    module.__dict__.update(attributes, _added=tuple(attributes))
    original: Any = type(module)
    module.__class__ = fused_class(part, original)


def release(module: nn.Module) -> None:
    """Undo `adopt`, if the module is swapped. The parameters' memory is not moved."""
    if isinstance(module, Fused):
        original = module.original
        for name in (*module._added, "_added"):
            del module.__dict__[name]
        module.__class__ = original


MARK = "_placed"


def is_placed(model: nn.Module) -> bool:
    """Return whether a placement of `model`, or of a part of it, has not been undone."""
    return any(isinstance(module, Fused) or MARK in vars(module) for module in model.modules())


def leaves(model: nn.Module) -> Iterator[Candidate]:
    """Yield every norm, attention and MLP that has a part, nested ones included."""
    for name, module in model.named_modules():
        role = role_of(module)
        if type(module) in TORCH_NORMS:
            yield Candidate(name, module, torch_norm(module))
        elif role is not None and role not in WHOLES and role in (swaps := swaps_of(module)):
            yield Candidate(name, module, swaps[role](module, _stack(model, name)))
        elif not swaps_of(module) and (swap := custom_norm(module)) is not None:
            yield Candidate(name, module, swap)


def wholes(model: nn.Module) -> Iterator[Candidate]:
    """Yield the decoder stacks, then the language models around them."""
    for wanted in WHOLES:
        for name, module in model.named_modules():
            if role_of(module) == wanted and (maker := swaps_of(module).get(wanted)):
                yield Candidate(name, module, maker(module, None))
    for name, module in model.named_modules():
        if (not swaps_of(module) or is_wrapper(module)) and _is_other_causal_lm(module):
            from ..models.hf_modules import tried_causal_lm

            yield Candidate(name, module, tried_causal_lm(module, None))


def unsupported(model: nn.Module) -> str | None:
    """Return the model_type of a transformers model without a decoder stack of a known family; None for any other model."""
    if any(role_of(module) in (*STACKS, "Attention", "MLP") and swaps_of(module) for module in model.modules()):
        return None
    types = [getattr(m.config, "model_type", "") for m in model.modules() if _of_transformers(m) and hasattr(m, "config")]
    return next(iter(types), None)


def is_plain(model: nn.Module) -> bool:
    """Return whether no module of `model` is transformers' or gpubound's: then only norms can be swapped."""
    return not any(_of_transformers(module) or hasattr(type(module), "fused_kernels") for module in model.modules())


def _stack(model: nn.Module, name: str) -> nn.Module | None:
    """Return the decoder stack with a rotary_emb that contains the module `name`."""
    above = model.get_submodule(name.rpartition(".layers.")[0])
    turns = isinstance(getattr(above, "rotary_emb", None), nn.Module)
    return above if turns and role_of(above) in STACKS else None


def _of_transformers(module: nn.Module) -> bool:
    """Return whether its class is of a model of transformers."""
    return getattr(type(module), "original", type(module)).__module__.startswith("transformers.models.")


def _is_other_causal_lm(module: Any) -> bool:
    """Return whether it is a language model of another family, with transformers' usual loss over lm_head's logits."""
    named = _of_transformers(module) and type(module).__name__.endswith(("ForCausalLM", WRAPPER)) and reads_tokens(module)
    usual = getattr(getattr(module, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    routed = named and hasattr(module.config.get_text_config(), "output_router_logits")  # the router adds a loss
    return named and usual and not routed and isinstance(getattr(module, "lm_head", None), nn.Linear)


def check_placeable(model: nn.Module) -> None:
    """Raise ValueError when the model as a whole cannot be placed."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"place: model must be a torch.nn.Module, got {type(model).__name__}; pass the model itself.")
    if is_placed(model):
        raise ValueError(
            "place: this model is placed already; call undo() on its placement first. (model.to(device) moves a placed model: "
            "its fused weights follow.)"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("place: model is a ScriptModule, whose code is frozen; place the nn.Module it was made from.")
    device_map = getattr(model, "hf_device_map", None) or {}
    if len(set(device_map.values())) > 1:
        raise ValueError(
            f"place: the model is on {_listed(set(device_map.values()))} by its hf_device_map; "
            f"load it without device_map, so that it is on one device."
        )
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


def move(model: nn.Module, device: torch.device) -> None:
    """Move the model. Raise ValueError when quantised weights cannot be moved."""
    elsewhere = {t.device for t in (*model.parameters(), *model.buffers())} - {device}
    if not elsewhere:
        return
    first = next((f"{name} ({why})" for name, m in model.named_modules() if (why := quantised(m))), None)
    if first and getattr(model, "is_quantized", False):
        raise ValueError(
            f"place: the model is on {_listed(elsewhere)} and its quantised weights cannot be moved: {first}; "
            f"load it with device_map={{'': '{device}'}}."
        )
    model.to(device)


def quantised(module: nn.Module) -> str | None:
    """Describe the quantised weights of `module` itself, or return None."""
    home = type(module).__module__.split(".")[0]
    if home in QUANTISERS:
        return f"{home}.{type(module).__name__} holds quantised weights"
    for name, p in module._parameters.items():
        if p is None or format_of(p).coded:  # by gb.lora.quantize_base, which our products support
            continue
        if p.dtype not in FLOATS or type(p.data) not in (Tensor, *PARAMETERS):
            return f"{type(module).__name__}'s {name} is quantised ({type(p.data).__name__}, {p.dtype})"
    for name, b in module._buffers.items():
        if b is not None and "weight" in name and b.dtype not in FLOATS:
            return f"{type(module).__name__}'s {name} is quantised ({b.dtype})"
    return None


def shared_memory(model: nn.Module) -> dict[str, str]:
    """Map each parameter or buffer that overlaps another one in memory, without being the same tensor, to the other's name."""
    pairs = list(overlapping([*model.named_parameters(), *model.named_buffers()]))
    return dict(pairs) | {b: a for a, b in pairs}


def leave_alone(module: nn.Module) -> str | None:
    """Return why `module` is not to be swapped, whatever its class, or None."""
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
