"""The optimizer's update in two parts: `plan_update` decides on the device, `adamw` carries it out in one pass over all state.

The gradient holds a sum over every item of every micro-batch. Dividing it by the number of items, undoing the loss scale and
clipping are one factor, so none of them costs a pass over the gradient. Nothing here is read by the host.
"""

import torch
from torch import Tensor

STATE = ("updates", "skipped", "loss_scale", "good_steps")  # fp64, carried from step to step
PLAN = ("apply", "gradient_factor", "decay_factor", "step_size", "inverse_root", "update")  # fp32, for adamw
PART = 1 << 16  # elements at a time on a CPU: what lies between stays in its cache, 0.1 s for ten million parameters, not 0.5
REPORT = ("loss", "grad_norm", "tokens", "skipped", "lr", "updates", "loss_scale")  # fp64, for people


@torch.no_grad()
def plan_update(
    gradient: Tensor, totals: Tensor, state: Tensor, rates: Tensor,
    beta1: float, beta2: float, weight_decay: float, clip: float | None, growth_interval: int,
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
        [apply.double(), factor, 1 - lr * weight_decay, lr / (1 - beta1**update), (1 - beta2**update).rsqrt(), update]
    ).to(torch.promote_types(gradient.dtype, torch.float32))

    good_steps = torch.where(apply, good_steps + 1, torch.where(nothing, good_steps, 0.0))
    if growth_interval:
        grow = good_steps >= growth_interval
        halve = ~apply & ~nothing
        loss_scale = torch.where(halve, loss_scale / 2, torch.where(grow, loss_scale * 2, loss_scale))
        good_steps = torch.where(grow, 0.0, good_steps)
    state.copy_(torch.stack([torch.where(apply, update, updates), skipped + (~apply).double(), loss_scale, good_steps]))
    return plan, torch.stack([loss, norm, items, state[1], lr, state[0], state[2]])


@torch.no_grad()
def adamw(
    weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, master: Tensor | None, plan: Tensor,
    beta1: float, beta2: float, eps: float, decay_until: int, seed: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """AdamW on flat tensors in place, with weight decay on the first `decay_until` elements; nothing if plan says skip.

    `master` holds the fp32 weights when `weight` is 16-bit; None updates `weight` itself. A `seed` rounds a bf16 `weight` up
    or down at random, by how near each is, so that updates below its precision are right on average.
    """
    part = PART if weight.device.type == "cpu" else max(1, weight.numel())
    for start in range(0, weight.numel(), part):
        here = slice(start, start + part)
        whole = weight[here] if master is None else master[here]
        p = _advance(whole, gradient[here], m[here], v[here], plan, beta1, beta2, eps, decay_until - start)
        rounded = p.to(weight.dtype) if seed is None else _round_at_random(p, start, plan[5], seed)
        for kept, new in ((weight[here], rounded), *(((whole, p),) if master is not None else ())):
            torch.where(plan[0] != 0, new, kept, out=kept)
    return weight, m, v


def _advance(
    p: Tensor, gradient: Tensor, m: Tensor, v: Tensor, plan: Tensor, beta1: float, beta2: float, eps: float, decay_until: int
) -> Tensor:
    """The new weights; the moments are updated in place, unless plan says skip."""
    apply, factor, decay, step_size, inverse_root, _ = plan.unbind()
    g = gradient * factor
    m_new = m + (1 - beta1) * (g - m)
    v_new = beta2 * v + (1 - beta2) * g * g
    wide = p.to(plan.dtype)
    cut = max(0, decay_until)
    decayed = torch.cat([wide[:cut] * decay, wide[cut:]])
    for kept, new in ((m, m_new), (v, v_new)):
        torch.where(apply != 0, new, kept, out=kept)
    return decayed - step_size * m_new / (v_new.sqrt() * inverse_root + eps)


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
