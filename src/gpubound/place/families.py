"""Which modules can be swapped, for what, and on which inputs each is verified.

Hugging Face's modules are known by name and home: `LlamaMLP` of transformers.models.llama.modeling_llama, and its like. A
subclass of a user's own lives elsewhere, may compute something else, and is left alone.

Of the other families of transformers only what every model has is swapped: RMS norms, by the formula that their verification
finds to be theirs, and the loss, where the model is shown to do nothing to its logits.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import MLP, Attention, LMLoss, RMSNorm, RopeTable, Stacked
from ..layers.head import why_whole
from ..layers.stacked import plain
from . import torch_parts
from .exercise import made_up, reads_tokens
from .verify import Case, mode, noise

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # the others change their frequencies with the length of what they read
NORM = "{}", ("rms_norm", "rms_norm.add_rms_norm")
LOSS = "loss without whole logits: {}", ("linear_cross_entropy",)
CALLED = "projections as they are"  # adapters, hooks, subclasses: each is called, and its output taken from there

BATCH, TOKENS = 2, 16


@dataclass
class Candidate:
    """A module that can be swapped: for which part, with which attributes, verified on which cases."""

    name: str
    module: nn.Module
    part: type
    kernels: str  # in words; {} stands for the kernels of `ops`, each under the implementation that runs it
    ops: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    cases: tuple[Case, ...] = ()
    refusal: str = ""
    otherwise: type | None = None  # the part to try when `part` is found to compute something else
    trial: Callable[[], str | None] | None = None  # what the exercise would not show: why not to swap, or None


def leaves(model: nn.Module) -> Iterator[Candidate]:
    """Every norm, attention and MLP that there is a part for, nested ones included."""
    rotary = _rotary_of(model)
    for name, module in model.named_modules():
        kind = type(module)
        if kind in torch_parts.PARTS:
            yield _torch_norm(name, module)
        elif role := role_of(module):
            if role == "RMSNorm":
                yield _norm(name, module)
            elif role == "MLP":
                yield _mlp(name, module)
            elif role == "Attention":
                yield _attention(name, module, rotary.get(name.rpartition(".layers.")[0]))
        elif _foreign_norm(module):
            yield _norm(name, module, otherwise=_parts().HFShiftedNorm)


def wholes(model: nn.Module) -> Iterator[Candidate]:
    """The decoder stacks, then the language models around them: verified by exercise, once their leaves are swapped."""
    for wanted, make in (("Model", _decoder), ("ForCausalLM", _causal_lm)):
        for name, module in model.named_modules():
            if role_of(module) == wanted:
                yield make(name, module)
    for name, module in model.named_modules():
        if not role_of(module) and _foreign_causal_lm(module):
            yield _causal_lm(name, module, trial=partial(_why_not_head, module))


def unsupported(model: nn.Module) -> str | None:
    """The model_type of a transformers model none of whose decoder stacks is of a known family; None for any other model."""
    kinds = {role_of(module) for module in model.modules()}
    if kinds & {"Model", "Attention", "MLP"}:
        return None
    types = [getattr(m.config, "model_type", "") for m in model.modules() if _home(m) and hasattr(m, "config")]
    return next(iter(types), None)


def kernels_of(model: nn.Module) -> Iterator[str]:
    """The ops that swapping `model` will call, its backward's among them. Found while they are drawn."""
    for candidate in chain(leaves(model), wholes(model)):
        for op in candidate.ops:
            yield op
            if op == "swiglu":
                yield "swiglu_backward"


def own(module: nn.Module) -> tuple[str, tuple[str, ...]] | None:
    """(kernels in words, ops) of a module that is gpubound's already; None for any other."""
    if isinstance(module, RMSNorm):
        return NORM
    if isinstance(module, MLP):
        return _mlp_kernels(module, module.activation)
    if isinstance(module, Attention):
        return _attention_kernels(module, getattr(module, "turns", True))
    return LOSS if isinstance(module, LMLoss) else None


