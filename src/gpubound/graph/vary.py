"""Other inputs than those captured with: of the same shapes and dtypes, with values that the function can take.

Floating tensors are drawn anew from the example's mean and spread. Integers and booleans are shuffled, so that ids stay in
range and a mask keeps its count; where a shuffle changes nothing (one position, a constant) an integer counts down and a
boolean flips.
What cannot be varied so is named in the certificate.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def vary(examples: Sequence[Tensor], round_: int) -> tuple[list[Tensor], list[int]]:
    """(new tensors, which of them still equal the example). It draws from its own generator: the user's stand still."""
    generator = torch.Generator().manual_seed(0x5EED + round_)
    made = [_other(example, generator) for example in examples]
    unvaried = [index for index, (new, old) in enumerate(zip(made, examples)) if torch.equal(new, old) and old.numel()]
    return made, unvaried


def _other(example: Tensor, generator: torch.Generator) -> Tensor:
    old = example.detach()
    if old.numel() == 0:
        return old.clone()
    drawable = old.is_floating_point() or old.is_complex()
    if drawable and bool(old.isfinite().all()):
        return _drawn(old, generator)
    new = _shuffled(old, generator)
    if not torch.equal(new, old) or drawable:
        return new
    if old.dtype == torch.bool:
        return ~old
    return torch.where(old > 0, old - 1, old)


def _drawn(old: Tensor, generator: torch.Generator) -> Tensor:
    real = torch.view_as_real(old) if old.is_complex() else old
    wide = real.double()
    spread = wide.std(correction=0)
    spread = torch.where(
        spread > 0, spread, wide.abs().mean().clamp(min=1.0)
    )  # one number, or a constant, has no spread of its own
    new = torch.randn(real.shape, generator=generator, dtype=torch.float64).to(real.device) * spread + wide.mean()
    new = torch.where(wide >= 0, new.abs(), new) if bool((wide >= 0).all()) else new  # a probability or a variance has no sign
    made = torch.empty_like(real).copy_(new)
    return torch.view_as_complex(made) if old.is_complex() else made


def _shuffled(old: Tensor, generator: torch.Generator) -> Tensor:
    order = torch.randperm(old.numel(), generator=generator).to(old.device)
    return torch.empty_like(old).copy_(old.reshape(-1)[order].reshape(old.shape))
