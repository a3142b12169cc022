"""The decoder in words: its path, kernels, sizes and certificate."""

from typing import TYPE_CHECKING

from ..device import label
from .quantized import QuantizedBody

if TYPE_CHECKING:
    from .engine import FastDecoder


def table(decoder: "FastDecoder") -> str:
    body = decoder.body
    weights = f"{body.kind} copies of the weights" if isinstance(body, QuantizedBody) else "the live weights"
    kind = decoder.kernels if decoder.path else f"{decoder.kernels} over {weights}"
    head = (
        f"decoder of {type(decoder.model).__name__} on {label(body.device)}: up to {decoder.max_batch} rows of "
        f"{decoder.max_length} tokens, {' or '.join(str(k) for k in sorted(decoder.ladder))} "
        f"{'tokens' if decoder.width == 1 else 'steps'} a launch"
    )
    rows = body.report() + (decoder.speculator.report() if decoder.speculator else [])
    widths = [max(len(row[i]) for row in rows) for i in range(2)] if rows else [0, 0]
    lines = [f"  {part:{widths[0]}}  {what:{widths[1]}}  {why}".rstrip() for part, what, why in rows]
    proof = f"  {decoder.certificate}" if decoder.certificate else "  not verified"
    return "\n".join([head, f"  path: {kind}", *lines, proof])
