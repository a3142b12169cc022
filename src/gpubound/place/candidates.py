"""The modules of a model that can be swapped, and how a module is swapped.

Candidates are modules of the families that models/ knows, torch's norms, and the loss of language models of transformers. In
models of other families and in plain modules, norms are recognised by what they compute (`recognise`), and the loss of a
transformers model is a candidate where a trial shows that its logits are its head's product alone.

A module is swapped by changing its class, on this instance alone. The new class inherits from the part that computes faster and
from the module's own class, and from `Fused`. So the instance keeps its parameters, buffers, hooks, attributes and name in the
tree; isinstance() and code that goes by the class's name hold; the original forward stays available
(`self.original.forward(self, ...)`); and undoing sets the class back. Nothing is patched for other instances.

Norms of any model are fused: torch's own by their class, all others by what they compute. `recognise` runs a copy of a module
with random parameters. A module qualifies if it has no children and no buffers, one or two parameters of shape (width,), and a
forward of one tensor. The copy's eps is fitted from the ratio of its outputs for an input of unit variance and for a tiny one:
y(s·z) / y(z) = s·sqrt((1 + eps) / (s² + eps)). A recognised module is only a candidate: it is verified on its own parameters,
gradients too, as every other swap is (verify.py).
"""

import math
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial, wraps
from inspect import Parameter, signature
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels import group_norm, layer_norm, rms_norm
from ..kernels.dispatch import Call
from ..kernels.norms import layer_norm_reference, rms_norm_reference
from ..layers.fused_weights import Kernels, overlapping
from ..layers.linear_product import format_of
from ..models.registry import (
    BATCH,
    TOKENS,
    WRAPPER,
    Case,
    Delegating,
    Swap,
    is_wrapper,
    noise,
    random_case,
    reads_tokens,
    role_of,
    swaps_of,
)
from ..watch.pretend import PARAMETERS


class _TorchNorm:
    """A norm of torch.nn. Under autocast torch's own forward runs: autocast has separate rules for norms."""

    op: str

    @classmethod
    def call(cls, x: tuple[int, ...]) -> Call:
        """Return the op and its shape for an input of shape `x`."""
        return cls.op, x[-1:]

    def forward(self: Any, x: Tensor) -> Tensor:  # self is also the module that was swapped
        return self.original.forward(self, x) if torch.is_autocast_enabled(x.device.type) else self.normed(x)

    def fused_kernels(self) -> Kernels:
        return "{}", (self.op,)


class TorchRMSNorm(_TorchNorm):
    op = "rms_norm"

    def normed(self: Any, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps if self.eps is not None else torch.finfo(x.dtype).eps)


