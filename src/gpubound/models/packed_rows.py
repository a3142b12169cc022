"""Packed rows through Hugging Face models: their attention functions and masks take the bounds of the examples.

transformers finds packed examples in position_ids by a read of the device, which a capture forbids, and then builds a mask of
T × T. Here the bounds go to every attention layer as the keyword `segments`. A model for which transformers supports flash
attention and other attention functions passes them all that changes the result, its window too; so its SDPA function is one of
ours that reads `segments`. Others, and eager attention, get masks.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers.attention import attend
from ..layers.packed_attention import Segments
from .decoding import FULL as FULL, WINDOWED as WINDOWED
from .reader import config_window, has_field, layer_window

FIELDS = frozenset(("segment_ids", "cu_seqlens"))  # of a batch of packed rows, besides position_ids
SEGMENTS = "segments"  # keyword of attention

UNPACKED = "pack: none or stream"


def packed_arguments(trunk: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a transformers model, whose base model is `trunk`, for a batch of packed rows."""
    rest = {name: value for name, value in arguments.items() if name not in FIELDS}
    if rest.get("attention_mask") is not None:
        raise ValueError(
            "packed rows: the batch has an attention_mask and segment_ids, wanted one of them; leave the attention_mask out: "
            "padding is an example like others, and its labels are -100."
        )
    segments = Segments.of(arguments["input_ids"], *(arguments.get(name) for name in ("segment_ids", "cu_seqlens")))
    assert segments is not None
    config = trunk.config.get_text_config()
    if unknown := sorted({*(getattr(config, "layer_types", None) or ())} - {FULL, WINDOWED}):
        raise ValueError(
            f"packed rows: {type(trunk).__name__} has layers of type {unknown[0]!r}, wanted {FULL!r} or {WINDOWED!r}: others "
            f"read other examples of a row; {UNPACKED}."
        )
    implementation = config._attn_implementation
    if implementation == "sdpa" and trunk._supports_flash_attn and trunk._supports_attention_backend:
        # Four dimensions: transformers makes no mask then. Nemotron's layers pass it to attention, and no keywords.
        mask: Any = segments.segment_ids[:, None, None]
        setattr(mask, SEGMENTS, segments)
        read_segments()
    elif implementation in ("sdpa", "eager"):
        mask = _masks(trunk, config, segments, implementation)
    else:
        raise ValueError(
            f"packed rows: {type(trunk).__name__} has {implementation!r} attention, wanted 'sdpa'; load the model with "
            f"attn_implementation='sdpa', or {UNPACKED}."
        )
    return rest | {"attention_mask": mask, SEGMENTS: segments}


def restarts(positions: Tensor, rows: int) -> Segments | None:
    """Return the examples that position_ids (1 or B, T) mark, a new one where they do not go on by one, as transformers finds
    them; None if each of B rows is one example. Synchronises with the device once."""
    first = F.pad(positions.expand(rows, -1).diff(dim=1) != 1, (1, 0), value=True)
    starts = first.flatten().nonzero().flatten()
    if len(starts) == rows:
        return None
    return Segments(first.cumsum(1), F.pad(starts, (0, 1), value=first.numel()).to(torch.int32))


def _masks(trunk: Any, config: Any, segments: Segments, implementation: str) -> Any:
    """Return the mask of all layers, or masks by type of layer."""

    def mask(window: int | None) -> Tensor:
        dtype = trunk.get_input_embeddings().weight.dtype
        return segments.mask(window) if implementation == "sdpa" else segments.bias(dtype, window)

    if WINDOWED in (getattr(config, "layer_types", None) or ()):
        return _MaskByType(lambda kind: mask(config.sliding_window if kind == WINDOWED else None))
    windows = {vars(module)["sliding_window"] for module in trunk.modules() if "sliding_window" in vars(module)}
    return mask(windows.pop() if len(windows) == 1 else config_window(config))


class _MaskByType(dict[str, Tensor]):
    """Masks by type of layer, each made when transformers' forward reads it: a placed model takes the segments."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        self._make = make

    def __missing__(self, kind: str) -> Tensor:
        return self.setdefault(kind, self._make(kind))


def read_segments() -> None:
    """Let transformers' SDPA function read `segments`; calls without them do as before.

    It is replaced in the registry, not chosen by the config: a recomputed layer calls it again in backward, when the config of
    an unpacked forward may be in force.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not hasattr(sdpa, SEGMENTS):
        ALL_ATTENTION_FUNCTIONS.register("sdpa", _reading_segments(sdpa))


def _reading_segments(sdpa: Any) -> Any:
    @wraps(sdpa)
    def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
        segments = kwargs.pop(SEGMENTS, getattr(attention_mask, SEGMENTS, None))
        if segments is None and attention_mask is not None and attention_mask.dtype in (torch.int32, torch.int64):
            segments = Segments(attention_mask[:, 0, 0])  # a recomputed layer has a copy of our mask
        if segments is None:
            return sdpa(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
        for name in ("softcap", "position_bias", "s_aux"):
            if kwargs.get(name) is not None:
                raise ValueError(f"packed rows: {type(module).__name__} has {name}, which SDPA does not; {UNPACKED}.")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # Qwen2-MoE passes its mask's window; OLMoE any sliding_window of its config, which SDPA and its mask leave out.
        passed = "sliding_window" in kwargs and has_field(module.config, "sliding_window")
        window = kwargs["sliding_window"] if passed else layer_window(module)
        return attend(query, key, value, segments, scale, dropout, causal, window), None

    setattr(attention, SEGMENTS, True)
    return attention
