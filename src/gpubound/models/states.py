"""A language model asked for its last hidden states or its logits, and what may be asked of it: whether its head makes the one
of the other, whether it looks ahead, whether it is told a time, how it is told of places that hold nothing."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ..layers.embedding_and_head import head_of, why_whole
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


@torch.no_grad()
def is_causal(model: Any, inputs: dict[str, Any], other: int) -> bool:
    """As its config says; else whether what it gives for the first token stays the same with other tokens behind it, such as
    the id `other`. Waits for the device."""
    declared = getattr(getattr(model, "config", None), "causal", None)
    row = first_row(inputs)
    if isinstance(declared, bool) or row["input_ids"].shape[1] < 2:
        return declared is True
    changed = row["input_ids"].clone()
    changed[:, 1:] = torch.where(changed[:, 1:] == other, 0, other)
    with mode(model, training=False):
        one, two = logits_of(model, row), logits_of(model, row | {"input_ids": changed})
    return torch.equal(one[:, 0], two[:, 0])


def told_time(model: Any, time_B: Tensor) -> dict[str, Tensor]:
    """The argument that tells a model the time of each row; nothing for one that is not told."""
    return {"time": time_B} if getattr(getattr(model, "config", None), "time", "none") != "none" else {}


def told_places(model: Any, real_BT: Tensor) -> dict[str, Tensor]:
    """The argument that keeps a model from looking at places that hold nothing: attention_mask as transformers has it, or an
    SDPA mask."""
    if "attention_mask" in signature(model.forward).parameters:
        return {"attention_mask": real_BT.long()}
    return {"mask": real_BT[:, None, None, :]}


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
