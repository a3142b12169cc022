"""Check of models whose forward is batch-invariant in `layers.invariant.BatchInvariant`."""

from typing import Any

from torch import nn

from ..kernels.dispatch import can_launch
from ..layers import Attention, RMSNorm
from ..layers.linear_product import format_of, is_sharded
from .decoding import AttentionWeights, DenseWeights
from .registry import reader_of

PLACE = "place it first (gb.place)"


def why_not_invariant(model: Any) -> str | None:
    """Return why a model's results would depend on what is computed with them even in a BatchInvariant context; None if not.

    It is a dense model of the Llama kind, gb.Decoder or placed, without a window or caps.
    """
    name = type(model).__name__
    reader = reader_of(model)
    if reader is None or (why := reader.refusal(1)):
        return (
            f"{name} is {why if reader is not None else 'none of the families with fused kernels, which docs/models.md lists'}"
        )
    shape = reader.shape()
    if shape.logit_cap or shape.logit_scale != 1:
        return f"{name} caps or scales its logits"
    for number, layer in enumerate(reader.layers()):
        attention = layer.attention
        if type(attention) is not AttentionWeights or type(layer.mlp) is not DenseWeights:
            return f"layer {number} of {name} is not dense: its experts have no batch-invariant kernel"
        if attention.window or attention.cap or attention.v is None or attention.v_eps or any(layer[2:]):
            return f"layer {number} has a window, capped scores or shared keys, and its batch-invariant kernel has none"
    return next((f"{key}: {why}" for key, module in _parts(reader) if (why := _unable(module))), None)


def _parts(reader: Any) -> list[tuple[str, nn.Module]]:
    head = reader.model.lm_head
    return [*((f"model.{key}", module) for key, module in reader.trunk.named_modules() if key), ("lm_head", head)]


def _unable(module: Any) -> str | None:
    """Return why a module would not be computed row by row."""
    weights = module._parameters.values()
    if any(weight is not None and (format_of(weight).coded or is_sharded(weight)) for weight in weights):
        return "its weights are quantised or sharded"
    kind = type(module).__name__
    if isinstance(module, nn.Linear | nn.Embedding | RMSNorm | nn.ModuleList) or not any(True for _ in weights):
        alone = kind.endswith("Attention") and not isinstance(module, Attention)
        return f"it is a {kind} of transformers; {PLACE}" if alone else None
    device = next(weight.device for weight in weights if weight is not None)
    # torch sums a row of a GPU by as many threads as few rows leave idle
    return (
        f"the sums of a {kind} depend on the number of rows; {PLACE}" if can_launch(device) or device.type == "cuda" else None
    )
