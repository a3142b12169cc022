"""A second judge for 16-bit models whose own rounding is large: the model as it came, in fp32, for one run.

Two right bf16 runs of four Gemma 3 layers lie 6.5e-2 apart, because each of them lies 5.0e-2 from fp32 (Llama: 1.6e-2). A limit
on their distance would refuse what is right, and a wider one would let pass what is wrong in a Llama. So where that limit is
passed, both runs are measured against fp32, as verify.py measures a module: the placed one may be FACTOR times as far off.
All gradients together came out 0.85 to 1.25 times as far off, of eight layers of Gemma 3 once 1.5 times.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .exercise import LIMIT, LOOSE, Exercise, Sketch
from .fused import Fused, adopt, release
from .verify import FACTOR, GRADIENT, UNIT, Verdict, noise_floor, worst


def judge_by_truth(model: nn.Module, run: Exercise, after: Sketch, before: Sketch, dtype: torch.dtype) -> Verdict:
    """After and before against the model as it came in fp32, on the same input."""
    with as_it_came(model), in_fp32(model):
        truth = run()
    floor, pairs = noise_floor(truth), []
    apart: list[list[Tensor]] = []
    for (name, a), (_, b), (_, t) in zip(after, before, truth):
        if a is None or b is None or t is None:
            continue
        distances, norm = [(x - t).norm().float() for x in (a, b)], t.norm().float()
        gradient = name.startswith(GRADIENT)
        if gradient:
            apart.append([*distances, norm])
        scale = (torch.maximum(norm, floor.float()) if gradient else norm).clamp_min(1e-12)
        pairs.append((name, LOOSE[dtype] if gradient else 0.0, [(d / scale).item() for d in distances]))
    if apart:
        new, own, whole = (torch.stack(column).norm().item() for column in zip(*apart))
        pairs.append(("all gradients together", 0.0, [new / max(whole, 1e-12), own / max(whole, 1e-12)]))
    names = [f"{name}, from fp32," for name, _, _ in pairs]
    return worst(names, [(new, max(loose, FACTOR * own + UNIT[dtype])) for _, loose, (new, own) in pairs])


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
