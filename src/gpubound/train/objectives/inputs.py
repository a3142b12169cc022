"""Checks of a language model's batch before it is used: which arguments its forward takes, and which token ids are possible.

A label outside the vocabulary makes a loss NaN on the device, and an id outside it raises an IndexError or kills the GPU's
context. Both come from a tokenizer that is not the model's.
"""

from collections.abc import Iterable
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.checks import INTEGERS
from ...layers.embedding_and_head import head_of

IGNORE = -100
ID_DTYPES = (torch.int32, torch.int64)  # that an embedding takes


def check_arguments(who: str, model: nn.Module, names: Iterable[str], complete: bool = True) -> None:
    """Raise ValueError unless model.forward takes arguments of these names; if `complete`, it must need no others."""
    try:
        parameters = signature(model.forward).parameters
    except (TypeError, ValueError):  # compiled code may have no signature
        return
    taken = {name: p for name, p in parameters.items() if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)}
    names, kind = list(names), type(model).__name__
    if all(p.kind is not Parameter.VAR_KEYWORD for p in parameters.values()):
        unknown = [name for name in names if name not in taken or taken[name].kind is Parameter.POSITIONAL_ONLY]
        if "input_ids" in unknown:
            raise ValueError(
                f"{who} calls model(input_ids=...), and {kind}.forward takes ({', '.join(taken)}); pass a loss function "
                f"(model, batch) -> (loss.sum(), count) instead."
            )
        if unknown:
            raise ValueError(
                f"{who}: batch[{unknown[0]!r}]: {kind}.forward takes ({', '.join(taken)}); leave {unknown[0]} out of the "
                f"batch, or pass a loss function that uses it."
            )
    needed = [name for name, p in taken.items() if p.default is p.empty and name not in names]
    if complete and needed and not any(p.kind is Parameter.VAR_POSITIONAL for p in parameters.values()):
        raise ValueError(
            f"{who}: {kind}.forward needs {needed[0]}, which the batch does not have; add it, or pass a loss function."
        )


@torch.no_grad()
def check_tokens(who: str, model: nn.Module, ids: Tensor, labels: Tensor, classes: int | None = None) -> None:
    """Raise ValueError unless ids and labels are integers in the model's vocabulary, or labels of -100. Waits for the device.

    classes  the number of classes that labels may name; None: as many as the head has
    """
    if ids.dtype not in ID_DTYPES:
        raise ValueError(f"{who}: input_ids are {ids.dtype}, wanted token ids in torch.int64.")
    if labels.dtype not in INTEGERS:
        raise ValueError(f"{who}: labels are {labels.dtype}, wanted token ids in torch.int64.")
    if not ids.numel():
        raise ValueError(f"{who}: input_ids are empty, of shape {tuple(ids.shape)}; wanted at least one token.")
    rows, head = embedding_rows(model), getattr(head_of(model), "out_features", None)
    classes = classes or head
    counted = labels.long().masked_fill(labels == IGNORE, 0)
    extremes = torch.stack([*torch.aminmax(ids.long()), *torch.aminmax(counted)]).tolist()
    for name, (least, most), size in (("input_ids", extremes[:2], rows or head), ("labels", extremes[2:], classes)):
        if least < 0 or (size is not None and most >= size):
            worst = least if least < 0 else most
            also = " and not -100" if name == "labels" else ""
            vocabulary = "the model's vocabulary" if size is None else f"the model's vocabulary of {size}"
            raise ValueError(
                f"{who}: {name} hold the token {worst}, outside {vocabulary}{also}; is the tokenizer this model's own?"
            )


def embedding_rows(model: Any) -> int | None:
    """The number of rows of the model's input embedding, where the model names it as transformers' models do."""
    try:
        return model.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        return None
