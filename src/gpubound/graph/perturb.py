"""Other inputs, and other seeds of the host's random generators, for each round of a certificate; poisoned memory.

Inputs keep their shapes and dtypes. Floating tensors are drawn again with the example's mean and spread. Integers and booleans
are shuffled, so that ids stay in range and a mask keeps its count; where a shuffle changes nothing (one position, a constant)
an integer counts down and a boolean flips. The certificate names inputs that cannot be varied.

Random numbers of Python and NumPy are baked into a graph. Two draws among few values may be the same by chance, so each eager
call of the certificate draws from another seed. The time is baked in, too, and is not varied: as an fp32 number it is the same
for two minutes.

Poison is NaN in memory that a replay must not read before it writes it.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .memory import difference
from .reachable import storage_key

SOURCES = "random numbers (random, numpy.random) or the time"


def perturb(examples: Sequence[Tensor], round_: int) -> tuple[list[Tensor], list[int]]:
    """Return new tensors, and the indices of those that equal the example. The user's random generators are not used."""
    generator = torch.Generator().manual_seed(0x5EED + round_)
    inputs = [_perturbed(example, generator) for example in examples]
    unvaried = [index for index, (new, old) in enumerate(zip(inputs, examples)) if _equal(new, old) and old.numel()]
    return inputs, unvaried


def _perturbed(example: Tensor, generator: torch.Generator) -> Tensor:
    old = example.detach()
    if old.numel() == 0:
        return old.clone()
    floating = old.is_floating_point() or old.is_complex()
    if floating and bool(_fp64(old).isfinite().all()):
        return _random_like(old, generator)
    order = torch.randperm(old.numel(), generator=generator, device="cpu").to(old.device)
    new = torch.empty_like(old).copy_(old.reshape(-1)[order].reshape(old.shape))
    if not _equal(new, old) or floating:
        return new
    return ~old if old.dtype == torch.bool else torch.where(old > 0, old - 1, old)


def _random_like(old: Tensor, generator: torch.Generator) -> Tensor:
    values, limits = _fp64(old), torch.finfo(old.dtype)
    spread = values.std(correction=0)
    if spread == 0:  # a single number or a constant has no spread
        spread = values.abs().mean().clamp(min=1.0)
    noise = torch.randn(values.shape, generator=generator, dtype=torch.float64, device="cpu").to(values.device)
    new = noise * spread + values.mean()
    if bool((values >= 0).all()):  # a probability or a variance is never negative
        new = new.abs()
    new = torch.view_as_complex(new) if old.is_complex() else new.clamp(limits.min, limits.max)
    return torch.empty_like(old).copy_(new)


def _fp64(tensor: Tensor) -> Tensor:
    """Return the tensor in fp64, because fp8 lacks most operations. A complex number becomes two."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _equal(new: Tensor, old: Tensor) -> bool:
    """Return whether the bits are the same: torch.equal does not support fp8, and a NaN is unequal to itself."""
    return difference(new, old).bitwise


@contextmanager
def other_seeds(round_: int) -> Iterator[None]:
    """Seed the random generators that Python and NumPy share, another seed for each round, and restore their states."""
    states = _random_states()
    try:
        for _, _, seed in states:
            seed(0x5EED + round_)
        yield
    finally:
        for state, restore, _ in states:
            restore(state)


def _random_states() -> list[tuple[Any, Callable[[Any], None], Callable[[int], None]]]:
    """Return (state, setter, seeding function) of each generator that a process shares."""
    states: list[tuple[Any, Callable[[Any], None], Callable[[int], None]]] = [(random.getstate(), random.setstate, random.seed)]
    shared = sys.modules["numpy"].random if "numpy" in sys.modules else None
    if shared is not None and shared.get_state(legacy=False)["bit_generator"] == "MT19937":  # other generators have no seed()
        states.append((shared.get_state(), shared.set_state, shared.seed))
    return states


def poison(tensor: Tensor) -> None:
    """Fill a floating tensor with NaN. Others, which may be addresses, are filled with their first value, which is in range."""
    tensor = tensor.detach()
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.numel():
        tensor.copy_(tensor.reshape(-1)[0].clone().expand(tensor.shape))


def poison_results(results: Any, external: set[int]) -> None:
    """Poison the outputs and gradients in the graph's memory, but not views of inputs or state."""
    for leaf in tree_leaves(results):
        if isinstance(leaf, Tensor) and storage_key(leaf) not in external:
            floating = leaf.is_floating_point() or leaf.is_complex()
            leaf.detach().fill_(float("nan") if floating else 119)  # 119 fits every integer, and is True


def poison_pool(pool: Any, device: torch.device) -> int:
    """Fill every free block of a graph's pool with 0xFF, which is NaN in every floating dtype. Return the number of bytes.

    Such a block is free between replays, so a replay must write to it before it reads from it.
    """
    if pool is None or device.type != "cuda":
        return 0
    segments = [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) == tuple(pool)]
    blocks = [block for segment in segments if segment["device"] == device.index for block in segment["blocks"]]
    free = [block for block in blocks if block["state"] == "inactive"]
    for block in free:
        memory = {"shape": (block["size"],), "typestr": "|u1", "data": (block["address"], False), "version": 2}
        torch.as_tensor(SimpleNamespace(__cuda_array_interface__=memory), device=device).fill_(255)  # it makes no copy
    return sum(block["size"] for block in free)
