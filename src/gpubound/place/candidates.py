"""Which modules of a model can be swapped: those of the families that models/ knows, torch's own norms, and what every
language model of transformers has.

Of families that nobody here knows, RMS norms are swapped by the formula that their verification finds to be theirs, and the
loss where the model is shown to do nothing to its logits.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from ..models.placing import Swap
from ..models.registry import role_of, swaps_of
from ..models.trial import BATCH, TOKENS, random_case, reads_tokens
from . import torch_parts

STACKS = ("Model", "TextModel")  # roles of decoder stacks
WHOLES = (*STACKS, "ForCausalLM")  # verified by exercise, in this order, once their leaves are swapped


class Candidate(NamedTuple):
    name: str
    module: nn.Module
    swap: Swap


def leaves(model: nn.Module) -> Iterator[Candidate]:
    """Every norm, attention and MLP that there is a part for, nested ones included."""
    stacks = _stacks(model)
    for name, module in model.named_modules():
        role = role_of(module)
        if type(module) in torch_parts.PARTS:
            yield Candidate(name, module, _torch_norm(module))
        elif role is not None and role not in WHOLES and role in (swaps := swaps_of(module)):
            yield Candidate(name, module, swaps[role](module, stacks.get(name.rpartition(".layers.")[0])))
        elif not swaps_of(module) and _foreign_norm(module):
            from ..models.parts import HFShiftedNorm, norm  # imports transformers, as the model has that leads here

            yield Candidate(name, module, norm(module, None, otherwise=HFShiftedNorm))


def wholes(model: nn.Module) -> Iterator[Candidate]:
    """The decoder stacks, then the language models around them: verified by exercise, once their leaves are swapped."""
    for wanted in WHOLES:
        for name, module in model.named_modules():
            if role_of(module) == wanted and (maker := swaps_of(module).get(wanted)):
                yield Candidate(name, module, maker(module, None))
    for name, module in model.named_modules():
        if not swaps_of(module) and _foreign_causal_lm(module):
            from ..models.language import tried_causal_lm

            yield Candidate(name, module, tried_causal_lm(module, None))


def unsupported(model: nn.Module) -> str | None:
    """The model_type of a transformers model none of whose decoder stacks is of a known family; None for any other model."""
    if any(role_of(module) in (*STACKS, "Attention", "MLP") and swaps_of(module) for module in model.modules()):
        return None
    types = [getattr(m.config, "model_type", "") for m in model.modules() if _home(m) and hasattr(m, "config")]
    return next(iter(types), None)


def kernels_of(model: nn.Module) -> Iterator[str]:
    """The ops that swapping `model` will call, its backward's among them. Found while they are drawn."""
    for candidate in chain(leaves(model), wholes(model)):
        for op in candidate.swap.ops:
            yield op
            if op == "swiglu":
                yield "swiglu_backward"


def _stacks(model: nn.Module) -> dict[str, nn.Module]:
    """The decoder stacks with a rotary_emb, by their names."""
    return {
        name: module
        for name, module in model.named_modules()
        if role_of(module) in STACKS and isinstance(getattr(module, "rotary_emb", None), nn.Module)
    }


def _torch_norm(module: Any) -> Swap:
    width = getattr(module, "normalized_shape", (getattr(module, "num_channels", 0),))
    shape = (BATCH, width[0], 4, 4) if isinstance(module, nn.GroupNorm) else (BATCH, TOKENS, *width)
    part: Any = torch_parts.PARTS[type(module)]
    refusal = f"it norms over {len(width)} dimensions, the kernel over one" if len(width) > 1 else ""
    return Swap(part, part.ops, cases=(random_case(module, shape),), refusal=refusal)


def _home(module: nn.Module) -> bool:
    """Whether its class is one of transformers' own models'."""
    return getattr(type(module), "original", type(module)).__module__.startswith("transformers.models.")


def _foreign_norm(module: Any) -> bool:
    """An RMS norm of another family, to judge by its name: one gain for each column, an eps, and nothing else."""
    kinds = list(module._parameters), list(module._buffers), list(module._modules)
    if not (_home(module) and type(module).__name__.endswith("RMSNorm") and kinds == (["weight"], [], [])):
        return False
    from ..models.parts import eps_of  # imports transformers, as the model has that leads here

    return module.weight.dim() == 1 and eps_of(module) is not None


def _foreign_causal_lm(module: Any) -> bool:
    """A language model of another family, whose loss is transformers' usual one over lm_head's logits."""
    named = _home(module) and type(module).__name__.endswith("ForCausalLM") and reads_tokens(module)
    usual = getattr(getattr(module, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    routed = hasattr(module.config, "output_router_logits") if named else False  # a loss of the router's is added to it
    return named and usual and not routed and isinstance(getattr(module, "lm_head", None), nn.Module)
