"""In which numbers a model is trained: what the weights are kept in, and whether anything finer stands behind them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """`dtype` is the weights' and what the model computes in; gradients are summed and moments kept in fp32 in all of them."""

    dtype: torch.dtype
    masters: bool = False  # fp32 weights behind the 16-bit ones: small updates are not lost
    at_random: bool = False  # round the updated weight up or down at random instead: right on average, 4 bytes a parameter less
    loss_scale: bool = False  # fp16 has too few exponents for small gradients
    fp8: bool = False  # the blocks' linear products in 8 bits (train/fp8.py)
    products: str | None = None  # how a GPU multiplies fp32 matrices


PRECISIONS = {
    "fp32": Precision(torch.float32, products="ieee"),
    "tf32": Precision(torch.float32, products="tf32"),
    "bf16": Precision(torch.bfloat16, masters=True),
    "bf16-pure": Precision(torch.bfloat16, at_random=True),
    "fp16": Precision(torch.float16, masters=True, loss_scale=True),
    "fp8": Precision(torch.bfloat16, masters=True, fp8=True),
}


def precision(name: str) -> Precision:
    if name not in PRECISIONS:
        raise ValueError(f"precision: got {name!r}, wanted one of {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]


@contextmanager
def products(mode: str | None) -> Iterator[None]:
    """fp32 products and convolutions on the GPU as "ieee" or "tf32" inside the block; None leaves them alone."""
    if mode is None:
        yield
        return
    owners = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    before = [owner.fp32_precision for owner in owners]
    try:
        for owner in owners:
            owner.fp32_precision = mode
        yield
    finally:
        for owner, old in zip(owners, before):
            owner.fp32_precision = old
