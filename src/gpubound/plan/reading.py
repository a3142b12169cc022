"""A recipe read as a setting: the model's outline, and how a step is cut. Nothing but a model folder's config.json is read."""

import math

import torch

from ..models.llama.decoder import Decoder
from ..models.registry import family_of, is_named
from ..train.muon import Muon, numbers_by_rule
from ..train.optimizer import AdamW
from ..train.recipe import Recipe, check_model
from ..train.recompute import parse as parse_recompute
from .lora import adapted
from .setting import Outline, Setting

META = torch.device("meta")


def setting_of(recipe: Recipe, world: int = 1) -> Setting:
    """The recipe as it stands, on `world` GPUs. Nothing but a model folder's config.json is read."""
    refuse_unknown(recipe)
    model = model_of(recipe)
    outline = outlined(model, recipe.numbers)
    rows = recipe.micro_batch * recipe.accumulate
    if rows % world:
        even = world // math.gcd(world, recipe.micro_batch)
        raise ValueError(
            f"plan: a step has {rows:,} rows (micro_batch {recipe.micro_batch} x accumulate {recipe.accumulate}), wanted a "
            f"multiple of the {world:,} GPUs that share them; give --accumulate {-(-recipe.accumulate // even) * even}."
        )
    share = rows // world
    micro = max(n for n in range(1, min(recipe.micro_batch, share) + 1) if share % n == 0)
    way, count = parse_recompute(recipe.recompute)
    if count > outline.config.layers and way == "count":
        raise ValueError(f"recompute: got {count} blocks, the model has {outline.config.layers}; give at most so many.")
    setting = Setting(
        outline,
        recipe.numbers,
        recipe.precision if recipe.precision != "auto" else "bf16",
        recipe.seq,
        micro,
        share // micro,
        recipe.recompute,
        recipe.graph != "off",
        bool(recipe.ema),
        world,
        recipe.parallel == "fsdp" and world > 1,
    )
    return setting if recipe.adapters is None else adapted(setting, recipe.adapters, model)


def refuse_unknown(recipe: Recipe) -> None:
    """What no prediction here knows."""
    if recipe.objective != "next_token":
        raise ValueError(f"plan: objective: got {recipe.objective}, wanted next_token, whose kept bytes are counted.")
    if recipe.phases:
        names = ", ".join(name for name, _ in recipe.stages())
        raise ValueError(f"plan: phases: got {names}, wanted a recipe of one; plan each phase by its own options.")


def model_of(recipe: Recipe) -> Decoder:
    """The model on the meta device: no memory, no weights."""
    check_model(recipe.model)
    family = family_of(recipe.model)
    if is_named(recipe.model):
        model = family.make(recipe.model, recipe.vocabulary, recipe.seq, META)
    else:
        model = family.outline(recipe.model)
    if type(model) is not Decoder:
        raise ValueError(
            f"plan: model: got {recipe.model}, a {type(model).__name__}, wanted one that our Llama-shaped Decoder computes; "
            f"what backward keeps of other models is not counted."
        )
    return model


def outlined(model: Decoder, optimizer: AdamW | Muon | None = None) -> Outline:
    """Of a model on any device."""
    of_adamw, by_muon = numbers_by_rule(model, optimizer)  # a tied table is one parameter
    in_block = sum(p.numel() for p in model.model.layers[0].parameters())
    return Outline(model.config, in_block, of_adamw + by_muon - model.config.layers * in_block, by_muon)
