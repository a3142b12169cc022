"""A language model asked for its last hidden states or its logits, and whether its head makes the one of the other."""

from typing import Any

from torch import Tensor

from ..layers.vocabulary import head_of, why_whole
from .placing import mode


def hidden_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """What lies below the head, (B, T, hidden)."""
    arguments = _arguments(model, inputs)
    out = _trunk(model)(arguments.pop("input_ids"), **arguments)
    return out.last_hidden_state if hasattr(out, "last_hidden_state") else out


def logits_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """What its forward gives, (B, T, words)."""
    out = model(**_arguments(model, inputs))
    return out.logits if hasattr(out, "logits") else out


def why_not_head(model: Any, inputs: dict[str, Any]) -> str | None:
    """None when the head applied to the hidden states below it gives the model's logits, else why not. Waits for the device."""
    head = head_of(model)
    if head is None or _trunk(model) is None:
        return f"{type(model).__name__} does not offer a base model and a linear head (get_output_embeddings)"
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        return f"{type(model).__name__} adds a router loss of its own; pass a loss that includes it"
    row = first_row(inputs)
    with mode(model, training=False):  # dropout would make the two differ
        return why_whole(head, lambda: logits_of(model, row), lambda: hidden_of(model, row))


def first_row(inputs: dict[str, Any]) -> dict[str, Any]:
    return {key: value[:1] if isinstance(value, Tensor) and value.dim() else value for key, value in inputs.items()}


def _arguments(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {**inputs}


def _trunk(model: Any) -> Any:
    """What computes the last hidden states: the base model, or, of a wrapper that still has the head inside (PEFT's), the base
    model within. None where there is none."""
    here, head = model, model.get_output_embeddings()
    while (below := getattr(here, "base_model", here)) is not here:
        here = below
        if not hasattr(here, "get_output_embeddings") or here.get_output_embeddings() is not head:
            return here
    return None
