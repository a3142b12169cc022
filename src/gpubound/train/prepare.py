"""Preparation of a run: build the corpus and the model of a recipe, and restore its newest checkpoint.

Errors that cost no time come first: a missing file is reported before the corpus is built. A resumed run may change what does
not affect the steps already done.
"""

import gc
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data import Corpus, Tokenizer
from ..device import grow_segments, resolve, total_bytes
from ..distributed import ALONE, Ranks
from ..distributed.local_shard import LocalShard
from ..errors import DataError, DeviceError, GraphError
from ..formatting import readable
from ..layers.embedding_and_head import head_of
from ..lora.base import FORMATS, InCodes, encode as quantise, report_quantised
from ..measure.memory_phases import MemoryPhases
from ..models.folder import read_config
from ..models.language_model import LanguageModel
from ..models.quantized.schemes import scheme_of
from ..models.registry import family_of, is_named
from ..models.storing import read_parts
from ..place import Placement, place, unplaced
from ..trace import notice
from .accumulate import counted
from .adamw import count_by_rule
from .adapters import add as add_adapters, base_of, check_base, check_published, frozen_bytes, load_quantised, published_weights
from .checkpoint.checkpoints import WHERE, Checkpoint, Checkpoints, seed_ranks
from .data import check_data, open_data, open_eval_data
from .loop import Run
from .objectives import Objective
from .offload import blocks_of
from .precision import precision as precision_named
from .recipe import PHASED, SOURCES, Recipe, check_model, check_out
from .stages import Stage, empty_values, rows_of, stage_of

FREE = (
    "out", "keep", "save_every", "saves_per_epoch", "eval_every", "evals_per_epoch", "patience", "device",
    "graph", "recompute", "overlap", "update_in_backward", "offload_optimizer",
    "parallel",
)  # fmt: skip
"""Keys that may change during a run: no weight of a step depends on them."""
ALLOWED = {
    "lr": ("lr",),
    "schedule": ("schedule", "warmup", "decay", "final"),
    "clip": ("clip",),
    "weight_decay": ("weight_decay",),
    "betas": ("betas", "eps"),
    "seq": ("seq",),
    "batch": ("micro_batch", "accumulate"),
    "data": (
        "data", "data_weights", "data_bytes", "text_key", "format", "chat_template", "train_on", "pack", "overlong", "buckets",
    ),
    "validation": ("validation", "eval_data", "eval_batches"),
}  # fmt: skip
"""Keys that may change by the name that `resume: {allow: [...]}` gives them."""
ROWS = {key for name in ("seq", "batch", "data", "validation") for key in ALLOWED[name]} - {"accumulate", "eval_batches"}
"""Keys that decide which rows there are."""


def changes_rows(changes: Collection[str], recipe: Recipe) -> bool:
    """Return whether these keys decide the rows of `recipe`, or their order."""
    return not ROWS.isdisjoint(changes) or bool(recipe.buckets and "accumulate" in changes)


def allowed_keys(names: Collection[str]) -> set[str]:
    """Return the keys that a resumed run may change."""
    for name in names:
        if name not in ALLOWED:
            raise ValueError(f"resume: allow: got {name!r}, wanted some of {', '.join(ALLOWED)}; the rest makes another run.")
    return {key for name in names for key in ALLOWED[name]}


def newest_checkpoint(checkpoints: Checkpoints, resume: bool) -> Checkpoint | None:
    """Return the checkpoint to resume from, None to begin anew; raise if the folder does not allow what was asked."""
    checkpoints.check_writable()
    checkpoints.clean()
    checkpoint = checkpoints.latest()
    if checkpoint is None and checkpoints.paths():  # a new run would remove them
        raise DataError(
            f"{checkpoints.folder} holds checkpoints, and none of them is whole; "
            f"restore one, or give another --out to begin anew."
        )
    if resume and checkpoint is None:
        notice(f"resume: {checkpoints.folder} holds no checkpoint; starting from the beginning.")
    if checkpoint is not None and not resume:
        raise ValueError(
            f"{checkpoints.folder} already holds step {checkpoint.step} of a run; "
            f"pass --resume to go on with it, or another --out to begin anew."
        )
    return checkpoint


