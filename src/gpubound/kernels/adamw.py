"""The optimizer's update in two parts: `plan_update` decides on the device, `adamw` carries it out in one pass over all state.

The gradient holds a sum over every item of every micro-batch. Dividing it by the number of items, undoing the loss scale and
clipping are one factor, so none of them costs a pass over the gradient. Nothing here is read by the host.
"""

import torch
from torch import Tensor

from .checks import require
from .choose import implementation
from .ops import definition
from .selftest import doubles, draw

STATE = ("updates", "skipped", "loss_scale", "good_steps")  # fp64, carried from step to step
PLAN = ("apply", "gradient_factor", "decay_factor", "step_size", "inverse_root", "update")  # fp32, for adamw
PART = 1 << 16  # elements at a time on a CPU: what lies between stays in its cache, 0.1 s for ten million parameters, not 0.5
REPORT = ("loss", "grad_norm", "tokens", "skipped", "lr", "updates", "loss_scale")  # fp64, for people


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

    When a step is not finite or has no items, the plan changes no weight, and `skipped` grows by one.
    """
    for name, tensor, length in (("totals", totals, 2), ("state", state, 4), ("rates", rates, None)):
        fits = tensor.dim() == 1 and len(tensor) == (length or max(1, len(tensor))) and tensor.is_contiguous()
        if tensor.dtype != torch.float64 or not fits:
            raise ValueError(
                f"plan_update: {name} must be a torch.float64 vector of {length or 'at least 1'}, "
                f"got {tuple(tensor.shape)} {tensor.dtype}{'' if tensor.is_contiguous() else ', not contiguous'}; "
                f"see its docstring for what each number is."
            )
    check_flat("plan_update", gradient=gradient)
    check_device("plan_update", gradient, totals=totals, state=state, rates=rates)
    return implementation("plan_update", gradient)(gradient, totals, state, rates, betas, weight_decay, clip, growth_interval)


@definition(
    lambda g: (*_draw_squares(g, 70, 1), doubles(5, 7), doubles(3, 1, 2, 1), doubles(1, 2, 3, 4), (0.9, 0.99), 0.1, 1.0, 2)
)
@torch.no_grad()
def plan_update_reference(
    gradient: Tensor, totals: Tensor, state: Tensor, rates: Tensor,
    betas: tuple[float, float], weight_decay: float, clip: float | None, growth_interval: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(plan, report), and `state` moved one step on. `totals` is (sum of losses times the loss scale, number of items).

    A step without items, or whose loss or gradient is not finite, is counted in `skipped` and changes nothing else but the
    loss scale, which halves; after `growth_interval` good steps it doubles. 0: no loss scale is in use.
    """
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
    state.copy_(torch.stack([torch.where(apply, update, updates), skipped + (~apply).double(), loss_scale, good_steps]))
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

    `master` holds the fp32 weights behind 16-bit ones. Without it `weight` itself is updated. A bf16 weight then needs a
    `seed` for stochastic rounding: rounding to the nearest would lose small updates. Weight decay applies to the first
    `decay_until` elements (None: all of them).
    """
    there = {"m": m, "v": v} | ({"master": master} if master is not None else {})
    check_flat("adamw", weight=weight, gradient=gradient, **there)
    check_device("adamw", weight, gradient=gradient, plan=plan, **there)
    for name, tensor in {"gradient": gradient, **there}.items():
        if tensor.numel() != weight.numel():
            raise ValueError(f"adamw: {name} must hold {weight.numel()} elements like weight, got {tensor.numel()}.")
        if tensor.dtype != gradient.dtype:
            raise ValueError(f"adamw: {name} must be {gradient.dtype} like gradient, got {tensor.dtype}.")
    check_plan("adamw", plan, gradient)
    check_seed("adamw", weight, master, seed)
    decay_until = weight.numel() if decay_until is None else decay_until
    implementation("adamw", weight)(weight, gradient, m, v, plan, master, betas, eps, decay_until, seed)


@definition(lambda g: (*_example(g), (0.9, 0.99), 1e-8, 40, None))
@torch.no_grad()
def adamw_reference(
    weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, plan: Tensor, master: Tensor | None,
    betas: tuple[float, float], eps: float, decay_until: int, seed: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """AdamW on flat tensors in place, with weight decay on the first `decay_until` elements; nothing if plan says skip.

    `master` holds the fp32 weights when `weight` is 16-bit; None updates `weight` itself. A `seed` rounds a bf16 `weight` up
    or down at random, by how near each is, so that updates below its precision are right on average.
    """
    part = PART if weight.device.type == "cpu" else max(1, weight.numel())
    for start in range(0, weight.numel(), part):
        here = slice(start, start + part)
        whole = weight[here] if master is None else master[here]
        p = advance(whole, gradient[here], m[here], v[here], plan, betas, eps, decay_until - start)
        rounded = p.to(weight.dtype) if seed is None else round_at_random(p, start, plan[5], seed)
        for kept, new in ((weight[here], rounded), *(((whole, p),) if master is not None else ())):
            torch.where(plan[0] != 0, new, kept, out=kept)
    return weight, m, v


def advance(
    p: Tensor, gradient: Tensor, m: Tensor, v: Tensor, plan: Tensor, betas: tuple[float, float], eps: float, decay_until: int
) -> Tensor:
    """The new weights; the moments are updated in place, unless plan says skip."""
    apply, factor, decay, step_size, inverse_root, _ = plan.unbind()
    g = gradient * factor
    m_new = m + (1 - betas[0]) * (g - m)
    v_new = betas[1] * v + (1 - betas[1]) * g * g
    wide = p.to(plan.dtype)
    cut = max(0, decay_until)
    decayed = torch.cat([wide[:cut] * decay, wide[cut:]])
    for kept, new in ((m, m_new), (v, v_new)):
        torch.where(apply != 0, new, kept, out=kept)
    return decayed - step_size * m_new / (v_new.sqrt() * inverse_root + eps)


def round_at_random(x: Tensor, start: int, update: Tensor, seed: int) -> Tensor:
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


def check_plan(op: str, plan: Tensor, gradient: Tensor) -> None:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    require(op, "plan", plan, wide, (len(PLAN),), gradient.device, "plan_update makes it")


def check_seed(op: str, weight: Tensor, master: Tensor | None, seed: int | None) -> None:
    if seed is not None and (weight.dtype != torch.bfloat16 or master is not None):
        raise ValueError(
            f"{op}: seed rounds bfloat16 weights at random where there is no master, "
            f"got {weight.dtype} {'with' if master is not None else 'without'} a master; leave seed out."
        )


def check_flat(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != 1 or not tensor.is_contiguous() or not tensor.is_floating_point():
            raise ValueError(
                f"{op}: {name} must be a flat, contiguous, floating-point tensor, "
                f"got {tuple(tensor.shape)} {tensor.dtype}; pass tensor.view(-1)."
            )


def check_device(op: str, first: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            raise ValueError(
                f"{op}: {name} is on {tensor.device}, wanted {first.device} like the first argument; move it there."
            )


def _draw_squares(generator: torch.Generator, size: int, count: int) -> list[Tensor]:
    return [draw(generator, size).detach().square() for _ in range(count)]


def _example(generator: torch.Generator) -> tuple[Tensor, ...]:
    weight, (gradient, m, v, master) = draw(generator, 70), _draw_squares(generator, 70, 4)
    return weight, gradient, m, v, example_plan(), master


def example_plan() -> Tensor:
    return doubles(1, 0.5, 0.9, 0.5, 2, 3).float()
