"""Whether a swapped module computes what it replaces: output, input gradient and every parameter gradient, on random input.

The measure is the original in a wider dtype (fp32 for 16-bit modules, fp64 for fp32 ones). The original in its own dtype
misses that by its rounding; the swapped one may miss it by FACTOR times as much, and one unit in the last place. So the
limit grows where rounding is large (long sums, deep inside a module) and is tight where it is not; a wrong formula misses
by orders of magnitude.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import FallbackError, GpuboundError
from ..layers import recompute
from ..layers.quantized_base import without_rounded_inputs
from ..models.placing import Case, mode, noise

FACTOR = 2.0
GRADIENT = "gradient of "

# One unit in the last place, relative, and a little for the order of sums. The fp64 figure is not fp64's: Hugging Face's
# norms and rotary angles are computed in fp32 whatever the model's dtype.
UNIT = {torch.float64: 1e-6, torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

Named = dict[str, Tensor]
"""Outputs and gradients of a run; a gradient that there is none of is not in it"""


@dataclass(frozen=True)
class Agreement:
    """The worst of all compared tensors, and what it may be."""

    where: str = ""
    error: float = 0.0
    limit: float = 0.0
    why: str = ""

    @property
    def ok(self) -> bool:
        return not self.why and self.error <= self.limit

    def __str__(self) -> str:
        if self.why:
            return self.why
        return f"{self.where} off by {self.error:.1e} ({'allowed' if self.ok else 'limit'} {self.limit:.1e})"


def verify(module: nn.Module, cases: Iterable[Case], swap: Callable[[], None]) -> Agreement:
    """Run `module` on every case, call `swap`, run it again, and judge the second run by the first."""
    cases, dtype = list(cases), coarsest(module)
    config = getattr(module, "config", None)
    wider = torch.float32 if dtype.itemsize < 4 else torch.float64
    wide = deepcopy(module, {id(config): config}).to(wider)
    truth, own = run(wide, cases, wider), run(module, cases, dtype)
    del wide
    swap()
    return judge(run(module, cases, dtype), own, truth, dtype)


def made_inside(module: nn.Module) -> str:
    """Why a module has no gradients to be judged by; empty when it may have."""
    name = next((name for name, p in module.named_parameters() if p.is_inference()), None)
    if name is None:
        return ""
    return (
        f"{name} was made inside torch.inference_mode(), and has no gradients to be verified by; "
        f"make or load the model outside of it"
    )


def coarsest(model: nn.Module) -> torch.dtype:
    """The coarsest dtype of its parameters: it decides how far two right runs may differ."""
    found = {p.dtype for p in model.parameters()}
    return max(found & set(UNIT), key=UNIT.__getitem__, default=torch.float32)


def run(module: nn.Module, cases: Iterable[Case], dtype: torch.dtype) -> Named:
    """What comes out in eval mode (dropout off) with fixed upstream gradients. Leaves no trace on the parameters."""
    named: Named = {}
    with bare(module, all_train=True), torch.enable_grad(), mode(module, training=False):
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}  # codes have no gradient
        for number, case in enumerate(cases):
            x, keywords = case(dtype)
            x.requires_grad_()
            y = module.forward(x, **keywords)  # not __call__: hooks are the user's business
            y = y[0] if isinstance(y, tuple) else y
            upstream = noise(y.shape, y, seed=1)
            gradients = torch.autograd.grad(y, [x, *parameters.values()], upstream, allow_unused=True)
            names = ["output", "input gradient", *(GRADIENT + name for name in parameters)]
            label = f" (case {number + 1})" if number else ""
            named |= {name + label: t for name, t in zip(names, [y.detach(), *gradients]) if t is not None}
    return named


def judge(new: Named, own: Named, truth: Named, dtype: torch.dtype, loose: float = 0.0) -> Agreement:
    """`new` against `truth`, which `own` misses too. `loose`: a single gradient may always be off by so much."""
    if why := missing(new, own):
        return Agreement(why=why)
    for name, n in new.items():
        if n.dtype != (o := own[name]).dtype or n.shape != o.shape:
            return Agreement(why=f"{name} is {n.dtype} {tuple(n.shape)}, the original's {o.dtype} {tuple(o.shape)}")
    before = distances(own, truth)
    limits = {name: FACTOR * error + UNIT[dtype] for name, error in before.items()}
    limits |= {name: max(loose, limit) for name, limit in limits.items() if name.startswith(GRADIENT)}
    return worst(distances(new, truth), limits)


def missing(new: Named, own: Named) -> str:
    """What only one of the two runs has; empty when nothing."""
    for name in (*own, *new):
        if name not in new or name not in own:
            return f"{name} is {'missing' if name in own else 'there'}, unlike the original's"
    return ""


def distances(run: Named, other: Named) -> dict[str, float]:
    """How far `run` is from `other`, each for its size. The device is read once, at the end.

    A gradient that is zero in exact arithmetic is nothing but rounding: it is measured against a thousandth of the largest.
    """
    norms = {name: t.norm().float() for name, t in other.items()}
    gradients = [norm for name, norm in norms.items() if name.startswith(GRADIENT)]
    floor = 1e-3 * torch.stack(gradients).max() if gradients else torch.zeros((), device="cpu", dtype=torch.float32)
    errors = {}
    for name in (name for name in other if name in run):
        scale = torch.maximum(norms[name], floor) if name.startswith(GRADIENT) else norms[name]
        # all of it may be zero, as at weights of zeros
        errors[name] = (run[name] - other[name]).norm().float() / scale.clamp_min(1e-12)
    return dict(zip(errors, torch.stack([*errors.values()]).tolist()))


def worst(errors: dict[str, float], limits: dict[str, float]) -> Agreement:
    """The name whose error is largest for its limit; one that is no number is the largest of all."""
    where = max(errors, key=lambda name: float("inf") if math.isnan(errors[name]) else errors[name] / limits[name])
    return Agreement(where, errors[where], limits[where])


def judged(what: str, judge: Callable[[], Agreement]) -> Agreement:
    """The verdict, or what was raised on the way to it: a kernel's compiler can raise anything, and so can the user's model."""
    try:
        return judge()
    except FallbackError:
        raise
    except Exception as error:  # the reason is reported
        return Agreement(why=f"{what} raised {said(error)}".lstrip())


def said(error: BaseException) -> str:
    line, kind = str(error).strip().partition("\n")[0].rstrip("."), type(error).__name__
    return line if line and isinstance(error, GpuboundError) else f"{kind}: {line}" if line else kind


@contextmanager
def bare(module: nn.Module, all_train: bool) -> Iterator[None]:
    """No parameter has an accumulator, and with `all_train` every one trains, for as long as the block lasts.

    What a large batch computes again in backward is computed again here too: its way is the longer one. Weights in codes are
    taken as their numbers: x in 8 bits, over a scale for one product or for several as one, is not the same number.
    """
    before = [(p, p.requires_grad, p.__dict__.pop("main_grad", None)) for p in module.parameters()]
    try:
        for p, _, _ in before if all_train else ():
            p.requires_grad_(p.is_floating_point())
        with recompute.recomputing(module, 0), without_rounded_inputs(module):
            yield
    finally:
        for p, trains, main in before:
            p.requires_grad_(trains)
            if main is not None:
                p.__dict__["main_grad"] = main
