"""A second judge for 16-bit models whose own rounding is large: the model as it came, in fp32, for one run.

Two right bf16 runs of four Gemma 3 layers lie 6.5e-2 apart, because each of them lies 5.0e-2 from fp32 (Llama: 1.6e-2). A limit
on their distance would refuse what is right, and a wider one would let pass what is wrong in a Llama. So where that limit is
passed, both runs are measured against fp32, as verify.py measures a module: the placed one may be FACTOR times as far off.
All gradients together came out 0.85 to 1.25 times as far off, of eight layers of Gemma 3 once 1.5 times.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .exercise import LIMIT, LOOSE, Exercise, Sketch, distances
from .fused import Fused, adopt, release
from .verify import FACTOR, GRADIENT, UNIT, Verdict, worst


def judge_by_truth(model: nn.Module, run: Exercise, after: Sketch, before: Sketch, dtype: torch.dtype) -> Verdict:
    """After and before against the model as it came in fp32, on the same input."""
    with as_it_came(model), in_fp32(model):
        truth = run()
    (names, new), (_, own) = distances(after, truth), distances(before, truth)
    loose = [LOOSE[dtype] if name.startswith(GRADIENT) else 0.0 for name in names]
    limits = [max(least, FACTOR * error + UNIT[dtype]) for least, error in zip(loose, own)]
    return worst([f"{name}, from fp32," for name in names], list(zip(new, limits)))


def wanted(verdict: Verdict, dtype: torch.dtype) -> bool:
    """Whether rounding may be what is wrong: a difference of 16-bit numbers, not far beyond its limit."""
    return not verdict.why and dtype in (torch.float16, torch.bfloat16) and verdict.error <= 5 * LIMIT[dtype]


@contextmanager
def as_it_came(model: nn.Module) -> Iterator[None]:
    """Every swapped module is its old self for as long as the block lasts."""
    swapped = [module for module in model.modules() if isinstance(module, Fused)]
    held = [(module, module.part, {name: module.__dict__[name] for name in module.__dict__["_added"]}) for module in swapped]
    for module in swapped:
        release(module)
    try:
        yield
    finally:
        for module, part, attributes in held:
            adopt(module, part, attributes)


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """The model's 16-bit numbers in fp32. The parameters stay the same objects, and get their own memory back."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.dtype in (torch.float16, torch.bfloat16)]
    before = [t.data for t in tensors]
    try:
        for t in tensors:
            t.data = t.data.float()
        yield
    finally:
        for t, data in zip(tensors, before):
            t.data = data
