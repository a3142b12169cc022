"""Whether a swapped module computes what it replaces: output, input gradient and every parameter gradient, on random input.

The measure is the original in a wider dtype (fp32 for 16-bit modules, fp64 for fp32 ones). The original in its own dtype
misses that by its rounding; the swapped one may miss it by FACTOR times as much, and one unit in the last place. So the
limit grows where rounding is large (long sums, deep inside a module) and is tight where it is not; a wrong formula misses
by orders of magnitude.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..layers import recompute
from ..models.placing import Case, mode, noise

FACTOR = 2.0

# One unit in the last place, relative, and a little for the order of sums. The fp64 figure is not fp64's: Hugging Face's
# norms and rotary angles are computed in fp32 whatever the model's dtype.
UNIT = {torch.float64: 1e-6, torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
    torch.float64: torch.float64,
}

Named = list[tuple[str, Tensor | None]]


@dataclass(frozen=True)
class Verdict:
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


def verify(module: nn.Module, cases: Iterable[Case], swap: Callable[[], None]) -> Verdict:
    """Run `module` on every case, call `swap`, run it again, and judge the second run by the first."""
    cases = list(cases)
    dtype = max({p.dtype for p in module.parameters()}, key=UNIT.__getitem__, default=torch.float32)
    config = getattr(module, "config", None)
    wide = deepcopy(module, {id(config): config}).to(WIDER[dtype])
    truth, own = run(wide, cases, WIDER[dtype]), run(module, cases, dtype)
    del wide
    swap()
    return judge(run(module, cases, dtype), own, truth, dtype)


def run(module: nn.Module, cases: Iterable[Case], dtype: torch.dtype) -> Named:
    """Outputs and gradients by name, in eval mode (dropout off), with fixed upstream gradients.

    Leaves no trace on the parameters.
    """
    named: Named = []
    with ExitStack() as stack:
        stack.enter_context(bare(module, all_train=True))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(mode(module, training=False))
        parameters = dict(module.named_parameters())
        for number, case in enumerate(cases):
            x, keywords = case(dtype)
            x.requires_grad_()
            y = module.forward(x, **keywords)  # not __call__: hooks are the user's business
            y = y[0] if isinstance(y, tuple) else y
            upstream = noise(y.shape, y, seed=1)
            gradients = torch.autograd.grad(y, [x, *parameters.values()], upstream, allow_unused=True)
            names = ["output", "input gradient", *(GRADIENT + name for name in parameters)]
            label = f" (case {number + 1})" if number else ""
            named += [(name + label, t) for name, t in zip(names, [y.detach(), *gradients])]
    return named


def judge(new: Named, own: Named, truth: Named, dtype: torch.dtype) -> Verdict:
    """The worst pair. Nothing is read from the device until all is computed."""
    errors, names, floor = [], [], noise_floor(truth)
    for (name, n), (_, o), (_, t) in zip(new, own, truth):
        if (n is None) != (o is None):
            return Verdict(why=f"{name} is {'missing' if n is None else 'there'}, unlike the original's")
        if n is None or o is None or t is None:
            continue
        if n.dtype != o.dtype or n.shape != o.shape:
            return Verdict(why=f"{name} is {n.dtype} {tuple(n.shape)}, the original's {o.dtype} {tuple(o.shape)}")
        scale = torch.maximum(t.norm(), floor) if name.startswith(GRADIENT) else t.norm()
        scale = scale.clamp_min(1e-12)  # all of it may be zero, as at weights of zeros
        errors.append(torch.stack([(a.to(t.dtype) - t).norm() / scale for a in (n, o)]))
        names.append(name)
    return worst(names, [(e, FACTOR * before + UNIT[dtype]) for e, before in torch.stack(errors).tolist()])


GRADIENT = "gradient of "


def noise_floor(named: Named) -> Tensor:
    """A gradient that is zero in exact arithmetic is nothing but rounding: measure it against a thousandth of the largest."""
    norms = [t.norm() for name, t in named if t is not None and name.startswith(GRADIENT)]
    return 1e-3 * torch.stack(norms).max() if norms else torch.zeros(())


def worst(names: list[str], pairs: list[tuple[float, float]]) -> Verdict:
    """The name whose error is largest for its limit; one that is no number is the largest of all."""
    i = max(range(len(names)), key=lambda i: pairs[i][0] / pairs[i][1] if pairs[i][0] == pairs[i][0] else float("inf"))
    return Verdict(names[i], *pairs[i])


@contextmanager
def bare(module: nn.Module, all_train: bool) -> Iterator[None]:
    """No parameter has an accumulator, and with `all_train` every one trains, for as long as the block lasts.

    What a large batch computes again in backward is computed again here too: its way is the longer one.
    """
    parameters = list(module.parameters())
    before = [(p.requires_grad, p.__dict__.pop("main_grad", None)) for p in parameters]
    try:
        for p in parameters if all_train else ():
            p.requires_grad_(p.is_floating_point())
        with recompute.recomputing(module, 0):
            yield
    finally:
        for p, (trains, main) in zip(parameters, before):
            p.requires_grad_(trains)
            if main is not None:
                p.__dict__["main_grad"] = main
