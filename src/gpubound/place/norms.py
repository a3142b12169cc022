"""Fused norms for modules of any model: torch's own by their class, all others by what they compute.

`recognise` runs a copy of a module with random parameters. A module qualifies if it has no children and no buffers, one or two
parameters of shape (width,), and a forward of one tensor. The copy's eps is fitted from the ratio of its outputs for an input
of unit variance and for a tiny one: y(s·z) / y(z) = s·sqrt((1 + eps) / (s² + eps)). A recognised module is only a candidate: it
is verified on its own parameters, gradients too, as every other swap is (verify.py).
"""

import math
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import group_norm, layer_norm, rms_norm
from ..kernels.dispatch import Call
from ..kernels.norms import layer_norm_reference, rms_norm_reference
from ..layers.fused_weights import Kernels
from ..models.registry import BATCH, TOKENS, Case, Delegating, Swap, noise, random_case


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
