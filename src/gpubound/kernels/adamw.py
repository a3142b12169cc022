"""The optimizer's update in two parts: `plan_update` decides on the device, `adamw` updates all state in one pass.

The gradient is a sum over every item of every micro-batch. Dividing it by the number of items, undoing the loss scale and
clipping are one factor, so none of them costs a pass over the gradient. The host reads nothing.

`adamw8` stores both moments in 8 bits. Each update decodes them, computes in fp32 as `adamw` does, and encodes the result.
Moments span many powers of ten, and small ones matter as much as large ones. So the leading zeros of a code give the magnitude,
a factor of 8 for each, and the following bits divide that range evenly: 128 steps (64 with a sign) between 1/8 and 1, half as
many between 1/64 and 1/8, down to 8^-7 (8^-6). Code 0 is 0, the largest is 1. Powers of two make it exact arithmetic on a
float's bits, without a table. Values are encoded in blocks of 256, relative to the largest magnitude of the block, in fp32.

An fp32 master takes 4 bytes in addition to its bf16 weight, although that has half of its bits. `split_fp32` divides it
into the weight and the remainder, the difference of their bits as integers, in 16 bits, and `join_fp32` restores it.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .dispatch import implementation, require
from .registry import definition, doubles, draw

STATE = ("updates", "skipped", "loss_scale", "good_steps")  # fp64, carried from step to step
PLAN = ("apply", "gradient_factor", "decay_factor", "step_size", "inverse_root", "update")  # fp32, for adamw
EXAMPLE = (1, 0.5, 0.9, 0.5, 2, 3)  # a plan
REPORT = ("loss", "grad_norm", "tokens", "skipped", "lr", "updates", "loss_scale")  # fp64, for people
BLOCK = 256  # moments in 8 bits that share a scale
PART = 256 * BLOCK  # elements at a time on a CPU: they stay in its cache, 0.1 s for ten million parameters, not 0.5
ZEROS = {torch.int8: 6, torch.uint8: 7}  # leading ones that a magnitude can have: of 7 bits after a sign, or of 8
FLAT = "pass tensor.view(-1)"
_TINY = 2.0**-126  # one over anything smaller may overflow: a block whose largest is smaller is all zeros


def plan_update(
    gradient: Tensor,
    totals: Tensor,
    state: Tensor,
    rates: Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.01,
    clip: float | None = None,
    growth_interval: int = 0,
) -> tuple[Tensor, Tensor]:
    """Decide the update on the device: (plan, report), two small tensors. `adamw` follows the plan. The report is for the host.

    gradient  flat fp32: the gradient of the sum of every item's loss, times the loss scale
    totals    fp64 (that sum, times the loss scale; the number of items): gradient and loss are divided by both here
    state     fp64 (updates, skipped, loss scale, good steps), updated in place, at first (0, 0, 1, 0)
    rates     fp64, the learning rates of update 1, 2, …; the last one holds from there on
    report    fp64 (loss, gradient norm before clipping, items, skipped, rate, updates, loss scale)

    When a step is not finite, the plan changes no weight, and `skipped` grows by one. A step without items changes no weight
    and no count: its loss is NaN, its number of items 0.
    """
    for name, t, length in (("totals", totals, 2), ("state", state, 4), ("rates", rates, "updates")):
        require("plan_update", name, t, torch.float64, (length,), gradient.device, "its docstring says what each number is")
    require("plan_update", "gradient", gradient, None, (gradient.numel(),), gradient.device, FLAT)
    shape = plan_shape(gradient.numel(), betas, weight_decay, clip, growth_interval)
    kernel = implementation("plan_update", gradient, None, shape)
    return kernel(gradient, totals, state, rates, betas, weight_decay, clip, growth_interval)


def plan_shape(count: int, *constants: tuple[float, float] | float | None) -> tuple:
    """Return what its kernels are compiled for: betas, weight decay, clip, growth interval and a bound on the programs."""
    return min(count, 1 << 22), *constants


def _plan_example(generator, count=80, *constants):
    gradient = draw(generator, count).detach().square()
    return gradient, doubles(5, 7), doubles(3, 1, 2, 1), doubles(1, 2, 3, 4), *(constants or ((0.9, 0.99), 0.1, 1.0, 2))


@definition(_plan_example)
def plan_update_reference(gradient, totals, state, rates, betas, weight_decay, clip, growth_interval):
    """The loss scale halves after a step that is not finite, and doubles after `growth_interval` good ones. 0: none in use."""
    loss_sum, items = totals.unbind()
    updates, skipped, loss_scale, good_steps = state.unbind()
    nothing = items <= 0
    unit = 1 / (torch.where(nothing, 1.0, items) * loss_scale)
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64) * unit
    loss = torch.where(nothing, torch.nan, loss_sum * unit)
    apply = norm.isfinite() & loss.isfinite()

    update = updates + 1
    lr = rates.take(updates.clamp(0, len(rates) - 1).long())
    factor = unit if clip is None else unit * (clip / (norm + 1e-6)).clamp(max=1.0)
    plan = torch.stack(
        [apply.double(), factor, 1 - lr * weight_decay, lr / (1 - betas[0] ** update), (1 - betas[1] ** update).rsqrt(), update]
    ).to(torch.promote_types(gradient.dtype, torch.float32))

    good_steps = torch.where(apply, good_steps + 1, torch.where(nothing, good_steps, 0.0))
    if growth_interval:
        grow = good_steps >= growth_interval
        halve = ~apply & ~nothing
        loss_scale = torch.where(halve, loss_scale / 2, torch.where(grow, loss_scale * 2, loss_scale))
        good_steps = torch.where(grow, 0.0, good_steps)
    skipped = skipped + (~apply & ~nothing).double()
    state.copy_(torch.stack([torch.where(apply, update, updates), skipped, loss_scale, good_steps]))
    return plan, torch.stack([loss, norm, items, state[1], lr, state[0], state[2]])


def adamw(
    weight: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    plan: Tensor,
    master: Tensor | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay_until: int | None = None,
    seed: int | None = None,
) -> None:
    """One pass of AdamW over flat buffers, in place, by the plan of `plan_update`. bf16 weights move 30 bytes per element.

    `master` holds the fp32 weights behind 16-bit ones, or of bf16 ones the int16 remainders of `split_fp32`. Without it
    `weight` itself is updated. A bf16 weight then needs a `seed` for stochastic rounding: rounding to the nearest would lose
    small updates. Weight decay applies to the first `decay_until` elements (None: all of them).
    """
    split = is_split(weight, master)
    for name, t in (("m", m), ("v", v), ("master", master)):
        if t is not None:
            dtype = torch.int16 if split and name == "master" else gradient.dtype
            require("adamw", name, t, dtype, weight.shape, weight.device, "it has a number for each weight")
    _check("adamw", weight, gradient, plan, master, seed)
    decay_until = weight.numel() if decay_until is None else decay_until
    shape = betas, eps, master is not None, seed is not None, split
    implementation("adamw", weight, None, shape)(weight, gradient, m, v, plan, master, betas, eps, decay_until, seed)


def _example(generator, betas=(0.9, 0.99), eps=1e-8, with_master=True, at_random=False, split=False):
    """80 numbers: as a layout's, their count is a multiple of 16, which Triton compiles apart from any other."""
    weight, (gradient, m, v, master) = draw(generator, 80), (draw(generator, 80).detach().square() for _ in range(4))
    weight, master = _split_example(master) if split else (weight, master)
    state = gradient, m, v, doubles(*EXAMPLE).float(), master if with_master else None
    return weight, *state, betas, eps, 40, 7 if at_random else None