def role_of(module: nn.Module) -> str | None:
    """'RMSNorm', 'Attention', 'MLP', 'DecoderLayer', 'Model' or 'ForCausalLM' for a module of a known family, else None."""
    kind = getattr(type(module), "original", type(module))
    for family, prefix in FAMILIES.items():
        if kind.__module__ == f"transformers.models.{family}.modeling_{family}":
            return kind.__name__.removeprefix(prefix)
    return None


def _parts() -> Any:
    """hf_parts imports transformers: only a model of Hugging Face's leads here, so it is imported already."""
    from . import hf_parts

    return hf_parts


def _rotary_of(model: nn.Module) -> dict[str, nn.Module]:
    """The rotary module of each decoder stack, by the stack's name."""
    return {
        name: module.rotary_emb
        for name, module in model.named_modules()
        if role_of(module) == "Model" and isinstance(getattr(module, "rotary_emb", None), nn.Module)
    }


def _torch_norm(name: str, module: Any) -> Candidate:
    width = getattr(module, "normalized_shape", (getattr(module, "num_channels", 0),))
    shape = (BATCH, width[0], 4, 4) if isinstance(module, nn.GroupNorm) else (BATCH, TOKENS, *width)
    part: Any = torch_parts.PARTS[type(module)]
    refusal = f"it norms over {len(width)} dimensions, the kernel over one" if len(width) > 1 else ""
    return Candidate(name, module, part, "{}", part.ops, cases=(_case(module, shape),), refusal=refusal)


def _home(module: nn.Module) -> bool:
    """Whether its class is one of transformers' own models'."""
    return getattr(type(module), "original", type(module)).__module__.startswith("transformers.models.")


def _foreign_norm(module: Any) -> bool:
    """An RMS norm of another family, to judge by its name: one gain for each column, an eps, and nothing else."""
    kinds = list(module._parameters), list(module._buffers), list(module._modules)
    named = _home(module) and type(module).__name__.endswith("RMSNorm") and kinds == (["weight"], [], [])
    return named and module.weight.dim() == 1 and _eps(module) is not None


def _eps(module: Any) -> float | None:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None


def _norm(name: str, module: Any, otherwise: type | None = None) -> Candidate:
    shape = (BATCH, TOKENS, module.weight.shape[0])
    eps = {} if hasattr(module, "eps") else {"eps": _eps(module)}
    return Candidate(name, module, _parts().HFNorm, *NORM, eps, (_case(module, shape),), otherwise=otherwise)


def _mlp(name: str, module: Any) -> Candidate:
    activation = ACTIVATIONS.get(getattr(module.config, "hidden_act", ""))
    return Candidate(
        name,
        module,
        _parts().HFMLP,
        *_mlp_kernels(module, activation),
        {"stacked": Stacked(), "activation": activation},
        (_case(module, (BATCH, TOKENS, module.config.hidden_size)),),
        "" if activation else f"no kernel for the activation {module.config.hidden_act!r}",
    )


def _attention(name: str, module: Any, rotary: Any) -> Candidate:
    config, part = module.config, _parts().HFAttention
    refusal = "it lies outside a decoder stack with a rotary_emb" if rotary is None else ""
    if config._attn_implementation != "sdpa":
        refusal = f"the config asks for {config._attn_implementation!r} attention; load with attn_implementation='sdpa'"
    attributes = {
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "dropout": module.attention_dropout,
        "turns": bool(getattr(module, "use_rope", True)),
        "stacked": Stacked(),
        "delegated": Counter(),
    }
    cases = tuple(_attention_case(module, rotary, masked) for masked in (False, True))
    return Candidate(name, module, part, *_attention_kernels(module, attributes["turns"]), attributes, cases, refusal)


def _mlp_kernels(module: Any, activation: str | None) -> tuple[str, tuple[str, ...]]:
    product = "gate and up as one product" if _one_product(module, ("gate_proj", "up_proj")) else CALLED
    return f"{product}; {{}}", ("swiglu" if activation == "silu" else "geglu",)


def _attention_kernels(module: Any, turns: bool) -> tuple[str, tuple[str, ...]]:
    one = _one_product(module, ("q_proj", "k_proj", "v_proj"))
    product = "q, k, v as one product" if one else CALLED
    op = "rope.rope_qkv" if one and not hasattr(module, "q_norm") else "rope"
    return f"{product}; {{}}; SDPA", (op,) if turns else ()