class TorchLayerNorm(_TorchNorm):
    op = "layer_norm"

    def normed(self: Any, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class TorchGroupNorm(_TorchNorm):
    op = "group_norm"

    @classmethod
    def call(cls, x: tuple[int, ...]) -> Call:
        return cls.op, ()  # its self-test takes no shape

    def normed(self: Any, x: Tensor) -> Tensor:
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


TORCH_NORMS: dict[type, type] = {nn.RMSNorm: TorchRMSNorm, nn.LayerNorm: TorchLayerNorm, nn.GroupNorm: TorchGroupNorm}


def torch_norm(module: Any) -> Swap:
    width = getattr(module, "normalized_shape", (getattr(module, "num_channels", 0),))
    shape = (BATCH, width[0], 4, 4) if isinstance(module, nn.GroupNorm) else (BATCH, TOKENS, *width)
    part: Any = TORCH_NORMS[type(module)]
    refusal = f"it norms over {len(width)} dimensions, the kernel over one" if len(width) > 1 else ""
    return Swap(part, (part.call(shape),), cases=(random_case(module, shape),), refusal=refusal)


@dataclass(frozen=True)
class NormFormula:
    """The formula of a module outside torch.nn, and the conditions under which it holds."""

    op: str  # rms_norm or layer_norm
    gain: str  # the parameter's name
    bias: str | None
    eps: float
    offset: float  # added to the gain, as Gemma does
    ranks: frozenset[int]  # numbers of input dimensions for which the copy agreed with the formula
    settings: dict[str, Any]  # the module's plain attributes at that time


class CustomNorm(Delegating):
    """A norm of a class outside torch.nn, computed by our kernel while its attributes, parameters and class stay the same.

    Its parts are named apart from the attributes that such a class may have.
    """

    norm_formula: NormFormula

    def forward(self: Any, *args, **kwargs):
        if why := self._unable(args, kwargs):
            return self.delegate(why, *args, **kwargs)
        f, parameters = self.norm_formula, self._parameters
        if f.op == "rms_norm":
            return rms_norm(args[0], parameters[f.gain], f.eps, f.offset)
        return layer_norm(args[0], parameters[f.gain], parameters[f.bias] if f.bias else None, f.eps)

    def _unable(self: Any, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """Return why this call needs the module's own forward; None when the formula holds."""
        if why := self.patched():
            return why
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            return "arguments other than one tensor"
        f, x = self.norm_formula, args[0]
        gain, attributes = self._parameters.get(f.gain), vars(self)
        if gain is None or (f.bias and self._parameters.get(f.bias) is None):
            return "its parameters are others than when it was placed"
        if any(attributes.get(name) != value for name, value in f.settings.items()):
            return "an attribute was changed after it was placed"
        if x.dim() not in f.ranks or x.shape[-1] != gain.shape[0]:
            return "an input of another shape than it was verified on"
        if x.dtype != gain.dtype:
            return "an input of another dtype than its weight"
        if x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type):
            return "autocast on a 16-bit input"
        return None

    def fused_kernels(self) -> Kernels:
        return "{}", (self.norm_formula.op,)


def custom_norm(module: nn.Module) -> Swap | None:
    """Return the swap of a module that computes RMSNorm or LayerNorm, whatever its class; None for any other module."""
    formula = recognise(module)
    if formula is None:
        return None
    gain = module._parameters[formula.gain]
    assert gain is not None
    shape = (BATCH, TOKENS, *gain.shape)
    attributes = {"norm_formula": formula, "delegated": Counter()}
    return Swap(CustomNorm, ((formula.op, shape[-1:]),), attributes, (random_case(module, shape), _small_case(gain, formula)))


def _small_case(gain: Tensor, formula: NormFormula) -> Case:
    """An input whose mean square is about eps, so that a wrong eps shows."""
    x = (noise((BATCH, TOKENS, *gain.shape), gain.detach(), seed=2) * math.sqrt(max(formula.eps, 1e-12))).detach()
    return lambda dtype: (x.to(dtype), {})


def recognise(module: nn.Module) -> NormFormula | None:
    """Return the formula that a copy of `module` with random parameters follows; None when it follows none."""
    try:
        if not _may_be_norm(module):
            return None
        devices = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
        with torch.no_grad(), torch.random.fork_rng(devices):
            return _fit(deepcopy(module), module)
    except Exception:  # the class is the user's: it may not take such an input, and is then no candidate
        return None


def _may_be_norm(module: nn.Module) -> bool:
    """Cheap conditions, checked for every module of a model before a copy is made."""
    parameters = [p for p in module._parameters.values() if p is not None]
    shapes = {tuple(p.shape) for p in parameters}
    if module._modules or module._buffers or not 1 <= len(parameters) <= 2 or len(shapes) != 1:
        return False
    kind, shape = type(module), shapes.pop()
    if len(shape) != 1 or shape[0] < 2 or not all(p.is_floating_point() for p in parameters):
        return False
    if kind.__module__.startswith("torch.") or hasattr(kind, "fused_kernels"):
        return False
    if {"norm_formula", "delegated"} & vars(module).keys() or "forward" in vars(module):
        return False
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in list(signature(kind.forward).parameters.values())[1:] if p.default is Parameter.empty]
    return len(required) == 1 and required[0].kind in positional


