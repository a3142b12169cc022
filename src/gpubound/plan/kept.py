"""What backward finds kept of a micro-batch, byte for byte, by the layers that keep it.

These are no formulas of a paper: each line is what a layer of ours saves, and tests/plan/test_kept.py counts the same bytes
with autograd's own hooks on a model that runs.

Legend: h hidden, f the MLP's inner width, s bytes of a number; q and kv the widths of all query heads and of all keys.
"""

from functools import singledispatch

from ..kernels.quantize import MULTIPLE
from ..layers.recompute import KEEP_ALL, LEAST_BYTES
from .setting import Setting

FP32 = 4  # bytes: of what norms and attention keep of a row


def block_keeps(setting: Setting, least: float = LEAST_BYTES) -> dict[str, int]:
    """Bytes of one block, by what they are. `least` as in layers/recompute.py."""
    c, s, tokens = setting.config, setting.numbers.dtype.itemsize, setting.tokens
    h, f, q, kv = c.hidden, c.intermediate, c.heads * c.head_dim, c.kv_heads * c.head_dim
    if setting.recompute == "none":
        least = KEEP_ALL
    found = {
        "residual stream": 2 * (h * s + FP32),  # what each of the two norms normed, and by how much
        "queries, keys and values": (q + 2 * kv) * s,
        "attention": q * s + c.heads * FP32,
        "gate and up": 2 * f * s,
    }
    if c.qk_norm:
        found["norms of queries and keys"] = 2 * (q + kv) * s + (c.heads + c.kv_heads) * FP32  # what goes in, and comes out
    if setting.numbers.fp8 and tokens % MULTIPLE == 0:
        found["inputs of products, in 8 bits"] = h + q + h + f
    else:
        found["norms' results"] = 0 if tokens * h * s >= least else 2 * h * s
        found["activation's result"] = 0 if tokens * f * s >= least else f * s
    return {name: tokens * size for name, size in found.items() if size}


@singledispatch
def model_keeps(setting: Setting, least: float = LEAST_BYTES) -> dict[str, int]:
    """Bytes of the whole model, by what they are, when its forward is done."""
    c, s, again = setting.config, setting.numbers.dtype.itemsize, setting.recomputed
    a_row = setting.tokens * c.hidden * s
    whole = {name: (c.layers - again) * size for name, size in block_keeps(setting, least).items()}
    whole["inputs of recomputed blocks"] = (2 * again - 1) * a_row if again else 0  # the stream, and what is still to be added
    whole["last norm and head"] = 2 * a_row + setting.tokens * FP32  # the head's own gradient is made in forward
    return {name: size for name, size in whole.items() if size}