def recipe_of(checkpoint: Checkpoint) -> Recipe:
    """Return the recipe of a checkpoint's run: JSON's lists become tuples."""
    known = {"name", *(field.name for field in fields(Recipe))}

    def read(values: dict[str, Any]) -> dict[str, Any]:
        return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key in known}

    saved = checkpoint.facts["recipe"]
    return Recipe(**read(saved) | {"phases": tuple(map(read, saved.get("phases", ())))})


def check_same(checkpoint: Checkpoint, old: Recipe, new: Recipe, allow: Collection[str] = ()) -> dict[str, str]:
    """Raise ValueError if `new` would have made other steps than those of `checkpoint`, from a run of `old`.

    FREE may change, as may the length of the present phase, and phases that have not begun. Return the other changes of the
    present phase by key: those that `allow`, names of ALLOWED, permits.
    """
    permitted = allowed_keys(allow)
    phase, before, after = checkpoint.facts["phase"], old.stages(), new.stages()
    where = checkpoint.facts.get(WHERE, "")
    of_the_run = {field.name for field in fields(Recipe)} - {*FREE, *PHASED, "phases"}
    changed = list(_differences(old, new, where, of_the_run).values())
    taken, refused = dict[str, str](), set[str]()
    for number, (name, own) in enumerate(before[: phase + 1]):
        new_name = after[number][0] if number < len(after) else None
        if new_name != name:
            now = "missing" if new_name is None else new_name or "without a name"
            changed.append(f"phase {number + 1} was {name or 'without a name'}, is {now}")
            break
        differences = _differences(own, after[number][1], where, set(PHASED) - set(FREE))
        if number == phase:
            differences = {key: text for key, text in differences.items() if key not in ("steps", "epochs")}
            taken = {key: text for key, text in differences.items() if key in permitted}
        refused |= differences.keys() - taken.keys()
        changed += [f"phase {name}: {text}" if name else text for key, text in differences.items() if key not in taken]
    if changed:
        advice = "Give the old values, or begin anew in another --out."
        if names := [name for name, keys in ALLOWED.items() if refused & set(keys)]:
            advice = f"Give the old values, allow it (resume: {{allow: [{', '.join(names)}]}}), or begin anew in another --out."
        raise ValueError(f"resume: the recipe has changed: {'; '.join(changed)}. {advice}")
    return taken


def check_steps(checkpoint: Checkpoint, old: Recipe, stages: list[Stage], changes: dict[str, str]) -> int:
    """Return the steps that the present phase had when `checkpoint` was written; raise ValueError if fewer are left than done.

    Print how the rate goes on if the number of steps, or what `changes` name of the rate, is another.
    """
    phase = checkpoint.facts["phase"]
    was, stage = old.stages()[phase][1], stages[phase]
    steps = checkpoint.facts["steps"][phase]
    was = replace(was, steps=steps, epochs=None)
    done = checkpoint.step - checkpoint.facts["began"]
    if stage.steps < done:
        raise ValueError(f"resume: steps: {done:,} are done, got {stage.steps:,}; give at least so many.")
    old_lr, new_lr = (own.numbers.lr * own.rates.factor(at) for own, at in ((was, max(done, 1)), (stage.recipe, done + 1)))
    if stage.steps != steps:
        notice(
            f"resume: steps was {steps:,}, is {stage.steps:,}: from here on the {stage.recipe.schedule} schedule is that of "
            f"{stage.steps:,} steps, and the learning rate goes from {old_lr:.2e} to {new_lr:.2e}."
        )
    elif changes.keys() & {"lr", *ALLOWED["schedule"]}:
        notice(f"resume: the learning rate goes from {old_lr:.2e} to {new_lr:.2e}.")
    return steps


def _differences(old: Recipe, new: Recipe, where: str, keys: set[str]) -> dict[str, str]:
    """Return a text for each key that differs, both as written and in its meaning.

    where  the folder that relative paths of the old recipe start from. A run's folder may have been moved with all of its
           content, so a path that is written as before is the same
    """
    was, will, before, after = (
        json.loads(json.dumps(values))
        for values in (asdict(old), asdict(new), _normalised(old, where), _normalised(new, where=""))
    )
    changed = (key for key in will if key in keys and was[key] != will[key] and before[key] != after[key])
    return {key: f"{key} was {was[key]!r}, is {will[key]!r}" for key in changed}


