"""The checks of a recipe: each raises ValueError for what could not be trained, before anything is read or built."""

from dataclasses import fields
from math import inf
from typing import TYPE_CHECKING

from ..data.tokenizer import SPECIALS
from ..models.registry import is_named
from .device_step import check as check_update_in_backward
from .fields import LORA, Lora, check_type
from .graph_cache import MODES as GRAPH_MODES, MOST as MOST_SHAPES
from .offload import check as check_offload, parse as parse_recompute
from .precision import precision
from .schedule import MOST_STEPS

if TYPE_CHECKING:
    from .recipe import Recipe  # which calls `check`

CHOICES = {
    "parallel": ("auto", "ddp", "fsdp"),
    "pack": ("auto", "stream", "examples", "none", "documents", "pairs", "packed_pairs"),
    "overlong": ("truncate", "truncate_left", "drop"),
    "train_on": ("assistant", "last", "all"),
    "graph": GRAPH_MODES,
}
OFF_AT_0 = ("eval_every", "patience", "save_every", "buckets")
MOST_EPOCHS = 4096  # orders that differ
MOST_ACCUMULATE = 1 << 16
LIMITS = (
    ("seq", 1, 1 << 24), ("micro_batch", 1, 1 << 24), ("accumulate", 1, MOST_ACCUMULATE), ("steps", 1, MOST_STEPS),
    ("keep", 1, 1 << 31), *((name, 0, 1 << 31) for name in OFF_AT_0[:-1]), ("buckets", 0, MOST_SHAPES),
    ("vocabulary", 256 + len(SPECIALS), 1 << 24), ("data_bytes", 1, 1 << 62), ("eval_batches", 0, 1 << 31),
    ("seed", 0, (1 << 63) - 1),
)  # fmt: skip
"""(key, least, most). The upper limits are far above any use, but that of buckets; they keep a typo from filling the memory."""


def check(recipe: "Recipe") -> None:
    """Raise ValueError for the first key that is wrong, alone or beside others."""
    for field in fields(recipe):
        check_type(field, getattr(recipe, field.name))
    for name, least, most in LIMITS:
        value = getattr(recipe, name)
        if not least <= (least if value is None else value) <= most:
            at_least = "0 (off)" if name in OFF_AT_0 else f"{least:,}"
            raise ValueError(f"recipe: {name} must lie between {at_least} and {most:,}, got {value:,}.")
    for name, choices in CHOICES.items():
        if getattr(recipe, name) not in choices:
            raise ValueError(f"recipe: {name} must be one of {', '.join(choices)}, got {getattr(recipe, name)!r}.")
    if not (recipe.lr or 0) > 0:
        raise ValueError(f"recipe: lr must be above 0, got {recipe.lr}.")
    if recipe.clip is not None and not recipe.clip > 0:
        raise ValueError(f"recipe: clip must be above 0, got {recipe.clip}; 0 or none does not clip.")
    if not 0 <= recipe.validation < 1:
        raise ValueError(
            f"recipe: validation must lie between 0 and 1, got {recipe.validation}; 0.02 holds out 2 % of the documents."
        )
    if not 0 <= recipe.ema < 1:
        raise ValueError(f"recipe: ema must be 0 (off) or a decay below 1 such as 0.999, got {recipe.ema}.")
    if recipe.epochs is not None and recipe.steps is not None:
        raise ValueError(f"recipe: steps and epochs: got {recipe.steps:,} and {recipe.epochs:g}; give one of them.")
    if recipe.epochs is not None and not 0 < recipe.epochs <= MOST_EPOCHS:
        raise ValueError(f"recipe: epochs must be above 0 and at most {MOST_EPOCHS:,}, got {recipe.epochs}.")
    _check_data(recipe)
    _check_intervals(recipe)
    numbers = None if recipe.precision == "auto" else precision(recipe.precision)
    if numbers is not None and (numbers.at_random or numbers.split) and recipe.optimizer == "muon":
        how = "rounds at random" if numbers.at_random else "divides weights"
        raise ValueError(f"recipe: precision {recipe.precision} {how} in AdamW alone, got optimizer muon; take precision bf16.")
    if recipe.update_in_backward:
        for _, own in recipe.stages():
            check_update_in_backward(own.accumulate, own.clip, numbers or precision("bf16"), own.numbers, overlap=own.overlap)
    if recipe.offload_optimizer:
        for _, own in recipe.stages():
            check_offload(own.numbers, alone=own.parallel != "fsdp")
        if recipe.ema:
            raise ValueError(
                f"recipe: ema: got {recipe.ema} with offload_optimizer, whose masters the average would read at every step; "
                f"leave one of them out."
            )
    if recipe.lora:
        _check_lora(recipe)
    # Each refuses what it cannot make.
    parse_recompute(recipe.recompute), recipe.rates, recipe.numbers, recipe.new_objective(), recipe.stages()


def _check_data(recipe: "Recipe") -> None:
    weights = recipe.data_weights
    if weights and (len(weights) != len(recipe.data) or not all(0 < weight < inf for weight in weights)):
        got = ", ".join(f"{weight:g}" for weight in weights)
        raise ValueError(
            f"recipe: data_weights: got {got} for {len(recipe.data)} paths in data, wanted a number above 0 for each, such as "
            f"2 or 0.5."
        )
    if recipe.buckets and recipe.pack not in ("auto", "none", "pairs"):
        raise ValueError(
            f"recipe: buckets: got {recipe.buckets} with pack {recipe.pack!r}, whose rows have one length; leave it out, or "
            f"take pack none."
        )


def _check_intervals(recipe: "Recipe") -> None:
    """Raise ValueError for evaluations or checkpoints at steps that cannot be."""
    for steps, parts in (("eval_every", "evals_per_epoch"), ("save_every", "saves_per_epoch")):
        every, often = getattr(recipe, steps), getattr(recipe, parts)
        if not 0 <= often <= MOST_STEPS:
            raise ValueError(f"recipe: {parts} must be 0 (off) or a number such as 1, got {often:g}.")
        if every and often:
            raise ValueError(f"recipe: {steps} and {parts}: got {every:,} and {often:g}; give one of them.")
    if not (recipe.validation or recipe.eval_data):
        for name in ("eval_every", "evals_per_epoch", "patience"):
            if getattr(recipe, name):
                raise ValueError(
                    f"recipe: {name}: there is no held-out loss, got validation 0 and no eval_data; give one of them."
                )
    if recipe.patience and not (recipe.eval_every or recipe.evals_per_epoch):
        raise ValueError("recipe: patience counts held-out losses, and eval_every is 0; say how often to evaluate.")


def _check_lora(recipe: "Recipe") -> None:
    """Raise ValueError for a recipe that adapters cannot be trained with."""
    Lora.of(recipe.lora)
    if is_named(recipe.model):
        raise ValueError(
            f"{LORA}: adapters learn what a trained model lacks, and the preset {recipe.model} begins with random weights; "
            f"give a Hugging Face folder as model."
        )
    if recipe.optimizer == "muon":
        raise ValueError(
            f"{LORA}: got optimizer muon, which moves the weights of whole layers, and these are frozen; take adamw."
        )
    if recipe.precision == "fp8":
        raise ValueError(
            f"{LORA}: got precision fp8, which rounds weights that train, and these are frozen; take bf16, "
            f"and base: fp8 in lora."
        )