def _split_example(master):
    weight, remainder = split_fp32(master)
    return weight.requires_grad_(), remainder


@definition(_example)
def adamw_reference(weight, gradient, m, v, plan, master, betas, eps, decay_until, seed):
    for here in _parts(weight):
        _advance(here, weight, gradient, m[here], v[here], plan, master, betas, eps, decay_until, seed)
    return weight, m, v


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
    n, blocks = weight.numel(), -(-weight.numel() // BLOCK)
    wanted = {"gradient": (gradient, torch.float32, n), "m": (m, torch.int8, n), "v": (v, torch.uint8, n)}
    wanted |= {name: (t, torch.float32, blocks) for name, t in (("m_scale", m_scale), ("v_scale", v_scale))}
    split = is_split(weight, master)
    wanted |= {} if master is None else {"master": (master, torch.int16 if split else torch.float32, n)}
    for name, (t, dtype, count) in wanted.items():
        require("adamw8", name, t, dtype, (count,), weight.device, f"begin with torch.zeros({count}, dtype={dtype})")
    _check("adamw8", weight, gradient, plan, master, seed)
    decay_until = n if decay_until is None else decay_until
    fast = implementation("adamw8", weight, None, (split,) if split else ())
    fast(weight, gradient, m, v, m_scale, v_scale, plan, master, betas, eps, decay_until, seed)


def _coded_example(generator, split=False):
    weight, gradient, master = (draw(generator, 300) for _ in range(3))
    weight, master = _split_example(master.detach()) if split else (weight, master)
    codes = torch.randint(-127, 128, (300,), generator=generator, device="cpu")
    scales = torch.linspace(0.5, 2, 2, device="cpu", dtype=torch.float32)
    moments = codes.to(torch.int8), codes.abs().to(torch.uint8), scales, scales.square()
    return weight, gradient.detach(), *moments, doubles(*EXAMPLE).float(), master.detach(), (0.9, 0.99), 1e-8, 40, None


@definition(_coded_example)
def adamw8_reference(weight, gradient, m, v, m_scale, v_scale, plan, master, betas, eps, decay_until, seed):
    for here in _parts(weight):
        rows = slice(here.start // BLOCK, -(-here.stop // BLOCK))
        fp32 = decode(m[here], m_scale[rows]), decode(v[here], v_scale[rows])
        _advance(here, weight, gradient, *fp32, plan, master, betas, eps, decay_until, seed)
        codes = (code for moment, old in zip(fp32, (m, v)) for code in encode(moment, old.dtype))
        _put(plan, zip((m[here], m_scale[rows], v[here], v_scale[rows]), codes))
    return weight, m, v, m_scale, v_scale


def _parts(weight: Tensor) -> Iterator[slice]:
    part = PART if weight.device.type == "cpu" else max(1, weight.numel())
    return (slice(start, start + part) for start in range(0, weight.numel(), part))


def _advance(
    here: slice, weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, plan: Tensor, master: Tensor | None,
    betas: tuple[float, float], eps: float, decay_until: int, seed: int | None,
) -> None:  # fmt: skip
    """Update the part `here`, of which `m` and `v` are the moments, in place, unless plan says skip."""
    _, factor, decay, step_size, inverse_root, update = plan.unbind()
    weight, master = weight[here], None if master is None else master[here]
    g = gradient[here] * factor
    m_new = m + (1 - betas[0]) * (g - m)
    v_new = betas[1] * v + (1 - betas[1]) * g * g
    in_two = is_split(weight, master)
    fp32 = join_fp32(weight, master) if in_two else (weight if master is None else master).to(plan.dtype)  # type: ignore[arg-type]
    cut = max(0, decay_until - here.start)
    decayed = torch.cat([fp32[:cut] * decay, fp32[cut:]])
    p = decayed - step_size * m_new / (v_new.sqrt() * inverse_root + eps)
    rounded = p.to(weight.dtype) if seed is None else _round_at_random(p, here.start, update, seed)
    rounded, p = split_fp32(p) if in_two else (rounded, p)
    _put(plan, [(m, m_new), (v, v_new), (weight, rounded), *([] if master is None else [(master, p)])])


def _put(plan: Tensor, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for old, new in pairs:
        torch.where(plan[0] != 0, new, old, out=old)


def is_split(weight: Tensor, master: Tensor | None) -> bool:
    """Return whether the master is a remainder of the weight."""
    return master is not None and master.dtype == torch.int16 and weight.dtype == torch.bfloat16


def split_fp32(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bf16, int16): `x` in fp32 rounded, and the remainder, in units of the last place of fp32.

    Halves are rounded away from zero: to even, two remainders could differ by 2^16, which has no room in 16 bits.
    """
    bits, number = x.view(torch.int32), x == x
    high = torch.where(number, (bits + 0x8000) >> 16, 0x7FC0)
    remainder = torch.where(number, bits - (high << 16), 0)
    return high.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join_fp32(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 numbers that `split_fp32` divided.

    A zero never has a negative remainder, unless it was written since, as by pruning: the sum would be NaN, and it counts as 0.
    """
    high, remainder = weight.view(torch.int16).int() << 16, remainder.int()
    remainder = torch.where(high & 0x7FFFFFFF == 0, remainder.clamp(min=0), remainder)
    return (high + remainder).view(torch.float32)


def _round_at_random(x: Tensor, start: int, update: Tensor, seed: int) -> Tensor:
    """fp32 to bf16: up with the probability of the part that is cut off; the same in every run for one seed, update, index."""
    index = torch.arange(start, start + x.numel(), device=x.device)
    noise = _mix(index ^ _mix(update.long() ^ _mix((index >> 32) ^ seed))) & 0xFFFF
    bits = x.view(torch.int32).long() + noise
    return (bits >> 16 << 16).to(torch.int32).view(torch.float32).to(torch.bfloat16)


def _mix(x: Tensor) -> Tensor:
    """A hash of the low 32 bits (Wellons' lowbias32)."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


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
    return number(codes) * scales.repeat_interleave(BLOCK, output_size=len(scales) * BLOCK)[: codes.numel()]


def _code(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest code's magnitude, as int32, of numbers from 0 to 1."""
    most = ZEROS[dtype]
    power = torch.where(x > 0, x.frexp().exponent, -99)
    zeros = ((-power).clamp(min=0) // 3).clamp(max=most)
    steps = _two_to(most - zeros)
    step = ((x * _two_to(3 * zeros) - 0.125) * (8 / 7 * steps) + 0.5).floor()
    return (steps - 1 + step).to(torch.int32)


def number(codes: Tensor) -> Tensor:
    """fp32 numbers from -1 to 1."""
    c = codes.to(torch.int32).abs().float()
    power = c.clamp(min=1).frexp().exponent - 1  # c lies from 2^power to just below 2^(power + 1)
    steps = (c + 1) * _two_to(-power) - 1
    x = (0.125 + 0.875 * steps) * _two_to(-3 * (ZEROS[codes.dtype] - power))
    return torch.where(c == 0, 0.0, torch.where(codes < 0, -x, x))


def _two_to(power: Tensor) -> Tensor:
    """fp32, as torch.ldexp has it where no other default dtype is set."""
    return torch.pow(2.0, power.float())


def _check(op: str, weight: Tensor, gradient: Tensor, plan: Tensor, master: Tensor | None, seed: int | None) -> None:
    require(op, "weight", weight, None, (weight.numel(),), weight.device, FLAT)
    require(op, "gradient", gradient, None, weight.shape, weight.device, FLAT)
    fp32 = torch.promote_types(gradient.dtype, torch.float32)
    require(op, "plan", plan, fp32, (len(PLAN),), weight.device, "plan_update makes it")
    if seed is not None and (weight.dtype != torch.bfloat16 or master is not None):
        raise ValueError(
            f"{op}: seed rounds bfloat16 weights at random where there is no master, "
            f"got {weight.dtype} {'with' if master is not None else 'without'} a master; leave seed out."
        )
