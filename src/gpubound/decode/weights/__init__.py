"""Weight formats: what a layer's matrices are when a step multiplies by them. One file a format.

A format takes weights from the model and gives back what the parts of a layer multiply by:

stacked(*layers)         layers below each other that read one x (q, k and v; o; down)
gate_up(gate, up)        the two halves of a gated MLP
head(weight)             the same as one alone, but too large to keep a second time
experts(gate_up, down)   those of a sparse MLP, stacked by expert

Each of them has the products of a step under the names of their kernels; `matrices()` in the model's dtype for many rows at
once, with `biases`; `exact()` in full for the judge; and `tensors()`, which a step reads. A format also says how the names of
its kernels begin (`prefix`), whether they add what adapters do (`adds`), with how many bytes they let their successors in at
once (`early_bytes`), whether its copies are out of date (`changed`), and what it adds to the decoder's table (`report`).
"""

from typing import Any

from ...kernels.packed_weights import KINDS
from .own import DenseFormat
from .packed import PackedFormat

FORMATS: dict[str | None, Any] = {None: DenseFormat, **dict.fromkeys(KINDS, PackedFormat)}


def weight_format(kind: str | None) -> DenseFormat | PackedFormat:
    """The format of that name; None is the model's own."""
    if kind not in FORMATS:
        known = ", ".join(filter(None, FORMATS))
        raise ValueError(f"decoder: weights: got {kind!r}, wanted one of {known}, or None for the live ones.")
    return FORMATS[kind](kind)