def _normalised(recipe: Recipe, where: str) -> dict[str, Any]:
    """Return the recipe with real paths, and with the defaults of its sections filled in."""

    def real(name: str) -> str:
        return os.path.realpath(Path(where, name))

    adapters, objective = recipe.adapters, recipe.new_objective()
    options = fields(objective)  # type: ignore[arg-type]
    return asdict(recipe) | {
        "data": [name if name in SOURCES else real(name) for name in recipe.data],
        "model": recipe.model if is_named(recipe.model) else real(recipe.model),
        "eval_data": [real(name) for name in recipe.eval_data],
        "tokenizer": recipe.tokenizer and real(recipe.tokenizer),
        "lora": adapters and asdict(adapters) | {"alpha": adapters.rank if adapters.alpha is None else adapters.alpha},
        "objective": type(objective).__name__,  # which may have two names
        "objective_options": {field.name: getattr(objective, field.name) for field in options if field.init},
    }


META = torch.device("meta")
SHARE = 0.8  # of a GPU's memory that weights, masters, gradient and moments may use: activations need the rest


def prepare(
    recipe: Recipe,
    resume: bool = False,
    auto_batch: bool = False,
    progress: bool = True,
    corpora: list[Corpus] | None = None,
    ranks: Ranks = ALONE,
    allow: Collection[str] = (),
    memory: MemoryPhases | None = None,
) -> Run:
    """Build what the recipe names; with `resume`, restore the newest complete checkpoint in its folder.

    auto_batch  use the largest micro-batch that fits, with fewer of them, so that a step has as many tokens as before
    corpora     those of the phases, if `open_data` has opened them already
    ranks       all of them make this call, and share every step
    allow       what the recipe of a resumed run may change, names of changes.ALLOWED
    memory      measures the peaks of the run's phases
    """
    check_shared(recipe, ranks)
    folder, device = Path(recipe.out), resolve(recipe.device)
    checkpoints = Checkpoints(folder / "checkpoints", keep=recipe.keep, ranks=ranks)
    checkpoint = newest_checkpoint(checkpoints, resume)
    changes = dict[str, str]()
    allowed_keys(allow)
    if checkpoint is not None:
        old = recipe_of(checkpoint)
    check_inputs(recipe)
    base = base_of(recipe.model) if recipe.adapters else {}
    if checkpoint is not None:
        if auto_batch:  # it was chosen when the run began
            recipe = replace(recipe, micro_batch=old.micro_batch, accumulate=old.accumulate)
        changes = check_same(checkpoint, old, recipe, allow)
        if recipe.adapters is not None:
            check_base(recipe.model, base, checkpoint)
    corpora = corpora or open_data(recipe, folder, progress, ranks)
    eval_data = open_eval_data(recipe, corpora, folder, progress, ranks)

    @cache
    def unpacked() -> str | None:
        """Return why the model reads other examples of a packed row; None if it does not, as far as is known before a trial."""
        model = outline(recipe, recipe.extended(corpora[0].tokenizer()))
        return model.unpacked() if isinstance(model, LanguageModel) else None

    stages = [
        stage_of(name, own, corpus, evaluated, unpacked)
        for (name, own), corpus, evaluated in zip(recipe.stages(), corpora, eval_data)
    ]
    had = check_steps(checkpoint, old, stages, changes) if checkpoint else 0
    for stage in stages:
        (kind, *defaults), own = stage.recipe.kind, stage.recipe
        source = f" (the defaults of {kind})" if [own.lr, own.weight_decay] == defaults else ""
        phase = f"phase {stage.name}: " if stage.name else ""
        notice(f"train: {phase}{kind}: lr {own.lr:g}, weight decay {own.weight_decay:g}{source}.")
    tokenizer = recipe.extended(stages[0].training.tokenizer())
    for stage in stages:
        stage.check_rows()
    if auto_batch and recipe.parallel == "fsdp":
        raise ValueError(
            "auto_batch: it tries whole models, got parallel: fsdp; give --micro-batch yourself (gpubound plan proposes one)."
        )
    if ranks.alone:  # several share memory with each other through NCCL
        grow_segments(device)
    if auto_batch and checkpoint is None:
        stages[0] = fit_micro_batch(stages, tokenizer, device, ranks)
        recipe = replace(recipe, micro_batch=stages[0].recipe.micro_batch, accumulate=stages[0].recipe.accumulate)
    torch.manual_seed(recipe.seed)
    memory = memory or MemoryPhases(device)
    with memory("place"):
        model, placement = place_model(recipe, tokenizer, device, ranks)
    seed_ranks(ranks, recipe.seed)
    run = Run(
        recipe, folder, device, tokenizer, stages, model.train(), placement, checkpoints, base, ranks=ranks, memory=memory
    )
    begun = checkpoint.facts["phase"] if checkpoint else 0
    new_rows = changes_rows(changes, stages[begun].recipe)
    run.enter(begun, checkpoint, new_rows)
    if checkpoint is not None:
        run.restore(checkpoint, new_rows)
        run.over = run.over and run.stage.steps <= had  # or it has more of them now
        report_resumption(run, changes)
    return run


