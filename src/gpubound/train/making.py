"""A run's model: whole on this rank's device, or only the rows that this rank holds of every weight, and never whole."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ..corpus import Tokenizer
from ..errors import DataError
from ..layers.embedding_and_head import head_of
from ..lora.base import FORMATS, InCodes, encode as put_into_codes, tell
from ..models.registry import family_of, is_named
from ..models.storing import read_parts
from ..parallel import Ranks
from ..parallel.pieces import Piece
from .adapters import Lora
from .precision import precision as precision_named
from .recipe import Recipe
from .recompute import blocks_of

META = torch.device("meta")


def outline(recipe: Recipe, tokenizer: Tokenizer) -> nn.Module:
    """What will train and what is frozen, on the meta device."""
    model = _new(recipe, tokenizer, META) if is_named(recipe.model) else family_of(recipe.model).outline(recipe.model)
    if recipe.adapters is not None:
        recipe.adapters.check_model(model)
    return model


def build_model(recipe: Recipe, tokenizer: Tokenizer, device: torch.device) -> nn.Module:
    if is_named(recipe.model):
        return _new(recipe, tokenizer, device)
    # What trains is cast by the step, the frozen base here.
    dtype = precision_named(recipe.precision_on(device)).dtype if recipe.adapters else None
    model = family_of(recipe.model).load(recipe.model, device, dtype)
    _check_vocabulary(recipe, tokenizer, model)
    return model


def build_shards(recipe: Recipe, tokenizer: Tokenizer, device: torch.device, ranks: Ranks) -> nn.Module:
    """The same weights, though no rank may have room for them: drawn one by one, or each rank's rows read from the folder.

    Adapters are added to a frozen base.
    """
    from ..parallel.sharded import shard_made  # a second's import, for those who shard

    dtype, folder = precision_named(recipe.precision_on(device)).dtype, Path(recipe.model)
    if is_named(recipe.model):
        return shard_made(lambda meta: _new(recipe, tokenizer, meta), blocks_of, ranks, dtype)
    model = family_of(recipe.model).unread(folder)
    _check_vocabulary(recipe, tokenizer, model)

    def fill(pieces: Mapping[str, Piece]) -> None:
        read_parts(folder, {name: (piece.local, piece.slices) for name, piece in pieces.items()})

    if recipe.adapters is not None:
        return _adapted(recipe.adapters, model, fill, ranks, dtype)
    return shard_made(lambda meta: model, blocks_of, ranks, dtype, fill=fill)


def _adapted(
    adapters: Lora, model: nn.Module, fill: Callable[[Mapping[str, Piece]], None], ranks: Ranks, dtype: torch.dtype
) -> nn.Module:
    """Each rank's rows of the frozen base, in `dtype` or in codes, and all of its adapters."""
    from ..parallel.sharded import shard_made

    names, coded = {id(module): name for name, module in model.named_modules()}, list[InCodes]()

    def encode(block: nn.Module) -> None:
        assert adapters.base is not None
        coded.append(put_into_codes(block, FORMATS[adapters.base], names[id(block)]))

    encodes = None if adapters.base is None else encode
    made = shard_made(lambda meta: model, blocks_of, ranks, dtype, fill=fill, frozen=True, encode=encodes)
    if adapters.base is not None:
        tell(coded, adapters.base, head_of(made) is not None)
    replace(adapters, base=None).add(made)
    return made


def _new(recipe: Recipe, tokenizer: Tokenizer, device: torch.device) -> nn.Module:
    positions = max(own.seq for _, own in recipe.stages())
    return family_of(recipe.model).make(recipe.model, tokenizer.vocab_size, positions, device)


def _check_vocabulary(recipe: Recipe, tokenizer: Tokenizer, model: nn.Module) -> None:
    known = family_of(recipe.model).sizes(model).vocabulary
    if tokenizer.vocab_size > known:
        raise DataError(
            f"{recipe.model} knows {known} tokens, the corpus has {tokenizer.vocab_size}; "
            f"build the corpus with the model's own tokenizer (--tokenizer {recipe.model})."
        )
