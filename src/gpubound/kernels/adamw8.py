"""AdamW on flat buffers with both moments in 8 bits. The numbers between two steps are coarse, the step is not: each update
decodes them, goes on in fp32 as `adamw` does, and codes them again.

Moments lie over many powers of ten, and small ones matter as much as large ones. So the leading zeros of a code say how small
it is, a factor of 8 for each, and the bits behind them divide that range evenly: 128 steps (64 with a sign) between 1/8 and 1,
half as many between 1/64 and 1/8, down to 8^-7 (8^-6). Code 0 is 0, the largest is 1. Powers of two make it exact arithmetic on
a float's own bits, without a table.

Numbers are coded in blocks of 256, each over its own largest magnitude, which is kept beside the codes in fp32.
"""

import torch
from torch import Tensor

from .adamw import advance, check_device, check_flat, check_plan, check_seed, example_plan, round_at_random
from .choose import implementation
from .ops import definition
from .selftest import draw

BLOCK = 256
PART = 256 * BLOCK  # elements at a time on a CPU, as in adamw.py
_TINY = 2.0**-126  # one over anything smaller may overflow: a block whose largest is smaller is all zeros


def adamw8(
    weight: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    m_scale: Tensor,
    v_scale: Tensor,
    plan: Tensor,
    master: Tensor | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay_until: int | None = None,
    seed: int | None = None,
) -> None:
    """`adamw` with both moments in 8 bits. It moves 18 bytes per element with bf16 weights and masters; fp32 moments need 30.

    `m` is int8, `v` uint8; `m_scale` and `v_scale` are fp32, one number for every 256 elements. All four begin as zeros.
    """
    wide = {"gradient": gradient} | ({"master": master} if master is not None else {})
    check_flat("adamw8", weight=weight, **wide, m_scale=m_scale, v_scale=v_scale)
    check_device("adamw8", weight, **wide, m=m, v=v, m_scale=m_scale, v_scale=v_scale, plan=plan)
    n = weight.numel()
    wanted = {name: (tensor, torch.float32, n) for name, tensor in wide.items()}
    wanted |= {"m": (m, torch.int8, n), "v": (v, torch.uint8, n)}
    wanted |= {name: (t, torch.float32, -(-n // BLOCK)) for name, t in (("m_scale", m_scale), ("v_scale", v_scale))}
    for name, (tensor, dtype, count) in wanted.items():
        if tensor.dtype != dtype or tensor.shape != (count,) or not tensor.is_contiguous():
            raise ValueError(
                f"adamw8: {name} must be a contiguous {dtype} vector of {count}, for {n} weights, "
                f"got {tuple(tensor.shape)} {tensor.dtype}; begin with torch.zeros({count}, dtype={dtype})."
            )
    check_plan("adamw8", plan, gradient)
    check_seed("adamw8", weight, master, seed)
    decay_until = n if decay_until is None else decay_until
    implementation("adamw8", weight)(
        weight, gradient, m, v, m_scale, v_scale, plan, master, betas, eps, decay_until, seed
    )  # fmt: skip


@definition(lambda g: (*_example(g, 300), (0.9, 0.99), 1e-8, 40, None))
@torch.no_grad()
def adamw8_reference(
    weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, m_scale: Tensor, v_scale: Tensor, plan: Tensor,
    master: Tensor | None, betas: tuple[float, float], eps: float, decay_until: int, seed: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """In place, as `adamw`: `m` is int8, `v` uint8, `m_scale` and `v_scale` hold the largest magnitude of each 256 elements."""
    part = PART if weight.device.type == "cpu" else max(1, weight.numel())
    for start in range(0, weight.numel(), part):
        here, rows = slice(start, start + part), slice(start // BLOCK, -(-(start + part) // BLOCK))
        whole = weight[here] if master is None else master[here]
        m_wide, v_wide = decode(m[here], m_scale[rows]), decode(v[here], v_scale[rows])
        p = advance(whole, gradient[here], m_wide, v_wide, plan, betas, eps, decay_until - start)
        rounded = p.to(weight.dtype) if seed is None else round_at_random(p, start, plan[5], seed)
        moments = zip((m[here], m_scale[rows], v[here], v_scale[rows]), encode(m_wide, m.dtype) + encode(v_wide, v.dtype))
        for kept, new in ((weight[here], rounded), *(((whole, p),) if master is not None else ()), *moments):
            torch.where(plan[0] != 0, new, kept, out=kept)
    return weight, m, v, m_scale, v_scale


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes, the largest magnitude of each block) of a flat fp32 tensor. int8 keeps the sign; in uint8 all must be positive.

    In uint8 only 0 becomes code 0: a second moment that vanished would make of a small step a jump.
    """
    blocks = -(-x.numel() // BLOCK)
    padded = torch.nn.functional.pad(x, (0, blocks * BLOCK - x.numel())).view(blocks, BLOCK)
    scale = padded.abs().amax(1)
    scale = torch.where(scale < _TINY, 0.0, scale)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    codes = _code((padded.abs() * inverse[:, None]).clamp(max=1), dtype)
    if dtype == torch.int8:
        codes = torch.where(padded < 0, -codes, codes)
    else:
        codes = torch.where((padded > 0) & (scale[:, None] > 0), codes.clamp(min=1), codes)
    return codes.to(dtype).view(-1)[: x.numel()], scale


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 numbers again."""
    return _number(codes) * scales.repeat_interleave(BLOCK, output_size=len(scales) * BLOCK)[: codes.numel()]


def _code(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest code's magnitude, as int32, of numbers from 0 to 1."""
    most = zeros_most(dtype)
    power = torch.where(x > 0, x.frexp().exponent, -99)
    zeros = ((-power).clamp(min=0) // 3).clamp(max=most)
    steps = torch.ldexp(torch.ones_like(x), most - zeros)
    step = ((torch.ldexp(x, 3 * zeros) - 0.125) * (8 / 7 * steps) + 0.5).floor()
    return (steps - 1 + step).to(torch.int32)


def _number(codes: Tensor) -> Tensor:
    """fp32 numbers from -1 to 1."""
    c = codes.to(torch.int32).abs().float()
    power = c.clamp(min=1).frexp().exponent - 1  # c lies from 2^power to just below 2^(power + 1)
    steps = torch.ldexp(c + 1, -power) - 1
    x = torch.ldexp(0.125 + 0.875 * steps, -3 * (zeros_most(codes.dtype) - power))
    return torch.where(c == 0, 0.0, x) * torch.where(codes < 0, -1.0, 1.0)


def zeros_most(dtype: torch.dtype) -> int:
    """How many leading zeros a magnitude can have: of 8 bits, or of 7 behind a sign."""
    return 6 if dtype == torch.int8 else 7


def _example(generator: torch.Generator, size: int) -> tuple[Tensor, ...]:
    """Weights, a gradient, both moments in 8 bits, their scales, a plan, masters."""
    weight, gradient, master = (draw(generator, size) for _ in range(3))
    codes = torch.randint(-127, 128, (size,), generator=generator, device="cpu")
    scales = torch.linspace(0.5, 2, -(-size // BLOCK), device="cpu")
    moments = codes.to(torch.int8), codes.abs().to(torch.uint8), scales, scales.square()
    return weight, gradient.detach(), *moments, example_plan(), master.detach()