def report_resumption(run: Run, changes: dict[str, str]) -> None:
    """Print what the recipe has changed on the way, which the run records, or that a finished run has nothing left to do."""
    if changes:
        run.changes.append(f"from step {run.done + 1:,} on {', '.join(changes.values())}")
        rows = "; the rows begin with their first epoch" if changes_rows(changes, run.stage.recipe) else ""
        notice(f"resume: {run.changes[-1]}{rows}.")
    if changes.keys() & set(ALLOWED["validation"]):
        run.evaluations = {}  # losses of other rows
    if run.finished:
        notice(f"resume: nothing to do: all {run.done:,} steps are done; give more --steps to go on.")


def check_inputs(recipe: Recipe) -> None:
    """Raise the errors of the recipe's model and data that show without reading them."""
    check_model(recipe.model)
    check_out(recipe.model, recipe.out)
    if not is_named(recipe.model):
        check_published(recipe.model, recipe.adapters)
    check_data(recipe)
    stages = [own for _, own in recipe.stages()]
    for own in stages:
        objective = own.new_objective()
        objective.check_files()
        if objective.adapts and any(
            (each.objective, each.objective_options) != (own.objective, own.objective_options) for each in stages
        ):
            raise ValueError(
                f"objective: {own.objective} gives the model another head, so every phase must have it, with equal options."
            )
    if recipe.adapters is not None:
        recipe.adapters.check_model(family_of(recipe.model).outline(recipe.model))


def check_launch(recipe: Recipe, resume: bool, processes: int) -> None:
    """Raise in the launcher what `prepare` would raise on each of `processes` ranks."""
    check_division(recipe, Ranks(world=processes))
    if resume:  # the paths are those of the checkpoint, which takes its time to read
        return
    checkpoints = Checkpoints(Path(recipe.out, "checkpoints"))
    if checkpoints.paths():
        newest_checkpoint(checkpoints, resume)
    check_inputs(recipe)


def check_division(recipe: Recipe, ranks: Ranks) -> None:
    """Raise ValueError if the micro-batches of a step cannot be divided among the ranks."""
    for _, own in recipe.stages():
        ranks.share(own.accumulate)


def check_shared(recipe: Recipe, ranks: Ranks) -> None:
    """Raise ValueError if the ranks cannot share the steps, or have different recipes."""
    check_division(recipe, ranks)
    if not ranks.alone and ":" in recipe.device:
        raise ValueError(f"device: got {recipe.device!r}, one GPU, for {ranks.world} ranks; leave it out: each takes its own.")
    ranks.check_same("recipe", asdict(recipe))


# The model


def place_model(recipe: Recipe, tokenizer: Tokenizer, device: torch.device, ranks: Ranks) -> tuple[nn.Module, Placement]:
    """Return the model with its adapters on its device, sharded or whole."""
    if choose_sharded(recipe, lambda: outline(recipe, tokenizer), device, ranks):
        if stages_objective(recipe).adapts:
            raise ValueError(f"parallel: fsdp cannot train the objective {recipe.objective}, got {recipe.parallel}; take ddp.")
        model = build_shards(recipe, tokenizer, device, ranks)
        return model, unplaced(model, device, "no rank holds all of it; the first steps show whether it runs")
    model = build_model(recipe, tokenizer, device)
    placement = place(model, device)
    if recipe.adapters is not None:
        torch.manual_seed(recipe.seed)  # placing draws random numbers, and adapters begin as those of a sharded base do
        add_adapters(recipe.adapters, model, stages_objective(recipe))
    return model, placement


