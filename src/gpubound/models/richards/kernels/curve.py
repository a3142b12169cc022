"""Richards curves: a logistic function with more freedom, nine numbers, some of them learned.

    z = c (scale · x / temperature + shift)             c = 2 for "tanh", else 1
    t = ln beta − rate · (z − m)                        rate = k, with `tail` k · nu
    σ = (1 + e^t)^(−1/nu)
    f = gain · σ + bias                                 for "tanh" gain · (2σ − 1) + bias

nu bends one end more than the other. Far to the left σ falls as e^(k z / nu), with `tail` as e^(k z), whatever nu is.

Learned numbers are one vector `free`. nu, k, beta and temperature must stay positive: `free` holds softplus⁻¹(p − LEAST).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

NAMES = ("nu", "k", "m", "beta", "temperature", "gain", "bias", "scale", "shift")
POSITIVE = ("nu", "k", "beta", "temperature")
VARIANTS = ("sigmoid", "tanh", "gompertz", "free")
LEAST = 1e-6  # what a learned positive number stays above: softplus may give 0, and all four are divided by or have a logarithm

# Of each group one number says all: the others give the same curves again, and an optimizer drifts along them.
SAME = {
    ("k", "scale", "temperature"): "each of them stretches x",
    ("m", "shift", "beta"): "each of them moves the curve along x",
}
GOMPERTZ = 0.01  # nu and beta of "gompertz": (1 + e^−z / 100)^−100 is within 0.3 % of 1 of its limit e^(−e^−z)


@dataclass(frozen=True)
class Curve:
    """A curve: its variant, its learned parameters, and the (initial) value of each parameter.

    "sigmoid" (0 to 1), "tanh" (−1 to 1) and "gompertz" (0 to 1, far from symmetric) keep their range. "free" is the sigmoid
    whose gain and bias may be learned. With nothing given f is the logistic sigmoid, or tanh, exactly.
    """

    learned: tuple[str, ...] = ()
    variant: str = "sigmoid"
    tail: bool = False
    nu: float = field(default=None)  # type: ignore[assignment]  # 1, of a Gompertz curve 0.01
    k: float = 1.0
    m: float = 0.0
    beta: float = field(default=None)  # type: ignore[assignment]  # as nu
    temperature: float = 1.0
    gain: float = 1.0
    bias: float = 0.0
    scale: float = 1.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.learned, str) or self.variant not in VARIANTS:
            raise ValueError(
                f"Curve: learned must be names in a tuple and variant one of {', '.join(VARIANTS)}, "
                f"got {self.learned!r} and {self.variant!r}."
            )
        own = GOMPERTZ if self.variant == "gompertz" else 1.0
        for name, value in (("nu", self.nu), ("beta", self.beta)):
            object.__setattr__(self, name, own if value is None else value)
        object.__setattr__(self, "learned", tuple(self.learned))
        self._check_learned()
        for name, value in zip(NAMES, self.values):
            if not math.isfinite(value) or (name in POSITIVE and value < 2 * LEAST):
                bound = f"a number from {2 * LEAST:g} up" if name in POSITIVE else "a finite number"
                raise ValueError(f"Curve: {name} must be {bound}, got {value}; start from its default.")

    def _check_learned(self) -> None:
        unknown = [name for name in self.learned if name not in NAMES]
        if unknown or len(set(self.learned)) < len(self.learned):
            raise ValueError(f"Curve: learned must name each once, some of {', '.join(NAMES)}, got {', '.join(self.learned)}.")
        for group, why in SAME.items():
            chosen = [name for name in self.learned if name in group]
            if len(chosen) > 1:
                raise ValueError(
                    f"Curve: at most one of {', '.join(group)} can be learned, got {' and '.join(chosen)}: {why}; "
                    f"keep one in learned."
                )
        ranged = [name for name in self.learned if name in ("gain", "bias")]
        if ranged and self.variant != "free":
            raise ValueError(
                f'Curve: a "{self.variant}" keeps its range, so {" and ".join(ranged)} cannot be learned; take variant "free".'
            )

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(float(getattr(self, name)) for name in NAMES)

    def start(self) -> list[float]:
        """`free` at first, which stands for these values."""
        return [_unbounded(value) if name in POSITIVE else value for name, value in self._of_learned()]

    def _of_learned(self) -> Iterable[tuple[str, float]]:
        return ((name, float(getattr(self, name))) for name in self.learned)

    @cached_property
    def constants(self) -> tuple:
        """What a kernel is compiled for: each number's place in `free`, or -1; its value, if it is fixed; tail; tanh."""
        places = [self.learned.index(name) if name in self.learned else -1 for name in NAMES]
        fixed = [0.0 if place >= 0 else value for place, value in zip(places, self.values)]
        return (*places, *fixed, self.tail, self.variant == "tanh")

    def parameters(self, free: Tensor | None, dtype: torch.dtype) -> list[Tensor | float]:
        """All nine in the order of NAMES, those learned as scalars of `dtype`."""
        numbers: list[Tensor | float] = list(self.values)
        for i, name in enumerate(self.learned):
            assert free is not None
            number = free[i].to(dtype)
            numbers[NAMES.index(name)] = LEAST - F.logsigmoid(-number) if name in POSITIVE else number
        return numbers

    def apply(self, x: Tensor, free: Tensor | None) -> Tensor:
        """f(x), in x's dtype: the definition."""
        nu, k, m, beta, temperature, gain, bias, scale, shift = self.parameters(free, x.dtype)
        z = scale * (x / temperature) + shift
        if self.variant == "tanh":
            z = 2 * z
        log_beta = torch.log(beta) if isinstance(beta, Tensor) else math.log(beta)
        t = log_beta - (k * nu if self.tail else k) * (z - m)
        sigma = torch.exp(F.logsigmoid(-t) / nu)  # logsigmoid(−t) is −softplus(t), without softplus's threshold
        return gain * (2 * sigma - 1 if self.variant == "tanh" else sigma) + bias


def _unbounded(value: float) -> float:
    """softplus⁻¹(value − LEAST)"""
    p = value - LEAST
    return p + math.log(-math.expm1(-p))
