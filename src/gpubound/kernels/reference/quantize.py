"""16-bit values rounded to 8: times a scale that is known beforehand, row-major and transposed at once.

`state` is (scale, seen, …) in fp32: values are divided by `scale`, and the largest magnitude among them is added to `seen`, of
which the next scale is made. What lies beyond the format's largest number becomes that number. Infinity becomes NaN, or a step
that overflowed would look finite.
"""

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@torch.no_grad()
def quantize(x: Tensor, state: Tensor, dtype: torch.dtype, both: bool = True) -> tuple[Tensor, Tensor | None]:
    """(q, its transpose) of a matrix; None for the transpose unless `both`."""
    q = _rounded(x.float(), state, dtype)
    return q, q.t().contiguous() if both else None


@torch.no_grad()
def quantize_swiglu(gate_up: Tensor, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """silu(gate) · up of the packed [gate | up] (N, 2 I), as (q, its transpose), never stored in 16 bits."""
    gate, up = gate_up.float().chunk(2, 1)
    q = _rounded(torch.nn.functional.silu(gate) * up, state, dtype)
    return q, q.t().contiguous()


@torch.no_grad()
def quantize_swiglu_backward(dh: Tensor, gate_up: Tensor, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradient of the packed [gate | up], from that of silu(gate) · up, as (q, its transpose)."""
    dh, (gate, up) = dh.float(), gate_up.float().chunk(2, 1)
    s = torch.sigmoid(gate)
    q = _rounded(torch.cat([dh * up * s * (1 + gate * (1 - s)), dh * gate * s], 1), state, dtype)
    return q, q.t().contiguous()


def _rounded(values: Tensor, state: Tensor, dtype: torch.dtype) -> Tensor:
    state[1] = torch.maximum(state[1], values.abs().amax())
    scaled = (values * (1 / state[0])).clamp(-LARGEST[dtype], LARGEST[dtype])
    return torch.where(values.isinf(), torch.nan, scaled).to(dtype)