def _fit(trial: nn.Module, module: nn.Module) -> NormFormula | None:
    """Fit the formula to `trial`, a copy of `module` whose parameters are overwritten."""
    settings = _settings(module)
    parameters = {name: p for name, p in trial._parameters.items() if p is not None}
    for seed, p in enumerate(parameters.values()):
        p.copy_(1.0 + 0.3 * noise(tuple(p.shape), p, seed=seed + 3))
    like = next(iter(parameters.values()))
    width, tiny = like.shape[0], 1e-3 if like.dtype == torch.float16 else 1e-6
    trial.eval()

    z = noise((BATCH, TOKENS, width), like.float(), seed=1)
    z = z - z.mean(-1, keepdim=True)
    z = (z / z.square().mean(-1, keepdim=True).sqrt()).to(like.dtype)
    at_zero = trial.forward(torch.zeros_like(z))
    bias = next((name for name, p in parameters.items() if len(parameters) == 2 and _near(at_zero, p.expand_as(z))), None)
    if len(parameters) == 2 and bias is None:
        return None
    gain = next(name for name in parameters if name != bias)
    weight, shift = parameters[gain], parameters[bias] if bias else None
    if shift is not None:
        shift.zero_()  # small outputs would be lost next to it in 16 bits
    unit, small = (trial.forward(s * z).double() for s in (1.0, tiny))
    if shift is not None:
        shift.copy_(at_zero[0, 0])
    eps = _eps(((small.norm() / unit.norm()) ** 2).item(), tiny**2, like.dtype, settings)
    if eps is None:
        return None

    if shift is None:
        formulas = {
            ("rms_norm", 0.0): partial(rms_norm_reference, weight=weight, eps=eps),
            ("rms_norm", 1.0): partial(rms_norm_reference, weight=weight, eps=eps, offset=1.0),
            ("layer_norm", 0.0): partial(layer_norm_reference, weight=weight, eps=eps),
        }
    else:
        formulas = {("layer_norm", 0.0): partial(layer_norm_reference, weight=weight, bias=shift, eps=eps)}
    several = 3 + (width == 3)  # unlike the width, so that a norm over another dimension fails
    inputs = {n: noise((*(BATCH, several, several + 2)[: n - 1], width), like, seed=4) + 0.5 for n in (2, 3, 4)}
    for (op, offset), formula in formulas.items():
        if not _near(trial.forward(inputs[3]), formula(inputs[3])):
            continue
        ranks = frozenset(n for n, x in inputs.items() if _agrees(trial, x, formula(x)))
        if 3 not in ranks or _settings(trial) != settings or vars(trial).keys() != vars(module).keys():
            return None  # other results in training, or a forward that writes attributes
        return NormFormula(op, gain, bias, eps, offset, ranks, settings)
    return None


def _agrees(trial: nn.Module, x: Tensor, want: Tensor) -> bool:
    """Return whether the copy computes `want` in eval mode and in training mode; False where it does not take such an input."""
    try:
        return all(_near(trial.train(training).forward(x), want) for training in (True, False))
    except Exception:  # another number of dimensions than its forward takes
        return False


def _eps(ratio: float, s: float, dtype: torch.dtype, settings: dict[str, Any]) -> float | None:
    """Solve ratio = s·(1 + eps) / (s + eps) for eps, the ratio and s squared, and round it to a value that is written down.

    16-bit outputs give eps to a few percent, which is not enough to compute with: there it has to be such a value.
    """
    fitted = s * (1 - ratio) / (ratio - s) if ratio > s else math.nan
    written = [value for value in settings.values() if isinstance(value, float)]
    for value in (*written, torch.finfo(dtype).eps, *(10.0**-n for n in range(1, 13)), 0.0):
        if abs(value - fitted) <= 0.1 * max(fitted, 0.01 * s):
            return value
    return fitted if dtype.itemsize >= 4 and fitted > 0 else None


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of `module` that its forward may read, other than tensors. Of private ones floats, such as _eps."""
    plain = (bool, int, float, str, type(None), tuple)
    found = {name: value for name, value in vars(module).items() if isinstance(value, plain) and name != "training"}
    return {name: value for name, value in found.items() if not name.startswith("_") or isinstance(value, float)}


def _near(got: Any, want: Tensor) -> bool:
    """A rough comparison that bf16 passes and another formula does not; the verification is the exact one."""
    if not isinstance(got, Tensor) or (got.shape, got.dtype) != (want.shape, want.dtype):
        return False
    return ((got.double() - want.double()).norm() <= 0.03 * want.double().norm()).item()


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
    if any(isinstance(module, Fused) or MARK in vars(module) for module in model.modules()):
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