def _one_product(module: Any, names: Sequence[str]) -> bool:
    """What its calls so far have shown, and before the first one what its projections look like."""
    stacked = getattr(module, "stacked", None)
    return all(plain(getattr(module, name)) for name in names) and not (stacked and stacked.fallbacks)


def _decoder(name: str, module: Any) -> Candidate:
    parts = _parts()
    rope_type = getattr(module.rotary_emb, "rope_type", None)
    refusal = "" if rope_type in ROPE_TYPES else f"rope_type {rope_type!r} changes its frequencies as it reads"
    for i, layer in enumerate(module.layers):
        for child, part in parts.PARTS.items():
            if not isinstance(getattr(layer, child), part):
                refusal = refusal or f"layers.{i}.{child} was not swapped"
    if not isinstance(module.norm, parts.HFNorm):
        refusal = refusal or "norm was not swapped"
    attributes: dict[str, Any] = {
        "table": RopeTable(parts.HFAngles(module.rotary_emb)),
        "window": _window(module),
        "delegated": Counter(),
    }
    ops = ("rms_norm.add_rms_norm",)
    return Candidate(name, module, parts.HFDecoder, "residual adds in the norms: {}", ops, attributes, refusal=refusal)


def _causal_lm(name: str, module: Any, trial: Callable[[], str | None] | None = None) -> Candidate:
    return Candidate(name, module, _parts().HFCausalLM, *LOSS, {"delegated": Counter()}, trial=trial)


def _foreign_causal_lm(module: Any) -> bool:
    """A language model of another family, whose loss is transformers' usual one over lm_head's logits."""
    named = _home(module) and type(module).__name__.endswith("ForCausalLM") and reads_tokens(module)
    usual = getattr(getattr(module, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    routed = hasattr(module.config, "output_router_logits") if named else False  # a loss of the router's is added to it
    return named and usual and not routed and isinstance(getattr(module, "lm_head", None), nn.Module)


def _why_not_head(module: Any) -> str | None:
    """Whether its logits are its head's product with the hidden states and nothing more."""
    trunk = getattr(module, module.base_model_prefix, module)
    if trunk is module:
        return f"it has no {module.base_model_prefix!r} to take hidden states from"
    ids = made_up(module)
    with mode(module, training=False):
        return why_whole(
            module.lm_head,
            lambda: module(input_ids=ids, use_cache=False).logits,
            lambda: trunk(input_ids=ids, use_cache=False).last_hidden_state,
        )


def _window(decoder: Any) -> int | None:
    """The narrowest sliding window of any layer: up to that length all of them are plainly causal."""
    of_config = getattr(decoder.config, "sliding_window", None)
    windows = [getattr(layer.self_attn, "sliding_window", of_config) for layer in decoder.layers]
    return min((w for w in windows if w is not None), default=None)


def _case(module: nn.Module, shape: tuple[int, ...]) -> Case:
    own, device = _dtype_and_device(module)

    def case(dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
        return _x(shape, own, dtype, device), {}

    return case


def _attention_case(module: Any, rotary: Any, masked: bool) -> Case:
    """Random hidden states at positions 0, 1, ...; masked: causal, and the second row a few tokens shorter."""
    own, device = _dtype_and_device(module)

    def case(dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
        x = _x((BATCH, TOKENS, module.config.hidden_size), own, dtype, device)
        positions = torch.arange(TOKENS, device=device)[None]
        mask = None
        if masked:
            mask = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool, device=device).tril()
            mask[1, :, :, -TOKENS // 3 :] = False
        return x, {"position_embeddings": rotary(x, positions), "attention_mask": mask}

    return case


def _x(shape: tuple[int, ...], own: torch.dtype, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rounded to the module's own dtype, whatever dtype it is wanted in: every run reads the same numbers."""
    return noise(shape, torch.empty(0, device=device, dtype=own)).to(dtype)


def _dtype_and_device(module: nn.Module) -> tuple[torch.dtype, torch.device]:
    p = next(module.parameters(), torch.empty(0))
    return p.dtype, p.device
