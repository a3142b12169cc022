"""One way to run a training step: which model, in which numbers, cut into which micro-batches, shared by how many GPUs."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from ..models.llama.decoder import Decoder, DecoderConfig
from ..models.registry import family_of, is_named
from ..train.flat_buffers import FlatLayout, counted
from ..train.muon import Muon, numbers_by_rule
from ..train.optimizer import AdamW
from ..train.precision import Precision, precision as precision_named
from ..train.recipe import Recipe, check_model
from ..train.recompute import parse as parse_recompute

META = torch.device("meta")


@dataclass(frozen=True)
class Outline:
    """What a plan must know of a model: its config, and how many parameters lie where."""

    config: DecoderConfig
    in_block: int
    """Parameters of one block."""
    outside: int
    """Those of the embedding, the head and the last norm."""
    by_muon: int
    """Those that Muon updates, where it is the optimizer."""

    @property
    def parameters(self) -> int:
        return self.config.layers * self.in_block + self.outside


@dataclass(frozen=True)
class Setting:
    """A step as it would run. `rows` is a micro-batch, `accumulate` how many of them one rank runs in a step."""

    outline: Outline
    optimizer: AdamW | Muon
    precision: str
    seq: int
    rows: int
    accumulate: int
    recompute: str = "cheap"
    captured: bool = True
    average: bool = False
    """Whether a moving average of the weights is kept."""
    world: int = 1
    sharded: bool = False
    """fsdp: every rank holds its part of the weights. Without it, ddp: every rank holds all."""
    once: bool = False
    """Sharded: whether gradients are summed over the ranks once a step, and until then every rank holds whole ones."""

    @property
    def config(self) -> DecoderConfig:
        return self.outline.config

    @cached_property
    def numbers(self) -> Precision:
        return precision_named(self.precision)

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.rows * self.seq

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.tokens * self.accumulate * self.world

    @property
    def recomputed(self) -> int:
        """How many blocks keep their input alone."""
        way, count = parse_recompute(self.recompute)
        return {"blocks": self.config.layers, "count": count}.get(way, 0)

    @property
    def parts(self) -> int:
        """Into how many parts weights and what belongs to them are cut."""
        return self.world if self.sharded else 1

    @property
    def layout(self) -> FlatLayout:
        """The flat buffers of one rank, but for the few bytes between two parameters."""
        of_muon = -(-self.outline.by_muon // self.parts)
        of_adamw = -(-(self.outline.parameters - self.outline.by_muon) // self.parts)
        dtype = torch.float32 if self.sharded else self.numbers.dtype  # shards are their own masters
        return counted(dtype, of_adamw, of_muon)


def setting_of(recipe: Recipe, world: int = 1) -> Setting:
    """The recipe as it stands, on `world` GPUs. Nothing but a model folder's config.json is read."""
    refuse_unknown(recipe)
    outline = outline_of(recipe)
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
    return Setting(
        outline,
        recipe.numbers,
        recipe.precision if recipe.precision != "auto" else "bf16",
        recipe.seq,
        micro,
        share // micro,
        "cheap" if way == "budget" else recipe.recompute,
        recipe.graph != "off",
        bool(recipe.ema),
        world,
        recipe.parallel == "fsdp" and world > 1,
    )


def refuse_unknown(recipe: Recipe) -> None:
    """What no prediction here knows."""
    if recipe.lora:
        raise ValueError("plan: lora: got adapters, wanted a run that trains all weights; leave lora out of the config.")
    if recipe.objective != "next_token":
        raise ValueError(f"plan: objective: got {recipe.objective}, wanted next_token, whose kept bytes are counted.")
    if recipe.phases:
        names = ", ".join(name for name, _ in recipe.stages())
        raise ValueError(f"plan: phases: got {names}, wanted a recipe of one; plan each phase by its own options.")


def outline_of(recipe: Recipe) -> Outline:
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
    return outlined(model, recipe.numbers)


def outlined(model: Decoder, optimizer: AdamW | Muon | None = None) -> Outline:
    """Of a model on any device."""
    of_adamw, by_muon = numbers_by_rule(model, optimizer)  # a tied table is one parameter
    in_block = sum(p.numel() for p in model.model.layers[0].parameters())
    return Outline(model.config, in_block, of_adamw + by_muon - model.config.layers * in_block, by_muon)
