"""A linear layer whose weight each row chooses itself, among E: the product of a mixture of experts, for training and decoding.

Which weight a row has is known on the device alone, and nothing here asks it. Few rows read their weights where they lie. Many
are sorted by weight, and `F.grouped_mm` multiplies each stretch, with ends that stay on the device.

Legend: N rows of K numbers, S choices a row, E weights (O, K).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import implementation, require_device
from .registry import definition, draw, ints

FEW = 96  # choices in all, up to which each reads its weight by itself. H200: 172 us, F.grouped_mm 182; of 384 669 and 237


def grouped_linear(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """y (N, S, O) with y_ns = weight[ids_ns] x_n, for x (N, K), weight (E, O, K) and whole ids (N, S).

    The host does not read the ids: one that no weight has makes its result NaN, and leaves all gradients without its part.
    """
    _check(x, weight, ids)
    many, unable = ids.numel() > FEW, None
    if many or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        unable = not_trained(weight)
    return implementation("grouped_linear", weight, unable, (many,))(x, weight, ids)


@definition(lambda g, many=False: _example(g, many))
def grouped_linear_reference(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """By every weight for all rows, of which those that chose it keep the result."""
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    y = torch.full((*ids.shape, weight.shape[1]), torch.nan, device=x.device, dtype=compute_dtype)
    for number, own in enumerate(weight):
        y = torch.where((ids == number)[..., None], F.linear(x.to(compute_dtype), own.to(compute_dtype))[:, None], y)
    return y.to(x.dtype)


def not_grouped(*stacks: Tensor) -> str | None:
    """Why F.grouped_mm cannot take these weights, or only by asking the device for the ends."""
    if any(w.shape[2] * w.element_size() % 16 or w.data_ptr() % 16 for w in stacks):
        return "F.grouped_mm wants rows of a multiple of 16 bytes"
    first = stacks[0]
    if not first.is_cuda:
        return None
    if first.dtype != torch.bfloat16:
        return f"F.grouped_mm takes bfloat16 on the device, not {str(first.dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(first.device)[0] not in (9, 10):
        return "F.grouped_mm reads its offsets on the host but for compute capability 9 and 10"
    return None


def not_trained(weight: Tensor) -> str | None:
    """Why F.grouped_mm cannot take it both ways, as a backward does."""
    return not_grouped(weight, weight.transpose(1, 2))


def by_group(ids: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order, back, ends) of ids in any shape: ids.flatten()[order] is sorted, `back` undoes it, `ends` is F.grouped_mm's."""
    ordered, order = ids.flatten().sort(stable=True)
    every = torch.arange(groups, device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(ordered, every, right=True, out_int32=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    return order, back, ends


def _check(x: Tensor, weight: Tensor, ids: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or not x.is_floating_point():
        raise ValueError(
            f"grouped_linear: x must be floating-point rows (N, K) and weight (E, O, K), got {x.dtype} {tuple(x.shape)} and "
            f"{tuple(weight.shape)}; flatten x to rows as long as a weight's."
        )
    if weight.dtype != x.dtype:
        raise ValueError(
            f"grouped_linear: weight must be of x's dtype, {x.dtype}, got {weight.dtype}; cast one of them before the call."
        )
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 2 or len(ids) != len(x):
        raise ValueError(
            f"grouped_linear: ids must be int32 or int64 ({len(x)}, choices), got {ids.dtype} {tuple(ids.shape)}; "
            "give each row of x the numbers of its weights."
        )
    require_device("grouped_linear", x, weight=weight, ids=ids)


def _example(generator: torch.Generator, many: bool) -> tuple:
    rows = FEW if many else 3
    ids = torch.randint(0, 5, (rows, 2), generator=generator, dtype=torch.int32, device="cpu")
    return draw(generator, rows, 48), draw(generator, 5, 32, 48), ids if many else torch.cat([ids[:2], ints(4, 4)[None]])
