"""Which modules of a model can be swapped: those of the families that models/ knows, torch's own norms, and what every
language model of transformers has. Which are better left alone, and what a model must be before it is placed: each refusal
names what it found.

In models of other families and in plain modules, norms are swapped by what they compute (norms.py), and the loss of a
transformers model where a trial shows that its logits are its head's product alone.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.dispatch import Call
from ..layers.linear_product import format_of
from ..layers.weight_memory import overlapping
from ..models.placing import Swap, reads_tokens
from ..models.registry import role_of, swaps_of
from .fused import adopt, is_placed
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


def leaves(model: nn.Module) -> Iterator[Candidate]:
    """Every norm, attention and MLP that there is a part for, nested ones included."""
    for name, module in model.named_modules():
        role = role_of(module)
        if type(module) in TORCH_NORMS:
            yield Candidate(name, module, torch_norm(module))
        elif role is not None and role not in WHOLES and role in (swaps := swaps_of(module)):
            yield Candidate(name, module, swaps[role](module, _stack(model, name)))
        elif not swaps_of(module) and (swap := custom_norm(module)) is not None:
            yield Candidate(name, module, swap)


def wholes(model: nn.Module) -> Iterator[Candidate]:
    """The decoder stacks, then the language models around them: verified by exercise, once their leaves are swapped."""
    for wanted in WHOLES:
        for name, module in model.named_modules():
            if role_of(module) == wanted and (maker := swaps_of(module).get(wanted)):
                yield Candidate(name, module, maker(module, None))
    for name, module in model.named_modules():
        if not swaps_of(module) and _foreign_causal_lm(module):
            from ..models.hf_modules import tried_causal_lm

            yield Candidate(name, module, tried_causal_lm(module, None))


def unsupported(model: nn.Module) -> str | None:
    """The model_type of a transformers model none of whose decoder stacks is of a known family; None for any other model."""
    if any(role_of(module) in (*STACKS, "Attention", "MLP") and swaps_of(module) for module in model.modules()):
        return None
    types = [getattr(m.config, "model_type", "") for m in model.modules() if _home(m) and hasattr(m, "config")]
    return next(iter(types), None)


def plain(model: nn.Module) -> bool:
    """Return whether no module of `model` is transformers' or ours: then only norms can be swapped."""
    return not any(_home(module) or hasattr(type(module), "fused_kernels") for module in model.modules())


def calls_of(model: nn.Module, leaves: Iterable[Candidate]) -> Iterator[Call]:
    """Yield the kernel calls of the parts that will be swapped in, while the candidates are made."""
    for candidate in chain(leaves, wholes(model)):
        yield from candidate.swap.calls


def _stack(model: nn.Module, name: str) -> nn.Module | None:
    """The decoder stack with a rotary_emb that the module `name` lies in."""
    above = model.get_submodule(name.rpartition(".layers.")[0])
    turns = isinstance(getattr(above, "rotary_emb", None), nn.Module)
    return above if turns and role_of(above) in STACKS else None


def _home(module: nn.Module) -> bool:
    """Whether its class is one of transformers' own models'."""
    return getattr(type(module), "original", type(module)).__module__.startswith("transformers.models.")


def _foreign_causal_lm(module: Any) -> bool:
    """A language model of another family, whose loss is transformers' usual one over lm_head's logits."""
    named = _home(module) and type(module).__name__.endswith("ForCausalLM") and reads_tokens(module)
    usual = getattr(getattr(module, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    routed = hasattr(module.config, "output_router_logits") if named else False  # a loss of the router's is added to it
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


def move(model: nn.Module, device: torch.device) -> None:
    """Move what is elsewhere. Raise ValueError when quantised weights cannot follow."""
    elsewhere = {t.device for t in (*model.parameters(), *model.buffers())} - {device}
    if not elsewhere:
        return
    found = next((f"{name} ({why})" for name, m in model.named_modules() if (why := quantised(m))), None)
    if found and getattr(model, "is_quantized", False):
        raise ValueError(
            f"place: the model is on {_listed(elsewhere)} and its quantised weights cannot be moved: {found}; "
            f"load it with device_map={{'': '{device}'}}."
        )
    model.to(device)


def quantised(module: nn.Module) -> str | None:
    """What in `module` itself holds quantised weights, in words; None when nothing does."""
    home = type(module).__module__.split(".")[0]
    if home in QUANTISERS:
        return f"{home}.{type(module).__name__} holds quantised weights"
    for name, p in module._parameters.items():
        if p is None or format_of(p).coded:  # of gb.lora.quantize_base, which our products read
            continue
        if p.dtype not in FLOATS or type(p.data) not in (Tensor, nn.Parameter):
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
