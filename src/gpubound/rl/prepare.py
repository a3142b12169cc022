"""Build a run from its recipe: everything is checked before the first step."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import decode, lora
from ..data import Tokenizer
from ..data.tokenizer import ends_of_turn
from ..decode.kv_cache import PAGE, pages_for
from ..device import resolve
from ..distributed import ALONE
from ..formatting import quantity, readable
from ..graph.lent_memory import released
from ..monitor import RunTape
from ..trace import notice
from ..train.adapters import base_of
from ..train.changes import newest_checkpoint
from ..train.checkpoint import Checkpoints
from ..train.prepare import place_model
from ..train.recipe import check_out
from ..train.step import TrainStep
from .batches import RowShape
from .environments import read_environment
from .episodes import Episodes
from .prompts import RLPrompt, fitting, read_prompts
from .recipe import RLRecipe
from .rewards import check_columns, read_rewards
from .run import RLRun


def prepare(
    recipe: RLRecipe,
    policy: nn.Module | None,
    prompts: Any,
    eval_prompts: Any,
    rewards: Any,
    environment: Any,
    tokenizer: Any,
    resume: bool,
) -> RLRun:
    """Return the run of a recipe: everything is checked and built, and its checkpoint restored."""
    functions = read_rewards(recipe.rewards if rewards is None else rewards)
    replies = read_environment(recipe.environment if environment is None else environment)
    if replies is not None and (recipe.seq is None or recipe.turns < 2):
        key, value, wanted = ("turns", recipe.turns, "2 or more") if recipe.turns < 2 else ("seq", None, "the most tokens")
        raise ValueError(f"rl: {key}: got {value} with an environment, wanted {wanted} that a conversation may have.")
    if replies is None and recipe.turns > 1:
        raise ValueError(f"rl: turns: got {recipe.turns} without an environment; give one, or leave turns out.")
    device, folder = resolve(recipe.device), Path(recipe.out)
    if policy is None and (recipe.model is None or not Path(recipe.model).is_dir()):
        raise ValueError(f"rl: model: got {recipe.model!r}, wanted a Hugging Face folder with the policy's weights.")
    check_out(recipe.model, recipe.out)
    known = _tokenizer(recipe, tokenizer)
    asked = read_prompts(recipe.prompts if prompts is None else prompts, known)
    validation = recipe.eval_prompts if eval_prompts is None else eval_prompts
    eval_list = [] if validation is None else read_prompts(validation, known)
    check_columns(functions, asked, "prompts")
    check_columns(functions, eval_list, "eval_prompts")
    new = recipe.max_new_tokens
    seq = recipe.seq or max(len(prompt.ids) for prompt in (*asked, *eval_list)) + new
    asked, eval_list = fitting(asked, seq, new, "prompts"), fitting(eval_list, seq, new, "eval_prompts") if eval_list else []
    checkpoints = Checkpoints(folder / "checkpoints", recipe.keep)
    checkpoint = newest_checkpoint(checkpoints, resume)
    shape = RowShape.of(recipe.prompts_per_step * recipe.samples, seq, recipe.row_tokens, recipe.micro_batch, recipe.pack)
    training = recipe.training(max(2, shape.most) if recipe.overlap else shape.most)  # one alone has no `add`
    objective = recipe.objective()
    torch.manual_seed(recipe.seed)
    if policy is None:
        assert known is not None
        model, _ = place_model(training, known, device, ALONE)
    else:
        model = policy
        device = next(model.parameters()).device
    exact = recipe.is_exact(model, device)
    recipe = replace(recipe, exact=exact)  # what the run's checkpoints record
    copied = recipe.kl and any(p.requires_grad for p in model.parameters()) and not _only_adapters(model)
    reference = copy.deepcopy(model).eval().requires_grad_(False) if copied else None
    step = training.make_step(model.train(), objective, device, exact=exact)
    if reference is not None:
        reference.to(next(p for p in model.parameters() if p.is_floating_point()).dtype)
    rows = min(recipe.rollout_rows, max(recipe.prompts_per_step * recipe.samples, len(eval_list)))
    pages = cache_pages(recipe, asked, rows, seq) if exact else None
    shares = shares_memory(recipe, step)
    with released(step.sums if shares else None):
        decoder = decode.decoder(model, rows, seq, verify="quick", cache=recipe.cache, exact=exact, pages=pages)
        memory = decoder.lend_cache(step.sums) if shares else None
    if memory is not None:
        step.borrow(memory)
        notice(
            f"rl: the cache of {readable(decoder.body.cache_bytes())} and the activations of the step's graphs share memory."
        )
    run = RLRun(
        recipe, model, known, device, asked, eval_list, functions, objective, step, decoder, reference, shape,
        _ends(recipe, decoder, known), Episodes(known, replies, recipe.turns, new, seq, recipe.timeout), checkpoints,
        RunTape.create(folder),
        base_of(recipe.model) if recipe.adapters and recipe.model else {},
    )  # fmt: skip
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    notice(
        f"rl: {quantity(trained)} parameters train on {len(asked):,} prompts: {recipe.prompts_per_step} a step, "
        f"{recipe.samples} answers each, learnt in rows of {shape.tokens:,} tokens, {shape.rows} at once."
    )
    if checkpoint is not None:
        run.restore(checkpoint)
    return run


def shares_memory(recipe: RLRecipe, step: TrainStep) -> bool:
    """Return whether the cache and the activations of captured steps share memory: with `overlap` both are in use at once."""
    return step.captures and not recipe.overlap and step.device.type == "cuda"


def cache_pages(recipe: RLRecipe, prompts: list[RLPrompt], rows: int, seq: int) -> int | None:
    """Return how many pages the cache of a run has, in which the samples of a prompt have its full pages once.

    They are enough for the longest prompts in all rows, and for twice as many prompts as begin together, since the last sample
    of one still needs its pages while the rows of the others have the next one's. Where prompts come with one sample, as in an
    evaluation, some rows may wait. None: room for all rows, as conversations need, which grow.
    """
    if recipe.turns > 1:
        return None
    shared = [(len(prompt.ids) - 1) // PAGE for prompt in prompts]
    own = [pages_for(min(len(prompt.ids) + recipe.max_new_tokens, seq)) - n for prompt, n in zip(prompts, shared)]
    needed = rows * max(own) + 2 * -(-rows // recipe.samples) * max(shared)
    return min(max(needed, pages_for(seq)), rows * pages_for(seq))


def _only_adapters(model: nn.Module) -> bool:
    adapters = {id(p) for p in lora.parameters(model)}
    return bool(adapters) and all(id(p) in adapters for p in model.parameters() if p.requires_grad)


def _tokenizer(recipe: RLRecipe, tokenizer: Any) -> Tokenizer | None:
    """Return the run's tokenizer: the one that is given, the recipe's, or that of the model's folder."""
    if isinstance(tokenizer, str | Path):
        known = Tokenizer.load(tokenizer)
    elif isinstance(tokenizer, Tokenizer):
        known = tokenizer
    elif tokenizer is not None:
        inner = getattr(tokenizer, "backend_tokenizer", None)
        if inner is None:
            raise ValueError(
                f"rl: tokenizer: got a {type(tokenizer).__name__}, wanted a folder, or a fast tokenizer of transformers."
            )
        known = Tokenizer(inner, tokenizer.eos_token, tokenizer.chat_template, bos_token=tokenizer.bos_token)
    elif recipe.tokenizer is not None or recipe.model is not None:
        known = Tokenizer.load(recipe.tokenizer or recipe.model or "")
    else:
        return None
    return known if recipe.chat_template is None else known.with_template(recipe.chat_template)


def _ends(recipe: RLRecipe, decoder: Any, tokenizer: Tokenizer | None) -> list[int]:
    """Return the tokens that end an answer."""
    ends = set(decoder.ends)
    if tokenizer is not None:
        ends |= {*([] if tokenizer.eos is None else [tokenizer.eos]), *ends_of_turn(tokenizer)}
    for text in recipe.stop:
        token = None if tokenizer is None else tokenizer.inner.token_to_id(text)
        if token is None and text.isdecimal():
            token = int(text)
        if token is None:
            raise ValueError(f"rl: stop: {text!r} is no single token of the tokenizer; give one that is, or its number.")
        ends.add(token)
    return sorted(ends)
