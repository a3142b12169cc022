"""Building a run's model: all of it on this rank's device, or this rank's shards alone; and the choice between the two."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ..data import Tokenizer
from ..distributed import Ranks
from ..distributed.local_shard import LocalShard
from ..errors import DataError
from ..formatting import readable
from ..layers.embedding_and_head import head_of
from ..lora.base import FORMATS, InCodes, encode as put_into_codes, tell
from ..models.registry import family_of, is_named
from ..models.storing import read_parts
from ..trace import notice
from .adapters import Lora
from .flat_buffers import counted
from .muon import count_by_rule
from .precision import precision as precision_named
from .recipe import Recipe
from .recompute import blocks_of

META = torch.device("meta")
SHARE = 0.8  # of a GPU's memory that weights, masters, gradient and moments may take: activations need the rest


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
    from ..distributed.fsdp import shard_deferred  # a second's import, for those who shard

    dtype, folder = precision_named(recipe.precision_on(device)).dtype, Path(recipe.model)
    if is_named(recipe.model):
        return shard_deferred(lambda meta: _new(recipe, tokenizer, meta), blocks_of, ranks, dtype)
    model = family_of(recipe.model).unread(folder)
    _check_vocabulary(recipe, tokenizer, model)

    def fill(pieces: Mapping[str, LocalShard]) -> None:
        read_parts(folder, {name: (piece.local, piece.slices) for name, piece in pieces.items()})

    if recipe.adapters is not None:
        return _adapted(recipe.adapters, model, fill, ranks, dtype)
    return shard_deferred(lambda meta: model, blocks_of, ranks, dtype, fill=fill)


def _adapted(
    adapters: Lora, model: nn.Module, fill: Callable[[Mapping[str, LocalShard]], None], ranks: Ranks, dtype: torch.dtype
) -> nn.Module:
    """Each rank's rows of the frozen base, in `dtype` or in codes, and all of its adapters."""
    from ..distributed.fsdp import shard_deferred

    names, coded = {id(module): name for name, module in model.named_modules()}, list[InCodes]()

    def encode(block: nn.Module) -> None:
        assert adapters.base is not None
        coded.append(put_into_codes(block, FORMATS[adapters.base], names[id(block)]))

    encodes = None if adapters.base is None else encode
    made = shard_deferred(lambda meta: model, blocks_of, ranks, dtype, fill=fill, frozen=True, encode=encodes)
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


def choose_sharded(recipe: Recipe, outline: Callable[[], nn.Module], device: torch.device, ranks: Ranks) -> bool:
    """Return whether each weight is sharded over the ranks, or each rank has a replica: as the recipe says, or as it fits.
    Print which, and its bytes.

    outline  returns the model on the meta device: no rank may have room for it
    """
    if ranks.alone:
        if recipe.parallel == "fsdp":
            notice("parallel: fsdp: there is one process, so it holds the whole model.")
        return False
    numbers, model = precision_named(recipe.precision_on(device)), outline()
    layout = counted(numbers.dtype, *count_by_rule(model, recipe.numbers))
    need = sum(layout.bytes(numbers.masters).values()) + recipe.numbers.moment_bytes(layout)
    need += 0 if recipe.adapters is None else recipe.adapters.frozen_bytes(model, numbers.dtype)
    who, what = "GPU" if device.type == "cuda" else "rank", "of weights, gradient and moments"
    has = min(ranks.gather(torch.cuda.get_device_properties(device).total_memory)) if device.type == "cuda" else None
    of = "" if has is None else f", {need / has:.0%} of its {readable(has)}"
    too_much = recipe.parallel == "auto" and has is not None and need > SHARE * has
    if recipe.parallel != "fsdp" and not too_much:
        notice(f"parallel: ddp: each of {ranks.world} {who}s holds {readable(need)} {what}{of}.")
        return False
    why = f", because a replica would hold {readable(need)} of them{of}" if too_much else ""
    held = "every weight, and their gradient and moments" if recipe.adapters is None else "the base, and all adapters"
    notice(f"parallel: fsdp: each of {ranks.world} {who}s holds its rows of {held}{why}.")
    return True
