"""The optimizer's update on flat buffers."""

import torch
from torch import Tensor

from .checks import require
from .choose import implementation
from .reference._code8 import BLOCK, dequantize
from .reference.adamw import PLAN


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
    """Decide on the device what the update will be, and say what it was: (plan for `adamw`, report), both small tensors.

    gradient  flat fp32: the gradient of the sum of every item's loss, times the loss scale
    totals    fp64 (that sum, times the loss scale; the number of items): gradient and loss are divided by both here
    state     fp64 (updates, skipped, loss scale, good steps), moved on in place; a fresh one is (0, 0, 1, 0)
    rates     fp64, the learning rates of update 1, 2, …; the last one holds from there on
    report    fp64 (loss, gradient norm before clipping, items, skipped, rate, updates, loss scale)

    A step that is not finite, or has no items, plans nothing and adds one to `skipped`.
    """
    for name, tensor, length in (("totals", totals, 2), ("state", state, 4), ("rates", rates, None)):
        fits = tensor.dim() == 1 and len(tensor) == (length or max(1, len(tensor))) and tensor.is_contiguous()
        if tensor.dtype != torch.float64 or not fits:
            raise ValueError(
                f"plan_update: {name} must be a torch.float64 vector of {length or 'at least 1'}, "
                f"got {tuple(tensor.shape)} {tensor.dtype}{'' if tensor.is_contiguous() else ', not contiguous'}; "
                f"see its docstring for what each number is."
            )
    _check_flat("plan_update", gradient=gradient)
    _check_device("plan_update", gradient, totals=totals, state=state, rates=rates)
    return implementation("adamw.plan_update", gradient)(
        gradient, totals, state, rates, *betas, weight_decay, clip, growth_interval
    )


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
    """One pass of AdamW over flat buffers, in place, as `plan_update` planned it: 30 bytes an element with bf16 weights.

    `master` holds fp32 weights behind 16-bit ones. Without it `weight` is updated itself; a bf16 one then wants a `seed`, which
    rounds at random instead of to the nearest. Weight decay applies to the first `decay_until` elements (None: all of them).
    """
    there = {"m": m, "v": v} | ({"master": master} if master is not None else {})
    _check_flat("adamw", weight=weight, gradient=gradient, **there)
    _check_device("adamw", weight, gradient=gradient, plan=plan, **there)
    for name, tensor in {"gradient": gradient, **there}.items():
        if tensor.numel() != weight.numel():
            raise ValueError(f"adamw: {name} must hold {weight.numel()} elements like weight, got {tensor.numel()}.")
        if tensor.dtype != gradient.dtype:
            raise ValueError(f"adamw: {name} must be {gradient.dtype} like gradient, got {tensor.dtype}.")
    _check_plan("adamw", plan, gradient)
    _check_seed("adamw", weight, master, seed)
    decay_until = weight.numel() if decay_until is None else decay_until
    implementation("adamw.adamw", weight)(weight, gradient, m, v, master, plan, *betas, eps, decay_until, seed)


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
    """`adamw` with both moments in 8 bits: 18 bytes an element with bf16 weights and masters, where fp32 moments move 30.

    `m` is int8, `v` uint8; `m_scale` and `v_scale` are fp32, one number for every 256 elements. Zeros are where they all begin.
    """
    wide = {"gradient": gradient} | ({"master": master} if master is not None else {})
    _check_flat("adamw8", weight=weight, **wide, m_scale=m_scale, v_scale=v_scale)
    _check_device("adamw8", weight, **wide, m=m, v=v, m_scale=m_scale, v_scale=v_scale, plan=plan)
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
    _check_plan("adamw8", plan, gradient)
    _check_seed("adamw8", weight, master, seed)
    decay_until = n if decay_until is None else decay_until
    implementation("adamw8", weight)(
        weight, gradient, m, v, m_scale, v_scale, master, plan, *betas, eps, decay_until, seed
    )  # fmt: skip


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """A moment that `adamw8` keeps, in fp32."""
    return dequantize(codes, scales)


def _check_plan(op: str, plan: Tensor, gradient: Tensor) -> None:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    require(op, "plan", plan, wide, (len(PLAN),), gradient.device, "plan_update makes it")


def _check_seed(op: str, weight: Tensor, master: Tensor | None, seed: int | None) -> None:
    if seed is not None and (weight.dtype != torch.bfloat16 or master is not None):
        raise ValueError(
            f"{op}: seed rounds bfloat16 weights at random where there is no master, "
            f"got {weight.dtype} {'with' if master is not None else 'without'} a master; leave seed out."
        )


def _check_flat(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != 1 or not tensor.is_contiguous() or not tensor.is_floating_point():
            raise ValueError(
                f"{op}: {name} must be a flat, contiguous, floating-point tensor, "
                f"got {tuple(tensor.shape)} {tensor.dtype}; pass tensor.view(-1)."
            )


def _check_device(op: str, first: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            raise ValueError(
                f"{op}: {name} is on {tensor.device}, wanted {first.device} like the first argument; move it there."
            )