def outline(recipe: Recipe, tokenizer: Tokenizer) -> nn.Module:
    """Return the model with its adapters on the meta device."""
    model = _new(recipe, tokenizer, META) if is_named(recipe.model) else family_of(recipe.model).outline(recipe.model)
    if recipe.adapters is not None:
        recipe.adapters.check_model(model)
    return model


def choose_sharded(recipe: Recipe, outline: Callable[[], nn.Module], device: torch.device, ranks: Ranks) -> bool:
    """Return whether weights are sharded over the ranks, by `recipe.parallel` or by the memory of a replica; print which.

    outline  returns the model on the meta device: no rank may have room for it
    """
    if ranks.alone:
        if recipe.parallel == "fsdp":
            notice("parallel: fsdp: there is one process, so it holds the whole model.")
        return False
    precision, model = precision_named(recipe.precision_on(device)), outline()
    layout = counted(precision.dtype, *count_by_rule(model, recipe.numbers))
    need = sum(layout.bytes(precision.masters).values()) + recipe.numbers.moment_bytes(layout)
    if recipe.adapters is not None:
        published = published_weights(recipe.model, family_of(recipe.model).outline(recipe.model), precision.dtype)
        need += frozen_bytes(model, precision.dtype, recipe.adapters.base, published)
    who, what = "GPU" if device.type == "cuda" else "rank", "of weights, gradient and moments"
    has = min(ranks.gather(total_bytes(device))) if device.type == "cuda" else None
    of = "" if has is None else f", {need / has:.0%} of its {readable(has)}"
    too_much = recipe.parallel == "auto" and has is not None and need > SHARE * has
    if recipe.parallel != "fsdp" and not too_much:
        notice(f"parallel: ddp: each of {ranks.world} {who}s holds {readable(need)} {what}{of}.")
        return False
    why = f", because a replica would hold {readable(need)} of them{of}" if too_much else ""
    held = "every weight, and their gradient and moments" if recipe.adapters is None else "the base, and all adapters"
    notice(f"parallel: fsdp: each of {ranks.world} {who}s holds its rows of {held}{why}.")
    return True


def build_model(recipe: Recipe, tokenizer: Tokenizer, device: torch.device) -> nn.Module:
    """Return the whole model, without adapters: initialised for a preset, else loaded; where adapters want it, quantised."""
    if is_named(recipe.model):
        model = _new(recipe, tokenizer, device)
    else:
        # The step casts what trains; a frozen base is cast here.
        adapters, family = recipe.adapters, family_of(recipe.model)
        dtype = precision_named(recipe.precision_on(device)).dtype if adapters else None
        if adapters is not None and adapters.base is not None and dtype is not None:
            model = load_quantised(recipe.model, family, adapters.base, device, dtype)
        else:
            model = family.load(recipe.model, device, dtype)
        _check_vocabulary(recipe, tokenizer, model)
    stages_objective(recipe).adapt(model)
    return model


def stages_objective(recipe: Recipe) -> Objective:
    """Return a new objective of the first phase; where it adapts the model, all phases have it."""
    return recipe.stages()[0][1].new_objective()


def build_shards(recipe: Recipe, tokenizer: Tokenizer, device: torch.device, ranks: Ranks) -> nn.Module:
    """Return the same model, of which each rank builds or reads only its rows; adapters are added to a frozen base.

    The rows of a base are in the computing dtype or quantised. Every rank has all of the adapters.
    """
    from ..distributed.fsdp import shard_deferred  # takes a second to import

    adapters, dtype, folder = recipe.adapters, precision_named(recipe.precision_on(device)).dtype, Path(recipe.model)
    if is_named(recipe.model):
        return shard_deferred(lambda meta: _new(recipe, tokenizer, meta), blocks_of, ranks, dtype)
    if scheme_of(folder, read_config(folder)) is not None:
        raise ValueError(f"parallel: fsdp: {folder} is quantised already, and its codes are not sharded; take ddp.")
    outline = family_of(recipe.model).unread(folder)
    _check_vocabulary(recipe, tokenizer, outline)

    def fill(shards: Mapping[str, LocalShard]) -> None:
        read_parts(folder, {name: (shard.local, shard.slices) for name, shard in shards.items()})

    if adapters is None:
        return shard_deferred(lambda meta: outline, blocks_of, ranks, dtype, fill=fill)
    names, quantised = {id(module): name for name, module in outline.named_modules()}, list[InCodes]()

    def encode(block: nn.Module) -> None:
        assert adapters is not None and adapters.base is not None
        quantised.append(quantise(block, FORMATS[adapters.base], names[id(block)]))

    encodes = None if adapters.base is None else encode
    model = shard_deferred(lambda meta: outline, blocks_of, ranks, dtype, fill=fill, frozen=True, encode=encodes)
    if adapters.base is not None:
        report_quantised(quantised, adapters.base, head_of(model) is not None)
    replace(adapters, base=None).add(model)
    return model


