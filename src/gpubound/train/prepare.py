"""From a recipe to a run that is ready: texts to a corpus, a name to a model, a folder to its newest checkpoint.

What is cheap to refuse is refused first: a missing file is named before the corpus is built, not after.
"""

import dataclasses
from pathlib import Path

import torch

from ..corpus import Corpus, Tokenizer
from ..device import resolve
from ..errors import DataError, GraphError
from ..models import Decoder, load_hf
from ..place import place
from ..trace import notice
from .auto_batch import largest_micro_batch
from .checkpoint import Checkpoint, Checkpoints
from .data import check_data, hold_out, open_data
from .recipe import MODELS, Recipe, check_model
from .resume import check_same, reopened
from .run import Run
from .stage import Stage, make_step


def prepare(
    recipe: Recipe,
    resume: bool = False,
    auto_batch: bool = False,
    progress: bool = True,
    corpora: list[Corpus] | None = None,
) -> Run:
    """Build what the recipe names; with `resume`, go on from the newest whole checkpoint in its folder.

    `auto_batch` takes the largest micro-batch that fits, and so many fewer of them that a step has as many tokens as before.
    `corpora` are the phases' own, when `open_data` has opened them already.
    """
    folder, device = Path(recipe.out), resolve(recipe.device)
    checkpoints = Checkpoints(folder / "checkpoints", keep=recipe.keep, keep_every=recipe.keep_every or None)
    check_model(recipe.model)
    check_data(recipe)
    found = _found(checkpoints, resume)
    if found is not None and auto_batch:  # it was tried when the run began
        recipe = dataclasses.replace(recipe, **{k: found.facts["recipe"][k] for k in ("micro_batch", "accumulate")})
    for said in check_same(found, recipe) if found is not None else ():
        notice(said)
    stages = [
        Stage(name, own, *hold_out(corpus, own.validation))
        for (name, own), corpus in zip(recipe.stages(), corpora or open_data(recipe, folder, progress))
    ]
    tokenizer = stages[0].training.tokenizer()
    for stage in stages:
        stage.check()
    if auto_batch and found is None:
        stages[0] = fitted(stages, tokenizer, device)
        recipe = stages[0].recipe
    torch.manual_seed(recipe.seed)
    model = build_model(recipe, tokenizer, device)
    placement = place(model, device)
    run = Run(recipe, folder, device, tokenizer, stages, model.train(), placement, checkpoints)
    run.enter(found.facts["phase"] if found else 0)
    if found is not None:
        run.restore(found)
        run.over = run.over and not reopened(found, recipe)
    return run


def _found(checkpoints: Checkpoints, resume: bool) -> Checkpoint | None:
    found = checkpoints.latest()
    if found is None and checkpoints.exist():  # a new run would remove them
        raise DataError(
            f"{checkpoints.folder} holds checkpoints, and none of them is whole; "
            f"restore one, or give another --out to begin anew."
        )
    if resume and found is None:
        notice(f"resume: {checkpoints.folder} holds no checkpoint; starting from the beginning.")
    if found is not None and not resume:
        raise ValueError(
            f"{checkpoints.folder} already holds step {found.step} of a run; "
            f"pass --resume to go on with it, or another --out to begin anew."
        )
    return found


def build_model(recipe: Recipe, tokenizer: Tokenizer, device: torch.device) -> Decoder:
    if recipe.model in MODELS:
        # Rows of the head, rounded up to a multiple of 64: tensor cores want it, and ids beyond the tokenizer's never occur.
        rows = -(-tokenizer.vocab_size // 64) * 64
        longest = max(own.seq for _, own in recipe.stages())
        config = dataclasses.replace(MODELS[recipe.model], vocabulary=rows, positions=max(longest, 4096))
        return Decoder(config, device=device)
    model = load_hf(recipe.model, device)
    if tokenizer.vocab_size > model.config.vocabulary:
        raise DataError(
            f"{recipe.model} knows {model.config.vocabulary} tokens, the corpus has {tokenizer.vocab_size}; "
            f"build the corpus with the model's own tokenizer (--tokenizer {recipe.model})."
        )
    return model


def fitted(stages: list[Stage], tokenizer: Tokenizer, device: torch.device) -> Stage:
    """The only stage, with the largest micro-batch that fits beside this model."""
    if device.type != "cuda":
        raise ValueError("auto_batch: there is no GPU memory to try; on a CPU give --micro-batch yourself.")
    if len(stages) > 1:
        raise ValueError("auto_batch: got phases, wanted a single one; give each phase a micro_batch of its own.")
    stage = stages[0]

    def attempt(recipe: Recipe) -> None:
        try:
            train(dataclasses.replace(recipe, graph="require") if recipe.graph == "auto" else recipe)
        except GraphError as error:  # this step cannot be captured, whatever its size
            notice(f"auto_batch: trying without a graph: {error}")
            train(dataclasses.replace(recipe, graph="off"))

    def train(recipe: Recipe) -> None:
        model = build_model(recipe, tokenizer, device).train()
        step = make_step(model, recipe.minimised(), recipe, device)
        feed = stage.feed(device, recipe)
        try:
            for _ in range(2):  # the first captures, the second runs what was captured
                step(feed)
            torch.cuda.synchronize(device)
        finally:
            step.close()

    return dataclasses.replace(stage, recipe=largest_micro_batch(stage.recipe, attempt, device))