def _new(recipe: Recipe, tokenizer: Tokenizer, device: torch.device) -> nn.Module:
    positions = max(own.seq for _, own in recipe.stages())
    return family_of(recipe.model).make(recipe.model, tokenizer.vocab_size, positions, device)


def _check_vocabulary(recipe: Recipe, tokenizer: Tokenizer, model: nn.Module) -> None:
    vocabulary = family_of(recipe.model).sizes(model).vocabulary
    if tokenizer.vocab_size > vocabulary:
        raise DataError(
            f"{recipe.model} knows {vocabulary} tokens, the corpus has {tokenizer.vocab_size}; "
            f"build the corpus with the model's own tokenizer (--tokenizer {recipe.model})."
        )


# The micro-batch


def fit_micro_batch(stages: list[Stage], tokenizer: Tokenizer, device: torch.device, ranks: Ranks = ALONE) -> Stage:
    """Return the only stage with the largest micro-batch that fits on every rank."""
    if device.type != "cuda":
        raise ValueError("auto_batch: there is no GPU memory to try; on a CPU give --micro-batch yourself.")
    if len(stages) > 1:
        raise ValueError("auto_batch: got phases, wanted a single one; give each phase its own micro_batch.")
    stage = stages[0]

    def attempt(recipe: Recipe) -> None:
        try:
            train(replace(recipe, graph="require") if recipe.graph == "auto" else recipe)
        except GraphError as error:  # this step cannot be captured, whatever its size
            notice(f"auto_batch: trying without a graph: {error}")
            train(replace(recipe, graph="off"))

    def train(recipe: Recipe) -> None:
        recipe = replace(recipe, buckets=0)  # the longest rows
        model = build_model(recipe, tokenizer, device).train()
        objective = recipe.new_objective(tokenizer)
        if recipe.adapters is not None:
            add_adapters(recipe.adapters, model, objective)
        step = recipe.make_step(model, objective, device)
        packing = rows_of(stage.training, recipe, recipe.seq)
        reference = empty_values(packing) if objective.needs_reference(model) else None
        feed = replace(stage, recipe=recipe).feed(device, reference=reference)
        try:
            for _ in range(2):  # the first captures, the second replays
                step(feed)
            torch.cuda.synchronize(device)
        finally:
            step.close()

    return replace(stage, recipe=largest_micro_batch(stage.recipe, attempt, device, ranks, stage.packing.group))


def largest_micro_batch(
    recipe: Recipe, attempt: Callable[[Recipe], None], device: torch.device, ranks: Ranks = ALONE, group: int = 1
) -> Recipe:
    """Return `recipe` with the largest micro-batch for which `attempt` has enough memory, and as many tokens a step.

    Only divisors of a rank's rows of a step are tried, the largest first: accumulation makes up for the rest exactly.

    group  rows that stay together: 2 for pairs
    """
    rows = recipe.micro_batch * recipe.accumulate
    for size in (n for n in range(rows // ranks.world, 0, -1) if rows % (n * ranks.world) == 0 and n % group == 0):
        candidate = replace(recipe, micro_batch=size, accumulate=rows // size)
        fits = True
        try:
            attempt(replace(candidate, accumulate=ranks.share(candidate.accumulate)))
        except torch.OutOfMemoryError:
            fits = False
        finally:
            gc.collect()  # a step and its model refer to each other
            torch.cuda.empty_cache()
        if not ranks.all(fits):
            continue
        notice(f"auto_batch: {size} rows fit; {rows // size} micro-batches make the {rows} rows of a step.")
        return candidate
    raise DeviceError(
        f"auto_batch: not even {'one row' if group == 1 else f'{group} rows'} of {recipe.seq} tokens fits on {device}; "
        f"take shorter rows, a smaller model, or recompute=blocks."
    )
